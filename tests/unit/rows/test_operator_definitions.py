"""Compiled graphs on torch's disk cache belong to the sources that they were made with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.compiler.config

import raymoe
import raymoe.moe  # defines all operators
from raymoe.rows.operator_definitions import source_digest

PACKAGE = Path(raymoe.__file__).parent

STEP = """
import torch
from torch._dynamo.utils import counters
from raymoe import Exchange, ExchangeSpec, World
from raymoe.moe import combine, dispatch
world = World.open(rank=0, size=1)
world.wire([world.descriptor()])
exchange = Exchange(world, ExchangeSpec(tokens=8, hidden=32, experts=4, topk=2, dtype="float32", depth=0))
ids, weights = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)

def step(x):
    got = dispatch(exchange, x, ids, weights)
    return combine(exchange, got.x, got)

x = torch.ones(5, 32, requires_grad=True)
torch.compile(step)(x).sum().backward()
torch.testing.assert_close(x.grad, torch.ones(5, 32))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""

LATER = {
    "Tensor[] routing, SymInt rows) -> Tensor": "Tensor[] routing, SymInt rows, bool later) -> Tensor",
    "routing: list[torch.Tensor], rows: int\n": "routing: list[torch.Tensor], rows: int, later: bool\n",
    "numbers[1] if rows is None else rows)": "numbers[1] if rows is None else rows, True)",
}
"""A later version of raymoe, whose operator `dispatch_gradients` takes one argument more."""


def test_the_key_of_the_compile_caches_names_the_sources() -> None:
    assert torch.compiler.config.cache_key_tag.count(f"raymoe-{source_digest(PACKAGE)}") == 1


@pytest.mark.parametrize(
    "changed", ["moe/differentiable.py", "rows/norm.py", "exchange/spec.py", "exchange/cpu/new.py"]
)
def test_a_changed_source_has_another_digest(tmp_path: Path, changed: str) -> None:
    package = tmp_path / "raymoe"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(package) == source_digest(PACKAGE)
    with (package / changed).open("a") as source:
        source.write("\n")
    assert source_digest(package) != source_digest(PACKAGE)


@pytest.mark.thorough
def test_a_later_version_takes_no_graph_of_an_earlier_one(tmp_path: Path) -> None:
    for name in ("raymoe", "kernels"):
        shutil.copytree(PACKAGE.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def hits() -> int:
        """Run a compiled step with its gradient, and return how many graphs came from the cache."""
        step = [sys.executable, "-c", STEP]
        return int(subprocess.check_output(step, env=environment, cwd=tmp_path, timeout=300, text=True))

    assert [hits(), hits()] == [0, 1]
    path = tmp_path / "raymoe" / "moe" / "differentiable.py"
    source = path.read_text()
    for earlier, later in LATER.items():
        assert earlier in source
        source = source.replace(earlier, later)
    path.write_text(source)
    assert [hits(), hits()] == [0, 1]
