"""Makes the figures of a page from result lines: copies, exchanges over tokens and SMs, time splits, overlap and the
load of experts.

Each figure is text of HTML and SVG with the table of its numbers. All lines are from `displayed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from raymoe.exchange.peer.trace import POINTS
from raymoe.report.bandwidth import bandwidth_curves, is_copy, rate
from raymoe.report.columns import BASELINE, EXCHANGES, Column, byte_size, show
from raymoe.report.copies import (
    LATENCY_BYTES,
    CopyWay,
    gbps,
    how_measured,
    integer,
    link_of,
    measured_link_gbps,
    ranks_on,
    three_digits,
    us,
    ways_of,
)
from raymoe.report.results import Line
from raymoe.report.svg import (
    MOST_CURVES,
    Axis,
    Bar,
    BarSegment,
    Chart,
    Curve,
    Heat,
    Limit,
    Point,
    bars,
    compact,
    duration,
    heat_map,
    legend,
    line_chart,
    safe,
)
from raymoe.report.sweeps import sms_curves
from raymoe.report.tables import Group, by_workload, grouped, overlap_times, timeline_of

MOST_HEAT_RANKS = 64
MOST_HEAT_MAPS = 12
MOST_BARS = 40
MOST_PANELS = 16


@dataclass(frozen=True)
class Figure:
    title: str
    how: str
    """How and where it was measured."""
    body: str
    """HTML without anything from outside that is not escaped."""
    columns: list[Column]
    """The numbers that it shows."""
    note: str = ""
    wide: bool = False


def figures(lines: Sequence[Line], protocol: str = "") -> Iterator[Figure]:
    """Make all figures of these lines. `protocol` is that of the job, for copies whose case does not name one."""
    timed = [line for line in lines if line["us_p50"]]
    copies = [line for line in timed if line["op"] == "copy" and line["bytes"]]
    steps = [line for line in timed if line["workload"] in ("exchange", "layer") and line["tokens"]]
    cold = [line for line in steps if line["op"] in (*EXCHANGES, "step") and line["l2"] in ("cold", None)]
    yield from copy_figures(ways_of(copies, protocol))
    for of_workload in by_workload(cold):
        yield from exchange_figures(of_workload)
    yield from sms_figures(cold)
    yield from timeline_figures(lines)
    yield from overlap_figures(timed)
    yield from bandwidth_figures(timed)
    yield from load_figures(lines)


# Copies between ranks: curves over the size of a message, and heat maps of all pairs.

_PATTERNS = {"pairs": "one pair at a time", "all_to_all": "every rank to every other at once"}


def copy_figures(ways: Mapping[CopyWay, Sequence[Line]]) -> Iterator[Figure]:
    lines = [line for of_way in ways.values() for line in of_way]
    for pattern in sorted({str(line["pattern"]) for line in lines}):
        of_pattern = _only(ways, str, "pattern", pattern)
        where = _PATTERNS.get(pattern, pattern)
        yield _copy_curves(f"Bandwidth of copies, {where}", of_pattern, gbps, "GB/s, one direction")
        short = _only(of_pattern, _is_short, "bytes", True)
        if short:
            yield _copy_curves(f"Latency of short copies, {where}", short, us, "µs a copy")
    yield from _heat_figures(ways)


def _is_short(size: object) -> bool:
    return int(str(size)) <= LATENCY_BYTES


def _is_known(value: object) -> bool:
    return value is not None


def _only(
    ways: Mapping[CopyWay, Sequence[Line]], of: Callable[[object], object], key: str, wanted: object
) -> dict[CopyWay, list[Line]]:
    """Keep the lines where `of` the key's value is `wanted`."""
    found = {way: [line for line in lines if of(line[key]) == wanted] for way, lines in ways.items()}
    return {way: lines for way, lines in found.items() if lines}


