"""DeepSpeed 0.19 and torchtitan 0.3, the real packages, on CPU ranks: their code for DeepEP over raymoe's `deep_ep`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.hosts.conftest import Run

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


def results_of(output: str) -> list[dict[str, dict[str, Any]]]:
    """Return the lines of JSON of all ranks."""
    found: list[dict[str, dict[str, Any]]] = json.loads(next(line for line in output.splitlines() if line[:2] == "[{"))
    return found


def test_a_layer_of_deepspeed_equals_the_one_by_its_own_all_to_all(on_ranks: Run) -> None:
    """Its DeepEP backend has the expanding layout, cached handles, and a replay for checkpoints."""
    kinds = {f"{kind}, {apply}" for kind in ("none", "reentrant", "non-reentrant") for apply in ("post", "pre")}
    for found in results_of(on_ranks("deepspeed", 2, "tests.hosts.deepspeed_layer")):
        assert set(found) == kinds
        for kind, result in found.items():
            assert result["largest"] > 0.1 and result["difference"] <= 1e-5, (kind, result)


def test_a_model_of_torchtitan_equals_the_one_by_its_all_to_all(on_ranks: Run) -> None:
    """Its DeepEP dispatcher trains with the compact layout, and infers with the expanding one where it may capture."""
    dispatches = {"none": 8, "full": 12}
    for found in results_of(on_ranks("torchtitan", 2, "tests.hosts.torchtitan_deep_ep")):
        for kind, count in dispatches.items():
            assert found[kind]["gradients"] == 23 and found[kind]["difference"] <= 1e-5, found[kind]
            assert (found[kind]["layouts"], found[kind]["dispatches"]) == (["compact"], count)
        inference = found["inference"]
        assert inference["largest"] > 1e-2 and inference["difference"] <= 1e-5, inference
        assert inference["layouts"] == ["expanding"] * 2
