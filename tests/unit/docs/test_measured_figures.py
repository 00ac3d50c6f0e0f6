"""The measured figures of the pages show the raw lines in benchmarks/*.jsonl."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.measured_figures import BY_HAND, FIGURES, FOLDER, NARROW, measured_figure
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
    shown = re.findall(r">(\d+) µs</text>", (FOLDER / "systems-sms-h100x2.svg").read_text())
    assert shown == [cell.partition(" / ")[0] for cell in cells]
    assert {"24", "48", "64", "auto"} <= set(shared_sms())
