"""Run the code of docs/library.md on two GPUs, in one process group as under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from raymoe.memory.world import World  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU, GpuRanks  # noqa: E402
from tests.unit.docs import library_page  # noqa: E402

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each of 2 ranks; {GPUS} here")]


def run_blocks_in_a_group(world: World, store: str) -> tuple[list[str], str]:
    torch.cuda.set_device(0)  # each process sees one GPU
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        return library_page.run({"gpu"})
    finally:
        dist.destroy_process_group()


def test_all_blocks_except_those_for_ray_run(tmp_path: Path) -> None:
    with GpuRanks(2) as ranks:
        for names, _ in ranks.run(2, run_blocks_in_a_group, str(tmp_path / "store")):
            assert {"shared", "kept", "streams", "layers"} <= set(names)
