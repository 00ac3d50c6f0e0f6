"""Time a load of one layer's weights from another world on the host, and sleep and wake of many bytes of weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer, let_sleep, offer_weights, open_weights
from tests.gpu.ranks import GPUS, GpuRanks

pytestmark = [
    pytest.mark.perf,
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"an engine and a trainer need a GPU each; {GPUS} here"),
    pytest.mark.timeout(300),
]
HIDDEN, FFN = 7168, 2048  # an expert of DeepSeek-V3, 88 MB
LOADED, SLEEPING = 32, 228
LINK_SHARE, SLEEP_S = 0.8, 2.0


@pytest.fixture(scope="module")
def pair() -> Iterator[GpuRanks]:
    with GpuRanks(2) as started:
        yield started


def layer_of(world: World, experts: int, ffn: int, hidden: int = HIDDEN) -> MoELayer:
    dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    spec = ExchangeSpec(tokens=8, hidden=hidden, experts=experts, topk=1, dtype=dtype, depth=0)
    return MoELayer(world, spec, LayerForm(ffn), seed=world.rank)


def alone(outer: World, name: str) -> World:
    """Make a world of this rank only."""
    world = World.open(0, 1, name=name, device=outer.device.type, timeout_s=outer.timeout_s)
    world.wire([world.descriptor()])
    return world


def seconds(world: World, act: Callable[[], object]) -> float:
    """Return the least time of some, the device's work included."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        act()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        best = min(best, time.perf_counter() - began)
    return best


def load_rates(outer: World, experts: int, ffn: int) -> dict[str, float]:
    """Rank 0 offers a layer, rank 1 loads it, and copies the same memory without raymoe. Return its GB/s."""
    with alone(outer, "train" if outer.rank == 0 else "serve") as world:
        layer = layer_of(world, experts, ffn)
        if outer.rank == 0:
            with offer_weights(layer, readers=1) as offered:
                offered.publish()
                outer.swap(offered.descriptor(), "offer")
                outer.barrier("measured", timeout_s=60)
            return {}
        offer: Any = outer.swap(None, "offer")[0]
        with open_weights(world, [offer]) as opened:
            with opened.reading() as (_, pieces):
                peers = {piece.name: piece.values for piece in pieces}
            copies = {name: torch.empty_like(values, device=world.device) for name, values in peers.items()}
            nbytes = sum(values.numel() * values.element_size() for values in peers.values())
            bare = seconds(world, lambda: [copies[name].copy_(values) for name, values in peers.items()])
            load = seconds(world, lambda: layer.load(opened))
        outer.barrier("measured", timeout_s=60)
        return {"bytes": nbytes, "copy_gbps": nbytes / bare / 1e9, "load_gbps": nbytes / load / 1e9}


def sleep_seconds(outer: World, experts: int, ffn: int) -> dict[str, float]:
    """Let the weights of one GPU sleep and wake, twice: the first time allocates page-locked memory."""
    if outer.rank > 0:
        outer.barrier("measured", timeout_s=80)
        return {}
    with alone(outer, "serve") as world:
        layer = layer_of(world, experts, ffn)
        nbytes = let_sleep(layer)
        first, _ = world.sleep(), world.wake()
        again, awake = world.sleep(), world.wake()
        outer.barrier("measured", timeout_s=80)
        return {
            "bytes": nbytes,
            "pinning_s": first.pinning_s,
            "sleep_s": again.seconds,
            "wake_s": awake.seconds,
            "first_sleep_s": first.seconds,
        }


def test_a_load_takes_little_more_than_a_copy_over_the_link(pair: GpuRanks) -> None:
    rates = pair.run(2, load_rates, LOADED, FFN)[1]
    print(rates)
    assert rates["load_gbps"] >= LINK_SHARE * rates["copy_gbps"], rates


def test_twenty_gigabytes_sleep_and_wake_in_two_seconds(pair: GpuRanks) -> None:
    times = pair.run(2, sleep_seconds, SLEEPING, FFN)[0]
    print(times)
    assert times["bytes"] >= 20e9
    assert times["sleep_s"] + times["wake_s"] <= SLEEP_S, times
