"""Bars of workload pointwise on one GPU, as shares of the faster copy or of the best other system in the same case."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.report.columns import COPIES  # noqa: E402
from tests.gpu.conftest import ranks as ranks  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU, GpuRanks  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.perf]

FORWARD = ("rms_norm", "add_rms_norm", "layer_norm")
BACKWARD = ("rms_norm_backward", "add_rms_norm_backward", "layer_norm_backward", "swiglu_backward")
QUANTISED = ("rms_norm_fp8", "swiglu_fp8")
OTHERS = ("compile", "liger", "quack")


def rates(ranks: GpuRanks, op: str, tokens: int, **pointwise: Any) -> dict[str, float]:
    """Return the GB/s of each system that ran; all are of the same tensors."""
    given = {
        "name": "bars",
        "workload": "pointwise",
        "world": {"ranks": 1, "device": "cuda"},
        "shape": {"tokens": tokens, "hidden": 7168, "ffn": 2048},
        "pointwise": {"op": op, **pointwise},
        "steps": {"warmup": 3, "count": 30},
    }
    (lines,) = ranks.run(1, run, given)
    found = {line["backend"]: line["gbps_memory"] for line in lines if line.get("gbps_memory")}
    print(f"{op}, {tokens} rows {pointwise or ''}: " + ", ".join(f"{name} {gbps:.0f}" for name, gbps in found.items()))
    return found


def share_of_copy(found: dict[str, float]) -> float:
    return found["raymoe"] / max(found[name] for name in COPIES)


def best_other(found: dict[str, float]) -> float:
    return max(found[name] for name in OTHERS if name in found)


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("op", FORWARD)
def test_a_norm_is_as_fast_as_a_copy(ranks, op, tokens):
    found = rates(ranks, op, tokens)
    assert share_of_copy(found) >= 0.97 and found["raymoe"] >= 0.97 * best_other(found)


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("op", FORWARD)
def test_a_norm_of_few_rows_is_as_fast_as_the_best_other(ranks, op, tokens):
    found = rates(ranks, op, tokens)
    assert found["raymoe"] >= 0.97 * best_other(found)


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("op", BACKWARD)
def test_a_backward_is_near_a_copy_and_ahead_of_torch_compile(ranks, op, tokens):
    found = rates(ranks, op, tokens)
    assert share_of_copy(found) >= 0.90 and found["raymoe"] >= 1.3 * found["compile"]


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("op", QUANTISED)
def test_quantised_results_are_near_a_copy(ranks, op, tokens):
    assert share_of_copy(rates(ranks, op, tokens)) >= 0.90


def test_rows_after_the_last_offset_cost_nothing(ranks):
    """The rows are a quarter of the capacity, and only their bytes count."""
    assert rates(ranks, "swiglu_experts", 4096)["raymoe"] >= 0.95 * rates(ranks, "swiglu", 4096)["raymoe"]


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_fp8", "rms_norm_backward"])
def test_the_pipeline_pays_on_few_sms(ranks, op):
    found = rates(ranks, op, 4096, sms=48)
    assert found["raymoe"] >= 1.10 * found["in_turn"]
