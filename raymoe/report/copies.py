"""Groups the result lines of copies, and draws curves over the size of a message and heat maps of all pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from raymoe.report.columns import Column, byte_size
from raymoe.report.figure import Figure, Panel, curve_columns, how_and_where
from raymoe.report.measures import gbps, integer, link_of, three_digits, us
from raymoe.report.results import Line
from raymoe.report.svg import MOST_CURVES, Axis, Chart, Curve, Heat, Limit, Point, compact, spread

LATENCY_BYTES = 256 * 1024
"""Up to this size a message's time matters more than its bandwidth."""

_SHOWN_ELSEWHERE = {"transports", "bytes", "pattern", "graph", "protocol"}
_COPY = ("pattern", "src", "dst", "bytes")


@dataclass(frozen=True)
class CopyWay:
    """One way of copying: the subject of a curve, and of a matrix for each size."""

    transport: str
    protocol: str = ""
    """put or get; empty if unknown."""
    details: tuple[str, ...] = ()
    """Further settings that distinguish it from other ways."""

    @property
    def label(self) -> str:
        """The name of this way in a legend.

        >>> CopyWay("tma", "get", ("8 SMs",)).label
        'tma pull (8 SMs)'
        """
        word = {"put": " push", "get": " pull"}.get(self.protocol, "")
        return f"{self.transport}{word}" + (f" ({', '.join(self.details)})" if self.details else "")


def ways_of(copies: Sequence[Line], protocol: str = "") -> dict[CopyWay, list[Line]]:
    """Group the lines by the way of the copy.

    Keys are added to the ways until no two lines of a way are of the same copy. `protocol` is that of the job, for
    lines whose case does not name one.
    """
    with_graph = len({line["graph"] for line in copies}) > 1
    extra_keys: list[str] = []
    ways: dict[CopyWay, list[Line]] = {}
    for key_to_add in ("", "sms", "ranks", "device", "run", "generation"):
        extra_keys += [key_to_add] if key_to_add else []
        ways = {}
        for line in copies:
            words = dict(word.partition("=")[::2] for word in str(line["case"]).split(",") if "=" in word)
            details = [f"{key} {value}" for key, value in words.items() if key not in _SHOWN_ELSEWHERE]
            details += [("graph" if line["graph"] else "eager")] * with_graph
            details += [f"{line[key]} SMs" if key == "sms" else f"{key} {line[key]}" for key in extra_keys]
            way = CopyWay(str(line["transport"]), words.get("protocol", protocol), tuple(details))
            ways.setdefault(way, []).append(line)
        copies_of_ways = [(way, *(line[key] for key in _COPY)) for way, lines in ways.items() for line in lines]
        if len(set(copies_of_ways)) == len(copies_of_ways):
            break
    return ways


# Figures.

MOST_HEAT_RANKS = 64
MOST_HEAT_MAPS = 12

_PATTERNS = {"pairs": "one pair at a time", "all_to_all": "every rank to every other at once"}


def copy_figures(ways: Mapping[CopyWay, Sequence[Line]]) -> Iterator[Figure]:
    """Draw the curves of each pattern, then the heat maps of each size."""
    for pattern in sorted({str(line["pattern"]) for line in _lines(ways)}):
        yield _curve_figure(ways, pattern)
    pairs = _only(ways, lambda line: line["src"] is not None and line["dst"] is not None)
    lines = _lines(pairs)
    ranks = 1 + max((integer(line, end) for line in lines for end in ("src", "dst")), default=0)
    if 2 <= ranks <= MOST_HEAT_RANKS and len({(line["src"], line["dst"]) for line in lines}) > 1:
        for size in sorted({integer(line, "bytes") for line in lines}):
            yield _heat_figure(pairs, ranks, size)


def _lines(ways: Mapping[CopyWay, Sequence[Line]]) -> list[Line]:
    return [line for of_way in ways.values() for line in of_way]


def _only(ways: Mapping[CopyWay, Sequence[Line]], wanted: Callable[[Line], bool]) -> dict[CopyWay, list[Line]]:
    chosen = {way: [line for line in lines if wanted(line)] for way, lines in ways.items()}
    return {way: lines for way, lines in chosen.items() if lines}