def _copy_curves(
    title: str, ways: Mapping[CopyWay, Sequence[Line]], quantity: Callable[[Line], float], unit: str
) -> Figure:
    lines = [line for of_way in ways.values() for line in of_way]
    curves, colours = [], dict[object, int]()
    for way, of_way in ways.items():
        by_size: dict[int, list[float]] = {}
        for line in of_way:
            by_size.setdefault(integer(line, "bytes"), []).append(quantity(line))
        points = [Point(size, median(each), min(each), max(each)) for size, each in sorted(by_size.items())]
        style = colours.setdefault((way.transport, way.details), len(colours))
        curves.append(Curve(way.label, points, style, dashed=way.protocol == "get"))
    latency = quantity is us
    limits = {limit for line in lines if (limit := link_of(line["device"]))} if not latency else set()
    chart = Chart(
        title,
        Axis("size of a message", log=True, write=byte_size),
        Axis(unit, log=latency and _spread(curves) > 20),
        curves[:MOST_CURVES],
        [Limit(full, f"{full:.0f} GB/s, {name}") for full, name in sorted(limits)],
    )
    several = len({(line["src"], line["dst"]) for line in lines}) > 1
    note = "Lines: the median pair. Bands: from the slowest pair to the fastest." if several else ""
    return Figure(title, _how(lines), _drawn(chart), curve_columns("size", curves, byte_size), note)


def _spread(curves: Sequence[Curve]) -> float:
    values = [point.y for curve in curves for point in curve.points]
    return max(values) / min(values)


def _heat_figures(ways: Mapping[CopyWay, Sequence[Line]]) -> Iterator[Figure]:
    pairs = _only(_only(ways, _is_known, "src", True), _is_known, "dst", True)
    lines = [line for of_way in pairs.values() for line in of_way]
    if not lines:
        return
    size = 1 + max(integer(line, end) for line in lines for end in ("src", "dst"))
    if not 2 <= size <= MOST_HEAT_RANKS or len({(line["src"], line["dst"]) for line in lines}) < 2:
        return
    for message in sorted({integer(line, "bytes") for line in lines}):
        of_size = _only(pairs, str, "bytes", str(message))
        yield _heat_figure(of_size, size, message)


def _heat_figure(ways: Mapping[CopyWay, Sequence[Line]], size: int, message: int) -> Figure:
    lines = [line for of_way in ways.values() for line in of_way]
    most, link = max(map(gbps, lines)), link_of(lines[0]["device"])
    # The scale of the link makes small differences look small. Short messages stay far below it.
    scale = link[0] if link and most > link[0] / 2 else most
    panels = []
    places = sorted({(integer(line, "src"), integer(line, "dst")) for line in lines})
    columns = [Column(end, [str(place[index]) for place in places]) for index, end in enumerate(("from", "to"))]
    for way, of_way in list(ways.items())[:MOST_HEAT_MAPS]:
        values = {(integer(line, "src"), integer(line, "dst")): gbps(line) for line in of_way}
        times = {(integer(line, "src"), integer(line, "dst")): us(line) for line in of_way}
        notes = {place: f"{three_digits(time)} µs" for place, time in times.items()} if message <= LATENCY_BYTES else {}
        heat = Heat(f"{way.label}, {byte_size(message)}", size, values, scale, "GB/s", notes)
        panels.append(f"<div><h4>{safe(way.label)}</h4>{heat_map(heat)}</div>")
        cells = [f"{three_digits(values[place])}" if place in values else "-" for place in places]
        columns.append(Column(f"{way.label} GB/s", cells, right=True))
        columns.append(
            Column("us", [f"{times[place]:,.1f}" if place in times else "-" for place in places], right=True)
        )
    title = f"{byte_size(message)} between all pairs, GB/s"
    full = f"Full colour: {compact(scale)} GB/s" + (f", {link[1]}." if link and scale == link[0] else ".")
    return Figure(title, _how(lines), f'<div class="panels">{"".join(panels)}</div>', columns, full, wide=True)


# Exchanges and layers: time and rate over tokens; bars where there is one number of tokens; dispatch against combine.


def exchange_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    groups = grouped(lines)
    several = len({line["run"] for line in lines}) > 1
    colours: dict[str, int] = {}
    for group in groups:
        for line in group.lines:
            if line["backend"] != BASELINE:
                colours.setdefault(group.label(line), len(colours))
    for group in groups:
        if len({line["tokens"] for line in group.lines}) > 1:
            yield from _token_figures(group, colours, several)
        else:
            yield _bar_figure(group, several)
    by_setting: dict[str, list[Group]] = {}
    for group in groups:
        by_setting.setdefault(group.setting, []).append(group)
    for of_setting in by_setting.values():
        yield from _split_figures(of_setting, several)


