"""The process that the user started: it keeps the driver, and outlives everything that the driver started.

Ray installs a SIGTERM handler of its own inside `ray.init`, swallows exceptions raised while it waits, and leaves
agents behind that outlive the driver by half a minute. So Ray lives in a child. The parent holds the signals, the files
and the terminal; it is a child subreaper, so that every process that Ray starts on this machine becomes its own sooner
or later and can be ended by pid.

Invariants
* The parent never imports Ray, starts no thread, and blocks only in one bounded `select`.
* When `run_in_child` returns, no descendant of this process is left.
* Whatever happens to the child (a crash in C++, a hang in `ray.init`), `run_in_child` returns a `RunOutcome`.
* Whatever happens to the parent (SIGKILL), the child drains as if it had been asked to stop, and cleans up for it.
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

STOP_S = 3.5  # from a signal to the child's last word, then everything is killed: a run is gone 5 s after SIGTERM
REAP_S = 3.0
PR_SET_CHILD_SUBREAPER = 36

Tell = Callable[[Message], None]
Stopped = Callable[[], int | None]
Work = Callable[[Tell, Stopped], RunOutcome]


def run_in_child(work: Work, hear: Callable[[Message], None]) -> RunOutcome:
    """Run `work` in a child, pass on all it tells, and return how it ended; never leaves a process behind.

    `work` gets a function that tells news and one that gives the signal that asked to stop (None while there is none).
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = Pipe(duplex=True)
    with _Signals() as signals:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            ours.close()
            _be_the_child(work, theirs)
        theirs.close()
        try:
            return _listen(child, ours, signals, hear)
        finally:
            end_descendants(REAP_S)
            ours.close()


class _Signals:
    """SIGINT and SIGTERM, noted and nothing else; `fileno` becomes readable when one arrives."""

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


def _listen(child: int, news: Connection, signals: _Signals, hear: Callable[[Message], None]) -> RunOutcome:
    """The parent's loop: pass news on, pass a signal down, end the child where a bound is passed."""
    bound, bound_ends = Bounded(None), float("inf")
    stop_ends, told = float("inf"), False
    while True:
        ends = min(bound_ends, stop_ends)
        wait = None if ends == float("inf") else max(0.0, ends - time.monotonic())
        ready, _, _ = select.select([news.fileno(), signals.fileno()], [], [], wait)
        if signals.fileno() in ready:
            signals.drain()
        if signals.first is not None and not told:
            told, stop_ends = True, time.monotonic() + STOP_S
            _send(news, signals.first)
        elif signals.count > 1:  # asked twice: no more patience
            stop_ends = time.monotonic()
        if news.fileno() in ready:
            try:
                heard = news.recv()
            except (EOFError, ConnectionResetError):
                return _stopped(signals.first) if signals.first is not None else _crashed(child)
            if isinstance(heard, RunOutcome):
                return heard if signals.first is None or heard.exit_code == 0 else _stopped(signals.first)
            if isinstance(heard, Bounded):
                bound, bound_ends = heard, float("inf") if heard.seconds is None else time.monotonic() + heard.seconds
            else:
                hear(heard)
        elif time.monotonic() >= stop_ends and signals.first is not None:
            return _stopped(signals.first)
        elif time.monotonic() >= bound_ends:
            return RunOutcome(bound.exit_code, bound.message)


def _send(pipe: Connection, signum: int) -> None:
    try:
        pipe.send(signum)
    except (BrokenPipeError, ConnectionResetError):
        return  # it is gone already, which the next read tells


def _stopped(signum: int) -> RunOutcome:
    return RunOutcome(128 + signum, f"stopped by {signal.Signals(signum).name}; finished cases are kept")


def _crashed(child: int) -> RunOutcome:
    """The child went without a word."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            return RunOutcome(1, f"the process that drives Ray {how} without a word; see /tmp/ray/session_latest/logs")
        time.sleep(0.01)
    return RunOutcome(1, "the process that drives Ray closed its pipe and lives on; it was killed")


def _be_the_child(work: Work, parent: Connection) -> None:
    """Never returns. Stays out of the terminal's process group, so that Ctrl-C reaches the parent alone."""
    os.setpgid(0, 0)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # should the parent be killed, orphans of Ray come to us
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)  # a stop comes through the pipe. Not SIG_IGN: Ray's processes would inherit it
    asked: list[int] = []

    def stopped() -> int | None:
        if not asked and parent.poll():
            try:
                asked.append(parent.recv())
            except (EOFError, ConnectionResetError):  # the parent is gone
                asked.append(signal.SIGTERM)
        return asked[0] if asked else None

    try:
        outcome = work(parent.send, stopped)
    except SystemExit:  # Ray's own SIGTERM handler, which is in place inside ray.init
        outcome = _stopped(signal.SIGTERM)
    except BaseException as error:  # noqa: BLE001  the last frame of this process: everything must become an outcome
        message = f"{type(error).__name__}: {error}"
        outcome = RunOutcome(1, f"the driver failed with {message}", traceback=traceback.format_exc())
    try:
        parent.send(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    except (BrokenPipeError, ConnectionResetError):
        end_descendants(REAP_S)
    finally:
        os._exit(outcome.exit_code)  # not exit(): Ray's atexit hooks wait for processes that the parent ends


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
    """Every process below `root`, from one reading of /proc."""
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
