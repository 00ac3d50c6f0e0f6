"""Run cases of the exchange and of the copy kernel under compute-sanitizer: `make sanitize`.

Each tool must first find the bug that each rank process runs for it. If it does not, it has not seen the rank
processes, and no finding in the cases would mean nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from raymoe.packaged import packaged_folder  # noqa: E402
from tests.gpu.ranks import NEEDS_GPU  # noqa: E402
from tests.gpu.sanitized import SIZE  # noqa: E402
from tests.gpu.sanitized_ranks import MISTAKES  # noqa: E402
from tests.gpu.sanitizer_report import Place, Report  # noqa: E402

TOOLKIT_BIN = "/usr/local/cuda/bin"
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT_BIN)

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.sanitize,
    pytest.mark.skipif(TOOL is None, reason=f"needs compute-sanitizer (CUDA toolkit); not in PATH or {TOOLKIT_BIN}"),
]

ROOT = Path(__file__).parents[2]
FOUND = 77
"""The exit code that the tool must give if it has found something."""
INJECTED_S = 240
OF_CUBLAS = "nvjet"
"""The names of cuBLAS's kernels begin so. Products of torch launch them, and racecheck 2025.3 reports hazards of one
with itself. The tool cannot leave them out: with its option for that, cuBLAS failed (H100, 2026-11-25)."""
CASES_S = {"memcheck": 1800, "synccheck": 900, "racecheck": 900}
CASES = {"memcheck": ["--exact"], "synccheck": [], "racecheck": ["--alone"]}
"""Racecheck runs no exchange: the ninth one under it had not ended after half a minute (H100). It runs the kernels on
rows with a change, `EACH_THREAD_ARRIVES` of sanitized_ranks.py, which says why."""

LOAD = 'Write raymoe::ptx::bulk_load ptx.cuh: "l"(global), "r"(bytes), "r"(barrier)'
EXPLAINED = {
    (
        LOAD,
        LOAD,
    ): "One thread begins both loads of a group, and waits for the first at its barrier in between. Racecheck "
    "reports them also if no barrier is invalidated."
}
"""Hazards of the baseline that racecheck reports wrongly: both accesses as `access_text` gives them, and why they are
in order. The kernels with a pipeline and those without stages have none."""


def access_text(place: Place) -> str:
    """Return an access with the text of its line, which stays the same when lines above it come or go."""
    kernels = packaged_folder("kernels")
    assert kernels is not None
    for path in kernels.rglob(Path(place.file).name or "no file"):
        lines = path.read_text().splitlines()
        if 0 < place.line <= len(lines):
            return f"{place.access} {place.function} {path.name}: {lines[place.line - 1].strip()}"
    return str(place)


def run_under(tool: str, log: Path, deadline_s: float, *arguments: str) -> tuple[int, str]:
    """Run the program under a tool, in a process group that is killed at the end; return its exit code and output."""
    assert TOOL is not None
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", str(FOUND), "--print-limit", "10000"]
    # The tool ends a bad kernel and keeps the context: the rank then ends normally, which the report needs.
    options += ["--destroy-on-device-error", "kernel"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with log.open("w") as output:
        process = subprocess.Popen(
            [TOOL, *options, sys.executable, "-m", "tests.gpu.sanitized", *arguments],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{tool}: {' '.join(arguments)} took more than {deadline_s} s; {log} ends:\n{end_of(log)}")
        finally:
            end_group(process)
    return code, log.read_text(errors="replace")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, also processes that a tool left running."""
    for _ in range(100):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        process.poll()
        time.sleep(0.1)
    process.wait(10)


def end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


@pytest.mark.timeout(sum(CASES_S.values()))
@pytest.mark.parametrize("tool", sorted(MISTAKES))
def test_injected_bugs_are_found_and_the_cases_are_clean(tool: str, tmp_path: Path) -> None:
    log = tmp_path / f"{tool}-injected.log"
    code, text = run_under(tool, log, INJECTED_S, "inject", tool)
    report = Report.of(text)
    assert code == FOUND, f"{tool} did not find the injected bug (exit code {code}); {log} ends:\n{end_of(log)}"
    named = [finding for finding in report.findings if MISTAKES[tool] in {place.function for place in finding.places}]
    assert len(named) >= SIZE, f"{tool} names {MISTAKES[tool]} {len(named)} times, {SIZE} ranks ran it: {report}"

    log = tmp_path / f"{tool}-cases.log"
    code, text = run_under(tool, log, CASES_S[tool], "cases", *CASES[tool])
    whole = Report.of(text)
    right = re.search(r"^right: (\d+) of (\d+)$", text, re.MULTILINE)
    assert right is not None and right[1] == right[2], f"{tool}: exit code {code}; {log} ends:\n{end_of(log)}"
    assert code == (FOUND if whole.total else 0), f"{tool}: exit code {code}: {whole}"
    report = whole.without(OF_CUBLAS) if tool == "racecheck" else whole
    assert report.clean, f"{tool}: {report}"


@pytest.mark.timeout(CASES_S["racecheck"])
def test_racecheck_finds_nothing_in_the_baseline_that_is_not_explained(tmp_path: Path) -> None:
    log = tmp_path / "baseline.log"
    code, text = run_under("racecheck", log, CASES_S["racecheck"], "cases", "--baseline")
    report = Report.of(text)
    right = re.search(r"^right: (\d+) of (\d+)$", text, re.MULTILINE)
    assert right is not None and right[1] == right[2], f"exit code {code}; {log} ends:\n{end_of(log)}"
    assert report.summaries, f"exit code {code}: {report}"
    assert code == (FOUND if report.total else 0), f"exit code {code}: {report}"
    other_findings = [finding.says for finding in report.findings if not any(place.access for place in finding.places)]
    hazards = {(access_text(first), access_text(second)) for first, second in report.hazards}
    unexplained = hazards - set(EXPLAINED)
    assert not other_findings, other_findings
    assert not unexplained, "\n".join(f"{first}\n    and {second}" for first, second in sorted(unexplained))
