"""Tables and figures of workload products: systems side by side over the rows of an expert."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymoe.report.plots import figures, write_plots
from raymoe.report.product_curves import product_curves
from raymoe.report.results import Line
from raymoe.report.tables import render
from tests.unit.report.lines import complete_line

FLOPS = 1e9
"""Work of a row."""
TIMES = {"raymoe": (110.0, 120.0, 900.0), "grouped_mm": (120.0, 240.0, 1000.0), "copy": (100.0, 100.0, 100.0)}
ROWS = (8, 64, 512)


def products_case(op: str = "up", run: str = "quick-1", **changed: object) -> list[Line]:
    """Lines of three numbers of rows."""
    lines = []
    for index, rows in enumerate(ROWS):
        for system, times in TIMES.items():
            us = times[index]
            measured: dict[str, object] = {
                "case": f"rows={rows}",
                "workload": "products",
                "op": op,
                "backend": system,
                "graph": True,
                "l2": "cold",
                "ranks": 1,
                "tokens": 64 * rows,
                "rows": rows,
                "hidden": 7168,
                "ffn": 2048,
                "experts": 64,
                "dtype": "bfloat16",
                "routing": "uniform",
                "samples": 20,
                "us_p50": us,
                "us_p99": us,
                "us_min": us,
                "us_max": us,
                "bytes_weights": 1 << 30,
                "tflops": None if system == "copy" else rows * FLOPS / us / 1e6,
                "device": "a GPU",
                **changed,
            }
            lines.append(complete_line(measured, run))
    skipped = {"case": "rows=8", "workload": "products", "op": op, "backend": "deep_gemm", "samples": 0, "rows": 8}
    return [*lines, complete_line({**skipped, "skipped": "it is not here", **changed}, run)]


def test_systems_stand_side_by_side_over_rows() -> None:
    text = render(products_case())
    title, head, _, *rows = text.split("Product up over rows of an expert: ")[1].splitlines()
    assert title == "us (TFLOP/s of useful work)"
    assert head.split() == ["rows", "raymoe", "grouped_mm", "copy"]
    assert [row.split()[0] for row in rows[:3]] == ["8", "64", "512"]
    assert "120.0 (533)" in rows[1] and rows[1].endswith("100.0")
    assert "skipped: it is not here" in text and "1 GiB" in text


def test_the_copy_is_a_curve_where_memory_bounds_a_product() -> None:
    """At 512 rows it would be nine times as fast as the fastest system, and is left out."""
    (found,) = product_curves(products_case())
    assert found.rates("raymoe") == pytest.approx({8: 8 / 0.11, 64: 64 / 0.12, 512: 512 / 0.9})
    assert found.rates("copy") == pytest.approx({8: 80.0, 64: 640.0})


def test_operations_kinds_and_sizes_have_figures_of_their_own() -> None:
    given = [
        *products_case(),
        *products_case("down"),
        *products_case(routing="hot"),
        *products_case(hidden=2880, ffn=2880),
    ]
    titles = [found.title for found in product_curves(given)]
    assert len(titles) == len(set(titles)) == 4
    assert "Product up over rows of an expert, routing hot, hidden 7168, ffn 2048" in titles


def test_runs_have_curves_of_their_own_and_each_its_copy() -> None:
    (found,) = product_curves([*products_case(run="A"), *products_case(run="B")])
    assert list(found.curves) == [f"{run}: {system}" for run in "AB" for system in TIMES]
    assert found.rates("A: copy") == found.rates("B: copy") != {}


def test_one_number_of_rows_is_no_curve() -> None:
    assert list(product_curves([line for line in products_case() if line["rows"] == 8])) == []


def test_plots_and_page_draw_each_operation(tmp_path: Path) -> None:
    given = [*products_case(), *products_case("up_swiglu")]
    written = write_plots(tmp_path, given)
    assert [file.name for file in written] == ["products-up.svg", "products-up_swiglu.svg"]
    drawn = written[0].read_text()
    for words in ("rows of an expert", "TFLOP/s of useful work", "copy of the weights", "grouped_mm"):
        assert words in drawn
    assert [figure.title for figure in figures(given, {})] == [
        f"Product {op} over rows of an expert" for op in ("up", "up_swiglu")
    ]
