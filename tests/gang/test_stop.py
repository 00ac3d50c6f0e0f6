"""A signal at any moment ends the run within 5 s, with the right exit code and no processes left.

test_private_ray.py ends its run of a local Ray by SIGTERM too.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.gang import configs, phases
from tests.gang.conftest import CALM, CALM_LOCAL, Command, Head, Start
from tests.gang.fault_lines import GONE_S, Fault
from tests.gang.processes import ray_processes

pytestmark = pytest.mark.usefixtures("nothing_left")


def check(fault: Fault, run: Command, number: signal.Signals) -> None:
    code = 128 + number
    assert fault.ended(60) == code, run.stderr()
    assert fault.line is not None and fault.line["seconds"] < 5.0 and fault.line["processes_left"] == 0, fault.line
    assert run.last_line() == f"stopped by {number.name}; finished cases are kept"
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("stopped", code)


def stop_and_check(fault: Fault, name: str, run: Command, number: signal.Signals) -> None:
    fault.strike(name, run)
    run.signal(number)
    check(fault, run, number)


@pytest.mark.thorough
def test_sigterm_while_ray_starts_stops_the_run(start: Start, tmp_path: Path, fault: Fault) -> None:
    """`ray.init` has its own SIGTERM handler. One run gets the signal early in it, one late."""
    config = configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG)
    runs = [start(config), start(config)]
    for run, seconds in zip(runs, (0.2, 1.3), strict=True):
        run.wait_for("results go to")
        time.sleep(seconds)
        stop_and_check(fault.another(), "sigterm-ray-init", run, signal.SIGTERM)


@pytest.mark.thorough
def test_sigterm_before_the_first_step_stops_the_run(start: Start, head: Head, tmp_path: Path, fault: Fault) -> None:
    config = configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG)
    struck = []
    for phase in ("placing", "starting"):
        note = tmp_path / phase
        run = start(config, "--address", head.address, first=phases.first(phase, signal.SIGTERM, note))
        struck.append((run, note, fault.another()))
        struck[-1][2].strike(f"sigterm-{phase}", run)
    for run, note, its in struck:
        run.end(60)
        phases.since(note, its)
        check(its, run, signal.SIGTERM)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param((signal.SIGHUP, signal.SIGQUIT), marks=pytest.mark.thorough),
    ],
    ids=["term-int", "hup-quit"],
)
def test_a_signal_during_steps_ends_the_ranks_on_a_cluster(
    start: Start, head: Head, tmp_path: Path, fault: Fault, numbers: tuple[signal.Signals, signal.Signals]
) -> None:
    config = configs.write(tmp_path, world__ranks=1, steps__count=configs.LONG)
    runs = [start(config, "--address", head.address, first=CALM) for _ in numbers]
    for run in runs:
        run.wait_for(r"case 1/1 default: step")
    for run, number in zip(runs, numbers, strict=True):
        stop_and_check(fault.another(), f"{number.name.lower()}-cluster", run, number)


def test_sigkill_of_the_command_leaves_no_processes(start: Start, tmp_path: Path, fault: Fault) -> None:
    """No process is left to clean up. The kernel ends the driver with the main process; Ray's processes follow."""
    before = ray_processes()
    run = start(configs.write(tmp_path, world__ranks=2, steps__count=configs.LONG), first=CALM_LOCAL)
    run.pids()
    assert len(ray_processes() - before) > 4  # two processes of the command, two ranks, and Ray's own
    fault.strike("main-killed", run)
    run.process.kill()
    assert fault.ended(10) == 137
    assert fault.line is not None and fault.line["processes_left"] == 0, f"not gone within {GONE_S} s"
