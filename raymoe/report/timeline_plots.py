"""Figures of where the time of an exchange goes: for each point of a kernel, from its first block to its last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from raymoe.device.trace import POINTS
from raymoe.report.drawing import COLOURS, GREY, headed, new_figure
from raymoe.report.results import Line
from raymoe.report.timelines import reached
from raymoe.report.ways import three_digits

PANELS_ABREAST = 4
BAR = 0.62
"""Of the height of a row."""

_COLOURS = {"all": COLOURS[0], "routers": COLOURS[3], "last": "#000000"}
_COLOURS |= dict.fromkeys(("senders", "reducers"), COLOURS[1]) | dict.fromkeys(("placers", "summers"), COLOURS[2])
_LEGEND = {"all": "all blocks", "last": "the last block out"}


def timeline_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """A figure for each operation, with the stem of its file; a panel for each case that was traced."""
    for op in POINTS:
        traced = [line for line in lines if line["op"] == op and reached(line)]
        if traced:
            yield f"{op}-timeline", _figure(op, traced)


def _figure(op: str, lines: Sequence[Line]) -> Figure:
    came = {each.point for line in lines for each in reached(line)}
    points = [*(point for point in POINTS[op] if point in came), *sorted(came - set(POINTS[op]))]
    across = min(len(lines), PANELS_ABREAST)
    down = math.ceil(len(lines) / across)
    figure = new_figure(max(7.2, 1.6 + 3.0 * across), 1.9 + down * (0.7 + 0.21 * len(points)))
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, line, title in zip(panels.flat, lines, _titles(lines), strict=False):
        _draw(axes, op, line, points)
        axes.set_title(title, fontsize=9.5)
    for axes in panels.flat[len(lines) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylim(len(points) - 0.5, -0.5)  # time goes down as well as to the right
        axes.set_yticks(range(len(points)), points)
    for axes in panels.flat[max(0, len(lines) - across) : len(lines)]:
        axes.set_xlabel("µs after the start")
    kinds = dict.fromkeys(_who(op, point) for point in points)
    bars = [Patch(color=_COLOURS.get(who, GREY), label=_LEGEND.get(who, who)) for who in kinds]
    figure.legend(handles=bars, loc="outside lower center", ncols=len(bars), frameon=False)
    how = "medians of eager runs of the slowest rank, L2 cache cold"
    title = f"Where the time of {op} goes: from the first block to the last, a tick at the median"
    headed(figure, title, how, lines)
    return figure


def _who(op: str, point: str) -> str:
    return POINTS[op][point].who if point in POINTS[op] else "others"


def _titles(lines: Sequence[Line]) -> list[str]:
    """What the cases do not have in common, tokens in words.

    >>> _titles([{"case": f"backend=fused,tokens={count}", "tokens": count} for count in (1, 8)])
    ['1 token', '8 tokens']
    >>> _titles([{"case": f"layout={layout},tokens=8", "tokens": 8} for layout in ("rank", "expert")])
    ['8 tokens, layout=rank', '8 tokens, layout=expert']
    """
    cases = [str(line["case"]).split(",") for line in lines]
    shared = set.intersection(*map(set, cases))
    titles = []
    for line, words in zip(lines, cases, strict=True):
        tokens = "1 token" if line["tokens"] == 1 else f"{line['tokens']} tokens"
        differing = [word for word in words if word not in shared and not word.startswith("tokens=")]
        titles.append(", ".join([tokens, *differing]))
    return titles


def _draw(axes: Axes, op: str, line: Line, points: Sequence[str]) -> None:
    came = reached(line)
    end = max(each.last for each in came)
    for each in came:
        row, colour = points.index(each.point), _COLOURS.get(_who(op, each.point), GREY)
        axes.barh(row, each.last - each.first, left=each.first, height=BAR, color=colour, alpha=0.45, linewidth=0)
        axes.vlines(each.median, row - BAR / 2, row + BAR / 2, color=colour, linewidth=2)
    axes.axvline(end, color=GREY, linewidth=1.0, linestyle=(0, (4, 2)))
    axes.annotate(
        f"{three_digits(end)} µs",
        (end, 0),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=GREY,
        fontsize=8.5,
    )
    axes.set_xlim(0, 1.03 * end)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