def _label(group: Group, line: Line, several: bool) -> str:
    return f"{line['run']}: {group.label(line)}" if several else group.label(line)


def _titled(group: Group, what: str) -> str:
    named = {"exchange": "dispatch and combine", "step": "a step"}.get(group.op, group.op)
    return f"{what} of {named}" + (f", {group.setting}" if group.setting else "")


def _token_figures(group: Group, colours: Mapping[str, int], several: bool) -> Iterator[Figure]:
    curves: dict[str, dict[int, Line]] = {}
    styles: dict[str, tuple[int, bool]] = {}
    first = group.lines[0]["run"]
    for line in group.lines:
        label = _label(group, line, several)
        curves.setdefault(label, {})[integer(line, "tokens")] = line
        # A backend has one colour in all runs. The first run has solid lines.
        styles[label] = colours.get(group.label(line), -1), several and line["run"] != first
    x = Axis("tokens a rank", log=True, write=lambda value: f"{value:.0f}")
    for what, unit, quantity in (("Time", "µs, slowest rank", us), ("Bandwidth", "GB/s, busiest port", _recorded_gbps)):
        drawn = []
        for label, by_tokens in curves.items():
            points = [Point(count, value) for count, line in sorted(by_tokens.items()) if (value := quantity(line))]
            if points:
                drawn.append(Curve(label, points, *styles[label]))
        if drawn:
            limits = _link_limits(group.lines) if what == "Bandwidth" else []
            chart = Chart(_titled(group, what), x, Axis(unit, log=what == "Time"), drawn[:MOST_CURVES], limits)
            columns = curve_columns("tokens", drawn, str)
            yield Figure(chart.title, _how(group.lines), _drawn(chart), columns)


def _recorded_gbps(line: Line) -> float | None:
    """The rate of a line; None if nothing crossed a link, as with one rank."""
    return gbps(line) if line["gbps_wire"] is not None else None


def _link_limits(lines: Sequence[Line]) -> list[Limit]:
    devices = {line["device"] for line in lines}
    nominal = {
        Limit(full, f"{full:.0f} GB/s, {name}") for device in devices for full, name in [link_of(device) or (0, "")]
    }
    measured = {
        Limit(most, f"{most:.0f} GB/s, most measured") for each in devices if (most := measured_link_gbps(each))
    }
    return sorted((limit for limit in nominal | measured if limit.value), key=lambda limit: limit.value)


def _bar_figure(group: Group, several: bool) -> Figure:
    lines = group.lines[:MOST_BARS]
    rows = []
    for index, line in enumerate(lines):
        time, least, most = us(line), _or(line["us_min"], us(line)), _or(line["us_p99"], us(line))
        grey = line["backend"] == BASELINE
        segment = BarSegment(0, time, "grey" if grey else f"c{index % 6}", f"median {time:,.1f} µs")
        rate = f", {three_digits(gbps(line))} GB/s" if line["gbps_wire"] else ""
        rows.append(Bar(_label(group, line, several), f"{duration(time)}{rate}", [segment], (least, most)))
    scale = max(bar.whisker[1] if bar.whisker else 0 for bar in rows)
    columns = [
        Column("backend", [_label(group, line, several) for line in lines]),
        *(_times(lines, key, header) for key, header in _SPREAD.items()),
        Column("samples", [show("samples", line["samples"]) for line in lines], right=True),
    ]
    note = "Bars: the median. Thin lines: from the fastest sample to the 99th percentile."
    return Figure(_titled(group, "Time"), _how(lines), bars(rows, 0, scale), columns, note)


_SPREAD = {"us_min": "min us", "us_p50": "p50 us", "us_p99": "p99 us", "us_max": "max us"}


def _times(lines: Sequence[Line], key: str, header: str) -> Column:
    cells = ["-" if line[key] is None else f"{float(str(line[key])):,.1f}" for line in lines]
    return Column(header, cells, right=True)


def _or(value: object, otherwise: float) -> float:
    return otherwise if value is None else float(str(value))


