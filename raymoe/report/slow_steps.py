"""Draws the times of operations whose 99th percentile is far from the median: over the steps, and by rank.

All lines are from `displayed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from raymoe.report.columns import Column
from raymoe.report.figure import Figure, Panel, how_and_where
from raymoe.report.measures import integer, us
from raymoe.report.results import Line
from raymoe.report.svg import Axis, Bar, BarChart, BarSegment, Chart, Curve, Limit, Point, duration
from raymoe.workload.progress import FAR

MOST_PANELS, MOST_RANKS = 3, 16


def slow_step_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the operations whose slow steps lose the most time: when they were slow, and on which rank."""
    slow = sorted(filter(_is_slow, lines), key=_lost, reverse=True)[:MOST_PANELS]
    if not slow:
        return
    several_cases = len({(line["run"], line["case"]) for line in slow}) > 1
    names = [_name(line, several_cases) for line in slow]
    titles = [_title(name, line) for name, line in zip(names, slow, strict=True)]
    yield Figure(
        "slow-steps",
        "Slow steps",
        how_and_where(slow),
        [Panel(_over_steps(line, title), title) for line, title in zip(slow, titles, strict=True)],
        _step_columns(slow, titles),
        note=f"Up to {MOST_PANELS} operations whose p99 is {FAR:g} times the median or more. Dotted lines: both. "
        + _TOGETHER * any(_steps_a_point(line) > 1 for line in slow),
    )
    ranked = [(line, name) for line, name in zip(slow, names, strict=True) if line["us_by_rank"]]
    if ranked:
        yield Figure(
            "slow-ranks",
            "Slow steps by rank",
            how_and_where([line for line, _ in ranked]),
            [Panel(_by_rank(line, name), name) for line, name in ranked],
            _rank_columns(ranked),
            note="Bars: the median of each rank. Thin lines: up to its 99th percentile. A rank that waits for a slow "
            "one is slow too.",
        )


_TOGETHER = "Where there are many steps, a point is the slowest of several."


def _is_slow(line: Line) -> bool:
    return bool(line["us_over_steps"] and line["us_p50"] and line["us_p99"])


def _lost(line: Line) -> float:
    return _tail(line) - us(line)


def _tail(line: Line) -> float:
    return float(str(line["us_p99"]))


def _name(line: Line, several_cases: bool) -> str:
    words = [str(line["op"])]
    words += [f"{line['l2']} L2"] if line["l2"] else []
    words += [f"beside {line['beside']}"] if line["beside"] else []
    words += [f"{line['src']} to {line['dst']}"] if line["src"] is not None else []
    words += [str(line["case"])] if several_cases else []
    return ", ".join(words)


def _title(name: str, line: Line) -> str:
    return f"{name}: median {duration(us(line))}, p99 {duration(_tail(line))}"


def _times(line: Line) -> list[float]:
    recorded = line["us_over_steps"]
    return [float(time) for time in recorded] if isinstance(recorded, list) else []


def _steps_a_point(line: Line) -> int:
    return max(1, ceil(integer(line, "samples") / len(_times(line)))) if line["samples"] else 1


def _over_steps(line: Line, title: str) -> Chart:
    together = _steps_a_point(line)
    points = [Point(1 + index * together, time) for index, time in enumerate(_times(line))]
    limits = [Limit(us(line), ""), Limit(_tail(line), "")]
    x = Axis("step", write=lambda value: f"{value:.0f}")
    return Chart(title, x, Axis("slowest rank", write=duration), [Curve(title, points, 0)], limits)


def _step_columns(slow: Sequence[Line], titles: Sequence[str]) -> list[Column]:
    most = max(len(_times(line)) for line in slow)
    columns = [Column("point", [str(index + 1) for index in range(most)], right=True)]
    for line, title in zip(slow, titles, strict=True):
        cells = [f"{time:,.1f}" for time in _times(line)]
        columns.append(Column(f"{title} us", cells + ["-"] * (most - len(cells)), right=True))
    return columns


def _rank_times(line: Line) -> list[tuple[int, float, float]]:
    """Give rank, median and 99th percentile; of many ranks those with the largest percentiles."""
    recorded = line["us_by_rank"]
    times = [(rank, *pair) for rank, pair in enumerate(recorded)] if isinstance(recorded, list) else []
    return sorted(sorted(times, key=lambda time: -time[2])[:MOST_RANKS])


def _by_rank(line: Line, title: str) -> BarChart:
    rows = []
    for rank, middle, tail in _rank_times(line):
        words = f"median {duration(middle)}, p99 {duration(tail)}"
        rows.append(
            Bar(
                f"rank {rank}",
                f"{duration(middle)}, p99 {duration(tail)}",
                [BarSegment(0, middle, "c0", words)],
                (middle, tail),
            )
        )
    return BarChart(title, rows, max(tail for _, _, tail in _rank_times(line)) or 1.0, unit="µs")


def _rank_columns(ranked: Sequence[tuple[Line, str]]) -> list[Column]:
    cells = [
        (title, str(rank), f"{middle:,.1f}", f"{tail:,.1f}")
        for line, title in ranked
        for rank, middle, tail in _rank_times(line)
    ]
    headers = ("operation", "rank", "p50 us", "p99 us")
    return [
        Column(header, list(column), right=header != "operation")
        for header, column in zip(headers, zip(*cells, strict=True), strict=True)
    ]
