"""The parts of `make sanitize` that need no GPU: reading the tool's report, the injected bugs, the list of cases."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda.jit import Cubins  # noqa: E402
from raymoe.packaged import packaged_folder  # noqa: E402
from tests.gpu import sanitized, test_sanitizer  # noqa: E402
from tests.gpu.sanitized_ranks import INJECTED_BUGS, MISTAKES, injected_compiler  # noqa: E402
from tests.gpu.sanitizer_report import Place, Report  # noqa: E402
from tests.gpu.test_exchange_gpu import WITH_WORKSPACE  # noqa: E402

MEMCHECK = """========= COMPUTE-SANITIZER
   1.0 s  a case
========= Invalid __global__ write of size 4 bytes
=========     at past_the_end+0x70 in injected_bugs.cu:21
=========     by thread (255,0,0) in block (0,0,0)
=========     Access to 0x7f2b0ea003fc is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2b0ea00000 of size 1,020 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x3f1] in libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at raymoe::put(unsigned int *)+0x70 in ptx.cuh:9
=========     Device Frame: past_the_end+0x30 in injected_bugs.cu:21
=========
right: 1 of 1
========= ERROR SUMMARY: 2 errors
"""
SYNCCHECK = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at divergent+0xb0 in injected_bugs.cu:29
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at unordered+0x90 in injected_bugs.cu:37
=========     and Read access at unordered+0xa0 in injected_bugs.cu:38 [1024 hazards]
=========     and Write access at raymoe::fill<(int)4>(int *)+0x50 in ring.cuh:7 [2 hazards]
=========
========= Warning: Race reported between Read access at copy+0x10
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_errors_are_read_with_their_places():
    report = Report.of(MEMCHECK)
    assert (report.summaries, report.total, report.clean) == (1, 2, False)
    first, second = report.findings
    assert first.says == "Invalid __global__ write of size 4 bytes"
    assert first.places == (Place("", "past_the_end", "injected_bugs.cu", 21),)
    assert second.places == (Place("", "raymoe::put", "ptx.cuh", 9), Place("", "past_the_end", "injected_bugs.cu", 21))
    (barrier,) = Report.of(SYNCCHECK).findings
    assert barrier.places == (Place("", "divergent", "injected_bugs.cu", 29),)


def test_errors_that_were_not_printed_are_counted_once():
    more = "========= ERROR SUMMARY: 924 errors were not printed. Use --print-limit option to adjust the number of them"
    report = Report.of(f"{SYNCCHECK.replace('1 error', '1024 errors')}{more}\n")
    assert (report.summaries, report.total, report.clean) == (1, 1024, False)


def test_hazards_are_read_as_pairs_of_accesses():
    report = Report.of(RACECHECK)
    written = Place("Write", "unordered", "injected_bugs.cu", 37)
    alone = Place("Read", "copy", "", 0)
    assert report.hazards == {
        (written, Place("Read", "unordered", "injected_bugs.cu", 38)),
        (written, Place("Write", "raymoe::fill<", "ring.cuh", 7)),
        (alone, alone),
    }
    assert report.total == 2


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("========= COMPUTE-SANITIZER\n12.0 s  a case\n========= ERROR SUMMARY: 0 errors\n", True),
        ("=========\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 1 error\n", False),  # from two processes
        ("========= COMPUTE-SANITIZER\n12.0 s  a case\n", False),  # the tool was killed
        ("", False),
        ("========= Target application returned an error\n========= ERROR SUMMARY: 0 errors\n", False),
        ("========= Internal Sanitizer Error: x\n========= ERROR SUMMARY: 0 errors\n", False),
    ],
)
def test_a_report_is_clean_only_if_the_tool_finished_without_errors(text, clean):
    assert Report.of(text).clean == clean


def test_equal_findings_are_printed_once():
    said = str(Report.of(MEMCHECK + MEMCHECK.replace("0x70 in injected_bugs.cu", "0x90 in injected_bugs.cu")))
    assert said.startswith("4 in 2 summaries\n2 x Invalid __global__ write")
    assert said.count("past_the_end injected_bugs.cu:21") == 2


def test_hazards_of_cublas_with_itself_are_left_out():
    kernel, ours = "nvjet_sm90_tss_64x24_splitK_TNT", "raymoe::ptx::bulk_load(unsigned int)"
    text = """========= Error: Race reported between Read access at {}+0xb30
