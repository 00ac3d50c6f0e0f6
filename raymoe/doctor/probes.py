"""Runs the probes of one examination, each in a process of its own that may hang or crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from raymoe.doctor.finding import ProbeOutcome

# A probe in a process of its own, which may hang, crash or leave processes behind and takes nothing down with it.
#
# - **A deadline from outside.** When it has passed, every process of the child's session is killed. One that the kernel
#   will not end (it sleeps inside a broken driver) is left where it is: nothing ever waits for it without a bound.
# - **A channel of its own.** A probe answers through a descriptor that nobody else knows, because libraries print to
#   both standard streams. Of these the last line is kept, for a probe that ends without a word.
# - **Nothing left over.** A child ends with its parent, and what it started ends when its outcome is taken.

# The child imports from where its parent does; -P keeps the working directory out of the way until then.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from raymoe.doctor.probe import main; main(sys.argv[2], int(sys.argv[3]))"
)
_KILL_S = 2.0


class Child:
    """`outcome` waits for what the probe tells, at most until its deadline; then, or by `end`, the child is gone."""

    def __init__(self, probe: str, bound_s: float, program: str = _PROGRAM) -> None:
        self.bound_s = bound_s
        self._deadline = time.monotonic() + bound_s
        self._told = os.memfd_create("told")
        self._printed = os.memfd_create("printed")
        command = [sys.executable, "-P", "-c", program, json.dumps(sys.path), probe, str(self._told)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[self._told],
            start_new_session=True,
        )

    def outcome(self) -> ProbeOutcome:
        in_time = True
        try:
            self._process.wait(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            in_time = False
        code = self._process.returncode
        gone = self.end()
        told, printed = _content(self._told), _content(self._printed)
        ending = _ending(code) if in_time else f"no answer within {self.bound_s:g} s"
        if not gone:
            ending += f", and process {self._process.pid} cannot be killed: it sleeps in the kernel"
        return understood(told, ending, printed)

    def end(self) -> bool:
        """Kill what is left of the child and of what it started; False where the kernel does not let it go."""
        for pid in _session(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended while we looked
                os.kill(pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=_KILL_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def understood(told: str, ending: str, printed: str) -> ProbeOutcome:
    r"""The outcome in what a child told: lines of JSON, of which the last with `told` counts.

    >>> understood('{"doing": "starting CUDA"}\n{"told": {"gpus": 4}}\n', "", "")
    ProbeOutcome(values={'gpus': 4}, trouble='')
    >>> understood('{"doing": "starting CUDA"}\n', "ended by SIGSEGV", "").trouble
    'ended by SIGSEGV while starting CUDA'
    >>> understood("", "ended with code 1", "x\nImportError: no ray\n").trouble
    'ended with code 1: ImportError: no ray'
    """
    doing = ""
    for line in told.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue  # cut short by its end
        doing = message.get("doing", doing)
        if "trouble" in message:
            return ProbeOutcome(trouble=message["trouble"])
        if "told" in message:
            return ProbeOutcome(message["told"])
    last = next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")
    return ProbeOutcome(
        trouble=(ending or "ended without a word") + (f" while {doing}" if doing else "") + (last and f": {last}")
    )


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _content(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _session(leader: int) -> list[int]:
    """The processes of a session. Whoever was orphaned in it is still one of them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


# The probes of one examination, beside one another.

# Seconds that a probe may take: from the start of the command, or from when it is looked at where it starts later.
BOUNDS = {"host": 60.0, "nvml": 60.0, "cuda": 60.0, "ipc": 60.0, "nvrtc": 60.0, "torch": 90.0, "ray": 150.0}
LATER = {"ipc"}  # where a GPU takes one process at a time, this one and `cuda` would be in each other's way


class Probes(Mapping[str, ProbeOutcome]):
    """What the probes tell. To look at one waits for it, at most until its bound."""

    def __init__(self, bounds: Mapping[str, float] = BOUNDS) -> None:
        self._bounds = bounds
        self._children: dict[str, Child] = {}
        self._outcomes: dict[str, ProbeOutcome] = {}
        for name in bounds:
            if name not in LATER:
                self._start(name)

    def __getitem__(self, name: str) -> ProbeOutcome:
        if name not in self._outcomes and name not in self._children:
            self._start(name)
        if name not in self._outcomes:
            self._outcomes[name] = self._children[name].outcome()
        return self._outcomes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bounds)

    def __len__(self) -> int:
        return len(self._bounds)

    def close(self) -> None:
        """End what is still running."""
        for name, child in self._children.items():
            if name not in self._outcomes:
                child.end()

    def _start(self, name: str) -> None:
        try:
            self._children[name] = Child(name, self._bounds[name])
        except OSError as error:
            self._outcomes[name] = ProbeOutcome(trouble=f"no process could be started: {error}")
