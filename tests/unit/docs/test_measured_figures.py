"""The measured figures of the pages show the raw lines in benchmarks/*.jsonl."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.blocks_figure import PANELS, PARTS, blocks_of, overlaps, rows_of, traced_line
from tests.unit.docs.measured_figures import BY_HAND, FIGURES, FOLDER, NARROW, measured_figure
from tests.unit.docs.raw_lines import in_history
from tests.unit.docs.systems_figure import OPERATIONS, SYSTEMS, equal_sms_table, shared_sms


@pytest.mark.parametrize("name", [*FIGURES, *NARROW])
def test_a_figure_shows_the_raw_lines(name: str) -> None:
    committed = (FOLDER / f"{name}.svg").read_text()
    assert committed == measured_figure(name), "`make figures` draws it again"


def test_every_figure_is_drawn_from_lines() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == {f"{name}.svg" for name in (*FIGURES, *NARROW)} | BY_HAND


def test_the_bars_of_systems_have_the_medians_of_the_table() -> None:
    rows = {row["SMs, 4096 tokens by expert"]: row for row in equal_sms_table().rows()}
    cells = [rows[sms][f"{op} `{system}`"] for op in OPERATIONS for sms in shared_sms() for system in SYSTEMS]
    shown = re.findall(r">(\d+) µs</text>", (FOLDER / "systems-sms-h200x2.svg").read_text())
    assert shown == [cell.partition(" / ")[0] for cell in cells]
    assert {"24", "48", "64", "auto"} <= set(shared_sms())


@pytest.mark.parametrize("panel", PANELS)
def test_each_block_is_drawn_once_and_no_two_at_once_in_a_row(panel: str) -> None:
    rows = rows_of(panel)
    drawn = sorted(block for row in rows for block in row)
    assert drawn == sorted((part, times) for part in PARTS for times in blocks_of(panel, part))
    assert len(rows) == 132  # the SMs
    assert overlaps(rows) == []
    assert sum(row[0][0] == "exchange" for row in rows) == (0 if panel == "in_turn" else traced_line()["sms"])


def test_blocks_at_once_in_a_row_would_be_found() -> None:
    row = [("product", (0.0, 5.0)), ("exchange", (4.9, 6.0))]
    assert overlaps([row, row[:1], row[::-1]]) == [row, row[::-1]]


def test_the_blocks_are_of_the_commit_and_day_that_the_page_names() -> None:
    line = traced_line()
    page = (FOLDER.parent / "evidence" / "experiments" / "beside_products.md").read_text()
    assert f"`{line['commit']}`" in page and str(line["date"]) in page
    assert in_history(str(line["commit"]))
