"""One rank: a Ray actor on one GPU or its share of the CPUs, one long `run()`, and a control thread that stays free.

Two-phase start: the constructor does nothing that can fail or take long; `sit` tells where Ray put the actor, and only
when all have told does `open` import torch and make memory, so that ranks can be numbered by where they sit. Calls of
the default group all run on one thread, always the same one, which is what CUDA wants. No method raises: a Ray
traceback wrapped around an error would hide it, so a failure comes back as a value.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from raymoe.config import Job
from raymoe.errors import Aborted, PeerTimeout, RaymoeError
from raymoe.gang.placement import Seat
from raymoe.gang.processes import standard_error, start_time
from raymoe.gang.supervisor import Failure

if TYPE_CHECKING:
    from raymoe.gang.metrics import RankMetrics
    from raymoe.memory.world import World

T = TypeVar("T")
Line = dict[str, object]


@dataclass(frozen=True)
class Seating:
    """What a rank must know before it can open its memory."""

    rank: int
    size: int
    generation: int
    wait_timeout_s: float
    threads: int
    device: str
    share_gpu: bool
    nbytes: int  # that each rank needs: of its GPU's memory, or of the host's on CPU ranks


@dataclass(frozen=True)
class Status:
    """A rank's answer to a poll: where it is, and the cases finished since `cursor`."""

    state: str
    case: str | None
    done: int
    total: int
    finished: tuple[tuple[str, tuple[Line, ...]], ...]


@dataclass
class _Progress:
    state: str = "starting"
    case: str | None = None
    done: int = 0
    total: int = 0
    finished: list[tuple[str, tuple[Line, ...]]] = field(default_factory=list)


class Rank:
    """What the actor does; a plain class, so that tests can drive it without Ray."""

    def __init__(self, run: str, index: int) -> None:
        self.run_name, self.index = run, index
        self.world: World | None = None
        self.metrics: RankMetrics | None = None
        self.progress = _Progress()

    def __repr__(self) -> str:
        return f"Rank({self.index}, {self.run_name})"

    def sit(self, bundle: int) -> Seat:
        """Where Ray put this actor."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        process = (os.getpid(), start_time(os.getpid()))
        return Seat(bundle, context.get_node_id(), gpus[0] if gpus else None, process, standard_error())

    def open(self, seating: Seating) -> dict[str, Any] | Failure:
        """Import torch, make this rank's memory, and tell peers how to reach it."""
        return self._safely(lambda: self._open(seating))

    def wire(self, descriptors: Sequence[Mapping[str, Any]]) -> Failure | None:
        """Map every peer and prove that what is written there arrives."""
        return self._safely(lambda: self._wire(descriptors))

    def run(self, resolved: Mapping[str, Any], finished: Collection[str]) -> Failure | None:
        """Run every case that is not finished yet."""
        return self._safely(lambda: self._run(resolved, finished))

    def close(self) -> Failure | None:
        """Unmap, meet the others once more, free."""
        return self._safely(lambda: self.world.close() if self.world is not None else None)

    @ray.method(concurrency_group="control")
    def poll(self, cursor: int) -> Status:
        """Where this rank is, and what it finished since `cursor` cases. Touches no device."""
        now = self.progress
        return Status(now.state, now.case, now.done, now.total, tuple(now.finished[cursor:]))

    @ray.method(concurrency_group="control")
    def abort(self, reason: str) -> None:
        """End whatever this rank waits for; its `run` then comes back with `Aborted`."""
        if self.world is not None:
            self.world.abort(reason)

    def _open(self, seating: Seating) -> dict[str, Any]:
        import torch

        from raymoe.gang.metrics import RankMetrics
        from raymoe.memory.world import World
        from raymoe.workload.memory_needed import check_device_memory, check_memory

        if seating.rank == 0 and seating.device == "cpu":  # for all: they are on one node
            check_memory(seating.size, seating.nbytes)
        torch.set_num_threads(seating.threads)
        self.metrics = RankMetrics(self.run_name, seating.rank)
        self._enter("wiring")
        self.world = World.open(
            seating.rank,
            seating.size,
            generation=seating.generation,
            name=self.run_name,
            timeout_s=seating.wait_timeout_s,
            device=seating.device,
            share_gpu=seating.share_gpu,
        )
        if seating.device == "cuda":
            gpu, sharers = torch.cuda.get_device_properties(self.world.device), seating.size if seating.share_gpu else 1
            check_device_memory(sharers, seating.nbytes, f"the {gpu.name} of rank {seating.rank}", gpu.total_memory)
        return dict(self.world.descriptor())

    def _wire(self, descriptors: Sequence[Mapping[str, Any]]) -> None:
        self._open_world().wire([dict(descriptor) for descriptor in descriptors])
        self._enter("ready")

    def _run(self, resolved: Mapping[str, Any], finished: Collection[str]) -> None:
        from raymoe.workload import Progress, run_case

        world, metrics, now = self._open_world(), self.metrics, self.progress
        self._enter("running")

        def progressed(progress: Progress) -> None:
            if metrics is not None:
                metrics.steps(progress.done - now.done, progress.seconds)
            now.done, now.total = progress.done, progress.total
            world.waiter.check()  # an abort ends a rank that computes as surely as one that waits

        for case in Job.from_resolved(dict(resolved)).cases():
            if case.name in finished:
                continue
            now.case, now.done, now.total = case.name, 0, 0
            lines = run_case(case, world, progressed)
            now.finished.append((case.name, tuple(lines)))
        self._enter("done")

    def _open_world(self) -> World:
        if self.world is None:
            raise RuntimeError(f"rank {self.index} was asked to work before its memory was opened")
        return self.world

    def _enter(self, state: str) -> None:
        self.progress.state = state
        if self.metrics is not None:
            self.metrics.state(state)

    def _safely(self, call: Callable[[], T]) -> T | Failure:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  whatever a rank raises is news for the driver
            self._enter("failed")
            return self._failure(error)

    def _failure(self, error: Exception) -> Failure:
        """The error as a value. One that only tells of a wait also tells whom it waited for."""
        peer = error.peer if isinstance(error, PeerTimeout | Aborted) else None
        known = isinstance(error, RaymoeError)
        message = str(error) if known else f"rank {self.index} raised {type(error).__name__}: {error}"
        return Failure(
            type(error).__name__,
            error.exit_code if isinstance(error, RaymoeError) else 1,
            message,
            peer,
            None if known else traceback.format_exc(),
        )


# `Any`: Ray's own annotations know neither concurrency groups nor the methods of an actor.
_remote: Any = ray.remote
RankActor: Any = _remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(Rank)
