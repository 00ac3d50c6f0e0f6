"""Figures of exchanges between GPUs: time and bandwidth over tokens, a curve for each backend, the L2 cache cold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from raymoe.report.columns import EXCHANGES, YARDSTICK, pushes_such_rows
from raymoe.report.drawing import COLOURS, GREY, MARKERS, headed, link_line, measured_limit, new_figure
from raymoe.report.results import Line
from raymoe.report.side_by_side import Group, groups_of
from raymoe.report.ways import gave, gbps, link_of, measured, us, whole

COLD = "cold"
_TITLES = {
    "dispatch": "Dispatch",
    "combine": "Combine",
    "exchange": "Dispatch and combine, one behind the other",
}


def exchange_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """A figure for each operation and setting, with the stem of its file; none with one count of tokens only, nor for
    the calls of a yardstick."""
    groups = groups_of([line for line in lines if line["l2"] == COLD and line["op"] in EXCHANGES])
    colours: dict[str, int] = {}
    for group in groups:  # a backend has the same colour in all figures
        for line in group.lines:
            if line["backend"] != YARDSTICK:
                colours.setdefault(group.label(line), len(colours))
    for group in groups:
        words = [group.op, *re.findall(r"[A-Za-z0-9_.]+", group.setting)]
        yield "-".join(words), _figure(_with_limit(group, groups), colours)


def _with_limit(group: Group, groups: Sequence[Group]) -> Group:
    """A combine sends the rows of dispatch the other way, so that what pushes those is its limit too."""
    if group.op != "combine" or not all(pushes_such_rows(line) for line in group.lines):
        return group
    there = (other for other in groups if (other.op, other.setting) == ("dispatch", group.setting))
    limit = [line for other in there for line in other.lines if line["backend"] == YARDSTICK]
    return Group(group.op, group.setting, [*group.lines, *limit], group.told)


def _figure(group: Group, colours: Mapping[str, int]) -> Figure:
    labels = dict.fromkeys(group.label(line) for line in group.lines)
    figure = new_figure(11.0, 4.7 + 0.2 * math.ceil(len(labels) / 4))
    time, bandwidth = figure.subplots(1, 2)
    for axes, of in ((time, us), (bandwidth, gbps)):
        _draw(axes, group, colours, of)
    time.set_yscale("log")
    time.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    time.set_ylabel("time of the slowest rank, µs")
    bandwidth.set_ylim(bottom=0)
    bandwidth.set_ylabel("GB/s, one direction of the busiest port")
    for full, name in {link for line in group.lines if (link := link_of(line["device"]))}:
        link_line(bandwidth, full, name)
    for most in {most for line in group.lines if (most := gave(line["device"]))}:
        measured_limit(bandwidth, most, f"{most:.0f} GB/s, the most that such links gave")
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    title = _TITLES.get(group.op, group.op) + (f", {group.setting}" if group.setting else "")
    headed(figure, title, f"{measured(group.lines)}, L2 cache cold", group.lines)
    return figure


def apart(counts: Sequence[int]) -> list[int]:
    """Those of them, in order, whose names have room beside one another on a logarithmic axis.

    >>> apart([1, 2048, 3072, 4096, 6144, 8192])
    [1, 2048, 4096, 8192]
    """
    kept: list[int] = []
    for count in counts:
        if not kept or count > 1.6 * kept[-1]:
            kept.append(count)
    return kept


def _draw(axes: Axes, group: Group, colours: Mapping[str, int], of: Callable[[Line], float]) -> None:
    curves: dict[str, dict[int, float]] = {}
    for line in group.lines:
        if line["gbps_wire"] is not None:  # one rank alone, or one token, may have nothing to send
            curves.setdefault(group.label(line), {})[whole(line, "tokens")] = of(line)
    for label, points in curves.items():
        place = colours.get(label)
        colour = GREY if place is None else COLOURS[place % len(COLOURS)]
        tokens = sorted(points)
        axes.plot(
            tokens,
            [points[count] for count in tokens],
            color=colour,
            linestyle=(0, (4, 2)) if place is None else "solid",
            marker="|" if place is None else MARKERS[place % len(MARKERS)],
            markersize=5,
            label=label,
        )
    ticks = apart(sorted({whole(line, "tokens") for line in group.lines}))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=40)
    axes.set_xlabel("tokens a rank")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
