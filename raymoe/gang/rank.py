"""A rank: a Ray actor on one GPU or its share of the CPUs, with one long `run()` and a control thread that stays free.

- **Start in two phases.** The constructor does nothing that can fail or take long, and `locate` returns where Ray
  placed the actor. Ranks are numbered by their locations; only then does `open` import torch and make memory.
- **One thread.** All calls of the default concurrency group run on the same thread, as CUDA wants.
- **No method raises.** Ray would wrap the error in a traceback of its own, so a failure is returned as a value.
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
from raymoe.gang.placement import Location
from raymoe.gang.processes import start_time, stderr_file
from raymoe.gang.supervisor import Failure

if TYPE_CHECKING:
    from raymoe.gang.metrics import RankMetrics
    from raymoe.memory.world import World

T = TypeVar("T")
Line = dict[str, object]


@dataclass(frozen=True)
class RankSettings:
    """All that a rank needs to know to open its memory."""

    rank: int
    size: int
    generation: int
    wait_timeout_s: float
    threads: int
    device: str
    share_gpu: bool
    nbytes: int  # memory that each rank needs: of its GPU, or of the host for CPU ranks


@dataclass(frozen=True)
class Status:
    """A rank's answer to a poll: its state and progress, and the cases finished since `cursor`."""

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
    """The methods of the actor. A plain class, so that tests can call it without Ray."""

    def __init__(self, run: str, index: int) -> None:
        self.run_name, self.index = run, index
        self.world: World | None = None
        self.metrics: RankMetrics | None = None
        self.progress = _Progress()

    def __repr__(self) -> str:
        return f"Rank({self.index}, {self.run_name})"

    def locate(self, bundle: int) -> Location:
        """Return where Ray placed this actor."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        process = (os.getpid(), start_time(os.getpid()))
        return Location(bundle, context.get_node_id(), gpus[0] if gpus else None, process, stderr_file())

    def open(self, settings: RankSettings) -> dict[str, Any] | Failure:
        """Import torch and make this rank's memory; return its descriptor, which tells peers how to reach it."""
        return self._safely(lambda: self._open(settings))

    def wire(self, descriptors: Sequence[Mapping[str, Any]]) -> Failure | None:
        """Map every peer's memory, and prove that writes into it arrive."""
        return self._safely(lambda: self._wire(descriptors))

    def run(self, resolved: Mapping[str, Any], finished: Collection[str]) -> Failure | None:
        """Run every case that is not in `finished`."""
        return self._safely(lambda: self._run(resolved, finished))

    def close(self) -> Failure | None:
        """Unmap the peers' memory, wait for all ranks to do so, free the own memory."""
        return self._safely(lambda: self.world.close() if self.world is not None else None)

    @ray.method(concurrency_group="control")
    def poll(self, cursor: int) -> Status:
        """Return state and progress, and the finished cases after the first `cursor`. Touches no device."""
        now = self.progress
        return Status(now.state, now.case, now.done, now.total, tuple(now.finished[cursor:]))

    @ray.method(concurrency_group="control")
    def abort(self, reason: str) -> None:
        """End any wait of this rank; its `run` then returns the failure `Aborted`."""
        if self.world is not None:
            self.world.abort(reason)

    def _open(self, settings: RankSettings) -> dict[str, Any]:
        import torch

        from raymoe.gang.metrics import RankMetrics
        from raymoe.memory.world import World
        from raymoe.workload.memory_needed import check_device_memory, check_memory

        if settings.rank == 0 and settings.device == "cpu":  # once for all ranks, which are on one node
            check_memory(settings.size, settings.nbytes)
        torch.set_num_threads(settings.threads)
        self.metrics = RankMetrics(self.run_name, settings.rank)
        self._enter("wiring")
        self.world = World.open(
            settings.rank,
            settings.size,
            generation=settings.generation,
            name=self.run_name,
            timeout_s=settings.wait_timeout_s,
            device=settings.device,
            share_gpu=settings.share_gpu,
        )
        if settings.device == "cuda":
            gpu = torch.cuda.get_device_properties(self.world.device)
            ranks_on_gpu = settings.size if settings.share_gpu else 1
            name = f"the {gpu.name} of rank {settings.rank}"
            check_device_memory(ranks_on_gpu, settings.nbytes, name, gpu.total_memory)
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
            world.waiter.check()  # so that an abort also ends a rank that computes and never waits

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
        except Exception as error:  # noqa: BLE001  every error of a rank goes to the driver
            self._enter("failed")
            return self._failure(error)

    def _failure(self, error: Exception) -> Failure:
        """Return the error as a value. A wait that failed also names the peer that it waited for."""
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


# `Any`: Ray's annotations cover neither concurrency groups nor the methods of an actor.
_remote: Any = ray.remote
RankActor: Any = _remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(Rank)
