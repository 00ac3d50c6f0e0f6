"""SIGTERM and SIGINT at any moment end the run within 5 s, with the right exit code and no processes left."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command, Head, Start, alive_after, ray_processes

pytestmark = pytest.mark.usefixtures("nothing_left")


def stop_and_check(run: Command, number: signal.Signals, code: int) -> None:
    began = time.monotonic()
    run.signal(number)
    assert run.end(10) == code, run.stderr()
    assert time.monotonic() - began < 5.0
    assert number.name in run.last_line() and run.last_line().startswith("stopped by")
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("stopped", code)


@pytest.mark.parametrize("seconds", [0.7, 2.0, 5.0])
def test_sigterm_while_ray_starts_stops_the_run_within_5_s(start: Start, tmp_path: Path, seconds: float) -> None:
    """The first seconds are ray.init, which has its own SIGTERM handler; then come placing and wiring."""
    run = start(configs.write(tmp_path, steps__count=configs.LONG))
    run.wait_for("results go to")
    time.sleep(seconds - 0.5)
    stop_and_check(run, signal.SIGTERM, 143)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_steps_stops_the_run_within_5_s(
    start: Start, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = start(configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG))
    run.wait_for(r"case 1/1 default: step")
    stop_and_check(run, number, code)


def test_sigterm_ends_the_ranks_on_a_cluster(start: Start, head: Head, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, steps__count=configs.LONG), "--address", head.address)
    pids = run.pids()
    stop_and_check(run, signal.SIGTERM, 143)
    assert not alive_after(0.5, pids)


def test_sigkill_of_the_command_leaves_no_processes(start: Start, tmp_path: Path) -> None:
    """No process is left to clean up. The kernel ends the driver with the main process; Ray's processes follow."""
    before = ray_processes()
    run = start(configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG))
    run.pids()
    assert len(ray_processes() - before) > 4  # two processes of the command, two ranks, and Ray's own
    run.process.kill()
    run.process.wait(timeout=10)
    deadline = time.monotonic() + 4.0  # nothing_left allows one second more
    while ray_processes() - before and time.monotonic() < deadline:
        time.sleep(0.1)
