"""The process that the user started: it runs the driver in a child, and ends everything that the driver started.

Ray runs in a child for three reasons. It replaces the SIGTERM handler inside `ray.init`. It swallows exceptions raised
while it waits. It leaves agents that outlive the driver by half a minute. The parent has the signals, the files
and the terminal. It is a child subreaper: every process that Ray starts on this machine becomes its child sooner or
later, and can be ended by pid.

Invariants
* The parent never imports Ray, starts no thread, and blocks only in one bounded `select`.
* When `run_in_child` returns, no descendant of this process is left.
* If the child crashes in C++, is stopped or hangs in a call of Ray, `run_in_child` still returns a `RunOutcome`.
* An outcome that the child has announced is final: neither a crash nor a hang while it cleans up changes it.
* If the parent is killed, the child drains as if it had been asked to stop, and ends its own descendants.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType

from raymoe.errors import Stopped as StoppedError
from raymoe.gang import local_ray
from raymoe.gang.messages import Alive, Bounded, Ending, Message, RunOutcome
from raymoe.shell import STOP_SIGNALS, stop_signals

STOP_S = 3.5  # from a signal to the child's outcome; then all is killed, so a run is gone 5 s after SIGTERM
REAP_S = 3.0  # to kill and reap all descendants
SILENT_S = 30.0  # without a message from the child; longer than any call of Ray that still returns
TICK_S = 0.5  # longest wait for a message
OUTPUT_BYTES = 1 << 20  # the end of the driver's output goes into the outcome
GCS_LOST = "Failed to connect to GCS"  # Ray's words when it ends the driver, 60 s after the GCS of a cluster ended
PR_SET_CHILD_SUBREAPER = 36

Send = Callable[[Message], None]
Stopped = Callable[[], int | None]
Work = Callable[[Send, Stopped], RunOutcome]


def run_in_child(work: Work, on_message: Callable[[Message], None], *, keep_output: bool = False) -> RunOutcome:
    """Run `work` in a child, pass its messages to `on_message`, and return the outcome; leave no process.

    `work` gets two functions: one sends a message, the other returns the signal that asked to stop (None before that).
    With `keep_output`, what the child and Ray print goes into the outcome instead of to the terminal.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent_end, child_end = Pipe(duplex=True)
    output = _Output() if keep_output else None
    began = time.time()
    with _Signals() as signals:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            parent_end.close()
            _run_child(work, child_end, None if output is None else output.fd)
        child_end.close()
        try:
            outcome = _Listener(child, parent_end, signals, on_message).listen()
        finally:
            end_descendants(REAP_S)
            parent_end.close()
    text = "" if output is None else output.close()
    session = local_ray.session_of(child, since=began)
    if outcome.exit_code == 1 and GCS_LOST in text:
        which = "the Ray cluster" if session is None else "the Ray that this run started"
        outcome = RunOutcome(3, f"lost {which}: its GCS ended or does not answer; see gcs_server.out in its logs")
    return replace(outcome, output=text, session=session)


class _Output:
    """Keeps the output of the child and of Ray in memory."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("driver output")

    def close(self) -> str:
        """Return the last OUTPUT_BYTES."""
        with os.fdopen(self.fd, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return file.read().decode(errors="replace")


class _Signals:
    """Record the signals that stop a run, without acting on them; `fileno` becomes readable when one arrives."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> _Signals:
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.first = self.first or signum
        self.count += 1

    def fileno(self) -> int:
        return self._read

    def drain(self) -> None:
        os.read(self._read, 4096)


