"""Draws the bandwidth of operations over rows: over rows by system, and over SMs and stages of raymoe's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from raymoe.report.bandwidth import BandwidthCurves, bandwidth_curves, is_copy, rate
from raymoe.report.copies import how_measured
from raymoe.report.drawing import COLOURS, GREY, MARKERS, measured_limit, new_figure, set_title
from raymoe.report.exchange_plots import spaced
from raymoe.report.results import Line

MOST_CURVES = 24


def bandwidth_figures(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """Draw a figure for each operation and axis, with its file's stem."""
    for found in bandwidth_curves(lines):
        yield found.stem, _figure(found)


def _figure(found: BandwidthCurves) -> Figure:
    figure = new_figure(7.2, 4.7 + 0.2 * math.ceil(min(len(found.curves), MOST_CURVES) / 4))
    axes = figure.add_subplot(1, 1, 1)
    for index, (label, points) in enumerate(islice(found.curves.items(), MOST_CURVES)):
        counts, copied = sorted(points), is_copy(label)
        axes.plot(
            counts,
            [rate(points[count]) for count in counts],
            color=GREY if copied else COLOURS[index % len(COLOURS)],
            linestyle=(0, (4, 2)) if copied else "solid",
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            label=label,
        )
    if found.limit:
        most = rate(found.limit)  # curves come close to it, and seldom above
        measured_limit(axes, most, f"{most:,.0f} GB/s, a copy of as many bytes", above=True)
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * most))
    ticks = spaced(sorted({count for points in found.curves.values() for count in points}))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(found.label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s, read and written")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    cold = ", L2 cache cold" if all(line["l2"] == "cold" for line in found.lines) else ""
    set_title(figure, found.title, how_measured(found.lines) + cold, found.lines)
    return figure
