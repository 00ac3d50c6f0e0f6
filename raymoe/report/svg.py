"""Draws small SVG pictures: curves, heat maps and bars.

Colours are classes of `figure.css`, so that a picture on a page follows the light or dark mode of its reader. A picture
has no ids, no script and no fixed size: several fit into one page, and each scales to the width that it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from raymoe.errors import printable

COLOURS = 6
"""Classes c0 to c5 of figure.css. Further curves have the same colours with dashes."""
MOST_CURVES = 12

PAGE_SIZE = 400, 272
"""Width and height of a chart on a page."""
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
    ring: bool = False
    """Marks the point with a ring."""


@dataclass(frozen=True)
class Curve:
    label: str
    points: Sequence[Point]
    style: int
    """Its colour and mark. A negative number is grey: a limit, not a result."""
    dashed: bool = False
    note: str = ""
    """Follows the label in the legend."""

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
    below: bool = False
    """Puts the text below the line. Where curves end just above a limit, they would cross it."""


@dataclass(frozen=True)
class Drawing:
    """SVG elements, and the size of the area that they fill."""

    width: float
    height: float
    elements: str


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
    """Maps values to positions in the picture."""

    least: float
    most: float
    begin: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        least, most, value = (math.log(number) if self.log else number for number in (self.least, self.most, value))
        share = (value - least) / (most - least) if most > least else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def line_chart(chart: Chart, size: tuple[int, int] = PAGE_SIZE) -> Drawing:
    """Draw curves with marks, bands, ticks and limits."""
    width, height = size
    right, bottom = width - RIGHT, height - BOTTOM
    points = [point for curve in chart.curves for point in curve.points]
    xs = [point.x for point in points]
    ys = [y for point in points for y in (point.y, point.low, point.high) if y is not None]
    x = _Scale(min(xs), max(xs), LEFT + 8, right - 8, chart.x.log)
    limits = [limit.value for limit in chart.limits]
    y_ticks = log_ticks(min(ys), max(ys)) if chart.y.log else linear_ticks(max([*ys, *limits]))
    y = _Scale(y_ticks[0], y_ticks[-1], bottom, TOP, chart.y.log)
    parts = []
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}H{right}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y(tick) + 3.5:.1f}" text-anchor="end">')
        parts.append(f"{safe(chart.y.write(tick))}</text>")
    ticks = chart.x.ticks if chart.x.ticks is not None else sorted(set(xs))
    widest = max(width_of(chart.x.write(tick), 11) for tick in ticks)
    for tick in apart([(x(value), value) for value in ticks], widest + 8):
        parts.append(f'<text class="tick" x="{x(tick)}" y="{bottom + 15}" text-anchor="middle">')
        parts.append(f"{safe(chart.x.write(tick))}</text>")
    parts.append(f'<text class="axis" x="{(LEFT + right) / 2}" y="{height - 6}" text-anchor="middle">')
    parts.append(f'{safe(chart.x.label)}</text><text class="axis" x="2" y="11">{safe(chart.y.label)}</text>')
    for limit in chart.limits:
        parts.append(f'<path class="limit" d="M{LEFT} {y(limit.value)}H{right}"/>')
        baseline = y(limit.value) + (12 if limit.below else -4)
        parts.append(f'<text class="tick" x="{right}" y="{baseline:.1f}" text-anchor="end">')
        parts.append(f"{safe(limit.text)}</text>")
    parts += [_curve(curve, x, y, chart) for curve in chart.curves]
    return Drawing(width, height, "".join(parts))


def spread(curves: Sequence[Curve]) -> float:
    """Divide the largest y of all points by the smallest."""
    values = [point.y for curve in curves for point in curve.points]
    return max(values) / min(values)


def _curve(curve: Curve, x: _Scale, y: _Scale, chart: Chart) -> str:
    points = thinned(sorted(curve.points, key=lambda point: point.x))
    parts = [f'<g class="{curve.colour}{curve.dash}">']
    ranges = [(point.x, point.low, point.high) for point in points if point.low is not None and point.high is not None]
    if len(ranges) > 1 and any(high > low for _, low, high in ranges):
        upper = [f"{x(value)} {y(high)}" for value, _, high in ranges]
        lower = [f"{x(value)} {y(low)}" for value, low, _ in reversed(ranges)]
        parts.append(f'<path class="band" d="M{"L".join([*upper, *lower])}Z"/>')
    parts.append(f'<path class="line" d="M{"L".join(f"{x(point.x)} {y(point.y)}" for point in points)}"/>')
    for point in points:
        value = f"{curve.label}, {chart.x.write(point.x)}: {compact(point.y)} {chart.y.label}"
        shape = mark(curve.style, x(point.x), y(point.y))
        parts.append(f'<g class="mark">{shape}<title>{safe(value)}</title></g>')
        if point.ring:
            parts.append(f'<circle class="ring" cx="{x(point.x)}" cy="{y(point.y)}" r="7"/>')
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


@dataclass(frozen=True)
class Key:
    """An entry of a legend for bars: a name and the class of its colour."""

    label: str
    colour: str


def swatch(entry: Curve | Key) -> Drawing:
    """Draw the sample beside an entry of a legend."""
    if isinstance(entry, Key):
        return Drawing(12, 12, f'<rect class="{entry.colour}" width="12" height="12" rx="2"/>')
    line = '<path class="line" d="M1 6h24"/>'
    sample = f'{line}<g class="mark">{mark(entry.style, 13, 6)}</g>'
    return Drawing(26, 12, f'<g class="{entry.colour}{entry.dash}">{sample}</g>')


def entry_text(entry: Curve | Key) -> str:
    return f"{entry.label}: {entry.note}" if isinstance(entry, Curve) and entry.note else entry.label


def apart(ticks: Sequence[tuple[float, float]], least: float) -> list[float]:
    """Choose ticks that are `least` apart, the last one always. A tick is a position and a value.

    >>> apart([(0, 1), (10, 2), (50, 3), (60, 4), (100, 5)], 44)
    [1, 3, 5]
    """
    chosen: list[tuple[float, float]] = []
    for position, value in ticks:
        if not chosen or position - chosen[-1][0] >= least:
            chosen.append((position, value))
    if ticks and chosen[-1] != ticks[-1]:
        if len(chosen) > 1 and ticks[-1][0] - chosen[-1][0] < least:
            chosen.pop()
        chosen.append(ticks[-1])
    return [value for _, value in chosen]


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


def heat_map(heat: Heat) -> Drawing:
    """Draw a heat map. A cell's number is in the cell, so that nobody must read it from the colour."""
    side = max(16, min(CELL, round(340 / heat.size)))
    margin = 30
    whole = margin + heat.size * side + 2
    parts = ['<g class="tick"><text x="2" y="10">from</text>']
    parts.append(f'<text x="{whole - 2}" y="10" text-anchor="end">to</text>')
    for index in range(heat.size):
        middle = margin + (index + 0.5) * side
        parts.append(f'<text x="{middle:.1f}" y="{margin - 6}" text-anchor="middle">{index}</text>')
        parts.append(f'<text x="{margin - 8}" y="{middle + 3.5:.1f}" text-anchor="end">{index}</text>')
    parts.append("</g>")
    for row in range(heat.size):
        for column in range(heat.size):
            parts.append(_cell(heat, row, column, side, margin))
    return Drawing(whole, whole, f'<g class="heat">{"".join(parts)}</g>')


