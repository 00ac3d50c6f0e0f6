"""raymoe inside torchtitan 0.3, the real package, on CPU ranks, beside torchtitan's own all-to-all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import Run

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
MODEL, TRAIN = "tests.hosts.torchtitan_model", "tests.hosts.torchtitan_train"
OVERRIDES = ("raymoe.integrations.torchtitan.dispatcher", "raymoe.integrations.torchtitan.selective_ac")


def results_of(output: str) -> list[dict[str, dict[str, Any]]]:
    """Return the lines of JSON of all ranks."""
    found: list[dict[str, dict[str, Any]]] = json.loads(next(line for line in output.splitlines() if line[:2] == "[{"))
    return found


def judge(result: dict[str, Any], bound: float) -> None:
    assert result["gradients"] == 23 and result["replaced"] == 2, "both layers have raymoe's dispatcher"
    assert result["largest gradient"] > 1e-2
    for name in ("logits", "loss", "gradient"):
        assert result[name] <= bound, (name, result)


def test_logits_loss_and_gradients_equal_those_of_its_all_to_all(on_ranks: Run) -> None:
    """Two layers, two steps. Full checkpointing dispatches again; selective does not, by raymoe's list alone."""
    counts = {"none": 8, "full": 12, "selective": 8, "own selective": 12, "hybridep": 8}
    for found in results_of(on_ranks("torchtitan", 2, MODEL, ",".join(counts), "1")):
        for kind, dispatches in counts.items():
            judge(found[kind], 1e-5)
            assert (found[kind]["dispatches"], found[kind]["combines"]) == (dispatches, dispatches), kind


def test_it_works_with_tensor_parallelism(on_ranks: Run) -> None:
    for found in results_of(on_ranks("torchtitan", 2, MODEL, "none", "2")):
        judge(found["none"], 1e-5)


@pytest.mark.parametrize("tp", ["1", "2"])
def test_its_routers_take_recorded_routes(on_ranks: Run, tp: str) -> None:
    """A pass that checkpointing repeats takes the same ones."""
    for found in results_of(on_ranks("torchtitan", 2, MODEL, "replayed,full replayed", tp)):
        for kind in ("replayed", "full replayed"):
            judge(found[kind], 1e-5)


def test_it_is_compiled_whole(on_ranks: Run) -> None:
    """torchtitan compiles blocks with fullgraph. Its own all-to-all does not compile on CPUs, so it runs eagerly."""
    for found in results_of(on_ranks("torchtitan", 2, MODEL, "compiled", "1")):
        judge(found["compiled"], 1e-3)  # experts in bfloat16: torch compiles no other grouped product
        assert found["compiled"]["dispatches"] == 8


def test_a_checkpoint_of_two_ranks_is_loaded_on_one(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks("torchtitan", 2, MODEL, "saved", str(tmp_path))
    output = on_ranks("torchtitan", 1, MODEL, "saved", str(tmp_path))
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["before"] > 1e-2 and found["after"] <= 1e-5


def losses(on_ranks: Run, folder: Path, *arguments: str) -> dict[int, float]:
    """Train four steps by torchtitan's trainer; return the loss of each."""
    shape = ["--training.seq_len", "32", "--training.local_batch_size", "1", "--training.disable_cuda_graphs"]
    ranks = ["--parallelism.expert_parallel_degree", "2", "--parallelism.spmd_backend", "partial_dtensor"]
    data = ["--hf_assets_path", str(folder / "tokenizer"), "--dataloader.dataset_path", str(folder / "text")]
    options = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--training.steps", "4", "--debug.seed", "7"]
    attention = ["--override.imports", "torchtitan_on_ray.cpu.sdpa"]
    output = on_ranks("torchtitan", 2, TRAIN, *options, *data, *shape, *ranks, *attention, *arguments)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([0-9.]+)", plain)}


def test_its_trainer_trains_and_its_own_dispatcher_goes_on_from_the_checkpoint(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks("torchtitan", 0, TRAIN, "make", str(tmp_path))
    own = losses(on_ranks, tmp_path, "--dump_folder", str(tmp_path / "own"))
    saved = ["--checkpoint.enable", "--checkpoint.interval", "3", "--dump_folder", str(tmp_path / "saved")]
    ours = losses(on_ranks, tmp_path, *OVERRIDES, *saved)
    later = losses(on_ranks, tmp_path, *saved, "--checkpoint.load_step", "3")
    assert sorted(own) == sorted(ours) == [1, 2, 3, 4] and sorted(later) == [4]
    assert own[1] - own[4] > 0.3, "it learns"
    for found in (ours, later):
        for step, loss in found.items():
            assert loss == pytest.approx(own[step], abs=5e-3), "experts compute in bfloat16"