class _Listener:
    """The parent's loop: it passes messages on and a signal down, until the child's outcome or a deadline."""

    def __init__(self, child: int, pipe: Connection, signals: _Signals, on_message: Callable[[Message], None]) -> None:
        self.child, self.pipe, self.signals, self.on_message = child, pipe, signals, on_message
        self.bound: Bounded | None = None
        self.ending: Ending | None = None
        self.silent_s = 0.0  # without a message; time in which this process was frozen counts as one tick
        self.stop_ends = float("inf")

    def listen(self) -> RunOutcome:
        while (outcome := self._wait()) is None:
            continue
        if self.ending is not None:
            return self.ending.outcome
        stopped = self.signals.first
        return outcome if stopped is None or outcome.exit_code == 0 else _stopped(stopped)

    def _wait(self) -> RunOutcome | None:
        """Handle one message, signal or deadline. Return the outcome if this is the end."""
        began = time.monotonic()
        wait_s = max(0.0, min(TICK_S, self.stop_ends - began))
        ready, _, _ = select.select([self.pipe.fileno(), self.signals.fileno()], [], [], wait_s)
        if self.signals.fileno() in ready:
            self.signals.drain()
        if self.signals.first is not None and self.stop_ends == float("inf"):
            self.stop_ends = time.monotonic() + stop_seconds()
            _send(self.pipe, self.signals.first)
        elif self.signals.count > 1:  # a second signal: stop at once
            self.stop_ends = time.monotonic()
        self.silent_s += min(time.monotonic() - began, 2 * TICK_S)
        if self.pipe.fileno() in ready:
            return self._receive()
        if self.signals.first is not None and time.monotonic() >= self.stop_ends:
            return _stopped(self.signals.first)
        return self._overdue()

    def _receive(self) -> RunOutcome | None:
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return _crashed(self.child)
        if self.ending is None or isinstance(message, Ending):
            self.silent_s = 0.0
        match message:
            case RunOutcome():
                return message
            case Ending():
                self.ending = message
            case Bounded():
                self.bound = None if message.seconds is None else message
            case Alive():
                pass
            case _:
                self.on_message(message)
        return None

    def _overdue(self) -> RunOutcome | None:
        """Return the outcome of a child that has sent nothing for too long."""
        if self.ending is not None:
            return self.ending.outcome if self.silent_s >= self.ending.seconds else None
        if self.bound is not None and self.bound.seconds is not None:
            return RunOutcome(self.bound.exit_code, self.bound.message) if self.silent_s >= self.bound.seconds else None
        return _silent(self.child, self.silent_s) if self.silent_s >= SILENT_S else None


def stop_seconds() -> float:
    """Return how long the child may take to stop. `ray job stop` kills this process 3 s after SIGTERM, or as set."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # Ray sets it for the entrypoint of a job only
        return STOP_S
    seconds = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "")
    return max(0.5, min(STOP_S, (float(seconds) if seconds.isdigit() else 3.0) - 1.0))


def _send(pipe: Connection, signum: int) -> None:
    try:
        pipe.send(signum)
    except (BrokenPipeError, ConnectionResetError):
        return  # the child is gone; the next read of the pipe says so


def _stopped(signum: int) -> RunOutcome:
    stopped = StoppedError(signum)
    return RunOutcome(stopped.exit_code, str(stopped))


def _silent(child: int, seconds: float) -> RunOutcome:
    """Return the outcome of a run whose driver hangs, and name the process that is stopped."""
    if _state(child) in STOPPED_STATES:
        return RunOutcome(5, f"the driver process (pid {child}) is stopped and said nothing for {seconds:.0f} s")
    for pid in _descendants(child):
        name = _name(pid)
        if name in local_ray.SERVERS and _state(pid) in STOPPED_STATES:
            cause = f"its {name} (pid {pid}) is stopped, so a call to it did not return for {seconds:.0f} s"
            return RunOutcome(3, f"lost the Ray that this run started: {cause}")
    return RunOutcome(3, f"lost Ray: the driver's call to it did not return for {seconds:.0f} s; see `ray status`")


def _crashed(child: int) -> RunOutcome:
    """Return the outcome of a child that closed its pipe without sending one."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return RunOutcome(1, f"the driver process (pid {child}) {how} and gave no reason")
        time.sleep(0.01)
    return RunOutcome(1, f"the driver process (pid {child}) closed its pipe but did not end, so it was killed")


def _run_child(work: Work, parent: Connection, output: int | None) -> None:
    """Run `work`, send its outcome and exit. Leaves the terminal's process group: Ctrl-C reaches only the parent."""
    os.setpgid(0, 0)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # if the parent is killed, Ray's orphans become children of this process
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)  # a stop comes through the pipe. Not SIG_IGN: Ray's processes would inherit it
    received: list[int] = []

    def stopped() -> int | None:
        if not received and parent.poll():
            try:
                received.append(parent.recv())
            except (EOFError, ConnectionResetError):  # the parent is gone
                received.append(signal.SIGTERM)
        return received[0] if received else None

    try:
        outcome = work(parent.send, stopped)
    except SystemExit:  # from Ray's SIGTERM handler, which is installed inside ray.init
        outcome = _stopped(signal.SIGTERM)
    except BaseException as error:  # noqa: BLE001  the outermost frame of this process: every error becomes an outcome
        message = f"{type(error).__name__}: {error}"
        outcome = RunOutcome(1, f"the driver failed with {message}", traceback=traceback.format_exc())
    try:
        parent.send(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    except (BrokenPipeError, ConnectionResetError):
        end_descendants(REAP_S)
    finally:
        os._exit(outcome.exit_code)  # not sys.exit: Ray's atexit hooks would wait for processes that the parent ends


def end_descendants(seconds: float) -> None:
    """Kill and reap every process below this one, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)


STOPPED_STATES = ("T", "t")  # by a signal, by a debugger


def _state(pid: int) -> str:
    """Return the state of a process as one letter, or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _descendants(root: int) -> list[int]:
    """Return every process below `root`, from one pass over /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family - {root})


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
