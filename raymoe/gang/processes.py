"""Start and end processes, and read the cause of a crash from their standard error."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.gang.placement import Location

# Imports.


@contextmanager
def kept_imports() -> Iterator[None]:
    """Import torch and the like without garbage collections, and leave them out of later ones: they live to the end.

    The imports take a tenth less time. No collection in the middle of a step looks at their 180,000 objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Crash reports.

READ_BYTES = 1 << 20  # at the end of the file
MAX_CAUSE_CHARS = 200
CAUSE_PATTERNS = (
    r"what\(\): +(?P<cause>.+)",  # an uncaught C++ exception
    r"Fatal Python error: (?P<cause>.+)",
    r"\*\*\* (?P<cause>SIG\w+) received",
)
"""Lines that say why a process ended, the most specific first."""


def stderr_file() -> str | None:
    """Return the file that receives this process's standard error, or None if that is a terminal or a pipe."""
    path = Path("/proc/self/fd/2").readlink()
    return str(path) if path.is_file() else None


def cause_in(text: str) -> str | None:
    """Find in a process's output why it ended, or return None.

    >>> cause_in("*** SIGABRT received at time=17 ***\\nFatal Python error: Aborted\\n")
    'Aborted'
    >>> cause_in("loading shards\\n") is None
    True
    """
    for pattern in CAUSE_PATTERNS:
        match = re.search(pattern, text)
        if match:
            cause = match["cause"].strip()
            return cause if len(cause) <= MAX_CAUSE_CHARS else f"{cause[: MAX_CAUSE_CHARS - 3]}..."
    return None


def crash_report(path: str) -> str | None:
    """Find the cause of a crash at the end of a file; return None if there is none or the file is missing."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            return cause_in(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return None


# Ending processes. `ray.kill` asks a process to exit. A process stopped by SIGSTOP cannot, and would hold its memory
# for 5 s more.

Process = tuple[int, int]  # (pid, start time in clock ticks): never reused
GRACE_S = 0.3  # for processes to exit by themselves after `ray.kill`
END_S = 3.0  # until `end` gives up
SILENCE_TICKS = 35
_PR_SET_PDEATHSIG = 1


def end_ranks(locations: Mapping[int, Location]) -> set[int]:
    """End these ranks' processes on every node; return the ranks whose processes still run."""
    alive_ranks: set[int] = set()
    here = ray.get_runtime_context().get_node_id()
    for node in {location.node for location in locations.values()}:
        ranks = {rank: location.process for rank, location in locations.items() if location.node == node}
        if node == here:
            alive = end(ranks.values())
        else:
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0)(end).options(scheduling_strategy=on_node, name="end ranks")
            try:
                alive = ray.get(task.remote(list(ranks.values())), timeout=GRACE_S + END_S + 10)
            except RayError as error:  # Ray gave the node up, or it hangs; `ray.kill` was asked already
                print(f"cannot end the ranks on node {node}: {error}", file=sys.stderr)
                alive = list(ranks.values())
        alive_ranks |= {rank for rank, process in ranks.items() if process in alive}
    return alive_ranks


def end(processes: Iterable[Process]) -> list[Process]:
    """Give processes GRACE_S to exit, then kill them; return those that still run after END_S."""
    alive, began = [p for p in processes if is_alive(p)], time.monotonic()
    killed = False
    while alive and time.monotonic() - began < END_S:
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


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends.

    A worker of Ray looks for its raylet only between two calls. In one long call it would outlive a killed raylet, and
    keep its GPU, although the driver has ended too (Ray 2.60).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class SilenceWatch:
    """Calls `end` once, when `heard` has not been called for `seconds` since its last call.

    Ray ends the actors of a driver that has ended, but on other nodes only with the help of the GCS. Where the GCS is
    stopped, ranks there would keep their GPUs. Time counts in ticks of this thread: while this process is stopped, or
    another of its threads holds the interpreter, nobody can be heard.
    """

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._ticks, self._tick_s, self._end = SILENCE_TICKS, seconds / SILENCE_TICKS, end
        self._silent = 0
        self._thread = threading.Thread(target=self._watch, name="raymoe-silence", daemon=True)

    def heard(self) -> None:
        self._silent = 0
        if self._thread.ident is None:
            self._thread.start()

    def _watch(self) -> None:
        while self._silent < self._ticks:
            time.sleep(self._tick_s)
            self._silent += 1
        self._end()


def is_alive(process: Process) -> bool:
    """Return whether this process runs. A zombie does not: it holds no memory any more."""
    return _state(process) not in ("", "Z")


def is_stopped(process: Process) -> bool:
    """Return whether a signal or a debugger holds this process."""
    return _state(process) in ("T", "t")


def _state(process: Process) -> str:
    """Return the letter of its state, or "" if it is gone."""
    pid, began = process
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return fields[0] if int(fields[19]) == began else ""


def children_named(names: Collection[str]) -> dict[str, Process]:
    """Return the children of this process with these names, as /proc shows names."""
    children: dict[str, Process] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = rest.split()
        if name in names and int(fields[1]) == os.getpid():
            children[name] = int(entry.name), int(fields[19])
    return children


def start_time(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; together with its pid this is never reused."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
