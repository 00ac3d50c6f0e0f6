"""The ranks of one generation, seen from the driver: what was asked of each, and what has come back.

`look` turns Ray's answers into the supervisor's events; the other methods carry its actions out. Nothing is decided
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymoe.config import Job
from raymoe.gang import supervisor as sv
from raymoe.gang.placement import Reservation, Seat, order
from raymoe.gang.processes import crash_report, end_ranks
from raymoe.gang.rank import Line, RankActor, Seating, Status
from raymoe.workload.memory_needed import bytes_per_rank, device_bytes_per_rank

POLL_S = 0.2  # how often each rank is asked where it is
START_S = 60.0  # for the first rank of a generation to answer: process start, import of torch
MARGIN_S = 5.0  # on top of world.wait_timeout_s before an unanswered call counts as a rank that is stuck
NAME_TAKEN_S = 5.0  # how long the name of a rank that died may still be taken
CLOSE_S = 3.0


@dataclass(frozen=True)
class Call:
    """One call that is under way: `what` of `rank`."""

    what: str
    rank: int


class Gang:
    """One generation of ranks. Begins to start them when made."""

    def __init__(self, job: Job, run: str, reservation: Reservation, generation: int) -> None:
        self.job, self.run_name, self.reservation, self.generation = job, run, reservation, generation
        self.size = job.world.ranks
        self.seats: dict[int, Seat] = {}
        self.descriptors: dict[int, dict[str, Any]] = {}
        self.progress: tuple[str, int, int] | None = None
        self._calls: dict[ray.ObjectRef[Any], Call] = {}
        self._polls: dict[int, tuple[ray.ObjectRef[Any], float]] = {}
        self._next_poll = 0.0
        self._failed = False  # a call of this round came back without an answer
        self._asked_at = time.monotonic()
        self._first_answer: float | None = None
        self._cursor = 0
        self._finished: list[tuple[str, tuple[Line, ...]]] = []
        self._start(list(range(self.size)))

    # Actions.

    def _start(self, bundles: list[int]) -> None:
        """Create the actor of every rank i in bundle bundles[i]."""
        self.bundles = bundles
        self.actors = [self._create(rank, bundle) for rank, bundle in enumerate(bundles)]
        self._ask("sit", lambda rank: (bundles[rank],))

    def _create(self, rank: int, bundle: int) -> Any:
        options = RankActor.options(
            name=f"raymoe/{self.run_name}/rank{rank}",
            num_cpus=self.reservation.bundle["CPU"],
            num_gpus=self.reservation.bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.reservation.group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
            # Ray runs workers at nice 15, and what the job's own runtime_env says of it does not arrive at actors.
            runtime_env={"env_vars": {"RAY_worker_niceness": "0"}},
        )
        deadline = time.monotonic() + NAME_TAKEN_S
        while True:
            try:
                return options.remote(self.run_name, rank)
            except ValueError:  # the rank of the last generation still holds the name
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def wire(self) -> None:
        """Hand every rank all descriptors."""
        everyone = ray.put([self.descriptors[rank] for rank in range(self.size)])
        self._ask("wire", lambda _: (everyone,))

    def run(self, finished: Iterable[str]) -> None:
        """The one long call of every rank."""
        resolved, done = ray.put(self.job.resolved()), sorted(finished)
        self._ask("run", lambda _: (resolved, done))

    def abort(self, reason: str) -> None:
        """Ask every rank to stop waiting. Nobody waits for the answers: what each `run` says follows from them."""
        for rank, actor in enumerate(self.actors):
            actor.abort.options(name=f"rank{rank} abort").remote(reason)

    def close(self) -> None:
        """Let the ranks unmap and free in order; whoever is not done after CLOSE_S is killed with the rest."""
        refs = [actor.close.options(name=f"rank{rank} close").remote() for rank, actor in enumerate(self.actors)]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_S)

    def kill(self) -> list[int]:
        """End every process of this generation, stopped ones too. Returns the ranks that could not be ended."""
        for actor in self.actors:
            ray.kill(actor)
        self._calls.clear()
        self._polls.clear()
        return sorted(end_ranks(self.seats))

    def _ask(self, what: str, arguments: Callable[[int], tuple[object, ...]]) -> None:
        self._calls.clear()
        self._failed = False
        for rank, actor in enumerate(self.actors):
            ref = getattr(actor, what).options(name=f"rank{rank} {what}").remote(*arguments(rank))
            self._calls[ref] = Call(what, rank)
        self._asked_at, self._first_answer = time.monotonic(), None

    def whereabouts(self) -> tuple[dict[str, object], ...]:
        """Where each rank lives, for environment.json and for whoever wants to look at one."""
        return tuple(
            {"rank": rank, "pid": seat.process[0], "node": seat.node, "gpu": seat.gpu}
            for rank, seat in sorted(self.seats.items())
        )

    # What has happened.

    def look(self, seconds: float) -> list[sv.Event]:
        """Everything that has come back, waiting at most `seconds` for the first of it."""
        self._poll_where_due()
        polls = {ref: rank for rank, (ref, _) in self._polls.items()}
        waiting = [*self._calls, *polls]
        events: list[sv.Event] = []
        if waiting:
            ready, _ = ray.wait(waiting, num_returns=1, timeout=seconds)
            if ready:  # take all that is there, not one a look
                ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            for ref in ready:
                if ref in polls:
                    events += self._on_poll(polls[ref], ref)
                else:
                    events += self._on_answer(self._calls.pop(ref), ref)
        else:
            time.sleep(seconds)
        return events or self._overdue()

    def take_finished(self) -> list[tuple[str, tuple[Line, ...]]]:
        """Cases that rank 0 finished since the last call, whole."""
        taken, self._finished = self._finished, []
        return taken

    def _on_answer(self, call: Call, ref: ray.ObjectRef[Any]) -> list[sv.Event]:
        self._first_answer = self._first_answer or time.monotonic()
        answer, event = self._read(call, ref)
        if event is not None:
            self._failed = True
            return [event]
        if call.what == "run":
            # What rank 0 finished after its last poll comes before the news that it is done.
            return [*(self._last_poll() if call.rank == 0 else []), sv.Finished(call.rank)]
        if call.what == "sit":
            self.seats[call.rank] = answer
        elif call.what == "open":
            self.descriptors[call.rank] = answer
        # Where one rank gave no answer, there is nothing to go on with: its seat or descriptor is missing.
        return [] if self._calls or self._failed else self._all_answered(call.what)

    def _all_answered(self, what: str) -> list[sv.Event]:
        if what == "sit":
            ranks = order([self.seats[rank] for rank in range(self.size)])
            if ranks != self.bundles:  # rare. A name is fixed at creation, so the ranks are created anew
                self.kill()
                self.seats.clear()
                self._start(ranks)
                return []
            world = self.job.world
            nbytes = device_bytes_per_rank if self.reservation.device == "cuda" else bytes_per_rank
            self._ask(
                "open",
                lambda rank: (
                    Seating(
                        rank=rank,
                        size=self.size,
                        generation=self.generation,
                        wait_timeout_s=world.wait_timeout_s,
                        threads=max(1, int(world.cpus)),
                        device=self.reservation.device,
                        share_gpu=world.share_gpu,
                        nbytes=nbytes(self.job),
                    ),
                ),
            )
            return []
        return [sv.Started()] if what == "open" else [sv.Wired()]

    def _read(self, call: Call, ref: ray.ObjectRef[Any]) -> tuple[Any, sv.Event | None]:
        try:
            answer = ray.get(ref)
        except RayActorError:
            return None, sv.Lost(call.rank, self._how_lost(call))
        except RayError as error:  # the call itself could not be made: no raymoe on that node, another version
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            message = f"rank {call.rank} could not {call.what}: {reason}"
            return None, sv.Failed(call.rank, sv.Failure(type(error).__name__, 1, message, traceback=str(error)))
        if isinstance(answer, sv.Failure):
            return None, sv.Failed(call.rank, answer)
        return answer, None

    def _how_lost(self, call: Call) -> str:
        seat = self.seats.get(call.rank)
        if seat is None or seat.errors is None:
            pid = f" (pid {seat.process[0]})" if seat else ""
            return f"rank {call.rank}{pid} died in `{call.what}`; `ray logs` has what it said"
        here = seat.node == ray.get_runtime_context().get_node_id()
        cause = crash_report(seat.errors) if here else None
        why, where = cause or "without a word", seat.errors if here else f"{seat.errors} on its node"
        return f"rank {call.rank} (pid {seat.process[0]}) died in `{call.what}`: {why}; its log: {where}"

    # Polls.

    def _poll_where_due(self) -> None:
        now = time.monotonic()
        if now < self._next_poll or not any(call.what == "run" for call in self._calls.values()):
            return
        self._next_poll = now + POLL_S
        for rank in range(self.size):
            if rank not in self._polls:  # one that hangs is kept, not queued behind
                cursor = self._cursor if rank == 0 else 1 << 30
                self._polls[rank] = (self._ask_where(rank, cursor), now)

    def _ask_where(self, rank: int, cursor: int) -> ray.ObjectRef[Any]:
        ref: ray.ObjectRef[Any] = self.actors[rank].poll.options(name=f"rank{rank} poll").remote(cursor)
        return ref

    def _on_poll(self, rank: int, ref: ray.ObjectRef[Any]) -> list[sv.Event]:
        if self._polls.get(rank, (None,))[0] != ref:
            return []  # `_last_poll` came in between and asked for the same again
        del self._polls[rank]
        status, event = self._read(Call("poll", rank), ref)
        if event is None and rank == 0:
            self._take(status)
        return [] if event is None else [event]

    def _last_poll(self) -> list[sv.Event]:
        self._polls.pop(0, None)
        ref = self._ask_where(0, self._cursor)
        if not ray.wait([ref], timeout=MARGIN_S)[0]:
            return [sv.Mute(0, "rank 0 finished and answers nothing any more; its process lives", 5)]
        status, event = self._read(Call("poll", 0), ref)
        if event is None:
            self._take(status)
        return [] if event is None else [event]

    def _take(self, status: Status) -> None:
        self._finished += status.finished
        self._cursor += len(status.finished)
        if status.case is not None and status.total:
            self.progress = (status.case, status.done, status.total)

    def _overdue(self) -> list[sv.Event]:
        """Ranks that should have answered by now."""
        now, patience = time.monotonic(), self.job.world.wait_timeout_s + MARGIN_S
        for rank, (_, asked) in self._polls.items():
            if now - asked > patience:
                return [
                    sv.Mute(rank, f"rank {rank} has answered nothing for {now - asked:.0f} s; its process lives", 5)
                ]
        for call in self._calls.values():
            if call.what == "run":
                continue
            late = self._first_answer is not None and now - self._first_answer > patience
            if late or now - self._asked_at > START_S + patience:
                message = f"rank {call.rank} did not {call.what} within {now - self._asked_at:.0f} s"
                return [sv.Mute(call.rank, message, 5 if self.seats else 3)]
        return []