=========     and Write access at nvjet_sm90_tss_64x24_splitK_TNT+0x30b0 [384 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
    for function, clean in ((kernel, True), (ours, False)):
        report = Report.of(text.format(function))
        assert report.total == 1 and not report.clean
        assert report.without(test_sanitizer.OF_CUBLAS).clean == clean


def test_a_hazard_is_identified_by_the_text_of_its_line():
    path = packaged_folder("kernels") / "copy" / "copy.cu"
    number, text = next((at, line) for at, line in enumerate(path.read_text().splitlines(), 1) if "copy(" in line)
    access_text = test_sanitizer.access_text
    assert access_text(Place("Write", "copy", "copy.cu", number)) == f"Write copy copy.cu: {text.strip()}"
    assert access_text(Place("Read", "copy", "", 0)) == "Read copy no line"
    assert access_text(Place("Read", "copy", "copy.cu", 10**6)) == "Read copy copy.cu:1000000"


def test_the_injected_bugs_survive_compilation(tmp_path):
    compiled = injected_compiler(Cubins(tmp_path)).compiled(INJECTED_BUGS, "sm_90a")
    body = {name: compiled.ptx.split(f".entry {name}(")[1].split(".entry ")[0] for name in MISTAKES.values()}
    assert re.search(r"st\.global", body["past_the_end"])
    divergent, unordered = body["divergent"], body["unordered"]
    assert divergent.index("bra") < re.search(r"bar(rier)?\.sync", divergent).start()
    assert re.search(r"st\.shared.*ld\.shared", unordered, re.DOTALL)
    assert "bar" not in unordered.replace("%bar", "")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A function that makes a fake compute-sanitizer, which prints its arguments and runs the given shell lines."""
    path = tmp_path / "tool"

    def does(body: str) -> None:
        path.write_text(f'#!/bin/sh\necho "called: $*"\n{body}\n')
        path.chmod(0o755)

    monkeypatch.setattr(test_sanitizer, "TOOL", str(path))
    return does


def test_the_tool_is_called_for_all_processes_with_its_own_exit_code(tool, tmp_path):
    tool("echo there >&2; exit 77")
    code, text = test_sanitizer.run_under("racecheck", tmp_path / "log", 30.0, "inject", "racecheck")
    assert code == test_sanitizer.FOUND
    assert "--tool racecheck --target-processes all --error-exitcode 77" in text
    assert text.endswith("-m tests.gpu.sanitized inject racecheck\nthere\n")


def test_a_hung_tool_is_killed_with_its_children(tool, tmp_path):
    child = tmp_path / "child"
    tool(f"sleep 60 & echo $! > {child}; wait")
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"memcheck: cases took more than 2\.0 s"):
        test_sanitizer.run_under("memcheck", tmp_path / "log", 2.0, "cases")
    assert time.monotonic() - start < 20
    stat = Path(f"/proc/{int(child.read_text())}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # a zombie has ended


class UnusedRanks:
    """Ranks that no step uses."""

    def __enter__(self) -> UnusedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_captured_steps_use_the_memory_cache(monkeypatch, capsys):
    seen = {}

    def step(name: str, captured: bool) -> sanitized.Step:
        return sanitized.Step(name, lambda _: seen.update({name: os.environ.get(sanitized.NO_CACHE)}), captured)

    monkeypatch.setattr(sanitized, "PatientRanks", UnusedRanks)
    steps = [step("eager", False), step("captured", True)]
    assert sanitized.run_cases(True, 60.0, steps) == 0
    assert seen == {"eager": "1", "captured": None}
    assert sanitized.run_cases(False, 60.0, steps) == 0
    assert seen == {"eager": None, "captured": None}
    assert capsys.readouterr().out.count("right: 2 of 2") == 2
    sanitized.run_cases(False, -1.0, steps)
    assert "right: 0 of 2" in capsys.readouterr().out


def test_a_wrong_result_ends_the_cases_with_exit_code_1(monkeypatch, capsys):
    def wrong(ranks: object) -> None:
        pytest.fail("not as it should be")

    monkeypatch.setattr(sanitized, "PatientRanks", UnusedRanks)
    assert sanitized.run_cases(False, 60.0, [sanitized.Step("first", wrong), sanitized.Step("second", wrong)]) == 1
    said = capsys.readouterr().out
    assert "WRONG first" in said and "not as it should be" in said and "second" not in said and "right:" not in said


def test_every_backend_has_every_kind_of_case():
    steps = sanitized.steps()
    kinds = Counter()
    for step in steps:
        backend, _, rest = step.name.partition(": ")
        kind = next((kind for kind in ("halves", "refused", "float8") if kind in rest), "")
        kinds[backend if rest else "copy", kind] += 1
        inspect.signature(step.run).bind(ranks=None)
    for backend in WITH_WORKSPACE:
        assert kinds[backend, ""] >= 18, "limits and drawn cases"
        assert kinds[backend, "halves"] == 2
        assert kinds[backend, "refused"] == 6
    assert kinds["fused", "float8"] == kinds["many fused", "float8"] >= 9
    assert kinds["copy", ""] == len(sanitized.COPIES)
    assert kinds["stream", ""] == 3 * len(sanitized.STREAMED) + len(sanitized.ON_ALL_SMS)
    assert kinds["layer", ""] == 4
    soon = " ".join(step.name for step in steps[: len(steps) // 4])
    assert all(kind in soon for kind in ("copy", "stream", "float8", "halves", "refused", "top-")), (
        "the first quarter must hold each kind"
    )
