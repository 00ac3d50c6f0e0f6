"""raymoe inside Megatron-Core 0.16, the real package, on CPU ranks, beside Megatron's all-gather dispatcher."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.hosts.conftest import Run

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
MODEL = "tests.hosts.megatron_model"


def results_of(output: str) -> list[dict[str, Any]]:
    """Return the lines of JSON of all ranks."""
    found: list[dict[str, Any]] = json.loads(next(line for line in output.splitlines() if line[:2] == "[{"))
    return found


@pytest.mark.parametrize(("kind", "tp"), [("plain", 1), ("dropped", 1), ("plain", 2)])
def test_loss_and_gradients_equal_those_of_its_all_gather(on_ranks: Run, kind: str, tp: int) -> None:
    """Two layers with a shared expert, two steps in float32. Then each model loads the other's checkpoint."""
    found = results_of(on_ranks("megatron", 2, MODEL, kind, str(tp)))
    assert (sum(each["dropped"] for each in found) > 0) == (kind == "dropped")
    for each in found:
        assert each["gradients"] == (39 if tp == 1 else 55)
        assert each["largest gradient"] > 1e-2
        assert max(each["loss"], each["gradient"], each["loaded"]) <= 1e-5, each


def test_what_it_has_not_is_refused_by_a_sentence(on_ranks: Run) -> None:
    for said in results_of(on_ranks("megatron", 2, MODEL, "refused", "1")):
        assert said["overlap_moe_expert_parallel_comm"].endswith(
            "raymoe has no schedule of two micro-batches: leave it out, or take Megatron's own dispatcher"
        )
        assert "brings the rows that came and no padding" in said["moe_pad_expert_input_to_capacity"]