def _split_figures(groups: Sequence[Group], several: bool) -> Iterator[Figure]:
    """Split the time of an exchange into dispatch and combine, for the largest number of tokens."""
    times: dict[str, dict[str, Line]] = {}
    tokens = max((integer(line, "tokens") for group in groups for line in group.lines), default=0)
    for group in groups:
        for line in group.lines:
            if line["tokens"] == tokens and group.op in EXCHANGES:
                times.setdefault(_label(group, line, several), {})[group.op] = line
    whole = {label: by_op for label, by_op in times.items() if len(by_op) == len(EXCHANGES)}
    if not whole:
        return
    rows = []
    parts: dict[str, tuple[float, float, float]] = {}
    for label, by_op in list(whole.items())[:MOST_BARS]:
        dispatch, combine, both = (us(by_op[op]) for op in EXCHANGES)
        parts[label] = dispatch, combine, both
        ends = (0.0, dispatch, dispatch + combine, max(both, dispatch + combine))
        names = ("dispatch", "combine", "between them")
        segments = [
            BarSegment(ends[i], ends[i + 1], ("c0", "c1", "grey")[i], f"{names[i]} {ends[i + 1] - ends[i]:,.1f} µs")
            for i in range(3)
            if ends[i + 1] > ends[i]
        ]
        rows.append(Bar(label, duration(both), segments, ticks=[both]))
    setting = f", {groups[0].setting}" if groups[0].setting else ""
    columns = [Column("backend", list(parts))]
    for index, header in enumerate(("dispatch us", "combine us", "both us")):
        columns.append(Column(header, [f"{each[index]:,.1f}" for each in parts.values()], right=True))
    keys = _keys(("dispatch", "c0"), ("combine", "c1"), ("between them", "grey"))
    lines = [line for by_op in whole.values() for line in by_op.values()]
    yield Figure(
        f"Time split of an exchange, {tokens} tokens{setting}",
        _how(lines),
        keys + bars(rows, 0, max(max(each[0] + each[1], each[2]) for each in parts.values())),
        columns,
        "Dispatch and combine are measured alone; the thin line is the time of one after the other in one step.",
    )


def _keys(*names: tuple[str, str]) -> str:
    items = "".join(f'<li><i class="{colour}"></i>{safe(name)}</li>' for name, colour in names)
    return f'<ul class="legend">{items}</ul>'


def sms_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the time over the SMs that an exchange may take, where a matrix varies them."""
    for op in EXCHANGES:
        swept = sms_curves(lines, op)
        if not swept:
            continue
        curves = [
            Curve(label, [Point(sms, us(points[sms])) for sms in sorted(points)], index)
            for index, (label, points) in enumerate(swept.items())
        ]
        of_op = [line for points in swept.values() for line in points.values()]
        x = Axis("SMs that the exchange may take", log=True, write=lambda value: f"{value:.0f}")
        chart = Chart(f"{op.capitalize()} over SMs", x, Axis("µs, slowest rank"), curves[:MOST_CURVES])
        yield Figure(chart.title, _how(of_op), _drawn(chart), curve_columns("SMs", curves, str))


# Timelines, and overlap with a product.

_BLOCKS = {"all": "c0", "routers": "c3", "senders": "c1", "reducers": "c1", "placers": "c2", "summers": "c2"}


def timeline_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw, for each traced operation, a row for each point of its kernel: from the first block to the last."""
    for op, known in POINTS.items():
        traced = [line for line in lines if line["op"] == op and timeline_of(line)]
        if not traced:
            continue
        panels, cells = [], []
        for line in traced[:MOST_PANELS]:
            order = [*known]
            points = sorted(timeline_of(line), key=lambda each: order.index(each.point) if each.point in known else 99)
            end = max(each.last for each in points)
            rows = []
            for each in points:
                blocks = known[each.point].who if each.point in known else "others"
                told = f"{each.first:.1f} to {each.last:.1f} µs, median {each.median:.1f}"
                segment = BarSegment(each.first, each.last, _BLOCKS.get(blocks, "grey"), told)
                rows.append(Bar(each.point, f"{each.last:.1f} µs", [segment], ticks=[each.median]))
                times = (f"{value:.1f}" for value in (each.first, each.median, each.last))
                cells.append((str(line["case"]), each.point, *times, blocks))
            panels.append(f"<div><h4>{safe(line['case'])}</h4>{bars(rows, 0, end, tight=True)}</div>")
        headers = ("case", "point", "first us", "median us", "last us", "blocks")
        columns = [
            Column(header, list(column), right=header.endswith("us"))
            for header, column in zip(headers, zip(*cells, strict=True), strict=True)
        ]
        names = dict.fromkeys(point.who for point in known.values())
        keys = _keys(*((name, _BLOCKS.get(name, "grey")) for name in names))
        note = "Bars: from the first block to the last. Thin lines: the median block."
        body = f'{keys}<div class="panels">{"".join(panels)}</div>'
        yield Figure(f"Where the time of {op} goes", _how(traced), body, columns, note, wide=True)


