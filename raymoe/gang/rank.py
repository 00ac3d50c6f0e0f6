"""A rank: a Ray actor on one GPU or its share of the CPUs, with one long `run()` and a control thread that stays free.

- **Start in two phases.** The constructor does nothing that can fail or take long, and `locate` returns where Ray
  placed the actor. Ranks are numbered by their locations; only then does `open` import torch and make memory.
- **One thread.** All calls of the default concurrency group run on the same thread, as CUDA wants.
- **No method raises.** Ray would wrap the error in a traceback of its own, so a failure is returned as a value.
- **It reports, and others record.** The workload reports each block of steps to a callback. Reports wait here for the
  driver's next poll, and a line for people goes to the log of this actor.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from raymoe.config import job_from_resolved
from raymoe.errors import Aborted, DataRefused, PeerTimeout, RaymoeError
from raymoe.gang.placement import Location
from raymoe.gang.processes import SilenceWatch, end_with_parent, kept_imports, start_time, stderr_file
from raymoe.gang.supervisor import Failure
from raymoe.memory.address import address_for, boot_id, network
from raymoe.workload.progress import Progress, Span, in_words

if TYPE_CHECKING:
    from raymoe.memory.member import Member
    from raymoe.memory.world import World

T = TypeVar("T")
Line = dict[str, object]


@dataclass(frozen=True)
class DomainSettings:
    """The domain of a rank, where there are several."""

    size: int  # ranks in each domain
    key: str  # ranks with one key map one another's memory: the id of the node, or the number of a pretended domain
    networks: tuple[tuple[str, str], ...]  # the networks of all ranks of the gang
    node_address: str  # other nodes reach this rank's node there


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
    ranks_to_hold: int = 0  # CPU ranks whose memory this rank checks: on one rank of a node all of them, else 0
    span: DomainSettings | None = None


@dataclass(frozen=True)
class Status:
    """A rank's answer to a poll: its state and progress, and what is new since the poll before."""

    state: str
    case: str | None
    done: int
    total: int
    finished: tuple[tuple[str, tuple[Line, ...]], ...]  # cases after the first `cursor`
    reports: tuple[Progress | Span, ...]  # reports after the first `taken`
    reported: int  # how many reports the rank has made so far
    now: float  # by the rank's CLOCK_MONOTONIC


@dataclass
class _Progress:
    state: str = "starting"
    case: str | None = None
    done: int = 0
    total: int = 0
    finished: list[tuple[str, tuple[Line, ...]]] = field(default_factory=list)


MOST_REPORTS = 10_000  # that wait for a driver that does not poll; a rank makes about five a second


class Reports:
    """Reports that wait for the driver's next poll. One thread adds, another takes."""

    def __init__(self) -> None:
        self._waiting: deque[Progress | Span] = deque()
        self._added = 0
        self._lock = threading.Lock()

    def add(self, report: Progress | Span) -> None:
        with self._lock:
            self._waiting.append(report)
            self._added += 1
            if len(self._waiting) > MOST_REPORTS:
                self._waiting.popleft()

    def after(self, taken: int) -> tuple[tuple[Progress | Span, ...], int]:
        """Drop the first `taken` reports, which the driver has; return the others, and how many there were so far.

        >>> reports = Reports()
        >>> for name in "abc":
        ...     reports.add(Span(name, 0.0, 0.0))
        >>> [span.name for span in reports.after(1)[0]], [span.name for span in reports.after(1)[0]], reports.after(3)
        (['b', 'c'], ['b', 'c'], ((), 3))
        """
        with self._lock:
            while self._waiting and self._added - len(self._waiting) < taken:
                self._waiting.popleft()
            return tuple(self._waiting), self._added


SILENT_S = 35.0  # without a poll, until a rank ends; the main process ends a driver that hangs for 30 s
LOG_S = 5.0  # between two lines of progress in a rank's log


