"""The code of docs/layer.md runs, on two CPU ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy
import torch.distributed as dist

from raymoe.memory.world import World
from tests.unit.docs import library_page
from tests.unit.ranks import RankPool

PAGE = library_page.PAGE.with_name("layer.md")


def run_in_a_process_group(world: World, store: str) -> tuple[list[str], str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        with contextlib.chdir(Path(store).parent):  # the page writes a trace
            return library_page.run(set(), PAGE)
    finally:
        dist.destroy_process_group()


def test_the_blocks_run_on_two_cpu_ranks(pool: RankPool, tmp_path: Path) -> None:
    for names, printed in pool.run(2, run_in_a_process_group, str(tmp_path / "store")):
        assert {"exchange", "y"} <= set(names)
        assert "tensor(nan)" not in printed and printed.count("tensor(") == 2
    for rank in range(2):
        assert numpy.load(tmp_path / f"ids-{rank}.npy").shape[:2] == (4, 100)
