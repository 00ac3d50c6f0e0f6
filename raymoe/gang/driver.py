"""Carry out a run: wait for events from Ray, ask `supervisor.decide`, carry out its actions.

The driver runs in a child process of `main_process.py`, so a crash or a hang in Ray's C++ loses no result, no message
and no exit code. It writes no file and nothing to the terminal: it sends messages to the main process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from raymoe.config import Job
from raymoe.errors import PlacementError, RankDied, RaymoeError
from raymoe.gang import local_ray, nodes
from raymoe.gang import supervisor as sv
from raymoe.gang.address import choose
from raymoe.gang.cluster import Cluster
from raymoe.gang.gang import Gang
from raymoe.gang.messages import (
    Alive,
    Bounded,
    CaseDone,
    CaseStopped,
    Connected,
    Ending,
    GenerationEnded,
    Message,
    Progressed,
    Ready,
    Recovered,
    RunOutcome,
    Waiting,
)
from raymoe.gang.placement import Reservation, place
from raymoe.gang.processes import Process, children_named, is_alive, is_stopped
from raymoe.gang.watch import RunWatch

EVENTS_S = 0.1  # longest wait for events of Ray, and so the delay until a stop is noticed
ALIVE_S = 1.0  # between two messages `Alive`
STOPPED_S = 6.0  # until a stopped server of the run's own Ray counts as lost
CLEAR_S = 20.0  # to close and end the ranks of the last generation, also on another node
LEAVE_S = 5.0  # to leave a cluster
SAME_PROGRESS_S = 5.0  # until unchanged progress is sent again, so that a log shows that the run is alive


@dataclass(frozen=True)
class DriverSettings:
    """The job to run, and the cluster to run it on."""

    job: Job
    run: str  # name of the run directory, part of the names of actors and metrics
    address: str | None
    finished: frozenset[str] = frozenset()
    profile: bool = False  # collect spans for a trace
    first_generation: int = 0  # more than 0 if the run is resumed


@dataclass
class Driver:
    """A run, from `ray.init` to `ray.shutdown`. `stopped` returns the signal that asked to stop, or None."""

    settings: DriverSettings
    send: Callable[[Message], None]
    stopped: Callable[[], int | None]
    finished: set[str] = field(default_factory=set)
    reservation: Reservation | None = None
    gang: Gang | None = None
    state: sv.State = field(init=False)
    stop_seen: bool = False
    progress_sent: tuple[Progressed | None, float] = None, 0.0  # the last progress sent, and when
    watch: RunWatch = field(init=False)
    generation_began: float = field(default_factory=time.monotonic)
    servers: dict[str, Process] = field(default_factory=dict)  # those of the run's own Ray, by name
    seen_running: dict[str, float] = field(default_factory=dict)  # when each server was last seen running
    alive_at: float = 0.0  # when the last `Alive` was sent
    lost: tuple[int, float] | None = None  # a generation that was lost, and when: no later one has made a step

    def __post_init__(self) -> None:
        world = self.settings.job.world
        first = self.settings.first_generation
        self.state = sv.State(ranks=world.ranks, restarts_left=world.restarts, generation=first)
        self.finished |= self.settings.finished
        cases = len(self.settings.job.cases())
        self.watch = RunWatch(self.settings.run, world.ranks, cases, self.send, self.settings.profile)

    def run(self) -> RunOutcome:
        """Carry out the whole run. A RaymoeError becomes the outcome."""
        outcome = self._run()
        self.send(Ending(outcome, LEAVE_S))
        self._leave()
        return outcome

    def _run(self) -> RunOutcome:
        try:
            self._connect()
            self._place()
            while self.state.phase is not sv.Phase.OVER:
                generation = self.state.generation
                for event in self._next_events():
                    if self.state.generation == generation:  # else the event is about a rank that is gone
                        self._on(event)
        except RaymoeError as error:
            return RunOutcome(error.exit_code, str(error))
        except RayError as error:  # a call that no rank answers: to place, to create an actor
            reason = str(error).strip().splitlines()[0]
            return RunOutcome(3, self._lost_server(given_up=True) or f"lost Ray: {reason}; see `ray status`")
        return self._outcome(self.state.verdict or sv.Verdict(1, "the supervisor ended without a verdict"))

    @staticmethod
    def _outcome(verdict: sv.Verdict) -> RunOutcome:
        return RunOutcome(verdict.exit_code, verdict.message, verdict.culprit, verdict.traceback)

    def _connect(self) -> None:
        world, began = self.settings.job.world, time.monotonic()
        cluster = Cluster(choose(self.settings.address), max(os.cpu_count() or 1, world.ranks))
        self.send(cluster.bound())
        cluster.connect()
        self.send(Bounded(None))
        if cluster.address is None:
            self.servers = children_named(local_ray.SERVERS)
        self.send(Connected(cluster.address, time.monotonic() - began))
        self.watch.connected(len(self.finished), self.state.generation)

    def _place(self) -> None:
        self.reservation = self._reserve()
        if self.reservation is not None:
            self._on(sv.Placed())

    def _reserve(self) -> Reservation | None:
        settings = self.settings
        return place(settings.job, settings.run, self._check_stop, lambda text: self.send(Waiting(text)))

    def _place_again(self, lost: sv.Verdict) -> None:
        """Reserve resources on other nodes. Ray first has to notice the loss, or it would choose the same ones."""
        assert self.gang is not None and self.reservation is not None
        lost_nodes = self.gang.lost_nodes()
        deadline = time.monotonic() + self.settings.job.world.placement_timeout_s
        while not all(nodes.given_up(node.id) for node in lost_nodes) and time.monotonic() < deadline:
            if self._check_stop():
                return
            time.sleep(EVENTS_S)
        remove_placement_group(self.reservation.group)
        try:
            self.reservation = self._reserve()
        except PlacementError as error:
            others = "no other nodes" if len(self.gang.nodes) > 1 else "no other node"
            raise RankDied(lost.culprit or 0, f"{lost.message}; and {others} can hold the ranks: {error}") from error

    def _check_stop(self) -> bool:
        """Return whether a signal asked to stop; pass it to the supervisor the first time. Every loop calls this."""
        if time.monotonic() - self.alive_at > ALIVE_S:
            self.alive_at = time.monotonic()
            self.send(Alive())
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
        if self.servers:
            events = self._explain(events)
        return [*events, sv.Tick()]

    def _explain(self, events: list[sv.Event]) -> list[sv.Event]:
        """Replace events by the loss of the run's own Ray, if that is their cause."""
        given_up = any(isinstance(event, sv.RayLost | sv.NodeLost) for event in events)
        lost = self._lost_server(given_up)
        if lost is None and given_up:
            lost = "lost the Ray that this run started: it gave its raylet up"
        return [sv.RayLost(lost)] if lost else events

    def _lost_server(self, given_up: bool) -> str | None:
        """Say which server of the run's own Ray has ended or, if Ray gave it up, is stopped.

        Ray gives a stopped raylet up after 3 s, but this process may hear of it late: a call to that raylet hangs. So a
        server that has not been seen running for STOPPED_S is lost too.
        """
        now = time.monotonic()
        for name, process in self.servers.items():
            state = None
            if not is_alive(process):
                state = "ended"
            elif not is_stopped(process):
                self.seen_running[name] = now
            elif given_up or now - self.seen_running.setdefault(name, now) > STOPPED_S:
                state = "is stopped"
            if state:
                return f"lost the Ray that this run started: its {name} (pid {process[0]}) {state}"
        return None

    def _send_progress(self) -> None:
        """Send the main process the cases that are finished and the progress of rank 0."""
        if self.gang is None:
            return
        for case, lines in self.gang.take_finished():
            self.finished.add(case)
            self.send(CaseDone(case, self.state.generation, lines))
            self.watch.case_done(len(self.finished))
        self.watch.take(self.gang)
        self._send_recovery(self.gang)
        sent, at = self.progress_sent
        now, progress = time.monotonic(), self.gang.progress
        if progress is not None and (progress != sent or now - at > SAME_PROGRESS_S):
            self.progress_sent = progress, now
            self.send(progress)

    def _send_recovery(self, gang: Gang) -> None:
        """Tell the main process when all ranks of a generation after a lost one have done a step."""
        if self.lost is not None and gang.generation > self.lost[0] and len(gang.first_steps) == gang.size:
            self.send(Recovered(gang.generation, max(gang.first_steps.values()) - self.lost[1]))
            self.lost = None

    def _on(self, event: sv.Event) -> None:
        before = self.state
        self.state, actions = sv.decide(before, event, time.monotonic())
        self.watch.on(event, before, self.state)
        if before.verdict is None and self.state.verdict is not None and self.state.verdict.restartable:
            self.lost = before.generation, time.monotonic() if self.lost is None else self.lost[1]
        if isinstance(event, sv.Failed) and event.rank == 0 and event.failure.lines:
            self.send(CaseStopped(before.generation, event.failure.lines))
        if isinstance(event, sv.Wired) and self.gang is not None:
            self.send(Ready(before.generation, time.monotonic() - self.generation_began, self.gang.describe_ranks()))
        if self.state.phase is sv.Phase.CLEARING and self.state.final and self.state.verdict is not None:
            self.send(Ending(self._outcome(self.state.verdict), CLEAR_S))
        elif before.phase is not self.state.phase and self.state.phase in (sv.Phase.OVER, sv.Phase.STARTING):
            self._end_generation(before)
        for action in actions:
            self._act(action)

    def _end_generation(self, before: sv.State) -> None:
        """Report how a generation ended, if there was one. Either another one starts, or the run is over."""
        restarting = self.state.phase is sv.Phase.STARTING
        verdict = before.verdict if restarting else self.state.verdict
        if self.gang is None or verdict is None:
            return
        self.send(GenerationEnded(before.generation, verdict.cause, verdict.culprit, verdict.message, restarting))
        self.generation_began = time.monotonic()
        if restarting and self.gang.lost_nodes():
            self._place_again(verdict)

    def _act(self, action: sv.Action) -> None:
        if action is sv.Action.START:
            if self.stop_seen:  # the stop came while the ranks were placed again; the state has it
                return
            assert self.reservation is not None
            self.gang = Gang(self.settings.job, self.settings.run, self.reservation, self.state.generation)
            return
        assert self.gang is not None, f"{action} before there are ranks"
        match action:
            case sv.Action.WIRE:
                self.gang.wire()
            case sv.Action.RUN:
                self.gang.run(self.finished)
            case sv.Action.ABORT:
                self.gang.abort(sv.reason_to_stop(self.state))
            case sv.Action.CLOSE:
                self.gang.close()
            case sv.Action.KILL:
                self.gang.kill()
                self._on(sv.Cleared())

    def _leave(self) -> None:
        """Release the reservation and leave the cluster. Ray would do it too, but later."""
        if ray.is_initialized() and not self.servers:  # the main process ends a Ray of the run's own
            try:
                if self.reservation is not None:
                    remove_placement_group(self.reservation.group)
                ray.shutdown()
            except RayError as error:  # the outcome is known, and the end of this process frees all
                print(f"cannot leave the cluster: {error}", file=sys.stderr)
        self.watch.send_spans()
