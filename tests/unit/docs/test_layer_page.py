"""The code of docs/layer.md runs, on two CPU ranks."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from pathlib import Path

import numpy
import torch.distributed as dist

import raymoe.moe
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.experts import SWIGLU
from raymoe.moe.layer import BlockOptions
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
        assert "tensor(nan)" not in printed and printed.count("tensor(") == 3
    for rank in range(2):
        assert numpy.load(tmp_path / f"ids-{rank}.npy").shape[:2] == (4, 100)


def test_the_bytes_kept_in_the_shape_of_deepseek_v3_are_those_of_the_formula() -> None:
    section = " ".join(PAGE.read_text().partition("## Memory for the backward pass")[2].split())
    H, F, T, K = 7168, 2048, 4096, 8
    rows = ExchangeSpec(tokens=T, hidden=H, experts=128, topk=K).rows(1)
    of_rows = [rows * (factor * F + 4) for factor in (6, 4)]
    kept, whole = ([(each + more) / 2**20 for each in of_rows] for more in (2 * H * T, 2 * H * (rows + T)))
    assert f"`nothing` | {6} F + 4:" in section and f"`activation` | {4} F + 4:" in section
    assert (
        f"has {rows} rows at worst. It keeps {kept[0]:.0f} MiB with `nothing` and {kept[1]:.0f} with `activation`; "
        f"with `keeps_rows` it would be {whole[0]:.0f} and {whole[1]:.0f}."
    ) in section


def arguments(parameters: list[inspect.Parameter]) -> list[tuple[str, bool, object]]:
    """Name, whether it is given by name alone, and default of each parameter."""
    return [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in parameters]


def test_the_signatures_are_those_of_the_code() -> None:
    block = PAGE.read_text().partition("These are the signatures")[2].split("```")[1]
    lines = re.findall(r"^([\w.]+)\((.*)\)$", block, re.MULTILINE)
    assert len(lines) == 9
    for name, text in lines:
        owner, _, method = name.partition(".")
        function = getattr(raymoe.moe, owner)
        real = inspect.signature(getattr(function, method) if method else function)
        given: dict[str, object] = {}
        exec(compile(ast.parse(f"def documented({text}): pass"), name, "exec"), {"SWIGLU": SWIGLU}, given)
        documented = arguments(list(inspect.signature(given["documented"]).parameters.values()))
        wanted = [each for each in real.parameters.values() if each.name not in ("self", "options")]
        if "options" in real.parameters:
            assert {each[0] for each in documented[len(wanted) :]} == set(BlockOptions.__annotations__)
            documented = documented[: len(wanted)]
        assert documented == arguments(wanted), name
