"""The probes of SMs and of products compile, keep their sums in registers, and their cases fit on an SM."""

import re
from pathlib import Path

import pytest

from raymoe.cuda.jit import Compiler, Cubins, KernelSource
from tests.perf import product_probes
from tests.perf.sm_probe import PROBE, cases, linked_cases, probe_compiler

MOST_SHARED = 232_448


@pytest.mark.parametrize("source", [PROBE, pytest.param(product_probes.PROBES, marks=pytest.mark.thorough)])
def test_the_probe_compiles_without_spills(source: KernelSource, tmp_path: Path) -> None:
    with probe_compiler(source.stem) as compiler:
        compiled = Compiler(compiler.folder, Cubins(tmp_path)).compiled(source, "sm_90a")
    assert set(re.findall(r"(\d+) bytes spill stores", compiled.log)) == {"0"}
    assert "serialized" not in compiled.log


def test_every_case_fits_on_an_sm() -> None:
    wanted = [*cases(132), *linked_cases()]
    too_large = [case for case in wanted if case.shared_bytes > MOST_SHARED]
    assert not too_large
    assert {case.mode for case in wanted} == {"load", "store", "place", "add"}
    assert all(case.count() % case.places == 0 for case in wanted if case.mode == "add")


def test_every_tile_fits_on_an_sm() -> None:
    shapes = product_probes.SHAPES + product_probes.TALL_SHAPES
    tiles = [product_probes.Case(*shape, 132, "rows", "boxes", True) for shape in shapes]
    assert all(tile.shared_bytes <= MOST_SHARED and tile.steps > 1000 for tile in tiles)
