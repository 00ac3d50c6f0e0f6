"""Draws the load of experts, and the rows of the busiest rank against its capacity. All lines are from `displayed`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raymoe.report.columns import Column
from raymoe.report.figure import Figure, Panel
from raymoe.report.measures import integer, ranks_on
from raymoe.report.results import Line
from raymoe.report.svg import MOST_CURVES, Axis, Bar, BarChart, BarSegment, Chart, Curve, Key, Limit, Point, spread

MOST_LOADS = 40

_LOAD_POINTS = 32  # of a curve
_LEAST_SHARE = 1e-3  # of the mean; experts with less have no point
_LEAST_LOAD = 1e-6  # rows of a step; a file of somebody else may hold sums that are too small to divide by


def load_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the rows of each expert in a step, the busiest first: a curve for each different load."""
    several = len({line["run"] for line in lines}) > 1
    different: dict[tuple[object, ...], tuple[Line, list[float]]] = {}
    for line in lines:
        load = line["expert_load"]
        if isinstance(load, list) and sum(load) > _LEAST_LOAD:
            different.setdefault((several and line["run"], *load), (line, load))
        if len(different) == MOST_LOADS:
            break
    if not different:
        return
    loads = _labelled(list(different.values()), several)
    curves = []
    for index, (label, (_, load)) in enumerate(loads.items()):
        mean, ordered = sum(load) / len(load), sorted(load, reverse=True)
        places = sorted({round(len(load) ** (i / _LOAD_POINTS)) for i in range(_LOAD_POINTS + 1)})
        points = [Point(place, ordered[place - 1] / mean) for place in places]
        curves.append(Curve(label, [point for point in points if point.y >= _LEAST_SHARE], index))
    x = Axis("experts, the busiest first", log=True, write=lambda value: f"{value:.0f}")
    y = Axis("rows of a step / mean", log=spread(curves) > 20)
    even = [Limit(1.0, "even")] if any(point.y <= 1 for curve in curves for point in curve.points) else []
    chart = Chart("Load of experts", x, y, curves[:MOST_CURVES], even)
    yield Figure(
        "expert-load",
        chart.title,
        f"{ranks_on([line for line, _ in loads.values()])}. Counted once, when a case is set up.",
        [Panel(chart)],
        _load_columns(loads),
        curves[:MOST_CURVES],
        "Rows of an average step, over all ranks. Cases with one routing share a curve. Idle experts have no point.",
    )


def rank_load_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the rows of an average rank and of the busiest one, as shares of the rows that a rank has memory for."""
    several = len({line["run"] for line in lines}) > 1
    different: dict[tuple[object, ...], tuple[Line, list[float]]] = {}
    for line in lines:
        load, capacity = line["expert_load"], line["rows_capacity"]
        if isinstance(load, list) and capacity and line["rows_busiest"] is not None and line["ranks"]:
            key = line["routing"], line["tokens"], line["rows_busiest"], capacity
            different.setdefault((several and line["run"], *key), (line, load))
    loads = _labelled(list(different.values())[:MOST_LOADS], several)
    if not loads:
        return
    rows, cells = [], []
    for label, (line, load) in loads.items():
        most, capacity = integer(line, "rows_busiest"), integer(line, "rows_capacity")
        mean = min(sum(load) / integer(line, "ranks"), most)
        segments = [
            BarSegment(0, mean / capacity, "c0", f"mean of all ranks {mean:,.0f} rows"),
            BarSegment(mean / capacity, most / capacity, "c1", f"busiest rank {most:,} rows"),
        ]
        rows.append(Bar(label, f"{most:,} of {capacity:,} rows, {most / capacity:.0%}", segments))
        cells.append((label, f"{mean:,.1f}", f"{most:,}", f"{capacity:,}", f"{most / capacity:.0%}"))
    headers = ("routing", "mean rows", "busiest rank", "capacity", "share")
    columns = [
        Column(header, list(column), right=header != "routing")
        for header, column in zip(headers, zip(*cells, strict=True), strict=True)
    ]
    yield Figure(
        "rank-load",
        "Rows of the busiest rank against capacity",
        f"{ranks_on([line for line, _ in loads.values()])}. Counted once, when a case is set up.",
        [Panel(BarChart("Rows of ranks", rows, 1.0, unit="rows / rows that a rank has memory for"))],
        columns,
        [Key("mean of all ranks", "c0"), Key("busiest rank, in its fullest step", "c1")],
        "The whole width is the memory of a rank. Gaps between experts count for the busiest rank.",
    )


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
