"""Run the probes of one examination, each in its own child process, which may hang or crash.

The parent starts a child (`Child`), whose program is `answer`: it runs one probe and sends lines of JSON back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from raymoe.doctor import cuda, host, ipc, nvml, software
from raymoe.doctor.finding import ProbeOutcome
from raymoe.errors import RaymoeError

# One probe in a child process.
#
# - **Deadline.** After it the parent kills every process of the child's session. A process that sleeps inside a broken
#   driver cannot be killed; the parent waits for it only for a bounded time, and leaves it.
# - **Answers.** A probe answers through a file descriptor of its own, because libraries print to both standard streams.
#   Their last line is reported for a probe that ends without an answer.
# - **Clean-up.** A child ends with its parent, and the processes that it started end when its outcome is taken.

# The child gets the import path of its parent; until then -P keeps the working directory out of it.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from raymoe.doctor.probes import answer; answer(sys.argv[2], int(sys.argv[3]))"
)
_KILL_S = 2.0


class Child:
    """One probe in its process, which runs until `outcome` or `end` is called."""

    def __init__(self, probe: str, bound_s: float, program: str = _PROGRAM) -> None:
        self.bound_s = bound_s
        self._deadline = time.monotonic() + bound_s
        self._answers = os.memfd_create("answers")
        self._output = os.memfd_create("output")
        command = [sys.executable, "-P", "-c", program, json.dumps(sys.path), probe, str(self._answers)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[self._answers],
            start_new_session=True,
        )

    def outcome(self) -> ProbeOutcome:
        """Wait for the probe, at most until its deadline, and end the child."""
        in_time = True
        try:
            self._process.wait(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            in_time = False
        code = self._process.returncode
        gone = self.end()
        answers, output = _content(self._answers), _content(self._output)
        ending = _ending(code) if in_time else f"no answer within {self.bound_s:g} s"
        if not gone:
            ending += f", and process {self._process.pid} cannot be killed: it sleeps in the kernel"
        return outcome_of(answers, ending, output)

    def end(self) -> bool:
        """Kill the child and all that it started; return False if the child cannot be killed."""
        for pid in _session(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=_KILL_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def outcome_of(answers: str, ending: str, output: str) -> ProbeOutcome:
    r"""Parse the outcome from a child's answers, lines of JSON: the first with `values` or `trouble` counts.

    >>> outcome_of('{"doing": "starting CUDA"}\n{"values": {"gpus": 4}}\n', "", "")
    ProbeOutcome(values={'gpus': 4}, trouble='')
    >>> outcome_of('{"doing": "starting CUDA"}\n', "ended by SIGSEGV", "").trouble
    'ended by SIGSEGV while starting CUDA'
    >>> outcome_of("", "ended with code 1", "x\nImportError: no ray\n").trouble
    'ended with code 1: ImportError: no ray'
    """
    doing = ""
    for line in answers.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue  # cut off when the child ended
        doing = message.get("doing", doing)
        if "trouble" in message:
            return ProbeOutcome(trouble=message["trouble"])
        if "values" in message:
            return ProbeOutcome(message["values"])
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return ProbeOutcome(
        trouble=(ending or "ended without an answer") + (f" while {doing}" if doing else "") + (last and f": {last}")
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
    """Return the processes of a session; orphans stay in it."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    pids.append(int(entry.name))
    return pids


# The program of a child.

PROBES: dict[str, Callable[[Callable[[str], None]], dict[str, object]]] = {
    "host": host.probe,
    "nvml": nvml.probe,
    "cuda": cuda.probe,
    "ipc": ipc.probe,
    "nvrtc": software.probe_nvrtc,
    "torch": software.probe_torch,
    "ray": software.probe_ray,
}
"""Each returns its values. It calls its argument with what it is doing, for the case that it hangs."""
_PR_SET_PDEATHSIG = 1


def answer(name: str, fd: int) -> None:
    """Run one probe, and send its values as JSON."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the doctor is killed, this process ends too
    os.set_inheritable(fd, False)

    def send(**message: object) -> None:
        os.write(fd, (json.dumps(message) + "\n").encode())

    try:
        send(values=PROBES[name](lambda activity: send(doing=activity)))
    except Exception as error:  # noqa: BLE001  (every error of a probe is its outcome)
        send(trouble=_one_line(error))


def _one_line(error: BaseException) -> str:
    """
    >>> _one_line(ModuleNotFoundError("No module named 'ray'"))
    "ModuleNotFoundError: No module named 'ray'"
    """
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, RaymoeError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


# All probes of one examination, which run at the same time.

# Seconds that a probe may take from its start.
BOUNDS = {"host": 60.0, "nvml": 60.0, "cuda": 60.0, "ipc": 60.0, "nvrtc": 60.0, "torch": 90.0, "ray": 150.0}
STARTED_WHEN_READ = {"ipc"}  # it must not run beside `cuda` on a GPU that takes one process at a time


class Probes(Mapping[str, ProbeOutcome]):
    """The outcomes of the probes. Reading one waits for it, at most until its bound."""

    def __init__(self, bounds: Mapping[str, float] = BOUNDS) -> None:
        self._bounds = bounds
        self._children: dict[str, Child] = {}
        self._outcomes: dict[str, ProbeOutcome] = {}
        try:
            for name in bounds:
                if name not in STARTED_WHEN_READ:
                    self._start(name)
        except BaseException:  # a signal; the caller does not have this object yet and cannot close it
            self.close()
            raise

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
        """End the probes that still run."""
        for name, child in self._children.items():
            if name not in self._outcomes:
                child.end()

    def _start(self, name: str) -> None:
        try:
            self._children[name] = Child(name, self._bounds[name])
        except OSError as error:
            self._outcomes[name] = ProbeOutcome(trouble=f"no process could be started: {error}")
