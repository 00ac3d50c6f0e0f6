"""The code of docs/reproducibility.md, docs/weights.md and docs/balance.md runs, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from raymoe.memory.world import World
from tests.unit.docs import library_page
from tests.unit.ranks import RankPool


def run_in_a_process_group(world: World, page: str, store: str) -> tuple[list[str], str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        return library_page.run(set(), library_page.PAGE.with_name(page))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("page", "defines", "prints"),
    [("reproducibility.md", "one_by_one", ""), ("weights.md", "epoch", ""), ("balance.md", "later", "tensor([[")],
)
def test_the_blocks_run_on_two_cpu_ranks(pool: RankPool, tmp_path: Path, page: str, defines: str, prints: str) -> None:
    (names, first), (_, second) = pool.run(2, run_in_a_process_group, page, str(tmp_path / "store"))
    assert defines in names and prints in first
    assert first == second, "all ranks compute one plan"
