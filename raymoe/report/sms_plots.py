"""Figures of exchanges between GPUs over the multiprocessors that they were allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from raymoe.report.columns import EXCHANGES
from raymoe.report.drawing import COLOURS, GREY, MARKERS, headed, measured_limit, new_figure
from raymoe.report.results import Line
from raymoe.report.ways import gave, gbps, measured, us, whole

LEAST_POINTS = 3
NEAR_BEST = 1.1
"""Times a curve's own best: what is below that is as good as the best for most uses."""

COLD = "cold"
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
            yield f"{op}-sms", _figure(op, curves)


def _figure(op: str, curves: dict[str, dict[int, Line]]) -> Figure:
    lines = [line for points in curves.values() for line in points.values()]
    figure = new_figure(7.2, 5.0 + 0.2 * len(curves))
    axes = figure.add_subplot(1, 1, 1)
    for place, (label, points) in enumerate(curves.items()):
        _draw(axes, place, label, {sms: us(points[sms]) for sms in sorted(points)})
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


def _draw(axes: Axes, place: int, label: str, times: dict[int, float]) -> None:
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
