"""SIGTERM and SIGINT, at any moment: drained, the right exit code, gone within 5 s, nothing left."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.gang import configs
from tests.gang.conftest import Command, Head, Start, ray_processes

pytestmark = pytest.mark.usefixtures("nothing_left")


def stopped(run: Command, number: signal.Signals, code: int) -> None:
    began = time.monotonic()
    run.signal(number)
    assert run.end(10) == code, run.said()
    assert time.monotonic() - began < 5.0
    assert number.name in run.last_line() and run.last_line().startswith("stopped by")
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("stopped", code)


@pytest.mark.parametrize("seconds", [0.7, 2.0, 5.0])
def test_while_ray_is_starting(start: Start, tmp_path: Path, seconds: float) -> None:
    """The first seconds are ray.init, which has a SIGTERM handler of its own; then come placing and wiring."""
    run = start(configs.write(tmp_path, steps__count=configs.LONG))
    run.wait_for("results go to")
    time.sleep(seconds - 0.5)
    stopped(run, signal.SIGTERM, 143)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_while_steps_run(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = start(configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG))
    run.wait_for(r"case 1/1 default: step")
    stopped(run, number, code)


def test_on_a_cluster_the_ranks_go_too(start: Start, head: Head, tmp_path: Path) -> None:
    run = start(configs.write(tmp_path, steps__count=configs.LONG), "--address", head.address)
    pids = run.pids()
    stopped(run, signal.SIGTERM, 143)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_killing_the_command_itself_leaves_nothing_either(start: Start, tmp_path: Path) -> None:
    """Nobody is left to clean up: the kernel ends the driver with the main process, and Ray's processes follow."""
    before = ray_processes()
    run = start(configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG))
    run.pids()
    assert len(ray_processes() - before) > 4  # two processes of the command, two ranks, and Ray's own
    run.process.kill()
    run.process.wait(timeout=10)
    deadline = time.monotonic() + 4.0  # nothing_left allows one second more
    while ray_processes() - before and time.monotonic() < deadline:
        time.sleep(0.1)
