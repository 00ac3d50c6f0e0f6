"""A figure with the table of its numbers: as a part of report.html, and as an SVG file of `plots/`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from raymoe.report.columns import Column
from raymoe.report.measures import how_measured, ranks_on, three_digits
from raymoe.report.results import Line
from raymoe.report.svg import (
    BarChart,
    Chart,
    Curve,
    Drawing,
    Heat,
    Key,
    Point,
    bar_chart,
    bar_list,
    entry_text,
    fitting,
    heat_map,
    line_chart,
    safe,
    swatch,
    width_of,
)

MOST_ROWS = 200
MOST_COLUMNS = 64
"""The size of the table of a figure's numbers."""


@dataclass(frozen=True)
class Panel:
    """One picture of a figure."""

    picture: Chart | Heat | BarChart
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """One picture, or several side by side with one legend."""

    stem: str
    """The name of its file in `plots/`, without the suffix."""
    title: str
    how: str
    """How and where it was measured."""
    panels: Sequence[Panel]
    columns: Sequence[Column]
    """The numbers that it shows."""
    legend: Sequence[Curve | Key] = ()
    note: str = ""

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of a page."""
        return len(self.panels) > 1 or isinstance(self.panels[0].picture, Heat)


def how_and_where(lines: Sequence[Line]) -> str:
    """Say where and how these lines were measured."""
    cold = "; L2 cache cold" if all(line["l2"] == "cold" for line in lines) else ""
    return f"{ranks_on(lines)}. {how_measured(lines)}{cold}."


def curve_columns(header: str, write: Callable[[int], str], **curves_by_unit: Sequence[Curve]) -> list[Column]:
    """Make the table of the points of curves: a row for each x, and a column for each curve in each unit."""
    xs = sorted({point.x for curves in curves_by_unit.values() for curve in curves for point in curve.points})
    xs = xs[:MOST_ROWS]
    columns = [Column(header, [write(int(x)) for x in xs], right=True)]
    for unit, curves in curves_by_unit.items():
        for curve in curves[:MOST_COLUMNS]:
            by_x = {point.x: point for point in curve.points}
            columns.append(Column(f"{curve.label} {unit}", [_cell(by_x.get(x)) for x in xs], right=True))
    return columns


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    if point.low is None or point.high is None or point.low == point.high:
        return three_digits(point.y)
    return f"{three_digits(point.y)} ({three_digits(point.low)} to {three_digits(point.high)})"


# On the page.


def figure_body(figure: Figure) -> str:
    """Make the HTML of the pictures and their legend, without anything from outside that is not escaped."""
    entries = []
    for entry in figure.legend:
        sample = swatch(entry)
        picture = f'<svg class="swatch" viewBox="0 0 {sample.width} {sample.height}">{sample.elements}</svg>'
        entries.append(f"<li>{picture}{safe(entry_text(entry))}</li>")
    legend = f'<ul class="legend">{"".join(entries)}</ul>' if entries else ""
    if len(figure.panels) == 1 and not figure.panels[0].title:
        return legend + picture_html(figure.panels[0].picture)
    panels = (
        f"<div>{f'<h4>{safe(panel.title)}</h4>' if panel.title else ''}{picture_html(panel.picture)}</div>"
        for panel in figure.panels
    )
    charts = " charts" * isinstance(figure.panels[0].picture, Chart)
    return f'{legend}<div class="panels{charts}">{"".join(panels)}</div>'


def picture_html(picture: Chart | Heat | BarChart) -> str:
    if isinstance(picture, BarChart):
        return bar_list(picture)
    drawing = line_chart(picture) if isinstance(picture, Chart) else heat_map(picture)
    look = 'class="chart"'
    if isinstance(picture, Heat):
        look = f'style="max-width:{drawing.width * HEAT_SCALE:.0f}px"'
    box = f"0 0 {drawing.width:g} {drawing.height:g}"
    return f'<svg {look} viewBox="{box}" role="img" aria-label="{safe(picture.title)}">{drawing.elements}</svg>'


HEAT_SCALE = 1.25


# In a file.

MARGIN, GAP = 20, 28
LEAST_WIDTH, MOST_TITLE = 560, 300
TITLE, TEXT = 15, 11
"""Sizes of fonts."""


def figure_file(figure: Figure, runs: Sequence[str]) -> str:
    """Make an SVG file of a figure of these runs. The same lines give the same file, byte for byte."""
    drawings, scale, columns = _drawings(figure)
    titles = [panel.title for panel in figure.panels]
    widest_title = min(MOST_TITLE, max(width_of(title) for title in titles))
    cell = max(widest_title, scale * max(drawing.width for drawing in drawings))
    sheet = Sheet(max(LEAST_WIDTH, round(2 * MARGIN + columns * cell + (columns - 1) * GAP)))
    sheet.write(figure.title, TITLE, "title")
    sheet.write(figure.how)
    sheet.write(run_names(runs))
    sheet.add_legend(figure.legend)
    titled = list(zip(titles, drawings, strict=True))
    for first in range(0, len(titled), columns):
        sheet.add_row(titled[first : first + columns], cell, scale)
    sheet.write(figure.note)
    return sheet.file(figure.title)


class Sheet:
    """Puts the parts of a figure below one another, in SVG."""

    def __init__(self, width: int) -> None:
        self._width, self._inside = width, width - 2 * MARGIN
        self._y = float(MARGIN)
        self._parts: list[str] = []

    def write(self, text: str, size: float = TEXT, kind: str = "axis") -> None:
        """Add text, with as many rows as it needs."""
        for row in textwrap.wrap(text, int(self._inside / width_of("x", size))):
            self._parts.append(f'<text class="{kind}" x="{MARGIN}" y="{self._y + 4:g}">{safe(row)}</text>')
            self._y += size + 4

    def add_legend(self, entries: Sequence[Curve | Key]) -> None:
        """Add the entries in a row, and in further rows where they do not fit."""
        x, self._y = 0.0, self._y + 8
        for entry in entries:
            sample = swatch(entry)
            text = fitting(entry_text(entry), self._inside - sample.width - 6)
            width = sample.width + 6 + width_of(text)
            if x and x + width > self._inside:
                x, self._y = 0.0, self._y + 18
            self._parts.append(f'<g transform="translate({MARGIN + x:g} {self._y:g})">{sample.elements}')
            self._parts.append(f'<text x="{sample.width + 6}" y="10">{safe(text)}</text></g>')
            x += width + 14
        self._y += 26 if entries else 0

    def add_row(self, titled: Sequence[tuple[str, Drawing]], cell: float, scale: float) -> None:
        """Add pictures side by side, each with its title above."""
        above = 18 if any(title for title, _ in titled) else 4
        size = f" scale({scale:g})" if scale != 1 else ""
        for column, (title, drawing) in enumerate(titled):
            x = MARGIN + column * (cell + GAP)
            if title:
                text = safe(fitting(title, cell))
                self._parts.append(f'<text class="panel" x="{x:g}" y="{self._y + 11:g}">{text}</text>')
            place = f"translate({x:g} {self._y + above:g}){size}"
            self._parts.append(f'<g transform="{place}">{drawing.elements}</g>')
        self._y += above + scale * max(drawing.height for _, drawing in titled) + 16

    def file(self, title: str) -> str:
        size = self._width, round(self._y + MARGIN - 4)
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">\n'
            f"<title>{safe(title)}</title>\n<style>{_style()}</style>\n"
            f'<rect width="{size[0]}" height="{size[1]}" fill="#fff"/>\n' + "\n".join(self._parts) + "\n</svg>\n"
        )


def _drawings(figure: Figure) -> tuple[list[Drawing], float, int]:
    """Draw the panels for a file. Also choose their scale, and how many stand side by side."""
    pictures = [panel.picture for panel in figure.panels]
    charts = [picture for picture in pictures if isinstance(picture, Chart)]
    heats = [picture for picture in pictures if isinstance(picture, Heat)]
    if charts:
        size = (600, 330) if len(charts) == 1 else (430, 290)
        return [line_chart(chart, size) for chart in charts], 1, min(len(charts), 2)
    if heats:
        return [heat_map(heat) for heat in heats], HEAT_SCALE, min(len(heats), 3 if heats[0].size <= 4 else 2)
    bars = [picture for picture in pictures if isinstance(picture, BarChart)]
    return [bar_chart(chart) for chart in bars], 1, min(len(bars), 3 if bars[0].tight else 1)


def run_names(runs: Sequence[str]) -> str:
    """Name the runs of a figure.

    >>> run_names(["a-run", "b-run", "b-run", "c-run"])
    'run a-run and 2 more'
    """
    first, *more = dict.fromkeys(runs)
    return f"run {first}" + (f" and {len(more)} more" if more else "")


def style_sheet(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    """Give figure.css with the colours of the light mode in place of variables, which converters do not know."""
    light = style_sheet("page.css").partition("@media")[0]
    colours = dict(re.findall(r"--([\w-]+): (#\w+);", light))
    rules = re.sub(r"/\*.*?\*/\s*", "", style_sheet("figure.css"), flags=re.DOTALL)
    return re.sub(r"var\(--([\w-]+)\)", lambda variable: colours[variable[1]], rules)
