"""Draws the parts of layers as stacked bars, a bar for each case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from raymoe.report.copies import how_measured, three_digits
from raymoe.report.drawing import COLOURS, GREY, new_figure, set_title
from raymoe.report.layer_parts import LayerParts, layer_parts
from raymoe.report.results import Line

MOST_BARS, MOST_PARTS = 12, 24
BACKWARD = "_backward"


def layer_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """Draw one figure of all cases, with its file's stem. Bars are shares of the step, so that all can be read."""
    cases = layer_parts(lines)[:MOST_BARS]
    if cases:
        yield "layer-parts", _figure(cases)


def _figure(cases: Sequence[LayerParts]) -> Figure:
    names = list(dict.fromkeys(name for case in cases for name in case.parts))[:MOST_PARTS]
    figure = new_figure(8.0, 2.4 + 0.5 * len(cases) + 0.2 * len(names) / 4)
    axes = figure.add_subplot(1, 1, 1)
    for row, case in enumerate(cases):
        left, whole = 0.0, case.step or 1.0
        for name in names:
            share = case.parts.get(name, 0.0) / whole
            style: dict[str, Any] = {"hatch": "///", "edgecolor": "white"} if name.endswith(BACKWARD) else {}
            colour = _colour(name, names)
            axes.barh(
                row, share, left=left, height=0.6, color=colour, linewidth=0, label=None if row else name, **style
            )
            left += share
        axes.annotate(f" {three_digits(case.step)} µs", (max(left, 1.0), row), va="center", fontsize=9, color=GREY)
    axes.axvline(1.0, color=GREY, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_yticks(range(len(cases)), [case.case for case in cases])
    axes.invert_yaxis()
    longest = max(case.total / (case.step or 1.0) for case in cases)
    axes.set_xlim(0, 1.15 * max(1.0, longest))
    axes.set_xlabel("time of each part on its slowest rank, as a share of the step")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    measured = [line for case in cases for line in case.lines]
    set_title(figure, "Where the time of a layer goes", how_measured(measured), measured)
    return figure


def _colour(name: str, names: Sequence[str]) -> str:
    """Give a part and its gradients one colour."""
    forward = list(dict.fromkeys(each.removesuffix(BACKWARD) for each in names))
    return COLOURS[forward.index(name.removesuffix(BACKWARD)) % len(COLOURS)]
