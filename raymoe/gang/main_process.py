"""The process that the user started: it runs the driver in a child, and ends everything that the driver started.

Ray runs in a child, because it replaces the SIGTERM handler inside `ray.init`, swallows exceptions raised while it
waits, and leaves agents behind that outlive the driver by half a minute. The parent has the signals, the files and the
terminal. It is a child subreaper: every process that Ray starts on this machine becomes its child sooner or later, and
can be ended by pid.

Invariants
* The parent never imports Ray, starts no thread, and blocks only in one bounded `select`.
* When `run_in_child` returns, no descendant of this process is left.
* If the child crashes in C++ or hangs in `ray.init`, `run_in_child` still returns a `RunOutcome`.
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
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType

from raymoe.gang.messages import Bounded, Message, RunOutcome

STOP_S = 3.5  # from a signal to the child's outcome; then all is killed, so a run is gone 5 s after SIGTERM
REAP_S = 3.0  # to kill and reap all descendants
PR_SET_CHILD_SUBREAPER = 36

Tell = Callable[[Message], None]
Stopped = Callable[[], int | None]
Work = Callable[[Tell, Stopped], RunOutcome]


def run_in_child(work: Work, on_message: Callable[[Message], None]) -> RunOutcome:
    """Run `work` in a child, pass its messages to `on_message`, and return the outcome; leave no process behind.

    `work` gets two functions: one sends a message, the other returns the signal that asked to stop (None before that).
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent_end, child_end = Pipe(duplex=True)
    with _Signals() as signals:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            parent_end.close()
            _run_child(work, child_end)
        child_end.close()
        try:
            return _listen(child, parent_end, signals, on_message)
        finally:
            end_descendants(REAP_S)
            parent_end.close()


class _Signals:
    """Record SIGINT and SIGTERM, without acting on them; `fileno` becomes readable when one arrives."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> _Signals:
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
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


def _listen(child: int, pipe: Connection, signals: _Signals, on_message: Callable[[Message], None]) -> RunOutcome:
    """Run the parent's loop: pass messages on and a signal down, until the child's outcome or a deadline."""
    bound, bound_ends = Bounded(None), float("inf")
    stop_ends, stop_sent = float("inf"), False
    while True:
        ends = min(bound_ends, stop_ends)
        wait = None if ends == float("inf") else max(0.0, ends - time.monotonic())
        ready, _, _ = select.select([pipe.fileno(), signals.fileno()], [], [], wait)
        if signals.fileno() in ready:
            signals.drain()
        if signals.first is not None and not stop_sent:
            stop_sent, stop_ends = True, time.monotonic() + STOP_S
            _send(pipe, signals.first)
        elif signals.count > 1:  # a second signal: stop at once
            stop_ends = time.monotonic()
        if pipe.fileno() in ready:
            try:
                message = pipe.recv()
            except (EOFError, ConnectionResetError):
                return _stopped(signals.first) if signals.first is not None else _crashed(child)
            if isinstance(message, RunOutcome):
                return message if signals.first is None or message.exit_code == 0 else _stopped(signals.first)
            if isinstance(message, Bounded):
                bound = message
                bound_ends = float("inf") if bound.seconds is None else time.monotonic() + bound.seconds
            else:
                on_message(message)
        elif time.monotonic() >= stop_ends and signals.first is not None:
            return _stopped(signals.first)
        elif time.monotonic() >= bound_ends:
            return RunOutcome(bound.exit_code, bound.message)


def _send(pipe: Connection, signum: int) -> None:
    try:
        pipe.send(signum)
    except (BrokenPipeError, ConnectionResetError):
        return  # the child is gone; the next read of the pipe says so


def _stopped(signum: int) -> RunOutcome:
    return RunOutcome(128 + signum, f"stopped by {signal.Signals(signum).name}; finished cases are kept")


def _crashed(child: int) -> RunOutcome:
    """Return the outcome of a child that closed its pipe without sending one."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return RunOutcome(1, f"the driver process {how} and gave no reason")
        time.sleep(0.01)
    return RunOutcome(1, "the driver process closed its pipe but did not end, so it was killed")


def _run_child(work: Work, parent: Connection) -> None:
    """Run `work`, send its outcome and exit. Leaves the terminal's process group: Ctrl-C reaches only the parent."""
    os.setpgid(0, 0)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # if the parent is killed, Ray's orphans become children of this process
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
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


def _descendants(root: int) -> list[int]:
    """Return every process below `root`, from one pass over /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