def overlap_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw an operation and a product: one after the other, and both at once."""
    for op in ("dispatch", "combine"):
        cases = overlap_times(lines, op)[:MOST_BARS]
        if not cases:
            continue
        rows = []
        for case in cases:
            after = [
                BarSegment(0, case.alone, "c0", f"{op} alone {case.alone:,.1f} µs"),
                BarSegment(case.alone, case.alone + case.product, "c1", f"product alone {case.product:,.1f} µs"),
            ]
            rows.append(Bar(f"{case.case}, one after the other", duration(case.alone + case.product), after))
            at_once = [BarSegment(0, case.both, "c2", f"both {case.both:,.1f} µs")]
            saved = f"{duration(case.both)}, {case.saved:.0%} saved"
            rows.append(Bar(f"{case.case}, both at once", saved, at_once))
        columns = [Column("case", [case.case for case in cases])]
        for header, name in _OVERLAP.items():
            columns.append(Column(header, [f"{getattr(case, name):,.1f}" for case in cases], right=True))
        columns.append(Column("saved", [f"{case.saved:.0%}" for case in cases], right=True))
        most = max(max(case.both, case.alone + case.product) for case in cases)
        body = _keys((op, "c0"), ("product", "c1"), ("both at once", "c2")) + bars(rows, 0, most)
        of_op = [line for line in lines if line["workload"] == "overlap"]
        yield Figure(f"{op.capitalize()} beside a matrix product", _how(of_op), body, columns)


_OVERLAP = {
    "alone us": "alone",
    "product us": "product",
    "beside the product us": "beside",
    "product beside us": "product_beside",
    "both us": "both",
}


# Bandwidth of memory: operations over rows, beside other systems and a copy.


def bandwidth_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the bandwidth of each operation over rows, over SMs and over stages."""
    for found in bandwidth_curves(lines):
        curves = [
            Curve(label, [Point(x, rate(points[x])) for x in sorted(points)], index, dashed=is_copy(label))
            for index, (label, points) in enumerate(found.curves.items())
        ]
        limits = [Limit(rate(found.limit), f"{rate(found.limit):,.0f} GB/s, a copy")] if found.limit else []
        x = Axis(found.label, log=True, write=lambda value: f"{value:.0f}")
        chart = Chart(found.title, x, Axis("GB/s, read and written"), curves[:MOST_CURVES], limits)
        columns = curve_columns(found.label, curves, str)
        yield Figure(found.title, _how(found.lines), _drawn(chart), columns)


# The load of experts.

_LOAD_POINTS = 32  # of a curve
_LEAST_SHARE = 1e-3  # of the mean; experts with less have no point
_LEAST_LOAD = 1e-6  # rows of a step; a file of somebody else may hold sums that are too small to divide by


