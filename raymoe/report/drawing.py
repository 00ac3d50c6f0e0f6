"""What the figures have in common: colours, letters, the link's limit, the head, and how they become files."""

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

# Okabe and Ito's colours, which everybody can tell apart, without their yellow, too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GREY = "#666666"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "raymoe",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
}
DOTS_PER_INCH = 150


def link_line(axes: Axes, full: float, name: str) -> None:
    """What the link can give at most, by the book."""
    axes.axhline(full, color=GREY, linewidth=1.2, linestyle=(0, (1, 2)))
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    axes.annotate(f"{full:.0f} GB/s, {name}", (0.01, full), color=GREY, fontsize=8.5, **place)
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * full))


def measured_limit(axes: Axes, most: float, words: str) -> None:
    """What was measured to be the most there is: dashed, its words at the right, below the line."""
    axes.axhline(most, color=GREY, linewidth=1.2, linestyle=(0, (6, 3)))
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, -10), "textcoords": "offset points"}
    axes.annotate(words, (0.99, most), color=GREY, fontsize=8.5, ha="right", **place)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def headed(figure: Figure, title: str, how: str, lines: Sequence[Line]) -> None:
    """What is seen, on which machine and in which run, and how it was measured."""
    figure.suptitle(f"{title}\n{machine(lines)}\n{how}", fontsize=10)


def rendered(figure: Figure, kind: str) -> bytes:
    page = io.BytesIO()
    # The date and the version of matplotlib would make two drawings of the same lines differ.
    blank: dict[str, str | None] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(page, format=kind, dpi=DOTS_PER_INCH, metadata=blank)
    return page.getvalue()
