"""Carry out a run: wait for events from Ray, ask `supervisor.decide`, carry out its actions.

The driver runs in a child process of `main_process.py`, so a crash or a hang in Ray's C++ loses no result, message or
exit code. It writes no file and nothing to the terminal: it sends messages to the main process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import remove_placement_group

from raymoe.config import Job
from raymoe.errors import RaymoeError
from raymoe.gang import supervisor as sv
from raymoe.gang.address import choose
from raymoe.gang.cluster import Cluster
from raymoe.gang.gang import Gang
from raymoe.gang.messages import Bounded, CaseDone, Connected, GenerationEnded, Message, Progressed, Ready, RunOutcome
from raymoe.gang.placement import Reservation, place
from raymoe.gang.watch import Watch

EVENTS_S = 0.1  # longest wait for events of Ray; bounds the delay until a stop is noticed
SAME_PROGRESS_S = 5.0  # until progress is sent again that has not changed, so that a log shows that the run is alive


@dataclass(frozen=True)
class RunOrder:
    """The job to run, and the cluster to run it on."""

    job: Job
    run: str  # name of the run directory, part of the names of actors and metrics
    address: str | None
    finished: frozenset[str] = frozenset()
    profile: bool = False  # collect spans for a trace


@dataclass
class Driver:
    """A run, from `ray.init` to `ray.shutdown`. `stopped` returns the signal that asked to stop, or None."""

    order: RunOrder
    tell: Callable[[Message], None]
    stopped: Callable[[], int | None]
    finished: set[str] = field(default_factory=set)
    reservation: Reservation | None = None
    gang: Gang | None = None
    state: sv.State = field(init=False)
    stop_seen: bool = False
    progress_sent: tuple[Progressed | None, float] = None, 0.0  # the last one, and when it was sent
    watch: Watch = field(init=False)
    generation_began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        world = self.order.job.world
        self.state = sv.State(ranks=world.ranks, restarts_left=world.restarts)
        self.finished |= self.order.finished
        cases = len(self.order.job.cases())
        self.watch = Watch(self.order.run, world.ranks, cases, self.tell, self.order.profile)

    def run(self) -> RunOutcome:
        """Carry out the whole run. A RaymoeError becomes the outcome."""
        try:
            self._connect()
            self._place()
            while self.state.phase is not sv.Phase.OVER:
                generation = self.state.generation
                for event in self._next_events():
                    if self.state.generation == generation:  # else the event is of a rank that is gone
                        self._on(event)
        except RaymoeError as error:
            return RunOutcome(error.exit_code, str(error))
        finally:
            self._leave()
        verdict = self.state.verdict or sv.Verdict(1, "the supervisor ended without a verdict")
        return RunOutcome(verdict.exit_code, verdict.message, verdict.culprit, verdict.traceback)

    def _connect(self) -> None:
        world, began = self.order.job.world, time.monotonic()
        cluster = Cluster(choose(self.order.address), max(os.cpu_count() or 1, world.ranks))
        self.tell(cluster.bound())
        cluster.connect()
        self.tell(Bounded(None))
        self.tell(Connected(cluster.address, time.monotonic() - began))
        self.watch.connected(len(self.finished))

    def _place(self) -> None:
        self.reservation = place(self.order.job, self.order.run, self._check_stop)
        if self.reservation is not None:
            self._on(sv.Placed())

    def _check_stop(self) -> bool:
        """Return whether a signal asked to stop; tell the supervisor the first time."""
        self.watch.refresh()
        signum = self.stopped()
        if signum is not None and not self.stop_seen:
            self.stop_seen = True
            self._on(sv.StopAsked(signum, signal.Signals(signum).name))
        return signum is not None

    def _next_events(self) -> list[sv.Event]:
        """Wait for events, at most EVENTS_S. The last one is always a Tick."""
        self._check_stop()
        events = [] if self.gang is None else self.gang.wait_for_events(EVENTS_S)
        self._send_progress()
        return [*events, sv.Tick()]

    def _send_progress(self) -> None:
        """Send the main process the cases that are finished and the progress of rank 0."""
        if self.gang is None:
            return
        for case, lines in self.gang.take_finished():
            self.finished.add(case)
            self.tell(CaseDone(case, self.state.generation, lines))
            self.watch.case_done(len(self.finished))
        self.watch.take(self.gang)
        sent, at = self.progress_sent
        now, progress = time.monotonic(), self.gang.progress
        if progress is not None and (progress != sent or now - at > SAME_PROGRESS_S):
            self.progress_sent = progress, now
            self.tell(progress)

    def _on(self, event: sv.Event) -> None:
        before = self.state
        self.state, actions = sv.decide(before, event, time.monotonic())
        self.watch.on(event, before, self.state)
        if isinstance(event, sv.Wired) and self.gang is not None:
            self.tell(Ready(before.generation, time.monotonic() - self.generation_began, self.gang.describe_ranks()))
        if before.phase is sv.Phase.CLEARING and self.state.phase is not before.phase and before.verdict is not None:
            verdict, restarting = before.verdict, self.state.phase is not sv.Phase.OVER
            self.tell(GenerationEnded(before.generation, verdict.cause, verdict.culprit, verdict.message, restarting))
            self.generation_began = time.monotonic()
        for action in actions:
            self._act(action)

    def _act(self, action: sv.Action) -> None:
        if action is sv.Action.START:
            assert self.reservation is not None
            self.gang = Gang(self.order.job, self.order.run, self.reservation, self.state.generation)
            return
        assert self.gang is not None, f"{action} before there are ranks"
        match action:
            case sv.Action.WIRE:
                self.gang.wire()
            case sv.Action.RUN:
                self.gang.run(self.finished)
            case sv.Action.ABORT:
                self.gang.abort("the gang is being stopped")
            case sv.Action.CLOSE:
                self.gang.close()
            case sv.Action.KILL:
                self.gang.kill()
                self._on(sv.Cleared())

    def _leave(self) -> None:
        """Release the reservation and leave the cluster. Ray would do it too, but later."""
        if ray.is_initialized():
            if self.reservation is not None:
                remove_placement_group(self.reservation.group)
            ray.shutdown()
        self.watch.send_spans()
