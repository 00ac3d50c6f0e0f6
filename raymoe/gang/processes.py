"""Ends processes for good, and reads what a dead process left on its standard error."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.gang.placement import Seat

# What a process that died left where its standard error went.

READ_BYTES = 1 << 20
LONGEST = 200
SAYS = (
    r"what\(\): +(?P<why>.+)",  # a C++ exception that nobody caught
    r"Fatal Python error: (?P<why>.+)",
    r"\*\*\* (?P<why>SIG\w+) received",
)
"""Lines that say why a process ends, those that say more first."""


def standard_error() -> str | None:
    """The file that this process's goes to; None where it is a terminal or a pipe."""
    path = Path("/proc/self/fd/2").readlink()
    return str(path) if path.is_file() else None


def cause_in(text: str) -> str | None:
    """Why the process that printed this ended, if it said so.

    >>> cause_in("*** SIGABRT received at time=17 ***\\nFatal Python error: Aborted\\n")
    'Aborted'
    >>> cause_in("loading shards\\n") is None
    True
    """
    for pattern in SAYS:
        found = re.search(pattern, text)
        if found:
            why = found["why"].strip()
            return why if len(why) <= LONGEST else f"{why[: LONGEST - 3]}..."
    return None


def crash_report(path: str) -> str | None:
    """The cause in the end of a file; None where there is none, or no such file here."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            return cause_in(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return None


# Ends processes for good.
#
# `ray.kill` asks a process to leave; one that is stopped (SIGSTOP) cannot, and would hold its memory for 5 s more.

Process = tuple[int, int]  # (pid, start time in clock ticks): never reused
GRACE_S = 0.3  # for those that `ray.kill` reached
GONE_S = 3.0


def end_ranks(seats: Mapping[int, Seat]) -> set[int]:
    """End these ranks' processes wherever they are; returns the ranks that are still there."""
    left: set[int] = set()
    here = ray.get_runtime_context().get_node_id()
    for node in {seat.node for seat in seats.values()}:
        ranks = {rank: seat.process for rank, seat in seats.items() if seat.node == node}
        if node == here:
            alive = end(ranks.values())
        else:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0)(end).options(scheduling_strategy=there, name="end ranks")
            alive = ray.get(task.remote(list(ranks.values())), timeout=GRACE_S + GONE_S + 10)
        left |= {rank for rank, process in ranks.items() if process in alive}
    return left


def end(processes: Iterable[Process]) -> list[Process]:
    """Kill what is still there after a short grace; returns what could not be ended in time."""
    alive, began = [p for p in processes if is_alive(p)], time.monotonic()
    killed = False
    while alive and time.monotonic() - began < GONE_S:
        if not killed and time.monotonic() - began > GRACE_S:
            for pid, _ in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            killed = True
        time.sleep(0.01)
        alive = [p for p in alive if is_alive(p)]
    return alive


def is_alive(process: Process) -> bool:
    """True while the very process runs; a zombie has let go of everything."""
    pid, began = process
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] != "Z" and int(fields[19]) == began


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its pid, a name that is never reused."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
