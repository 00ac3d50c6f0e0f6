"""Draws exchanges between GPUs, with a cold L2 cache: over tokens, over SMs, and where the time goes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from raymoe.exchange.peer.trace import POINTS
from raymoe.report.columns import BASELINE, EXCHANGES, sends_dispatch_rows
from raymoe.report.copies import gbps, how_measured, integer, link_of, measured_link_gbps, three_digits, us
from raymoe.report.drawing import COLOURS, GREY, MARKERS, measured_limit, new_figure, nominal_limit, set_title
from raymoe.report.results import Line
from raymoe.report.sweeps import sms_curves
from raymoe.report.tables import Group, groups_of, timeline_of

COLD = "cold"
MOST_CURVES = 24
_TITLES = {
    "dispatch": "Dispatch",
    "combine": "Combine",
    "exchange": "Dispatch, then combine",
}


def exchange_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """Draw a figure for each operation and setting, with its file's stem: a curve for each backend over tokens.

    There is none if all lines have the same number of tokens, nor for operations such as the calls of nccl_bare.
    """
    groups = groups_of([line for line in lines if line["l2"] == COLD and line["op"] in EXCHANGES])
    colours: dict[str, int] = {}
    for group in groups:  # all groups, because a backend has the same colour in all figures
        for line in group.lines:
            if line["backend"] != BASELINE:
                colours.setdefault(group.label(line), len(colours))
    for group in groups:
        words = [group.op, *re.findall(r"[A-Za-z0-9_.]+", group.setting)]
        yield "-".join(words), _tokens_figure(_with_limit(group, groups), colours)


def _with_limit(group: Group, groups: Sequence[Group]) -> Group:
    """Add the lines of row_push to a combine: it sends the rows of dispatch back, so its limit is the same."""
    if group.op != "combine" or not all(sends_dispatch_rows(line) for line in group.lines):
        return group
    dispatches = (each for each in groups if (each.op, each.setting) == ("dispatch", group.setting))
    limit = [line for dispatch in dispatches for line in dispatch.lines if line["backend"] == BASELINE]
    return Group(group.op, group.setting, [*group.lines, *limit], group.named_keys)


def _tokens_figure(group: Group, colours: Mapping[str, int]) -> Figure:
    labels = dict.fromkeys(group.label(line) for line in group.lines)
    figure = new_figure(11.0, 4.7 + 0.2 * math.ceil(min(len(labels), MOST_CURVES) / 4))
    time, bandwidth = figure.subplots(1, 2)
    for axes, quantity in ((time, us), (bandwidth, gbps)):
        _draw_tokens(axes, group, colours, quantity)
    time.set_yscale("log")
    time.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    time.set_ylabel("time of the slowest rank, µs")
    bandwidth.set_ylim(bottom=0)
    bandwidth.set_ylabel("GB/s, one direction of the busiest port")
    for full, name in {link for line in group.lines if (link := link_of(line["device"]))}:
        nominal_limit(bandwidth, full, name)
    for most in {most for line in group.lines if (most := measured_link_gbps(line["device"]))}:
        measured_limit(bandwidth, most, f"{most:.0f} GB/s, the most measured on such links")
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    title = _TITLES.get(group.op, group.op) + (f", {group.setting}" if group.setting else "")
    set_title(figure, title, f"{how_measured(group.lines)}, L2 cache cold", group.lines)
    return figure


def spaced(counts: Sequence[int]) -> list[int]:
    """Choose the counts whose labels do not overlap on a logarithmic axis.

    >>> spaced([1, 2048, 3072, 4096, 6144, 8192])
    [1, 2048, 4096, 8192]
    """
    kept: list[int] = []
    for count in counts:
        if not kept or count > 1.6 * kept[-1]:
            kept.append(count)
    return kept


def _draw_tokens(axes: Axes, group: Group, colours: Mapping[str, int], quantity: Callable[[Line], float]) -> None:
    curves: dict[str, dict[int, float]] = {}
    for line in group.lines:
        if line["gbps_wire"] is not None:  # a single rank or a single token may send nothing
            curves.setdefault(group.label(line), {})[integer(line, "tokens")] = quantity(line)
    for label, points in islice(curves.items(), MOST_CURVES):
        index = colours.get(label)
        colour = GREY if index is None else COLOURS[index % len(COLOURS)]
        tokens = sorted(points)
        axes.plot(
            tokens,
            [points[count] for count in tokens],
            color=colour,
            linestyle=(0, (4, 2)) if index is None else "solid",
            marker="|" if index is None else MARKERS[index % len(MARKERS)],
            markersize=5,
            label=label,
        )
    ticks = spaced(sorted({integer(line, "tokens") for line in group.lines}))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=40)
    axes.set_xlabel("tokens a rank")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


# Exchanges between GPUs over the SMs that they may take.

NEAR_BEST = 1.1
"""Up to this multiple of a curve's best time counts as near the best."""


def sms_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """Draw a figure for each operation that a matrix varies over SMs, with its file's stem."""
    for op in EXCHANGES:
        if curves := sms_curves([line for line in lines if line["l2"] == COLD], op):
            yield f"{op}-sms", _sms_figure(op, curves)


