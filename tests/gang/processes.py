"""Processes and shared memory of this machine, as the tests count and end them."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.conftest import MARK

_SHM_NAME = re.compile(r" /dev/shm/(\S+)")


def end_session(session: int) -> None:
    """Kill every process of a session; the head's agents stay in it after their parent has ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def ray_processes() -> set[int]:
    """Return the processes that inherited these tests' mark, except zombies and Ray's idle workers."""
    pids, mark = set(), f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark not in (entry / "environ").read_bytes():
                    continue
                words, stat = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if stat.rpartition(")")[2].split()[0] != "Z" and b"IDLE" not in words and b"default_worker" not in words:
                pids.add(int(entry.name))
    return pids


def runs(pid: int) -> bool:
    """Return whether a process runs. A zombie has ended, and waits only for its parent to ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(root: int) -> dict[int, str]:
    """Return the name of every process below `root`, parents first."""
    names: dict[int, str] = {}
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{root}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
                    names |= descendants(pid)
    return names


def alive_after(seconds: float, pids: list[int]) -> list[int]:
    """Return the processes that still run after so many seconds, or at once the empty list."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def commands_of(pids: set[int]) -> str:
    lines = []
    for pid in sorted(pids):
        path = Path(f"/proc/{pid}/cmdline")
        lines.append(f"{pid} {path.read_bytes().replace(bytes(1), b' ').decode()[:120] if path.exists() else ''}")
    return "\n".join(lines)


SHM = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Return the names of shared memory on this machine, except semaphores and what processes of others have mapped.

    Other tests may run at the same time. Python processes make semaphores too.
    """
    names = {path.name for path in SHM.iterdir() if not path.name.startswith("sem.mp-")}
    return names - _mapped_by_others() if names else names


def _mapped_by_others() -> set[str]:
    """Return the names of shared memory that processes without these tests' mark have mapped."""
    names, mark = set(), f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if mark not in (entry / "environ").read_bytes():
                    names |= set(_SHM_NAME.findall((entry / "maps").read_text()))
    return names