def _cell(heat: Heat, row: int, column: int, side: int, margin: int) -> str:
    x, y = margin + column * side, margin + row * side
    box = f'x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}" rx="3"'
    value = heat.values.get((row, column))
    if value is None:
        return f'<rect class="empty" {box}/>'
    share = min(1.0, max(0.0, value / heat.scale)) if heat.scale > 0 else 0.0
    ink = "over" if share > FULL else "under"
    words = f"{row} to {column}: {compact(value)} {heat.unit}"
    parts = [f'<rect class="cell" fill-opacity="{0.06 + 0.94 * share:.3f}" {box}><title>{safe(words)}</title></rect>']
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


# Bars: rows of text, each with a bar on one scale.


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar, from `begin` to `end` on the common scale."""

    begin: float
    end: float
    colour: str
    """Classes of figure.css: `c0`, or `c0 faded`."""
    title: str = ""


@dataclass(frozen=True)
class Bar:
    label: str
    value: str
    segments: Sequence[BarSegment]
    whisker: tuple[float, float] | None = None
    """A thin line over the bar: the range of the samples."""
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class BarChart:
    """Bars on one scale from `least` to `most`. The labels of `tight` bars are short, and stand beside them."""

    title: str
    rows: Sequence[Bar]
    most: float
    least: float = 0.0
    unit: str = ""
    """The label of the axis in a file."""
    tight: bool = False

    def at(self, value: float, width: float) -> float:
        """Give the position of a value between 0 and `width`."""
        span = self.most - self.least or 1.0
        return round(width * min(1.0, max(0.0, (value - self.least) / span)), 2)


def bar(row: Bar, chart: BarChart, width: float, height: float) -> str:
    """Draw one bar, without its label and value."""
    parts = []
    for part in row.segments:
        x, end = sorted((chart.at(part.begin, width), chart.at(part.end, width)))
        least = (0.02 if chart.tight else 0.003) * width
        x = min(x, width - least)
        rect = f'<rect class="{part.colour}" x="{x}" y="1" width="{max(end - x, least):.2f}" height="{height - 2:g}"'
        parts.append(f"{rect}><title>{safe(part.title)}</title></rect>" if part.title else f"{rect}/>")
    if row.whisker:
        low, high = (chart.at(value, width) for value in row.whisker)
        middle = height / 2
        ends = f"M{low} {middle - 2:g}v4M{high} {middle - 2:g}v4"
        parts.append(f'<path class="whisker" d="M{low} {middle:g}H{high}{ends}"/>')
    parts += [f'<path class="whisker" d="M{chart.at(tick, width)} 0v{height:g}"/>' for tick in row.ticks]
    return "".join(parts)


def bar_list(chart: BarChart) -> str:
    """Make the bars as a list of HTML, whose text wraps and whose bars are as wide as there is room."""
    items = []
    for row in chart.rows:
        drawn = bar(row, chart, 100, 10)
        picture = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
        items.append(f"<li><span>{safe(row.label)}</span><b>{safe(row.value)}</b>{picture}</li>")
    return f'<ul class="bars{" tight" * chart.tight}">{"".join(items)}</ul>'


def bar_chart(chart: BarChart) -> Drawing:
    """Draw the bars with an axis below them. Labels stand beside tight bars, and above others."""
    left, right, height, whole = (124, 60, 17, 350) if chart.tight else (2, 12, 36, 640)
    width, bar_height = whole - left - right, 12 if chart.tight else 13
    bottom = len(chart.rows) * height
    parts = []
    ticks = [tick for tick in linear_ticks(chart.most) if chart.least <= tick <= chart.most * 1.000001]
    for tick in ticks if chart.unit else ():
        x = left + chart.at(tick, width)
        parts.append(f'<path class="grid" d="M{x:g} 0V{bottom + 2}"/>')
        parts.append(f'<text class="tick" x="{x:g}" y="{bottom + 15}" text-anchor="middle">{compact(tick)}</text>')
    for index, row in enumerate(chart.rows):
        y = index * height
        label, value = fitting(row.label, left - 8 if chart.tight else 0.7 * whole), safe(row.value)
        if chart.tight:
            parts.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{safe(label)}</text>')
            parts.append(f'<text x="{whole}" y="{y + 12}" text-anchor="end">{value}</text>')
        else:
            parts.append(f'<text x="{left}" y="{y + 13}">{safe(label)}</text>')
            parts.append(f'<text x="{left + width}" y="{y + 13}" text-anchor="end">{value}</text>')
        top = y + (2 if chart.tight else 18)
        parts.append(f'<g transform="translate({left} {top})">{bar(row, chart, width, bar_height)}</g>')
    if chart.unit:
        middle = left + width / 2
        parts.append(
            f'<text class="axis" x="{middle:g}" y="{bottom + 30}" text-anchor="middle">{safe(chart.unit)}</text>'
        )
    return Drawing(whole, bottom + (36 if chart.unit else 0), "".join(parts))


def width_of(text: str, size: float = 11.5) -> float:
    """Estimate how wide a text is. Fonts without serifs differ; this is the width in a wide one."""
    return 0.58 * size * len(text)


def fitting(text: str, width: float, size: float = 11.5) -> str:
    """Cut a text that would be wider.

    >>> fitting("first push", 100), fitting("a long name of a case", 100)
    ('first push', 'a long name o…')
    """
    most = int(width / width_of("x", size) + 1e-6)
    return text if len(text) <= most else f"{text[: most - 1]}…"
