"""The measured figures of the pages show the raw lines in benchmarks/*.jsonl."""

from __future__ import annotations

import pytest

from tests.unit.docs.measured_figures import BY_HAND, FIGURES, FOLDER, measured_figure


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_the_raw_lines(name: str) -> None:
    committed = (FOLDER / f"{name}.svg").read_text()
    assert committed == measured_figure(name), "`make figures` draws it again"


def test_every_figure_is_drawn_from_lines() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == {f"{name}.svg" for name in FIGURES} | BY_HAND
