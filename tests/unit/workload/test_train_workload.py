"""Workload train on CPU ranks: its losses are those of the unsharded run, and it goes on from its last checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.config import load_job
from raymoe.config.job import Job
from raymoe.errors import ConfigError, WrongResult
from raymoe.memory.world import World
from raymoe.workload import Progress, run_case
from raymoe.workload.train import run_train
from tests.unit.ranks import RankPool
from tests.unit.workload.test_workload import failures, job, run

STEPS = 12


def train_job(folder: Path, ranks: int = 2, **train: Any) -> dict[str, Any]:
    shape = {"tokens": 40, "hidden": 16, "experts": 4, "topk": 2, "ffn": 16, "dtype": "float32"}
    given = {"layers": 2, "oracle": 6, "checkpoint_every": 4, "folder": str(folder), **train}
    return job("train", ranks, shape=shape, train=given, steps={"warmup": 2, "count": STEPS - 2})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_line_has_the_losses_of_an_unsharded_run(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    (line,) = run(pool, train_job(tmp_path / "kept", ranks))
    assert (line["op"], line["samples"], line["starts"]) == ("step", STEPS - 2, [0])
    assert line["verified"] and line["max_error"] < 1e-5
    assert len(line["losses"]) == STEPS and abs(line["losses"][0][1] - math.log(256)) < 1
    assert sum(line["expert_load"]) == pytest.approx(ranks * 40 * 2, abs=0.1)
    assert line["tokens_per_s"] == pytest.approx(ranks * 40 / line["us_p50"] * 1e6, rel=1e-3)
    assert 0 < line["rows_busiest"] <= line["rows_capacity"] and line["expert_load_imbalance"] >= 1
    assert not (tmp_path / "kept").exists(), "checkpoints stay after the last step"


@pytest.mark.thorough
def test_the_model_learns_who_follows_whom(pool: RankPool, tmp_path: Path) -> None:
    given = train_job(tmp_path, oracle=0)
    given["shape"] |= {"hidden": 32, "tokens": 128}
    (line,) = run(pool, given | {"steps": {"warmup": 0, "count": 60}})
    assert line["verified"] is None and line["losses"][-1][1] < 0.6 * line["losses"][0][1]


# A lost rank.


class LostError(Exception):
    pass


def lost_at(world: World, given: dict[str, Any], step: int) -> list[dict[str, object]]:
    """Run until all ranks are lost after some steps; with a step that does not come, to the end."""

    def progressed(progress: Progress) -> None:
        if progress.done >= step:
            raise LostError

    (case,) = Job.model_validate(given).cases()
    try:
        return run_case(case, world, progressed)
    except LostError:
        return []


def one_step_a_block(world: World, given: dict[str, Any], step: int) -> list[dict[str, object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymoe.workload.measure.BLOCK_SECONDS", 0.0)
        return lost_at(world, given, step)


def test_training_goes_on_from_the_last_checkpoint_with_the_same_losses(pool: RankPool, tmp_path: Path) -> None:
    (whole,) = run(pool, train_job(tmp_path / "whole"))
    given = train_job(tmp_path / "lost")
    assert pool.run(2, one_step_a_block, given, 2) == [[], []]  # before the first checkpoint
    assert pool.run(2, one_step_a_block, given, 9) == [[], []]
    assert sorted(path.name for path in (tmp_path / "lost" / "case-0").iterdir()) == ["4", "8", "starts.json"]
    for (line,) in pool.run(2, one_step_a_block, given, STEPS + 1):
        assert line["starts"] == [0, 0, 8]
        assert line["losses"] == whole["losses"], "a resumed run has other losses"
        assert line["samples"] == STEPS - 8 and line["verified"] is True


def test_a_checkpoint_of_some_ranks_is_not_taken(pool: RankPool, tmp_path: Path) -> None:
    given = train_job(tmp_path)
    pool.run(2, one_step_a_block, given, 9)
    (tmp_path / "case-0" / "8" / "complete").unlink()  # a rank was lost while it wrote
    for (line,) in pool.run(2, one_step_a_block, given, STEPS + 1):
        assert line["starts"] == [0, 4]


def test_a_checkpoint_of_another_job_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, one_step_a_block, train_job(tmp_path), 5)
    for error in failures(pool, 2, lost_at, train_job(tmp_path, layers=3), 99):
        assert isinstance(error, ConfigError) and "is of another job; set train.folder" in str(error)


# Wrong results.


def without_averages(world: World, given: dict[str, Any]) -> None:
    """An injected bug: the experts' gradients stay sums over the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_train, "average_expert_gradients", lambda _: None)
        lost_at(world, given, 99)


def with_own_gradients(world: World, given: dict[str, Any]) -> None:
    """An injected bug: each rank steps by the gradients of its own tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_train.Training, "_average_others", lambda _: None)
        lost_at(world, given, 99)


def with_nan(world: World, given: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forward = run_train.TrainedModel.forward
        patch.setattr(
            run_train.TrainedModel,
            "forward",
            lambda model, ids: forward(model, ids) * (math.nan if world.rank == 1 else 1.0),
        )
        lost_at(world, given, 99)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (without_averages, "has an error of"),
        (with_own_gradients, "has an error of"),
        (with_nan, "the loss of step 0 is"),
    ],
)
def test_a_wrong_loss_stops_all_ranks(pool: RankPool, tmp_path: Path, bug: Any, said: str) -> None:
    given = train_job(tmp_path)
    given["shape"] |= {"tokens": 64}
    given["train"] |= {"oracle": STEPS}
    for error in failures(pool, 2, bug, given):
        assert isinstance(error, WrongResult) and said in str(error), error


def test_the_text_is_the_same_for_a_seed_and_another_for_another() -> None:
    ids = [
        run_train.Text(seed, 64).of(rank, step)[0] for seed, rank, step in ((0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0))
    ]
    assert torch.equal(ids[0], ids[1]) and not any(torch.equal(ids[0], other) for other in ids[2:])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("routing.kind", "zipf", "route by their own routers"),
        ("shape.dtype", "float32", "cannot be trained on GPUs"),
        ("exchange.layout", "token", "take no rows by token"),
        ("exchange.backend", "row_push", "is no exchange"),
        ("world.domain", "1", "workload train has one domain"),
        ("train.layers", "0", "layers"),
    ],
)
def test_what_cannot_be_trained_is_refused(key: str, value: str, said: str) -> None:
    device = ["world.device=cuda"] if key in ("shape.dtype", "exchange.backend") else []
    with pytest.raises(ConfigError, match=said):
        load_job("train", [*device, f"{key}={value}"])
