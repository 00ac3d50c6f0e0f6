"""The ranks of one generation, as the driver sees them: the calls to each rank, and their answers.

`wait_for_events` turns Ray's answers into the supervisor's events. The other methods carry out its actions. Every
decision is the supervisor's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymoe.config import Job
from raymoe.gang import nodes
from raymoe.gang import supervisor as sv
from raymoe.gang.messages import ClockShift, Progressed
from raymoe.gang.placement import Location, Reservation, seats_by_rank
from raymoe.gang.processes import crash_report, end_ranks
from raymoe.gang.rank import DomainSettings, Line, RankActor, RankSettings, Status
from raymoe.workload.memory_needed import bytes_per_rank, device_bytes_per_rank
from raymoe.workload.progress import Progress, Span

POLL_S = 0.2  # between two polls of a rank
START_S = 60.0  # extra time for the first answer to a call, which may start a process and import torch
MARGIN_S = 5.0  # extra time after world.wait_timeout_s, until a rank that does not answer counts as stuck
NAME_TAKEN_S = 5.0  # for Ray to free the actor name of a rank that died
LAST_REPORTS_S = 0.5  # for the last reports of a rank that failed
CLOSE_S = 3.0  # for all ranks to close; then they are killed


@dataclass(frozen=True)
class RankCall:
    """A call to a rank that has not answered yet."""

    method: str
    rank: int


class Gang:
    """One generation of ranks. The constructor begins to start them."""

    def __init__(self, job: Job, run: str, reservation: Reservation, generation: int) -> None:
        self.job, self.run_name, self.reservation, self.generation = job, run, reservation, generation
        self.size = job.world.ranks
        self.locations: dict[int, Location] = {}
        self.nodes: dict[str, nodes.Node] = {}  # the ranks' nodes by id, once the ranks are located
        self.descriptors: dict[int, dict[str, Any]] = {}
        self.progress: Progressed | None = None
        self._calls: dict[ray.ObjectRef[Any], RankCall] = {}
        self._polls: dict[int, tuple[ray.ObjectRef[Any], float]] = {}
        self._next_poll = 0.0
        self._failed = False  # a rank failed in the current call
        self._suspicious = False  # a rank failed, perhaps because a node is lost
        self._called_at = time.monotonic()
        self._first_answer: float | None = None
        self._cursor = 0  # finished cases taken from rank 0
        self._taken: dict[int, int] = {}  # reports taken from each rank
        self._reports: list[tuple[int, Progress | Span]] = []
        self.shifts: dict[int, ClockShift] = {}  # of each rank's clock, as its last answer to a poll shows it
        self.first_steps: dict[int, float] = {}  # when each rank knew that all had done a first step, by this clock
        self._finished: list[tuple[str, tuple[Line, ...]]] = []
        self._start(list(range(self.size)))

    # Actions.

    def _start(self, seats: list[int]) -> None:
        """Create the actor of rank i in seat seats[i], for every rank."""
        self.seats = seats
        self.actors = [self._create(rank, seat) for rank, seat in enumerate(seats)]
        here = ray.get_runtime_context().get_node_id()
        self._ask("locate", lambda rank: (seats[rank], here))

    def _create(self, rank: int, seat: int) -> Any:
        bundle = self.reservation.plan.place_of(seat)
        options = RankActor.options(
            name=f"raymoe/{self.run_name}/rank{rank}",
            num_cpus=self.reservation.bundle["CPU"],
            num_gpus=self.reservation.bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.reservation.group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
            # Ray runs workers at nice 15. A value in the job's runtime_env does not reach actors.
            runtime_env={"env_vars": {"RAY_worker_niceness": "0"}},
        )
        deadline = time.monotonic() + NAME_TAKEN_S
        while True:
            try:
                return options.remote(self.run_name, rank)
            except ValueError:  # a dead rank of the last generation still holds the name
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def wire(self) -> None:
        """Give every rank the descriptors of all."""
        descriptors = ray.put([self.descriptors[rank] for rank in range(self.size)])
        self._ask("wire", lambda _: (descriptors,))

    def run(self, finished: Iterable[str]) -> None:
        """Start the one long call of every rank."""
        resolved, done = ray.put(self.job.resolved()), sorted(finished)
        self._ask("run", lambda _: (resolved, done))

    def abort(self, reason: str) -> None:
        """Ask every rank to stop waiting, without waiting for answers: the effect shows when `run` returns."""
        for rank, actor in enumerate(self.actors):
            actor.abort.options(name=f"rank{rank} abort").remote(reason)

    def close(self) -> None:
        """Let the ranks unmap and free their memory in order, for at most CLOSE_S."""
        refs = [actor.close.options(name=f"rank{rank} close").remote() for rank, actor in enumerate(self.actors)]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_S)

    def kill(self) -> list[int]:
        """End every process of this generation, also stopped ones; return the ranks that could not be ended."""
        for actor in self.actors:
            ray.kill(actor)
        self._calls.clear()
        self._polls.clear()
        lost = {node.id for node in self.lost_nodes()}
        return sorted(end_ranks({rank: at for rank, at in self.locations.items() if at.node not in lost}))

    def lost_nodes(self) -> list[nodes.Node]:
        """Return the nodes of this gang whose raylets are gone."""
        return [node for node in self.nodes.values() if node.lost]

    def _ask(self, method: str, arguments: Callable[[int], tuple[object, ...]]) -> None:
        """RankCall a method of every rank."""
        self._calls.clear()
        self._failed = False
        for rank, actor in enumerate(self.actors):
            ref = getattr(actor, method).options(name=f"rank{rank} {method}").remote(*arguments(rank))
            self._calls[ref] = RankCall(method, rank)
        self._called_at, self._first_answer = time.monotonic(), None

    def describe_ranks(self) -> tuple[dict[str, object], ...]:
        """Return process, node and GPU of each rank, for environment.json and for a user who wants to inspect one."""
        return tuple(
            {"rank": rank, "domain": rank // self.reservation.plan.size}
            | {"pid": location.process[0], "node": location.node, "address": self.nodes[location.node].address}
            | {"gpu": location.gpu}
            for rank, location in sorted(self.locations.items())
        )

    # Events.

    def wait_for_events(self, seconds: float) -> list[sv.Event]:
        """Wait at most `seconds` for an answer; return the events in all answers that are there."""
        self._send_due_polls()
        polls = {ref: rank for rank, (ref, _) in self._polls.items()}
        waiting = [*self._calls, *polls]
        events: list[sv.Event] = []
        if waiting:
            ready, _ = ray.wait(waiting, num_returns=1, timeout=seconds)
            if ready:  # take all answers that are there, not only one
                ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            for ref in ready:
                if ref in polls:
                    events += self._on_poll(polls[ref], ref)
                else:
                    events += self._on_answer(self._calls.pop(ref), ref)
        else:
            time.sleep(seconds)
        events += self._find_lost_node(events)
        return events or self._find_overdue()

    def take_finished(self) -> list[tuple[str, tuple[Line, ...]]]:
        """Return the cases that rank 0 finished since the last call, each with all its lines."""
        taken, self._finished = self._finished, []
        return taken

    def take_reports(self) -> list[tuple[int, Progress | Span]]:
        """Return the reports of all ranks since the last call, each with its rank."""
        taken, self._reports = self._reports, []
        return taken

    def _on_answer(self, call: RankCall, ref: ray.ObjectRef[Any]) -> list[sv.Event]:
        self._first_answer = self._first_answer or time.monotonic()
        answer, event = self._read(call, ref)
        # Reports after the last poll come before the event that the rank is done, or that it failed.
        last: list[sv.Event] = []
        if call.method == "run" and (event is None or isinstance(event, sv.Failed)):  # the rank answers
            last = self._last_poll(call.rank, MARGIN_S if event is None else LAST_REPORTS_S)
        if event is not None:
            self._failed = True
            return [event]
        if call.method == "run":
            return [*last, sv.Finished(call.rank)]
        if call.method == "locate":
            self.locations[call.rank] = answer
        elif call.method == "open":
            self.descriptors[call.rank] = answer
        # After a failure the next call cannot be made: the location or descriptor of a rank is missing.
        return [] if self._calls or self._failed else self._on_all_answered(call.method)

    def _on_all_answered(self, method: str) -> list[sv.Event]:
        if method == "locate":
            seats = seats_by_rank([self.locations[rank] for rank in range(self.size)])
            if seats != self.seats:  # rare; an actor's name is fixed, so all are created again in the right order
                self.kill()
                self.locations.clear()
                self._start(seats)
                return []
            self.nodes = {
                name: nodes.find_node(name) for name in {location.node for location in self.locations.values()}
            }
            settings = [self._settings(rank) for rank in range(self.size)]
            self._ask("open", lambda rank: (settings[rank],))
            return []
        return [sv.Started()] if method == "open" else [sv.Wired()]

    def _settings(self, rank: int) -> RankSettings:
        world, plan, device = self.job.world, self.reservation.plan, self.reservation.device
        node = self.nodes[self.locations[rank].node]
        first, together = (rank % plan.size, plan.size) if plan.on_nodes else (rank, self.size)
        gpu = device == "cuda"
        return RankSettings(
            rank=rank,
            size=self.size,
            generation=self.generation,
            wait_timeout_s=world.wait_timeout_s,
            threads=max(1, int(world.cpus)),
            device=device,
            share_gpu=world.share_gpu,
            nbytes=device_bytes_per_rank(self.job) if gpu else bytes_per_rank(self.job, plan.domains),
            ranks_to_hold=together if first == 0 else 0,
            span=self._span(rank, node.address) if plan.domains > 1 else None,
        )

    def _span(self, rank: int, node_address: str) -> DomainSettings:
        """Return the domain of a rank: its size, its key, and the address of the rank for other domains."""
        plan, at = self.reservation.plan, self.locations[rank]
        networks = tuple({location.network for location in self.locations.values()})
        return DomainSettings(plan.size, at.node if plan.on_nodes else str(rank // plan.size), networks, node_address)

    def _read(self, call: RankCall, ref: ray.ObjectRef[Any]) -> tuple[Any, sv.Event | None]:
        """Return the answer, or the event that there is none."""
        try:
            answer = ray.get(ref)
        except RayActorError as error:
            return None, self._loss(call, str(error))
        except OutOfMemoryError:
            return None, sv.Lost(call.rank, self._out_of_memory(call))
        except RayError as error:  # Ray could not make the call: raymoe is missing on that node, or another version
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            message = f"Ray could not call `{call.method}` of rank {call.rank}: {reason}"
            return None, sv.Failed(call.rank, sv.Failure(type(error).__name__, 1, message, traceback=str(error)))
        if isinstance(answer, sv.Failure):
            return None, sv.Failed(call.rank, answer)
        return answer, None

    def _loss(self, call: RankCall, error: str) -> sv.Event:
        """Return the event of a rank that is lost: alone, with its node, or with Ray."""
        if nodes.OWNER_NODE_DIED in error:
            return sv.RayLost("lost Ray: the raylet of the driver's node ended or does not answer; see `ray status`")
        node = self._node_of(call.rank)
        if nodes.NODE_DIED in error or (node is not None and node.lost):
            return self._node_loss(call.rank, f"died in `{call.method}` with {node or 'the node'}")
        return sv.Lost(call.rank, self._death_message(call))

    def _node_of(self, rank: int) -> nodes.Node | None:
        location = self.locations.get(rank)
        return None if location is None else self.nodes.get(location.node)

    def _node_loss(self, rank: int, how: str) -> sv.NodeLost:
        """Return the event that the node of `rank` is lost. `how` says how the rank shows it."""
        node = self._node_of(rank)
        others = [other for other in sorted(self.locations) if other != rank and node and self._node_of(other) == node]
        also = f", and so did rank {', '.join(map(str, others))}" if others and len(self.nodes) > 1 else ""
        return sv.NodeLost(
            rank, f"rank {rank} {how}, whose raylet is gone{also}; see `ray status`, and whether that machine is up"
        )

    def _find_lost_node(self, events: list[sv.Event]) -> list[sv.Event]:
        """Return the loss of a node if that may be why ranks on others failed.

        These notice a closed connection at once. Ray reports a lost node only after missed health checks. The loss of
        the driver's own node is the loss of Ray, and shows in the next call.
        """
        if len(self.nodes) < 2:
            return []
        failures = [event.failure for event in events if isinstance(event, sv.Failed)]
        self._suspicious = self._suspicious or any(failure.may_be_consequence for failure in failures)
        if not self._suspicious or any(isinstance(event, sv.NodeLost) for event in events):
            return []
        here = ray.get_runtime_context().get_node_id()
        lost = {node.id for node in self.nodes.values() if node.id != here and node.lost}
        gone = [rank for rank, location in sorted(self.locations.items()) if location.node in lost]
        return [self._node_loss(gone[0], f"was lost with {self._node_of(gone[0])}")] if gone else []

    def _out_of_memory(self, call: RankCall) -> str:
        """Say that the raylet's memory monitor ended a rank."""
        location = self.locations.get(call.rank)
        pid = f" (pid {location.process[0]})" if location else ""
        node = self._node_of(call.rank) or "its node"
        death = f"rank {call.rank}{pid} died in `{call.method}`: Ray ended it because {node} ran low on memory"
        return f"{death}; lower shape or world.ranks, or see RAY_memory_usage_threshold"

    def _death_message(self, call: RankCall) -> str:
        location = self.locations.get(call.rank)
        if location is None or location.stderr_file is None:
            pid = f" (pid {location.process[0]})" if location else ""
            return f"rank {call.rank}{pid} died in `{call.method}`; `ray logs` has its output"
        here = location.node == ray.get_runtime_context().get_node_id()
        report = crash_report(location.stderr_file) if here else None
        cause = report or "it printed no cause"
        log = location.stderr_file if here else f"{location.stderr_file} on its node"
        return f"rank {call.rank} (pid {location.process[0]}) died in `{call.method}`: {cause}; its log: {log}"

    # Polls.

    def _send_due_polls(self) -> None:
        now = time.monotonic()
        if now < self._next_poll or not any(call.method == "run" for call in self._calls.values()):
            return
        self._next_poll = now + POLL_S
        for rank in range(self.size):
            if rank not in self._polls:  # one poll at a time: its age tells how long the rank has not answered
                cursor = self._cursor if rank == 0 else 1 << 30  # cases are taken from rank 0 alone
                self._polls[rank] = (self._send_poll(rank, cursor), time.monotonic())

    def _send_poll(self, rank: int, cursor: int) -> ray.ObjectRef[Any]:
        # Without task events: five polls a second would fill the task table of Ray's dashboard.
        poll = self.actors[rank].poll.options(name=f"rank{rank} poll", enable_task_events=False)
        ref: ray.ObjectRef[Any] = poll.remote(cursor, self._taken.get(rank, 0))
        return ref

    def _on_poll(self, rank: int, ref: ray.ObjectRef[Any]) -> list[sv.Event]:
        if self._polls.get(rank, (None,))[0] != ref:
            return []  # `_last_poll` has asked for the same cases in the meantime
        _, sent = self._polls.pop(rank)
        status, event = self._read(RankCall("poll", rank), ref)
        if event is None:
            self.shifts[rank] = ClockShift.of_answer(sent, status.now, time.monotonic())
            self._record(rank, status)
        return [] if event is None else [event]

    def _last_poll(self, rank: int, timeout_s: float) -> list[sv.Event]:
        """Take the last cases and reports of a rank whose `run` has returned."""
        self._polls.pop(rank, None)
        ref = self._send_poll(rank, self._cursor if rank == 0 else 1 << 30)
        if not ray.wait([ref], timeout=timeout_s)[0]:
            message = f"rank {rank} finished its cases and no longer answers; its process still runs"
            return [sv.NotAnswering(rank, message, 5)]
        status, event = self._read(RankCall("poll", rank), ref)
        if event is None:
            self._record(rank, status)
        return [] if event is None else [event]

    def _record(self, rank: int, status: Status) -> None:
        self._taken[rank] = status.reported
        self._reports += [(rank, report) for report in status.reports]
        met = [report.block.met for report in status.reports if isinstance(report, Progress)]
        if met and rank in self.shifts:
            self.first_steps.setdefault(rank, met[0] + self.shifts[rank].seconds)
        if rank != 0:
            return
        self._finished += status.finished
        self._cursor += len(status.finished)
        if status.case is not None:
            blocks = [report.block for report in status.reports if isinstance(report, Progress)]
            step_s = blocks[-1].step_s if blocks else None
            if step_s is None and self.progress is not None and self.progress.case == status.case:
                step_s = self.progress.step_s
            self.progress = Progressed(status.case, status.done, status.total, step_s)

    def _find_overdue(self) -> list[sv.Event]:
        """Return the first rank that should have answered by now."""
        now, limit_s = time.monotonic(), self.job.world.wait_timeout_s + MARGIN_S
        for rank, (_, sent) in self._polls.items():
            if now - sent > limit_s:
                message = f"rank {rank} has not answered for {now - sent:.0f} s; its process still runs"
                return [sv.NotAnswering(rank, message, 5)]
        for call in self._calls.values():
            if call.method == "run":
                continue
            late = self._first_answer is not None and now - self._first_answer > limit_s
            if late or now - self._called_at > START_S + limit_s:
                message = f"rank {call.rank} did not answer `{call.method}` within {now - self._called_at:.0f} s"
                return [sv.NotAnswering(call.rank, message, 5 if self.locations else 3)]
        return []