class RankLog:
    """Lines for people in the log of the actor, which Ray's dashboard shows. Each begins with the rank."""

    def __init__(self, index: int) -> None:
        self.who = f"rank {index}"
        self._progress_at = time.monotonic()

    def line(self, text: str) -> None:
        printable = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
        with suppress(OSError):  # a full disk: the run goes on without this line
            print(f"{time.strftime('%H:%M:%S')} {self.who}: {printable}", flush=True)
        self._progress_at = time.monotonic()

    def progress(self, text: str) -> None:
        """Print a line, unless there was one less than LOG_S ago."""
        if time.monotonic() - self._progress_at >= LOG_S:
            self.line(text)


class Rank:
    """The methods of the actor. A plain class, so that tests can call it without Ray."""

    def __init__(self, run: str, index: int) -> None:
        self.run_name, self.index = run, index
        self.world: World | None = None
        self.progress = _Progress()
        self.reports = Reports()
        self.log = RankLog(index)
        self.generation = 0
        self.silence: SilenceWatch | None = None
        self.stopped_lines: tuple[Line, ...] = ()  # of the case that this rank was told to stop in

    def __repr__(self) -> str:
        return f"Rank({self.index}, {self.run_name})"

    def locate(self, seat: int, driver_node: str) -> Location:
        """Return where Ray placed this actor. From now on it ends with its raylet.

        The raylet ends it after its driver. If that ran on another node, the raylet needs the GCS to learn of its end.
        """
        end_with_parent()
        context = ray.get_runtime_context()
        if context.get_node_id() != driver_node:
            self.silence = SilenceWatch(SILENT_S, self._end_alone)
        gpus = context.get_accelerator_ids().get("GPU", [])
        process = (os.getpid(), start_time(os.getpid()))
        self.log.line(f"{self.run_name}, seat {seat}, GPU {gpus[0] if gpus else 'none'}, pid {os.getpid()}")
        node, gpu = context.get_node_id(), gpus[0] if gpus else None
        return Location(seat, node, gpu, process, stderr_file(), boot_id(), network())

    def open(self, settings: RankSettings) -> dict[str, Any] | Failure:
        """Import torch and make this rank's memory; return its descriptor, by which peers reach it."""
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
    def poll(self, cursor: int, taken: int) -> Status:
        """Return state and progress, the cases after the first `cursor` and the reports after the first `taken`.

        Touches no device.
        """
        if self.silence is not None:
            self.silence.heard()
        now, (reports, reported) = self.progress, self.reports.after(taken)
        finished = tuple(now.finished[cursor:])
        return Status(now.state, now.case, now.done, now.total, finished, reports, reported, time.monotonic())

    @ray.method(concurrency_group="control")
    def abort(self, reason: str) -> None:
        """End any wait of this rank; its `run` then returns the failure `Aborted`."""
        if self.world is not None:
            self.world.abort(reason)

    def _open(self, settings: RankSettings) -> dict[str, Any]:
        self.generation = settings.generation
        with self._phase("open"):
            return self._open_memory(settings)

    def _open_memory(self, settings: RankSettings) -> dict[str, Any]:
        with kept_imports():
            import torch

            from raymoe.memory.member import Member
            from raymoe.workload.memory_needed import check_device_memory, check_memory

        if settings.device == "cpu" and settings.ranks_to_hold:
            check_memory(settings.ranks_to_hold, settings.nbytes)
        torch.set_num_threads(settings.threads)
        self._enter("wiring")
        member = Member(
            settings.rank,
            settings.size,
            generation=settings.generation,
            name=self.run_name,
            timeout_s=settings.wait_timeout_s,
            device=settings.device,
            share_gpu=settings.share_gpu,
        )
        self.world = _open_world(member, settings.span)
        if settings.device == "cuda":
            gpu = torch.cuda.get_device_properties(self.world.device)
            ranks_on_gpu = settings.size if settings.share_gpu else 1
            name = f"the {gpu.name} of rank {settings.rank}"
            check_device_memory(ranks_on_gpu, settings.nbytes, name, gpu.total_memory)
        return dict(self.world.descriptor())

    def _wire(self, descriptors: Sequence[Mapping[str, Any]]) -> None:
        from raymoe.cuda.nvtx import nvtx_range

        world = self._require_world()
        with self._phase("wire"), nvtx_range(world.device, "wire"):
            world.wire([dict(descriptor) for descriptor in descriptors])
        self._enter("ready")

    def _run(self, resolved: Mapping[str, Any], finished: Collection[str]) -> None:
        from raymoe.cuda.nvtx import nvtx_range
        from raymoe.workload import run_case

        world, now = self._require_world(), self.progress
        idle_since = time.monotonic()  # no step since then
        self._enter("running")

        def progressed(progress: Progress) -> None:
            nonlocal idle_since
            block = progress.block
            if block.first == 0:
                self.reports.add(Span("set up", idle_since, block.began, self.generation))
            idle_since = block.met
            self.reports.add(progress)
            now.done, now.total = progress.done, progress.total
            self.log.progress(f"case {now.case}: {in_words(progress.done, progress.total, block.step_s)}")
            world.waiter.check()  # so that an abort also ends a rank that computes and never waits

        for case in job_from_resolved(dict(resolved)).cases():
            if case.name in finished:
                continue
            now.case, now.done, now.total = case.name, 0, 0
            self.log.line(f"case {case.name}")
            with self._phase(f"case {case.name}"), nvtx_range(world.device, f"case {case.name}"):
                idle_since = time.monotonic()
                lines = run_case(case, world, progressed)
            if world.waiter.interrupted is not None:
                self.stopped_lines = tuple({**line, "stopped": True} for line in lines)
                raise world.waiter.interrupted
            now.finished.append((case.name, tuple(lines)))
        self._enter("done")

    def _require_world(self) -> World:
        if self.world is None:
            raise RuntimeError(f"rank {self.index} was asked to work before its memory was opened")
        return self.world

    def _end_alone(self) -> None:
        """End this process: the driver has ended, or the main process ends it because it hangs."""
        self.log.line(f"the driver has said nothing for {SILENT_S:g} s; this rank ends")
        os.kill(os.getpid(), signal.SIGKILL)

    def _enter(self, state: str) -> None:
        self.progress.state = state
        self.log.line(state)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report a phase of this rank at its end, also if it ends by an error."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.reports.add(Span(name, began, time.monotonic(), self.generation))

    def _safely(self, call: Callable[[], T]) -> T | Failure:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  every error of a rank goes to the driver
            self._enter("failed")
            return self._failure(error)

    def _failure(self, error: Exception) -> Failure:
        """Return the error as a value. A wait that failed also names the peer that it waited for."""
        _advise_in_a_job(error)
        peer = error.peer if isinstance(error, PeerTimeout | Aborted) else None
        self.log.line(f"failed: {error}")
        known = isinstance(error, RaymoeError)
        message = str(error) if known else f"rank {self.index} raised {type(error).__name__}: {error}"
        return Failure(
            type(error).__name__,
            error.exit_code if isinstance(error, RaymoeError) else 1,
            message,
            peer,
            None if known else traceback.format_exc(),
            self.stopped_lines,
        )


def _advise_in_a_job(error: Exception) -> None:
    """Let an error name a key of the job, instead of an argument of the library. All ranks of a job call all layers."""
    if isinstance(error, DataRefused) and error.rows_needed is not None:
        error.advice = "raise exchange.capacity"
    elif isinstance(error, PeerTimeout):
        error.advice = ""


def _open_world(member: Member, span: DomainSettings | None) -> World:
    from raymoe.memory.world import SpanningWorld, World

    if span is None:
        return World.of_member(member)
    address = address_for(span.networks, span.node_address)
    return SpanningWorld.open_rank(replace(member, domain=span.key), span.size, address)


# `Any`: Ray's annotations cover neither concurrency groups nor the methods of an actor.
_remote: Any = ray.remote
RankActor: Any = _remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(Rank)
