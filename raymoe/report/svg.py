"""Draws small SVG pictures for a page: curves, heat maps and bars.

Colours are classes of `page.css`, so that a picture follows the light or dark mode of its reader. A picture has no ids,
no script and no fixed size: several fit into one page, and each scales to the width that it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from raymoe.errors import printable

COLOURS = 6
"""Classes c0 to c5 of page.css. Further curves have the same colours with dashes."""
MOST_CURVES = 12

WIDTH, HEIGHT = 400, 272
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 28, 40


def safe(outside: object) -> str:
    r"""Escape text from outside for HTML and SVG.

    >>> print(safe('<b a="1">\n'))
    &lt;b a=&quot;1&quot;&gt;\n
    """
    return escape(printable(str(outside)))


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    """With `high`: the range around y, drawn as a band."""
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    label: str
    points: Sequence[Point]
    style: int
    """Its colour and mark. A negative number is grey: a limit, not a result."""
    dashed: bool = False

    @property
    def colour(self) -> str:
        return "grey" if self.style < 0 else f"c{self.style % COLOURS}"

    @property
    def dash(self) -> str:
        return " dash" if self.dashed or self.style >= COLOURS or self.style < 0 else ""


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    write: Callable[[float], str] = lambda value: compact(value)
    """Writes the label of a tick."""
    ticks: Sequence[float] | None = None
    """Chosen from the values where it is None."""


@dataclass(frozen=True)
class Limit:
    """A horizontal line with its text."""

    value: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over one axis. All x and y are positive if their axis is logarithmic."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    limits: Sequence[Limit] = ()


@dataclass(frozen=True)
class _Scale:
    """Maps values to places in the picture."""

    least: float
    most: float
    begin: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        least, most, value = (math.log(each) if self.log else each for each in (self.least, self.most, value))
        share = (value - least) / (most - least) if most > least else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def line_chart(chart: Chart) -> str:
    """Draw curves with marks, bands, ticks and limits."""
    points = [point for curve in chart.curves for point in curve.points]
    xs = [point.x for point in points]
    ys = [y for point in points for y in (point.y, point.low, point.high) if y is not None]
    x = _Scale(min(xs), max(xs), LEFT + 8, WIDTH - RIGHT - 8, chart.x.log)
    y_ticks = log_ticks(min(ys), max(ys)) if chart.y.log else linear_ticks(max([*ys, *_values(chart.limits)]))
    y = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, chart.y.log)
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(chart.title)}">']
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y(tick) + 3.5:.1f}" text-anchor="end">')
        parts.append(f"{safe(chart.y.write(tick))}</text>")
    ticks = chart.x.ticks if chart.x.ticks is not None else sorted(set(xs))
    for tick in apart([(x(value), value) for value in ticks]):
        parts.append(f'<text class="tick" x="{x(tick)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">')
        parts.append(f"{safe(chart.x.write(tick))}</text>")
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">')
    parts.append(f'{safe(chart.x.label)}</text><text class="axis" x="2" y="11">{safe(chart.y.label)}</text>')
    for limit in chart.limits:
        parts.append(f'<path class="limit" d="M{LEFT} {y(limit.value)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{y(limit.value) - 4:.1f}" text-anchor="end">')
        parts.append(f"{safe(limit.text)}</text>")
    parts += [_curve(curve, x, y, chart) for curve in chart.curves]
    return "".join(parts) + "</svg>"


def _values(limits: Sequence[Limit]) -> list[float]:
    return [limit.value for limit in limits]


def _curve(curve: Curve, x: _Scale, y: _Scale, chart: Chart) -> str:
    points = thinned(sorted(curve.points, key=lambda point: point.x))
    parts = [f'<g class="{curve.colour}{curve.dash}">']
    ranges = [(point.x, point.low, point.high) for point in points if point.low is not None and point.high is not None]
    if len(ranges) > 1 and any(high > low for _, low, high in ranges):
        upper = [f"{x(at)} {y(high)}" for at, _, high in ranges]
        lower = [f"{x(at)} {y(low)}" for at, low, _ in reversed(ranges)]
        parts.append(f'<path class="band" d="M{"L".join([*upper, *lower])}Z"/>')
    parts.append(f'<path class="line" d="M{"L".join(f"{x(point.x)} {y(point.y)}" for point in points)}"/>')
    for point in points:
        told = f"{curve.label}, {chart.x.write(point.x)}: {compact(point.y)} {chart.y.label}"
        parts.append(f'<g class="mark">{mark(curve.style, x(point.x), y(point.y))}<title>{safe(told)}</title></g>')
    return "".join(parts) + "</g>"


MOST_POINTS = 200


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Leave out points of a curve that has more than a picture can show.

    >>> len(thinned([Point(x, 1.0) for x in range(1000)])), len(thinned([Point(x, 1.0) for x in range(201)]))
    (200, 101)
    """
    return points[:: -(-len(points) // MOST_POINTS)] if len(points) > MOST_POINTS else points


def mark(style: int, x: float, y: float) -> str:
    """Draw a curve's mark: its shape tells curves apart without colours."""
    shape = abs(style) % COLOURS
    if style < 0:
        return f'<path d="M{x} {y - 4:.1f}v8"/>'
    if shape == 0:
        return f'<circle cx="{x}" cy="{y}" r="3.2"/>'
    if shape == 1:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    paths = {2: "m0 -4l4 7h-8z", 3: "m0 -4.2l4.2 4.2l-4.2 4.2l-4.2 -4.2z", 4: "m0 4l4 -7h-8z"}
    return f'<path d="M{x} {y}{paths.get(shape, "m-3 -3l6 6m0 -6l-6 6")}"/>'


def legend(curves: Sequence[Curve]) -> str:
    """Make the legend of curves, as text that wraps."""
    parts = []
    for curve in curves:
        line = f'<g class="{curve.colour}{curve.dash}"><path class="line" d="M1 6h24"/>'
        shown = (
            f'<svg class="swatch" viewBox="0 0 26 12">{line}<g class="mark">{mark(curve.style, 13, 6)}</g></g></svg>'
        )
        parts.append(f"<li>{shown}{safe(curve.label)}</li>")
    return f'<ul class="legend">{"".join(parts)}</ul>'


def apart(placed: Sequence[tuple[float, float]], least: float = 44) -> list[float]:
    """Choose the values whose labels do not overlap, the last one always. Each comes with its place.

    >>> apart([(0, 1), (10, 2), (50, 3), (60, 4), (100, 5)])
    [1, 3, 5]
    """
    kept: list[tuple[float, float]] = []
    for place, value in placed:
        if not kept or place - kept[-1][0] >= least:
            kept.append((place, value))
    if placed and kept[-1] != placed[-1]:
        if len(kept) > 1 and placed[-1][0] - kept[-1][0] < least:
            kept.pop()
        kept.append(placed[-1])
    return [value for _, value in kept]


def linear_ticks(most: float, count: int = 5) -> list[float]:
    """Give ticks from 0 to at least `most`, in steps of 1, 2 or 5 times a power of ten.

    >>> linear_ticks(381), linear_ticks(0.7)
    ([0.0, 100.0, 200.0, 300.0, 400.0], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if most / step <= count)
    return [float(f"{step * index:.6g}") for index in range(math.ceil(most / step * 0.999999) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Give ticks of 1, 2 and 5 times powers of ten around the values, or of powers alone where there are many.

    >>> log_ticks(6.3, 480), log_ticks(1, 1e6)
    ([5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0])
    """
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    factors = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
    step = 1 + (last - first) // 9
    ticks = [float(f"{factor}e{power}") for power in range(first, last + step, step) for factor in factors]
    low = max([index for index, tick in enumerate(ticks) if tick <= least * 1.000001], default=0)
    high = min([index for index, tick in enumerate(ticks) if tick >= most * 0.999999], default=len(ticks) - 1)
    return ticks[low : max(high, low + 1) + 1]


def compact(value: float) -> str:
    """Write a number with three digits or more.

    >>> compact(0.05714), compact(21.46), compact(1174.2), compact(418276.8), compact(2.5e7)
    ('0.0571', '21.5', '1,174', '418,277', '25 M')
    """
    if abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    for unit, size in ((" M", 1e6), (" G", 1e9)):
        if abs(value) < 1e3 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(us: float) -> str:
    """Write microseconds in the unit that fits.

    >>> duration(6.62), duration(473.4), duration(4432.2), duration(418276.8), duration(2.5e6)
    ('6.62 µs', '473 µs', '4.43 ms', '418 ms', '2.5 s')
    """
    size, unit = (1.0, "µs") if us < 1e3 else (1e3, "ms") if us < 1e6 else (1e6, "s")
    return f"{compact(us / size)} {unit}"


# Heat maps.

CELL = 46


@dataclass(frozen=True)
class Heat:
    """A square of cells by row and column, with its title. `scale` is the value of the full colour."""

    title: str
    size: int
    values: dict[tuple[int, int], float]
    scale: float
    unit: str
    notes: dict[tuple[int, int], str] = field(default_factory=dict)
    """A second line of a cell."""


def heat_map(heat: Heat) -> str:
    """Draw a heat map. A cell's number is in the cell, so that nobody must read it from the colour."""
    side = max(16, min(CELL, round(340 / heat.size)))
    margin = 30
    whole = margin + heat.size * side + 2
    parts = [f'<svg class="heat" viewBox="0 0 {whole} {whole}" style="max-width:{whole * 1.25:.0f}px" role="img"']
    parts.append(f' aria-label="{safe(heat.title)}"><g class="tick"><text x="2" y="10">from</text>')
    parts.append(f'<text x="{whole - 2}" y="10" text-anchor="end">to</text>')
    for index in range(heat.size):
        middle = margin + (index + 0.5) * side
        parts.append(f'<text x="{middle:.1f}" y="{margin - 6}" text-anchor="middle">{index}</text>')
        parts.append(f'<text x="{margin - 8}" y="{middle + 3.5:.1f}" text-anchor="end">{index}</text>')
    parts.append("</g>")
    for row in range(heat.size):
        for column in range(heat.size):
            parts.append(_cell(heat, row, column, side, margin))
    return "".join(parts) + "</svg>"


def _cell(heat: Heat, row: int, column: int, side: int, margin: int) -> str:
    x, y = margin + column * side, margin + row * side
    box = f'x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}" rx="3"'
    value = heat.values.get((row, column))
    if value is None:
        return f'<rect class="empty" {box}/>'
    share = min(1.0, max(0.0, value / heat.scale)) if heat.scale > 0 else 0.0
    ink = "over" if share > FULL else "under"
    told = f"{row} to {column}: {compact(value)} {heat.unit}"
    parts = [f'<rect class="cell" fill-opacity="{0.06 + 0.94 * share:.3f}" {box}><title>{safe(told)}</title></rect>']
    if side >= 30:
        note = heat.notes.get((row, column))
        middle = f'x="{x + side / 2:.1f}" text-anchor="middle"'
        parts.append(
            f'<text class="{ink}" {middle} y="{y + side / 2 + (0 if note else 4):.1f}">{compact(value)}</text>'
        )
        if note:
            parts.append(f'<text class="{ink} small" {middle} y="{y + side / 2 + 12:.1f}">{safe(note)}</text>')
    return "".join(parts)


FULL = 0.66
"""From this share of the scale on, text in a cell has the other colour."""


# Bars: rows of text with a picture that is as wide as there is room.


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar, from `begin` to `end` on the common scale."""

    begin: float
    end: float
    colour: str
    title: str = ""


@dataclass(frozen=True)
class Bar:
    label: str
    value: str
    segments: Sequence[BarSegment]
    whisker: tuple[float, float] | None = None
    """A thin line over the bar: the range of the samples."""
    ticks: Sequence[float] = ()


def bars(rows: Sequence[Bar], least: float, most: float, *, tight: bool = False) -> str:
    """Make rows of label, bar and value on one scale from `least` to `most`. `tight` rows have short labels."""
    span = most - least or 1.0

    def place(value: float) -> float:
        return round(100 * min(1.0, max(0.0, (value - least) / span)), 2)

    made = []
    for row in rows:
        parts = []
        for part in row.segments:
            x, end = sorted((place(part.begin), place(part.end)))
            rect = f'<rect class="{part.colour}" x="{x}" y="1" width="{max(end - x, 0.3):.2f}" height="8"'
            parts.append(f"{rect}><title>{safe(part.title)}</title></rect>" if part.title else f"{rect}/>")
        if row.whisker:
            low, high = map(place, row.whisker)
            parts.append(f'<path class="whisker" d="M{low} 5H{high}M{low} 3v4M{high} 3v4"/>')
        parts += [f'<path class="whisker" d="M{place(tick)} 0v10"/>' for tick in row.ticks]
        picture = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{"".join(parts)}</svg>'
        made.append(f"<li><span>{safe(row.label)}</span><b>{safe(row.value)}</b>{picture}</li>")
    return f'<ul class="bars{" tight" * tight}">{"".join(made)}</ul>'
