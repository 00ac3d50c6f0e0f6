"""Draws the loss of a training over its steps, with the steps from which restarted ranks went on.

All lines are from `displayed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymoe.report.columns import Column, restarts
from raymoe.report.figure import Figure, Panel
from raymoe.report.measures import ranks_on
from raymoe.report.results import Line
from raymoe.report.svg import MOST_CURVES, Axis, Chart, Curve, Point

KNOWS_NOTHING, KNOWS_ALL = 5.545, 1.386  # ln 256 and ln 4: the losses of Text in workload/train/model.py


def loss_figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Draw the losses of all trainings. A ring marks where one went on after a lost rank, or was resumed."""
    trained = [line for line in lines if line["losses"]][:MOST_CURVES]
    if not trained:
        return
    several = len({line["run"] for line in trained}) > 1
    labels = [f"{line['run']} {line['case']}" if several else str(line["case"]) for line in trained]
    curves = [
        Curve(label, _points(line), style) for style, (label, line) in enumerate(zip(labels, trained, strict=True))
    ]
    chart = Chart("Loss of training", Axis("step", write=lambda value: f"{value:.0f}"), Axis("loss"), curves)
    marked = any(restarts(line) for line in trained)
    yield Figure(
        "losses",
        chart.title,
        f"{ranks_on(trained)}. Mean over the tokens of all ranks.",
        [Panel(chart)],
        _columns(trained, labels),
        curves if len(curves) > 1 else [],
        f"A model that knows nothing has {KNOWS_NOTHING}, one that knows the text {KNOWS_ALL}."
        + " Rings: steps from which all ranks went on, after a lost rank or by --resume." * marked,
    )


def _points(line: Line) -> list[Point]:
    """Give the points of a curve. A ring is at the first point after a step from which ranks went on."""
    recorded = line["losses"]
    pairs = [(float(step), float(loss)) for step, loss in recorded] if isinstance(recorded, list) else []
    ringed = {next((end for end, _ in pairs if end > step), pairs[-1][0]) for step in restarts(line)}
    return [Point(end, loss, ring=end in ringed) for end, loss in pairs]


def _columns(trained: Sequence[Line], labels: Sequence[str]) -> list[Column]:
    cells = [
        (label, f"{point.x:.0f}", f"{point.y:.4f}", "went on" if point.ring else "-")
        for line, label in zip(trained, labels, strict=True)
        for point in _points(line)
    ]
    headers = ("case", "step", "loss", "restart")
    return [
        Column(header, list(column), right=header in ("step", "loss"))
        for header, column in zip(headers, zip(*cells, strict=True), strict=True)
    ]
