"""A run whose output nobody takes or whose disk is full: its exit code, and what it keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command, Head, Start
from tests.gang.fault_lines import Fault

pytestmark = pytest.mark.usefixtures("nothing_left")


def summary_of(run: Command) -> dict[str, object]:
    return json.loads((run.out / "summary.json").read_text())


@contextmanager
def full() -> Iterator[int]:
    """A stream that takes nothing."""
    device = os.open("/dev/full", os.O_WRONLY)
    try:
        yield device
    finally:
        os.close(device)


@contextmanager
def closed() -> Iterator[int]:
    """A pipe whose reader has ended."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


LOST = "the output cannot be written: No space left on device"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "stream", "code", "message"), [("stdout-closed", closed, 0, "done"), ("stdout-full", full, 8, LOST)]
)
def test_a_table_that_nobody_takes_takes_nothing_from_the_results(
    start: Start, head: Head, tmp_path: Path, fault: Fault, name: str, stream: object, code: int, message: str
) -> None:
    with stream() as stdout:  # type: ignore[operator]
        run = start(configs.write(tmp_path, world__ranks=1), "--address", head.address, streams={"stdout": stdout})
        run.wait_for("case 1/1 default: done")
        fault.strike(name, run)
        assert fault.ended(30) == code, run.stderr()
    summary = summary_of(run)
    assert summary["cases"] == {"default": "done"}
    assert (summary["status"], summary["exit_code"]) == ("failed" if code else "done", code)
    assert summary["message"] == message and message in (run.out / "report.html").read_text()
    if code:
        assert run.last_line() == message and run.stderr().count(message) == 1


def test_a_failure_keeps_its_code_and_its_summary_where_stderr_is_full(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    with full() as stderr:
        config = configs.write(tmp_path, world__ranks=2, world__cpus=64)
        run = start(config, "--address", head.address, streams={"stderr": stderr})
        fault.strike("stderr-full", run)
        assert fault.ended(30) == 3
    assert str(summary_of(run)["message"]).startswith("asked for 2 ranks with 64 CPU each")


LIMIT_BYTES = 12_000  # of a file: four cases fit into results.jsonl, and report.html never does
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT_BYTES}, {LIMIT_BYTES}))"


def test_a_full_disk_ends_the_run_and_keeps_the_finished_cases(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    """The system refuses a write in the middle of a file, as a full disk does. Ray's processes are not limited."""
    config = configs.write(tmp_path, world__ranks=1, matrix={"steps.count": list(range(2, 12))})
    run = start(config, "--address", head.address, first=LIMITED)
    run.wait_for("case 1/10 count=2: done")
    fault.strike("disk-full", run)
    assert fault.ended(30) == 8, run.stderr()
    assert run.last_line() == (
        f"cannot write {run.out}/results.jsonl: File too large; make room there or name another place with --out"
    )
    summary = summary_of(run)
    assert (summary["exit_code"], summary["message"]) == (8, run.last_line())
    assert [generation["cause"] for generation in summary["generations"]] == ["unknown"]  # type: ignore[attr-defined]
    finished = [json.loads(line)["case"] for line in (run.out / "results.jsonl").read_text().splitlines()]
    done = [case for case, mark in summary["cases"].items() if mark == "done"]  # type: ignore[attr-defined]
    assert list(dict.fromkeys(finished)) == done and 1 <= len(done) < 10
    assert not list(run.out.glob(".*.tmp"))


def test_a_report_that_cannot_be_written_is_exit_8_in_the_summary_too(
    start: Start, head: Head, tmp_path: Path, fault: Fault
) -> None:
    run = start(configs.write(tmp_path, world__ranks=1), "--address", head.address)
    run.pids()
    (run.out / "report.html").mkdir()
    fault.strike("report-unwritable", run)
    assert fault.ended(30) == 8, run.stderr()
    assert f"cannot write {run.out}/report.html: " in run.last_line()
    summary = summary_of(run)
    assert (summary["status"], summary["exit_code"], summary["message"]) == ("failed", 8, run.last_line())
    assert summary["cases"] == {"default": "done"} and (run.out / "results.jsonl").exists()
