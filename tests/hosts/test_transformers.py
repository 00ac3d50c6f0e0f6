"""raymoe inside transformers 5.24 on two CPU ranks: the example, and fine-tuning by Trainer. Other tests have 5.23."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hosts.conftest import Run

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


def test_the_example_generates_and_has_the_gradients_of_the_unsharded_model(on_ranks: Run) -> None:
    output = on_ranks("transformers", 2, "examples.transformers_moe")
    assert output.count("tokens by raymoe, as the unsharded model; gradients too") == 2


def test_the_example_has_near_logits_with_8_bit_experts(on_ranks: Run) -> None:
    output = on_ranks("transformers", 2, "examples.transformers_moe", "--fp8")
    assert output.count("tokens with 8-bit experts, logits ") == 2


def test_trainer_learns_what_it_learns_on_one_rank(on_ranks: Run, tmp_path: Path) -> None:
    """Two ranks with half of the batch each: the losses of four steps, and the weights that Trainer saves."""
    from safetensors.torch import load_file

    losses, weights = [], []
    for ranks in (1, 2):
        output = on_ranks("transformers", ranks, "tests.hosts.transformers_train", str(tmp_path))
        losses.append(json.loads(next(line for line in output.splitlines() if line.startswith('{"losses"')))["losses"])
        weights.append(load_file(tmp_path / f"trained-{ranks}" / "model.safetensors"))
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == weights[0].keys() == weights[1].keys()
    learned = 0.0
    for name, whole in weights[0].items():
        moved = float((whole - before[name]).abs().max())
        learned = max(learned, moved)
        assert float((weights[1][name] - whole).abs().max()) <= 1e-5 + 1e-3 * moved, name
    experts = [name for name in before if ".experts." in name]
    assert learned > 0.01 and all(not weights[1][name].equal(before[name]) for name in experts)