def load_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the rows of each expert in a step, the busiest first: a curve for each different load."""
    several = len({line["run"] for line in lines}) > 1
    found: dict[tuple[object, ...], tuple[Line, list[float]]] = {}
    for line in lines:
        load = line["expert_load"]
        if isinstance(load, list) and sum(load) > _LEAST_LOAD:
            found.setdefault((several and line["run"], *load), (line, load))
        if len(found) == MOST_BARS:
            break
    if not found:
        return
    loads = _labelled(list(found.values()), several)
    curves = []
    for index, (label, (_, load)) in enumerate(loads.items()):
        mean, ordered = sum(load) / len(load), sorted(load, reverse=True)
        places = sorted({round(len(load) ** (i / _LOAD_POINTS)) for i in range(_LOAD_POINTS + 1)})
        points = [Point(place, ordered[place - 1] / mean) for place in places]
        curves.append(Curve(label, [point for point in points if point.y >= _LEAST_SHARE], index))
    x = Axis("experts, the busiest first", log=True, write=lambda value: f"{value:.0f}")
    y = Axis("rows of a step / mean", log=_spread(curves) > 20)
    even = [Limit(1.0, "even")] if any(point.y <= 1 for curve in curves for point in curve.points) else []
    chart = Chart("Load of experts", x, y, curves[:MOST_CURVES], even)
    note = "Rows of an average step, over all ranks. Cases with one routing share a curve. Idle experts have no point."
    how = f"{ranks_on([line for line, _ in loads.values()])}. Counted once, when a case is set up."
    yield Figure(chart.title, how, _drawn(chart), _load_columns(loads), note)


def _labelled(loads: Sequence[tuple[Line, list[float]]], several: bool) -> dict[str, tuple[Line, list[float]]]:
    """Name each load by its routing and tokens, and also by its case where that is not enough."""
    plain = [f"{line['routing']}, {line['tokens']} tokens" for line, _ in loads]
    names = [f"{line['run']}: {name}" if several else name for name, (line, _) in zip(plain, loads, strict=True)]
    return {
        name if names.count(name) == 1 else f"{name} ({line['case']})": (line, load)
        for name, (line, load) in zip(names, loads, strict=True)
    }


def _load_columns(loads: Mapping[str, tuple[Line, list[float]]]) -> list[Column]:
    rows = []
    for line, load in loads.values():
        mean, busiest = sum(load) / len(load), max(load)
        ranks = int(str(line["ranks"] or 1))
        local = max(1, len(load) // max(1, ranks))
        by_rank = [sum(load[first : first + local]) for first in range(0, len(load), local)]
        rows.append(
            (
                f"{len(load)}",
                f"{mean:,.1f}",
                f"{load.index(busiest)}",
                f"{busiest:,.1f}",
                f"{busiest / mean:.2f}",
                f"{max(by_rank) * len(by_rank) / sum(load):.2f}",
                f"{load.count(0)}",
            )
        )
    headers = ("experts", "mean rows", "busiest", "its rows", "/ mean", "busiest rank / mean", "idle")
    cells = [list(column) for column in zip(*rows, strict=True)]
    numbers = [Column(header, column, right=True) for header, column in zip(headers, cells, strict=True)]
    return [Column("routing", list(loads)), *numbers]


# Shared parts.


def _how(lines: Sequence[Line]) -> str:
    cold = "; L2 cache cold" if all(line["l2"] == "cold" for line in lines) else ""
    return f"{ranks_on(lines)}. {how_measured(lines)}{cold}."


def _drawn(chart: Chart) -> str:
    return legend(chart.curves) + line_chart(chart)


def curve_columns(header: str, curves: Sequence[Curve], write: Callable[[int], str]) -> list[Column]:
    """Make the table of the points of curves: a row for each x, a column for each curve."""
    xs = sorted({point.x for curve in curves for point in curve.points})[:MOST_ROWS]
    columns = [Column(header, [write(int(x)) for x in xs], right=True)]
    for curve in curves[:MOST_COLUMNS]:
        by_x = {point.x: point for point in curve.points}
        columns.append(Column(curve.label, [_point(by_x.get(x)) for x in xs], right=True))
    return columns


MOST_ROWS = 200
MOST_COLUMNS = 64


def _point(point: Point | None) -> str:
    if point is None:
        return "-"
    if point.low is None or point.high is None or point.low == point.high:
        return three_digits(point.y)
    return f"{three_digits(point.y)} ({three_digits(point.low)} to {three_digits(point.high)})"


def change_figure(pairs: Sequence[tuple[str, float, str]]) -> str:
    """Draw relative changes: label, change and colour. Bars to the right are slower."""
    most = max(0.1, min(1.0, max(abs(change) for _, change, _ in pairs)))
    rows = [
        Bar(label, f"{change:+.1%}", [BarSegment(0, change, colour)], ticks=[0.0]) for label, change, colour in pairs
    ]
    return bars(rows, -most, most)
