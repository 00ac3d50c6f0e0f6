"""The code of docs/library.md runs: here on two CPU ranks, in tests/gpu on GPUs, and in tests/gang on Ray."""

from __future__ import annotations

import ast
from pathlib import Path

import torch.distributed as dist

import raymoe
from raymoe.memory.world import World
from tests.unit.docs import library_page
from tests.unit.ranks import RankPool


def test_the_page_has_blocks_of_each_kind_and_all_are_python() -> None:
    found = library_page.blocks()
    assert {need for need, _ in found} == {"", "gpu", "ray"}
    for _, text in found:
        ast.parse(text)
    assert len(library_page.PAGE.read_text().splitlines()) <= 210, "the page has at most two printed pages"


def test_the_page_uses_only_public_names() -> None:
    for _, text in library_page.blocks():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raymoe":
                assert node.attr in raymoe.__all__


def run_in_a_process_group(world: World, store: str) -> tuple[list[str], str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    try:
        return library_page.run(set())
    finally:
        dist.destroy_process_group()


def test_the_blocks_for_any_device_run_on_two_cpu_ranks(pool: RankPool, tmp_path: Path) -> None:
    for names, printed in pool.run(2, run_in_a_process_group, str(tmp_path / "store")):
        assert {"y", "kept"} <= set(names)
        assert printed == "x is torch.float32; torch.bfloat16 is needed\n"
