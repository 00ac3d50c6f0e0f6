"""Follows a job on a cluster until it ends or the user leaves it.

Two threads ask the cluster: one reads the log, one the state. Both are daemons, so that a request that hangs delays no
exit. The main thread gets what they find, and signals, from one queue.

Signals of a job that this command submitted (`stops`)
* The first SIGINT, SIGQUIT or SIGTERM stops the job, after LEAVE_S. A second one before that leaves the job running.
* A second one after that leaves the job to end by itself.

Signals of a job that was only attached to: each leaves the job running.
* In both, SIGHUP leaves the job running: a job outlives the terminal that it was started from.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from aiohttp import ClientError

from raymoe.config.submission import JobRequest
from raymoe.errors import ClusterError, RaymoeError, one_line
from raymoe.gang.jobs_api import JobsApi, JobState
from raymoe.shell import stop_signals

LEAVE_S = 1.0  # between the first signal and the request to stop
STOP_S = 30.0  # for a job that was asked to stop
LOST_S = 30.0  # without an answer, until the cluster counts as lost
REST_S = 5.0  # for the rest of the log of a job that has ended
POLL_S = 0.5
PENDING_S = 10.0  # between lines about a job that has not started


Event = str | JobState | RaymoeError | int | None
"""A piece of the log, a state, a failed request or the number of a signal; None once the log has ended."""


@dataclass
class Follower:
    """Follows one job. `write` gets its log, `notify` gets lines about it; `again` is the command for later."""

    api: JobsApi
    job: str
    write: Callable[[str], None]
    notify: Callable[[str], None]
    again: str
    stops: bool = True  # whether a signal stops the job
    state: JobState | None = None  # the last one
    signum: int | None = None  # the signal that asked to stop the job, or to leave it
    left: bool = False  # before the job ended
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _stop_at: float = float("inf")
    _give_up_at: float = float("inf")
    _passed: int = 0  # characters of the log

    @property
    def stopping(self) -> bool:
        """Whether the cluster was asked to stop the job."""
        return self._give_up_at != float("inf")

    def follow(self) -> None:
        """Follow to the end, or until the user leaves. Raises ClusterError if the cluster answers no more."""
        with self._signals():
            for work in (self._read_log, self._read_states):
                threading.Thread(target=work, daemon=True).start()
            try:
                self._listen()
            finally:
                self._over.set()

    def _listen(self) -> None:
        log_ended, ends_at, next_line = False, float("inf"), time.monotonic() + PENDING_S
        while True:
            now = time.monotonic()
            if now >= self._stop_at:
                self._stop_at, self._give_up_at = float("inf"), now + STOP_S
                threading.Thread(target=self._stop, daemon=True).start()
            if now >= self._give_up_at:
                self.notify(f"job {self.job} has not ended {STOP_S:g} s after it was asked to stop")
                self.left = True
                return
            if self.state is not None and self.state.over and (log_ended or now >= ends_at):
                return
            if self.state is not None and self.state.status == "PENDING" and now >= next_line:
                next_line = now + PENDING_S
                self.notify(f"job {self.job}: {one_line(self.state.message)}")
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                continue
            match event:
                case str():
                    self.write(event)
                case JobState():
                    self.state = event
                    ends_at = min(ends_at, time.monotonic() + REST_S) if event.over else ends_at
                case None:
                    log_ended = True
                case RaymoeError():
                    raise event
                case int(signum) if self._leaves(signum):
                    self.signum, self.left = signum, True
                    return

    def _leaves(self, signum: int) -> bool:
        """Note a signal; return whether the user leaves the job with it."""
        if signum == signal.SIGHUP or not self.stops or self.signum is not None:
            return True
        self.signum, self._stop_at = signum, time.monotonic() + LEAVE_S
        self.notify(f"stopping job {self.job} in {LEAVE_S:g} s; press Ctrl-C again to leave it running")
        return False

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(signum: int, _: FrameType | None) -> None:
            self._events.put(signum)  # a SimpleQueue may be used in a signal handler

        before = {number: signal.signal(number, note) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        try:
            self.api.stop(self.job)
        except RaymoeError as error:
            self._events.put(error)

    def _read_states(self) -> None:
        """Ask for the state until it is final."""
        answered = time.monotonic()
        while not self._over.is_set():
            try:
                state = self.api.state(self.job)
            except ClusterError as error:
                if time.monotonic() - answered > LOST_S:
                    lost = f"job {self.job} was followed, and the cluster has not answered for {LOST_S:g} s"
                    self._events.put(ClusterError(f"{lost} ({error}); follow it again with `{self.again}`"))
                    return
            except RaymoeError as error:
                self._events.put(error)
                return
            else:
                answered = time.monotonic()
                self._events.put(state)
                if state.over:
                    return
            self._over.wait(POLL_S)

    def _read_log(self) -> None:
        """Pass on the log. If the connection breaks, read again from the beginning and skip what was passed on."""
        while not self._over.is_set():
            try:
                asyncio.run(self._pass_log_on())
            except (RuntimeError, OSError, ClientError):
                self._over.wait(1.0)
            else:
                self._events.put(None)
                return

    async def _pass_log_on(self) -> None:
        seen = 0
        async for text in self.api.tail(self.job):
            fresh = text[max(0, self._passed - seen) :]
            seen += len(text)
            if fresh:
                self._events.put(fresh)
                self._passed = seen


def stop(api: JobsApi, job: str) -> JobState:
    """Stop a job and wait until it has ended, at most STOP_S. Raises ClusterError past that."""
    state = api.state(job)
    if state.over:
        return state
    api.stop(job)
    deadline = time.monotonic() + STOP_S
    while not (state := api.state(job)).over:
        if time.monotonic() > deadline:
            raise ClusterError(f"job {job} has not ended {STOP_S:g} s after it was asked to stop")
        time.sleep(POLL_S)
    return state


def output_of(api: JobsApi, job: str, request: JobRequest, seconds: float) -> str:
    """Run a short job and return its log. Raises ClusterError past `seconds`."""
    api.submit(job, request, lambda _: None)
    deadline = time.monotonic() + seconds
    while not (state := api.state(job)).over:
        if time.monotonic() > deadline:
            api.stop(job)
            raise ClusterError(f"the job {job} on that node has not ended after {seconds:g} s")
        time.sleep(0.1)
    if state.status != "SUCCEEDED":
        raise ClusterError(f"the job {job} on that node failed: {one_line(state.message)}")
    return api.log(job)
