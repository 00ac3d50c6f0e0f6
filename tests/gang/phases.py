"""Send a stop signal to a run at the moment when its driver enters a phase."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.gang.conftest import in_driver
from tests.gang.fault_lines import Fault

PROGRAM = """
import os, time
from pathlib import Path
from raymoe.gang import driver, supervisor
note = Path({note!r})
def strike():
    if not note.exists():
        note.write_text(repr(time.monotonic()))
        os.kill(os.getppid(), {number})
def after_a_strike(call):
    def struck(*arguments):
        strike()
        return call(*arguments)
    return struck
if {phase!r} == "connecting":
    driver.Cluster.connect = after_a_strike(driver.Cluster.connect)
if {phase!r} == "placing":
    driver.place = after_a_strike(driver.place)
decide = supervisor.decide
def deciding(state, event, now):
    after, actions = decide(state, event, now)
    if after.phase.value == {phase!r}:
        strike()
    return after, actions
supervisor.decide = deciding
"""

PHASES = ("connecting", "placing", "starting", "wiring", "running", "ending", "clearing")


def first(phase: str, number: signal.Signals, note: Path) -> str:
    """Make a `first` of a run on a cluster. `note` gets the moment of the signal, by CLOCK_MONOTONIC."""
    return in_driver(PROGRAM.format(phase=phase, number=int(number), note=str(note)))


def since(note: Path, fault: Fault) -> None:
    """Let the clock of a fault begin at the signal."""
    fault.began = float(note.read_text())
