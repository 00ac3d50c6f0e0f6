"""The probe of SMs compiles, keeps its sums in registers, and its cases fit on an SM."""

import re
from pathlib import Path

from raymoe.cuda.jit import Compiler, Cubins
from tests.perf.sm_probe import PROBE, cases, linked_cases, probe_compiler

MOST_SHARED = 232_448


def test_the_probe_compiles_without_spills(tmp_path: Path) -> None:
    with probe_compiler() as compiler:
        compiled = Compiler(compiler.folder, Cubins(tmp_path)).compiled(PROBE, "sm_90a")
    assert set(re.findall(r"(\d+) bytes spill stores", compiled.log)) == {"0"}


def test_every_case_fits_on_an_sm() -> None:
    wanted = [*cases(132), *linked_cases()]
    too_large = [case for case in wanted if case.shared_bytes > MOST_SHARED]
    assert not too_large
    assert {case.mode for case in wanted} == {"load", "store", "place", "add"}
    assert all(case.count() % case.places == 0 for case in wanted if case.mode == "add")
