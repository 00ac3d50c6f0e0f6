"""Measure how long ranks take to reach one another's memory. The time is printed: `pytest -rP` shows it."""

from __future__ import annotations

import time

import torch

from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU

HEAP = Layout.of([Region("rows", (1 << 30,), "uint8")])
MAX_S = 1.0
SIZE = max(2, GPUS)


def rendezvous(world: World, number: int) -> float:
    """Return the seconds until each rank has a heap of 1 GiB that all have mapped and proven. CUDA is initialised."""
    shared = world.member.share_gpu
    world.barrier("start")
    started = time.monotonic()
    with World.open(world.rank, world.size, name=f"rendezvous-{number}", device="cuda", share_gpu=shared) as new:
        descriptors = [dict(each) for each in world.swap(new.descriptor(), "descriptors")]  # type: ignore[call-overload]
        new.wire(descriptors)
        heap = new.allocate(HEAP, "rows", where="device")
        new.barrier("ready")
        elapsed = time.monotonic() - started
        last = heap.tensor("rows", (world.rank + 1) % world.size)[-1:]
        last.fill_(world.rank + 1)
        torch.cuda.synchronize()
        new.barrier("written")
        assert int(heap.tensor("rows")[-1]) == (world.rank - 1) % world.size + 1
    return elapsed


def test_ranks_with_heaps_of_1_gib_meet_within_a_second(ranks: GpuRanks) -> None:
    seconds = [max(ranks.run(SIZE, rendezvous, number)) for number in range(3)]
    where = f"{SIZE} ranks, a GPU each" if SIZE <= GPUS else f"{SIZE} ranks on one GPU"
    print(f"rendezvous with heaps of 1 GiB, {where}: {', '.join(f'{each:.3f}' for each in seconds)} s")
    assert max(seconds) < MAX_S
