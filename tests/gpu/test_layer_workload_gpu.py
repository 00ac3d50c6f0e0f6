"""Workload layer on GPU ranks: verified lines of the step, its parts and the parts alone, forward and backward."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.exchange.choice import FUSED_CAPABILITY  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.moe import product_launch  # noqa: E402
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.gpu.test_exchange_workload import run  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() < FUSED_CAPABILITY, reason=f"needs {FUSED_CAPABILITY}"
    ),
]

FORWARD = ["norm", "router", "dispatch", "experts", "combine", "shared", "sum"]
ALONE = [f"{part}_alone" for part in FORWARD if part != "sum"]
BACKWARD = {f"{part}_backward" for part in FORWARD}
BACKWARD_ALONE = {"dispatch_backward_alone", "combine_backward_alone"}
ROUTERS = {
    "softmax": {"kind": "softmax"},
    "sigmoid": {"kind": "sigmoid", "groups": 4, "topk_groups": 2, "scale": 2.5},
    "chosen": {"kind": "chosen"},
}


def job(tokens: int, kind: str, **layer: Any) -> dict[str, Any]:
    return {
        "name": "test",
        "workload": "layer",
        "world": {"ranks": 2, "device": "cuda", "share_gpu": GPUS < 2},
        "shape": {"tokens": tokens, "hidden": 512, "ffn": 256, "experts": 16, "topk": 4},
        "layer": {"shared": 256, "router": ROUTERS[kind], **layer},
        "steps": {"warmup": 1, "count": 2},
    }


@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_captured_layer_has_verified_lines_for_the_step_and_every_part(ranks: GpuRanks, kind: str, tokens: int):
    lines = ranks.run(2, run, job(tokens, kind))[0]
    assert [line["op"] for line in lines] == ["step", "step", *FORWARD, *ALONE]
    assert [line["l2"] for line in lines[:2]] == ["cold", "warm"]
    assert all(line["verified"] and line["graph"] and line["bytes_peak"] > 0 for line in lines)
    assert sum(line["us_p50"] for line in lines[2:9]) > 0


@pytest.mark.parametrize("recompute", ["nothing", "activation", "all"])
def test_a_captured_layer_has_a_backward_pass(ranks: GpuRanks, recompute: str):
    lines = ranks.run(2, run, job(300, "sigmoid", backward=True, recompute=recompute))[0]
    found = {line["op"] for line in lines}
    assert found == {
        "step",
        *FORWARD,
        *ALONE,
        *BACKWARD,
        *BACKWARD_ALONE,
        *(["recompute"] if recompute == "all" else []),
    }
    assert all(line["verified"] and line["graph"] for line in lines)


@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("backward", [False, True])
def test_experts_of_gpt_oss_are_verified(ranks: GpuRanks, backward: bool, tokens: int):
    lines = ranks.run(2, run, job(tokens, "chosen", experts="gpt_oss", shared=0, backward=backward))[0]
    assert all(line["verified"] and line["graph"] for line in lines)


@pytest.mark.parametrize("tokens", [16, 300])
def test_a_layer_of_float16_is_captured_and_verified(ranks: GpuRanks, tokens: int):
    """On Hopper, where no product of torch makes the host wait."""
    if torch.cuda.get_device_capability() != product_launch.CAPABILITY:
        pytest.skip("grouped_mm makes the host wait for float16")
    given = job(tokens, "sigmoid")
    given["shape"]["dtype"] = "float16"
    lines = ranks.run(2, run, given)[0]
    assert all(line["verified"] and line["graph"] and line["dtype"] == "float16" for line in lines)


def test_recomputing_keeps_only_what_the_forward_pass_gets_and_gives(ranks: GpuRanks):
    whole, less, recomputed = (
        ranks.run(2, run, job(2000, "softmax", backward=True, recompute=kind))[0][0]
        for kind in ("nothing", "activation", "all")
    )
    ranks_rows = 2 * 2000 * 4  # at worst all tokens' entries come to one rank
    saved = whole["bytes_kept"] - less["bytes_kept"]
    assert 0.95 * ranks_rows * 256 * 2 <= saved <= 1.1 * (ranks_rows + 8 * 15) * 256 * 2
    assert less["bytes_peak"] <= 1.01 * whole["bytes_peak"]
    rows = 2000 * 512 * 2
    assert whole["bytes_kept"] > 8 * rows  # dispatched rows, and the experts' work on them
    assert rows <= recomputed["bytes_kept"] < 2 * rows
    assert recomputed["bytes_peak"] <= 1.01 * whole["bytes_peak"]


@pytest.mark.parametrize("backend", ["staged", "allgather", "collective"])
def test_other_backends_run_a_layer(ranks: GpuRanks, backend: str):
    if backend in ("allgather", "collective") and GPUS < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    lines = ranks.run(2, run, job(64, "softmax", backward=True) | {"exchange": {"backend": backend}})[0]
    assert lines[0]["verified"] and lines[0]["graph"] == (backend != "collective")


def replay_of_work_that_nobody_holds(world: World) -> float:
    """Capture a sum, drop its source, and empty torch's cache by a second capture; return what a replay then gives."""
    new_stream: Any = torch.cuda.Stream  # has no annotations
    stream = new_stream(world.device)
    with torch.cuda.stream(stream), closing(TorchGraphClock(world, stream, stream.synchronize, captured=True)) as clock:
        source, into = torch.ones(64 << 20, device=world.device), torch.zeros((), device=world.device)
        timed = clock.timed(lambda source=source: into.copy_(source.sum()))
        del source
        clock.timed(lambda: into.zero_())
        torch.full((64 << 20,), 2.0, device=world.device)
        timed.warm()
        stream.synchronize()
        return float(into)


def test_a_graph_keeps_the_tensors_that_its_work_reads(ranks: GpuRanks):
    assert ranks.run(1, replay_of_work_that_nobody_holds) == [float(64 << 20)]


def test_the_exchange_of_a_layer_takes_the_sms_of_the_job(ranks: GpuRanks):
    lines = ranks.run(2, run, job(2000, "softmax") | {"exchange": {"sms": 24}})[0]
    assert {line["sms"] for line in lines} == {24}


def test_a_given_routing_has_the_line_of_the_step_alone(ranks: GpuRanks):
    given = job(64, "softmax") | {"layer": {"shared": 128}, "routing": {"masked": 0.3, "ragged": True}}
    assert [line["op"] for line in ranks.run(2, run, given)[0]] == ["step", "step"]
