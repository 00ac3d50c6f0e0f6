"""Records a run while it goes on: a line of `metrics.jsonl` for each step, and at its end two pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.train import Checkpoint, UserCallback

from raymoe.report.figure import Figure, Panel, figure_file
from raymoe.report.svg import Axis, Chart, Curve, Point

METRICS = "metrics.jsonl"
TICKS = 8


class Recorder(UserCallback):
    """Writes what workers report. Ray Train calls it in its controller, on the node of the driver."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.attempt = read(folder)[-1]["attempt"] + 1 if (folder / METRICS).exists() else 0

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:  # noqa: ARG002
        """Write the steps that all ranks have reported."""
        ranks = [rank["steps"] for rank in metrics]
        lines = [line_of(step) | {"attempt": self.attempt} for step in zip(*ranks, strict=True)]
        with (self.folder / METRICS).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        last = lines[-1]
        busiest = max(max(layer) for layer in last["load"])
        where = f"step {last['step']}/{self.steps}: loss {last['loss']:.4f}, busiest expert {busiest:.2f} x mean"
        print(where + (", checkpoint saved" if checkpoint else ""), flush=True)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Count an attempt that has ended."""
        self.attempt += 1
        ranks = ", ".join(f"rank {rank}: {type(error).__name__}" for rank, error in sorted(worker_exceptions.items()))
        print(f"attempt {self.attempt} ended ({ranks}); all workers start again", flush=True)


def line_of(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join what the ranks reported of a step. The load of an expert is its tokens as a multiple of the mean."""
    first = metrics[0]
    load = []
    for layers in zip(*(rank["load"] for rank in metrics), strict=True):
        counts = [sum(column) for column in zip(*layers, strict=True)]
        mean = sum(counts) / len(counts)
        load.append([round(count / mean, 3) for count in counts])
    return {
        **{key: first[key] for key in ("step", "loss", "grad_norm", "seconds")},
        "tokens": sum(rank["tokens"] for rank in metrics),
        "load": load,
        "ranks": [f"{rank['host']}:{rank['process']}" for rank in metrics],
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the steps of a run in the order in which they were trained."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def draw(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Draw the loss, a curve for each attempt, and the busiest and the least busy expert of each layer."""
    attempts = sorted({line["attempt"] for line in lines})
    losses = [
        Curve(
            f"attempt {attempt + 1}",
            [Point(line["step"], line["loss"]) for line in lines if line["attempt"] == attempt],
            attempt,
        )
        for attempt in attempts
    ]
    last = {line["step"]: line for line in lines}  # of a step that was trained twice, the later
    loads = [
        Curve(
            f"layer {layer}, {name}",
            [Point(step, pick(line["load"][layer])) for step, line in last.items()],
            layer,
            dash,
        )
        for layer in range(len(lines[0]["load"]))
        for name, pick, dash in (("busiest", max, False), ("least busy", min, True))
    ]
    how = f"{len(lines[0]['ranks'])} ranks, {max(line['tokens'] for line in lines)} tokens"
    _write(folder / "loss.svg", "Loss", how, Axis("loss"), losses)
    _write(folder / "load.svg", "Tokens of an expert", how, Axis("multiple of the mean"), loads)


def _write(path: Path, title: str, how: str, y: Axis, curves: list[Curve]) -> None:
    steps = sorted({point.x for curve in curves for point in curve.points})
    x = Axis("step", write=lambda step: f"{step:.0f}", ticks=steps[:: -(-len(steps) // TICKS)])
    panel = Panel(Chart(title, x, y, curves))
    path.write_text(figure_file(Figure(path.stem, title, how, (panel,), (), curves), [path.parent.name]))
