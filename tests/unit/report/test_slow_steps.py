"""Figures of operations whose 99th percentile is far from the median, and of the rows of the busiest rank."""

from __future__ import annotations

from typing import Any

from raymoe.report.loads import rank_load_figures
from raymoe.report.plots import figures, write_plots
from raymoe.report.results import Line
from raymoe.report.slow_steps import MOST_PANELS, MOST_RANKS, slow_step_figures
from tests.unit.report.lines import exchange_case, slow_case


def test_slow_steps_are_drawn_over_the_steps_and_by_rank() -> None:
    over_steps, by_rank = slow_step_figures(slow_case())
    assert [panel.title for panel in over_steps.panels] == ["dispatch: median 200 µs, p99 2 ms"]
    chart: Any = over_steps.panels[0].picture
    assert [(point.x, point.y) for point in chart.curves[0].points] == [(1, 200.0), (2, 2000.0), (3, 200.0), (4, 210.0)]
    assert [limit.value for limit in chart.limits] == [200.0, 2000.0]
    assert [panel.title for panel in by_rank.panels] == ["dispatch"]
    bars: Any = by_rank.panels[0].picture
    assert [(row.label, row.value) for row in bars.rows] == [
        ("rank 0", "190 µs, p99 250 µs"),
        ("rank 1", "195 µs, p99 2 ms"),
    ]


def test_operations_without_slow_steps_have_no_figure() -> None:
    assert not list(slow_step_figures(exchange_case("host", 5.0)))
    assert not [figure for figure in figures(exchange_case("host", 5.0), {}) if figure.stem.startswith("slow")]
    assert [figure.stem for figure in figures(slow_case(), {})][-2:] == ["slow-steps", "slow-ranks"]


def test_the_operations_that_lose_the_most_time_come_first() -> None:
    many: list[Line] = [
        line | {"case": f"tokens={tokens}", "us_p99": 2000.0 + tokens} for tokens in range(9) for line in slow_case()
    ]
    over_steps, by_rank = slow_step_figures(many)
    assert [panel.title.partition(":")[0] for panel in over_steps.panels] == [
        f"dispatch, tokens={tokens}" for tokens in (8, 7, 6)[:MOST_PANELS]
    ]
    crowd = slow_case()[0] | {"us_by_rank": [[100.0, 100.0 + rank] for rank in range(64)]}
    _, by_rank = slow_step_figures([crowd])
    bars: Any = by_rank.panels[0].picture
    assert [row.label for row in bars.rows] == [f"rank {rank}" for rank in range(64 - MOST_RANKS, 64)]


def test_a_point_of_many_steps_stands_at_the_first_of_them() -> None:
    line = slow_case()[0] | {"samples": 400}
    over_steps, _ = slow_step_figures([line])
    chart: Any = over_steps.panels[0].picture
    assert [point.x for point in chart.curves[0].points] == [
        1,
        101,
        201,
        301,
    ] and "slowest of several" in over_steps.note


def test_rows_of_the_busiest_rank_are_drawn_against_its_capacity(tmp_path: Any) -> None:
    (figure,) = rank_load_figures(slow_case())
    bars: Any = figure.panels[0].picture
    assert [(row.label, row.value) for row in bars.rows] == [("uniform, 512 tokens", "2,500 of 8,320 rows, 30%")]
    mean, busiest = bars.rows[0].segments
    assert (mean.end, busiest.end, bars.most) == (512 / 8320, 2500 / 8320, 1.0)
    assert not list(rank_load_figures(exchange_case("host", 5.0))), "lines of older runs do not have it"
    assert {path.stem for path in write_plots(tmp_path, slow_case())} >= {"slow-steps", "slow-ranks", "rank-load"}