def _curve_figure(ways: Mapping[CopyWay, Sequence[Line]], pattern: str) -> Figure:
    """Draw bandwidth over all sizes, and the time of a copy over the small ones."""
    ways = _only(ways, lambda line: str(line["pattern"]) == pattern)
    lines = _lines(ways)
    x = Axis("size of a message", log=True, write=byte_size)
    rates = _curves(ways, gbps)
    links = {limit for line in lines if (limit := link_of(line["device"]))}
    limits = [Limit(full, f"{full:.0f} GB/s, {name}") for full, name in sorted(links)]
    port = "" if pattern == "pairs" else " of the busiest port"
    bandwidth = Chart("Bandwidth", x, Axis(f"GB/s, one direction{port}"), rates[:MOST_CURVES], limits)
    panels = [Panel(bandwidth, bandwidth.title)]
    times = _curves(_only(ways, lambda line: integer(line, "bytes") <= LATENCY_BYTES), us)
    if times:
        latency = Chart("Time of short copies", x, Axis("µs a copy", log=spread(times) > 20), times[:MOST_CURVES])
        panels.append(Panel(latency, latency.title))
    several = len({(line["src"], line["dst"]) for line in lines}) > 1
    return Figure(
        f"curves-{pattern}",
        f"Copies, {_PATTERNS.get(pattern, pattern)}",
        how_and_where(lines),
        panels,
        curve_columns("size", byte_size, **{"GB/s": rates, "us": times}),
        rates[:MOST_CURVES],
        "Lines: the median pair. Bands: from the slowest pair to the fastest." if several else "",
    )


def _curves(ways: Mapping[CopyWay, Sequence[Line]], quantity: Callable[[Line], float]) -> list[Curve]:
    """Make a curve for each way. Push and pull of a transport have one colour, and pull is dashed."""
    curves: list[Curve] = []
    styles: dict[object, int] = {}
    for way, lines in ways.items():
        by_size: dict[int, list[float]] = {}
        for line in lines:
            by_size.setdefault(integer(line, "bytes"), []).append(quantity(line))
        points = [Point(size, median(pairs), min(pairs), max(pairs)) for size, pairs in sorted(by_size.items())]
        style = styles.setdefault((way.transport, way.details), len(styles))
        curves.append(Curve(way.label, points, style, dashed=way.protocol == "get"))
    return curves


def _heat_figure(ways: Mapping[CopyWay, Sequence[Line]], ranks: int, size: int) -> Figure:
    """Draw one panel for each way, on one colour scale, so that they can be compared."""
    ways = _only(ways, lambda line: integer(line, "bytes") == size)
    lines = _lines(ways)
    most, link = max(map(gbps, lines)), link_of(lines[0]["device"])
    # The scale of the link makes small differences look small. Short messages stay far below it.
    scale = link[0] if link and most > link[0] / 2 else most
    panels = []
    pairs = sorted({(integer(line, "src"), integer(line, "dst")) for line in lines})
    columns = [Column(end, [str(pair[index]) for pair in pairs]) for index, end in enumerate(("from", "to"))]
    for way, of_way in list(ways.items())[:MOST_HEAT_MAPS]:
        rates = {(integer(line, "src"), integer(line, "dst")): gbps(line) for line in of_way}
        times = {(integer(line, "src"), integer(line, "dst")): us(line) for line in of_way}
        notes = {pair: f"{three_digits(time)} µs" for pair, time in times.items()} if size <= LATENCY_BYTES else {}
        heat = Heat(f"{way.label}, {byte_size(size)}", ranks, rates, scale, "GB/s", notes)
        panels.append(Panel(heat, way.label + _who_moves(way)))
        cells = [three_digits(rates[pair]) if pair in rates else "-" for pair in pairs]
        columns.append(Column(f"{way.label} GB/s", cells, right=True))
        cells = [f"{times[pair]:,.1f}" if pair in times else "-" for pair in pairs]
        columns.append(Column("us", cells, right=True))
    full = f"Full colour: {compact(scale)} GB/s" + (f", {link[1]}." if link and scale == link[0] else ".")
    return Figure(
        f"matrix-{byte_size(size).replace(' ', '')}",
        f"{byte_size(size)} between all pairs, GB/s",
        how_and_where(lines),
        panels,
        columns,
        note=full,
    )


def _who_moves(way: CopyWay) -> str:
    if way.transport == "collective":
        return ": the row's rank sends"
    return {"put": ": the row's rank writes", "get": ": the column's rank reads"}.get(way.protocol, "")
