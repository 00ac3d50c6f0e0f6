"""Ends processes for good.

`ray.kill` asks a process to leave; one that is stopped (SIGSTOP) cannot, and would hold its memory for 5 s more.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.gang.placement import Seat

Process = tuple[int, int]  # (pid, start time in clock ticks): never reused
GRACE_S = 0.3  # for those that `ray.kill` reached
GONE_S = 3.0


def bury(seats: Mapping[int, Seat]) -> set[int]:
    """End these ranks' processes wherever they are; returns the ranks that are still there."""
    left: set[int] = set()
    here = ray.get_runtime_context().get_node_id()
    for node in {seat.node for seat in seats.values()}:
        ranks = {rank: seat.process for rank, seat in seats.items() if seat.node == node}
        if node == here:
            alive = end(ranks.values())
        else:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0)(end).options(scheduling_strategy=there, name="bury ranks")
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
