"""Shared parts of the figures: colours, fonts, lines for limits, titles, and conversion to PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from raymoe.report.copies import machine
from raymoe.report.results import Line

# The colour-blind safe palette of Okabe and Ito, without its yellow, which is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GREY = "#666666"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "raymoe",
    "font.family": "DejaVu Sans",  # shipped with matplotlib, so figures are the same on every machine
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "text.parse_math": False,  # a `$` of a name is no formula
}
DOTS_PER_INCH = 150


def nominal_limit(axes: Axes, full: float, name: str) -> None:
    """Draw the nominal limit of the link: dotted, its text at the left, above the line."""
    axes.axhline(full, color=GREY, linewidth=1.2, linestyle=(0, (1, 2)))
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    axes.annotate(f"{full:.0f} GB/s, {name}", (0.01, full), color=GREY, fontsize=8.5, **place)
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * full))


def measured_limit(axes: Axes, most: float, text: str, *, above: bool = False) -> None:
    """Draw a measured limit: dashed, its text at the right, below the line or above it."""
    axes.axhline(most, color=GREY, linewidth=1.2, linestyle=(0, (6, 3)))
    offset = (0, 4 if above else -10)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": offset, "textcoords": "offset points"}
    axes.annotate(text, (0.99, most), color=GREY, fontsize=8.5, ha="right", **place)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, title: str, how: str, lines: Sequence[Line]) -> None:
    """Set the title: the subject, then machine and run, then how it was measured."""
    figure.suptitle(f"{title}\n{machine(lines)}\n{how}", fontsize=10)


def rendered(figure: Figure, kind: str) -> bytes:
    content = io.BytesIO()
    # With the date or matplotlib's version, two drawings of the same lines would differ.
    removed: dict[str, str | None] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=removed)
    return content.getvalue()
