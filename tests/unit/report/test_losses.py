"""The figure and the columns of a training: its loss, and where it went on after a lost rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raymoe.report.columns import caption_of, columns_of
from raymoe.report.losses import loss_figures
from raymoe.report.plots import figures, write_plots
from raymoe.report.results import Line, complete, decode, encode


def training(losses: list[list[float]], starts: list[int], case: str = "default") -> Line:
    measured = {"case": case, "workload": "train", "op": "step", "ranks": 2, "device": "cpu", "us_p50": 900.0}
    measured |= {"losses": losses, "starts": starts, "tokens_per_s": 5e5, "expert_load_imbalance": 1.25}
    return complete(measured, run="soak", generation=1, commit=None)


LOSSES = [[10, 6.1], [20, 3.0], [30, 1.6]]


def test_the_loss_is_drawn_with_a_ring_where_ranks_went_on(tmp_path: Path) -> None:
    (figure,) = loss_figures([training(LOSSES, [0, 10])])
    chart: Any = figure.panels[0].picture
    assert [(point.x, point.y, point.ring) for point in chart.curves[0].points] == [
        (10, 6.1, False),
        (20, 3.0, True),
        (30, 1.6, False),
    ]
    assert "Rings:" in figure.note and [column.cells[1] for column in figure.columns] == [
        "default",
        "20",
        "3.0000",
        "went on",
    ]
    assert [path.name for path in write_plots(tmp_path, [training(LOSSES, [0, 10])])] == ["losses.svg"]


def test_a_training_that_never_stopped_has_no_ring_and_other_lines_no_figure() -> None:
    (figure,) = loss_figures([training(LOSSES, [0]), training(LOSSES, [0], "tokens=2")])
    assert "Rings:" not in figure.note and len(figure.legend) == 2
    other = complete({"case": "c", "op": "copy", "us_p50": 1.0}, run="r", generation=0, commit=None)
    assert not list(loss_figures([other])) and not [each for each in figures([other], {}) if each.stem == "losses"]


def test_the_table_has_losses_and_restarts() -> None:
    lines = [training(LOSSES, [0, 10, 20])]
    cells = {column.header: column.cells for column in columns_of(lines)}
    assert cells["loss"] == ["6.100 to 1.600"] and cells["went on from step"] == ["10, 20"]
    assert cells["tokens/s"] == ["500,000"] and "imbalance 1.25" in caption_of(lines)


@pytest.mark.parametrize(
    ("key", "value"), [("losses", [[1, -2.0]]), ("losses", [1.0]), ("starts", [-1]), ("starts", 3)]
)
def test_lines_with_damaged_losses_are_refused(key: str, value: object) -> None:
    good = encode(training(LOSSES, [0]))
    assert decode(good)["losses"] == LOSSES
    with pytest.raises(ValueError, match=key):
        decode(encode(training(LOSSES, [0]) | {key: value}))