def _sms_figure(op: str, curves: dict[str, dict[int, Line]]) -> Figure:
    lines = [line for points in curves.values() for line in points.values()]
    figure = new_figure(7.2, 5.0 + 0.2 * min(len(curves), MOST_CURVES))
    axes = figure.add_subplot(1, 1, 1)
    for index, (label, points) in enumerate(islice(curves.items(), MOST_CURVES)):
        _draw_sms(axes, index, label, {sms: us(points[sms]) for sms in sorted(points)})
    for limit in sorted({round(least, 1) for line in lines if (least := _least_us(line))}):
        measured_limit(axes, limit, f"{limit:.0f} µs: the busiest port's bytes at the most measured on such links")
    ticks = sorted({sms for points in curves.values() for sms in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("SMs that the exchange may take")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time of the slowest rank, µs")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", frameon=False)
    tokens = "/".join(str(count) for count in sorted({integer(line, "tokens") for line in lines}))
    title = f"{op.capitalize()} of {tokens} tokens a rank over SMs"
    set_title(figure, title, f"{how_measured(lines)}, L2 cache cold", lines)
    return figure


def _draw_sms(axes: Axes, index: int, label: str, times: dict[int, float]) -> None:
    """Draw a curve, and a circle at the fewest SMs with a time within 10 % of its best."""
    best = min(times.values())
    near = min(sms for sms, time in times.items() if time <= NEAR_BEST * best)
    colour = COLOURS[index % len(COLOURS)]
    legend = f"{label}: best {best:.0f} µs, within 10 % from {near} on"
    axes.plot(list(times), list(times.values()), color=colour, marker=MARKERS[index % len(MARKERS)], label=legend)
    axes.plot([near], [times[near]], marker="o", markersize=12, markerfacecolor="none", color=GREY, linestyle="none")


def _least_us(line: Line) -> float | None:
    """Give the time of the busiest port's bytes at the highest rate measured on such links."""
    most = measured_link_gbps(line["device"])
    return gbps(line) * us(line) / most if most and line["gbps_wire"] is not None else None


# Where the time of an exchange goes: for each point of a kernel, a bar from the first block to the last.

PANELS_IN_A_ROW = 4
MOST_PANELS = 32
BAR = 0.62
"""Height of a bar, as a share of its row."""

_COLOURS = {"all": COLOURS[0], "routers": COLOURS[3], "last": "#000000"}
_COLOURS |= dict.fromkeys(("senders", "reducers"), COLOURS[1]) | dict.fromkeys(("placers", "summers"), COLOURS[2])
_LEGEND = {"all": "all blocks", "last": "the last block out"}


def timeline_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """Draw a figure for each operation, with its file's stem, and in it a panel for each traced case."""
    for op in POINTS:
        traced = [line for line in lines if line["op"] == op and timeline_of(line)]
        if traced:
            yield f"{op}-timeline", _timeline_figure(op, traced[:MOST_PANELS])


def _timeline_figure(op: str, lines: Sequence[Line]) -> Figure:
    recorded = {each.point for line in lines for each in timeline_of(line)}
    points = [*(point for point in POINTS[op] if point in recorded), *sorted(recorded - set(POINTS[op]))]
    columns = min(len(lines), PANELS_IN_A_ROW)
    rows = math.ceil(len(lines) / columns)
    figure = new_figure(max(7.2, 1.6 + 3.0 * columns), 1.9 + rows * (0.7 + 0.21 * len(points)))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, line, title in zip(panels.flat, lines, _titles(lines), strict=False):
        _draw_timeline(axes, op, line, points)
        axes.set_title(title, fontsize=9.5)
    for axes in panels.flat[len(lines) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylim(len(points) - 0.5, -0.5)  # the first point at the top
        axes.set_yticks(range(len(points)), points)
    for axes in panels.flat[max(0, len(lines) - columns) : len(lines)]:
        axes.set_xlabel("µs after the start")
    kinds = dict.fromkeys(_blocks_of(op, point) for point in points)
    bars = [Patch(color=_COLOURS.get(blocks, GREY), label=_LEGEND.get(blocks, blocks)) for blocks in kinds]
    figure.legend(handles=bars, loc="outside lower center", ncols=len(bars), frameon=False)
    how = "medians of eager runs of the slowest rank, L2 cache cold"
    title = f"Where the time of {op} goes: bars from the first block to the last, a tick at the median"
    set_title(figure, title, how, lines)
    return figure


def _blocks_of(op: str, point: str) -> str:
    """Name the kind of block that reaches a point."""
    return POINTS[op][point].who if point in POINTS[op] else "others"


def _titles(lines: Sequence[Line]) -> list[str]:
    """Title each panel with its tokens and with the settings that the cases do not share.

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


def _draw_timeline(axes: Axes, op: str, line: Line, points: Sequence[str]) -> None:
    timeline = timeline_of(line)
    end = max(each.last for each in timeline) or 1.0
    for each in timeline:
        row, colour = points.index(each.point), _COLOURS.get(_blocks_of(op, each.point), GREY)
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
