"""The code of docs/training.md runs, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from raymoe.memory.world import World
from tests.unit.docs import library_page
from tests.unit.ranks import RankPool

PAGE = library_page.PAGE.with_name("training.md")


def run_in_a_process_group(world: World, store: str) -> tuple[list[str], str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        return library_page.run(set(), PAGE)
    finally:
        dist.destroy_process_group()


def test_the_blocks_run_on_two_cpu_ranks(pool: RankPool, tmp_path: Path) -> None:
    printed = [text for _, text in pool.run(2, run_in_a_process_group, str(tmp_path / "store"))]
    first, second = printed[0].splitlines()
    assert printed[1] == printed[0] and first.startswith("1 [") and second.startswith("2 [")
    assert first.endswith(" rows") and " of " in first
