"""Figures of exchanges between GPUs: time and bandwidth over tokens, a curve for each backend, the L2 cache cold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from raymoe.device.trace import POINTS
from raymoe.report.columns import EXCHANGES, YARDSTICK, pushes_such_rows
from raymoe.report.copies import gave, gbps, link_of, measured, three_digits, us, whole
from raymoe.report.drawing import COLOURS, GREY, MARKERS, headed, link_line, measured_limit, new_figure
from raymoe.report.results import Line
from raymoe.report.tables import Group, groups_of, reached

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
        yield "-".join(words), _tokens_figure(_with_limit(group, groups), colours)


def _with_limit(group: Group, groups: Sequence[Group]) -> Group:
    """A combine sends the rows of dispatch the other way, so that what pushes those is its limit too."""
    if group.op != "combine" or not all(pushes_such_rows(line) for line in group.lines):
        return group
    there = (other for other in groups if (other.op, other.setting) == ("dispatch", group.setting))
    limit = [line for other in there for line in other.lines if line["backend"] == YARDSTICK]
    return Group(group.op, group.setting, [*group.lines, *limit], group.told)


def _tokens_figure(group: Group, colours: Mapping[str, int]) -> Figure:
    labels = dict.fromkeys(group.label(line) for line in group.lines)
    figure = new_figure(11.0, 4.7 + 0.2 * math.ceil(len(labels) / 4))
    time, bandwidth = figure.subplots(1, 2)
    for axes, of in ((time, us), (bandwidth, gbps)):
        _draw_tokens(axes, group, colours, of)
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


def spaced(counts: Sequence[int]) -> list[int]:
    """Those of them, in order, whose names have room beside one another on a logarithmic axis.

    >>> spaced([1, 2048, 3072, 4096, 6144, 8192])
    [1, 2048, 4096, 8192]
    """
    kept: list[int] = []
    for count in counts:
        if not kept or count > 1.6 * kept[-1]:
            kept.append(count)
    return kept


def _draw_tokens(axes: Axes, group: Group, colours: Mapping[str, int], of: Callable[[Line], float]) -> None:
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
    ticks = spaced(sorted({whole(line, "tokens") for line in group.lines}))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=40)
    axes.set_xlabel("tokens a rank")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


# Figures of exchanges between GPUs over the multiprocessors that they were allowed.

LEAST_POINTS = 3
NEAR_BEST = 1.1
"""Times a curve's own best: what is below that is as good as the best for most uses."""

_ASKED = re.compile(r"(?:^|,)sms=(\d+)(?:,|$)")


def asked_sms(line: Line) -> int | None:
    """The multiprocessors that a case of a sweep asks for.

    >>> asked_sms({"case": "layout=rank,sms=24"}), asked_sms({"case": "layout=rank,sms=auto"})
    (24, None)
    """
    found = _ASKED.search(str(line["case"]))
    return int(found[1]) if found else None


def sms_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """A figure for each operation that was swept over multiprocessors, with the stem of its file."""
    for op in EXCHANGES:
        swept: dict[tuple[str, ...], dict[int, Line]] = {}
        for line in lines:
            sms = asked_sms(line)
            if line["op"] == op and line["l2"] == COLD and line["us_p50"] and sms is not None:
                words = tuple(word for word in str(line["case"]).split(",") if not word.startswith("sms="))
                swept.setdefault(words, {})[sms] = line
        swept = {words: points for words, points in swept.items() if len(points) >= LEAST_POINTS}
        shared = set.intersection(*(set(words) for words in swept)) if swept else set()
        curves: dict[str, dict[int, Line]] = {}
        for words, points in swept.items():
            backend = str(next(iter(points.values()))["backend"])
            curves[" ".join([backend, *(word for word in words if word not in shared)])] = points
        if curves:
            yield f"{op}-sms", _sms_figure(op, curves)


def _sms_figure(op: str, curves: dict[str, dict[int, Line]]) -> Figure:
    lines = [line for points in curves.values() for line in points.values()]
    figure = new_figure(7.2, 5.0 + 0.2 * len(curves))
    axes = figure.add_subplot(1, 1, 1)
    for place, (label, points) in enumerate(curves.items()):
        _draw_sms(axes, place, label, {sms: us(points[sms]) for sms in sorted(points)})
    for limit in sorted({round(least, 1) for line in lines if (least := _least_us(line))}):
        measured_limit(axes, limit, f"{limit:.0f} µs: the busiest port's bytes at the most that such links gave")
    ticks = sorted({sms for points in curves.values() for sms in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("multiprocessors that the exchange may take")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time of the slowest rank, µs")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", frameon=False)
    tokens = "/".join(str(count) for count in sorted({whole(line, "tokens") for line in lines}))
    title = f"{op.capitalize()} of {tokens} tokens a rank over multiprocessors"
    headed(figure, title, f"{measured(lines)}, L2 cache cold", lines)
    return figure


def _draw_sms(axes: Axes, place: int, label: str, times: dict[int, float]) -> None:
    """A curve, and where it comes within a tenth of its best."""
    best = min(times.values())
    near = min(sms for sms, time in times.items() if time <= NEAR_BEST * best)
    colour = COLOURS[place % len(COLOURS)]
    said = f"{label}: best {best:.0f} µs, within 10 % from {near} on"
    axes.plot(list(times), list(times.values()), color=colour, marker=MARKERS[place % len(MARKERS)], label=said)
    axes.plot([near], [times[near]], marker="o", markersize=12, markerfacecolor="none", color=GREY, linestyle="none")


def _least_us(line: Line) -> float | None:
    """The time that the bytes of the busiest port would take at the most that such links gave."""
    most = gave(line["device"])
    return gbps(line) * us(line) / most if most and line["gbps_wire"] is not None else None


# Figures of where the time of an exchange goes: for each point of a kernel, from its first block to its last.

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
            yield f"{op}-timeline", _timeline_figure(op, traced)


def _timeline_figure(op: str, lines: Sequence[Line]) -> Figure:
    came = {each.point for line in lines for each in reached(line)}
    points = [*(point for point in POINTS[op] if point in came), *sorted(came - set(POINTS[op]))]
    across = min(len(lines), PANELS_ABREAST)
    down = math.ceil(len(lines) / across)
    figure = new_figure(max(7.2, 1.6 + 3.0 * across), 1.9 + down * (0.7 + 0.21 * len(points)))
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, line, title in zip(panels.flat, lines, _titles(lines), strict=False):
        _draw_timeline(axes, op, line, points)
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


def _draw_timeline(axes: Axes, op: str, line: Line, points: Sequence[str]) -> None:
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
