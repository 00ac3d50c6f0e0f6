"""Time one operation over rows by every system, on the same tensors, and verify each against float64.

A sample is on a cold L2 cache, replayed from a CUDA graph on GPUs. Each rank works alone on its own tensors, and the
slowest rank's time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from time import perf_counter_ns
from typing import Protocol

import torch

from raymoe.config import Case
from raymoe.errors import WrongResult, one_line
from raymoe.memory.world import World
from raymoe.workload.measure import Line, Samples, Step, Steps, measure, result_line, runs_of
from raymoe.workload.pointwise.operations import OPERATIONS, RowSizes, drawn, error_of, poison
from raymoe.workload.pointwise.row_systems import (
    COPIES,
    LIMITED,
    OURS,
    OWN,
    SYSTEMS,
    Compute,
    Results,
    Task,
    Unavailable,
)
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import Traffic


class RowClock(Protocol):
    """Times a system's function, on CPU ranks or GPU ranks."""

    captured: bool

    def ready(self, make: Callable[[], Compute]) -> Callable[[], float]:
        """Make a function and prepare it to be timed; return a function that takes a sample, in microseconds.

        The function is made on the stream that is timed: a backward by autograd works on the stream of its forward.
        """

    def results(self) -> Results:
        """Compute once more in the same way, and return the results."""

    def close(self) -> None: ...


def run_pointwise(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return a line for each system: its times, or why it has none."""
    job = case.job
    sizes = RowSizes.of(job)
    section = job.pointwise
    task = Task(
        section.op,
        drawn(section.op, sizes, world.rank, world.device),
        sizes,
        None if section.sms == "auto" else section.sms,
        None if section.stages == "auto" else section.stages,
    )
    run = _RunContext(case, world, progress)
    return [_line_of(system, index, task, run) for index, system in enumerate(SYSTEMS)]


class _RunContext:
    """The case, the world and the listener of a run."""

    def __init__(self, case: Case, world: World, progress: Callable[[Progress], None]) -> None:
        self.case, self.world, self.progress = case, world, progress
        steps, op = case.job.steps, case.job.pointwise.op
        dtype: torch.dtype = getattr(torch, case.job.shape.dtype)
        self.steps = Steps(steps.warmup, steps.count, steps.verify, OPERATIONS[op].bound(dtype))

    def clock(self) -> RowClock:
        if self.world.device.type == "cpu":
            return CpuClock(self.world)
        from raymoe.workload.pointwise.gpu_clock import GpuClock

        return GpuClock(self.world, self.case.job.shape.tokens, self.case.job.steps.graph)


def _line_of(system: str, index: int, task: Task, run: _RunContext) -> Line:
    """Measure a system. An error of one in OWN ends the run. An error of another system goes into its line."""
    case, world = run.case, run.world
    label = f"{case.name}: {task.op} by {system}"
    total, before = len(SYSTEMS) * run.steps.total, index * run.steps.total
    with closing(run.clock()) as clock:
        reason, step = None, None
        try:
            step = RowStep(world, system, task, clock)
        except Unavailable as error:
            reason = str(error)
        except Exception as error:
            if system in OWN:
                raise
            reason = f"{type(error).__name__}: {one_line(str(error))}"
        reason = _first_reason(world, reason)
        samples = None
        if reason is None:
            assert step is not None
            report = step_listener(run.progress, total, before)
            try:
                samples = measure(world, run.steps, step, report, label)
            except WrongResult as error:  # all ranks raise it at the same step
                if system in OWN:
                    raise
                reason = one_line(str(error))
        l2 = None if world.device.type == "cpu" else "cold"
        keys: Line = {"graph": clock.captured, "l2": l2, "runs": runs_of(task.sizes.tokens, clock.captured, l2)}
    return _line(case, task, system, samples, reason) | keys | {"device": _device(world)}


def _first_reason(world: World, reason: str | None) -> str | None:
    """Return the reason of the first rank that has one; the same on all ranks."""
    return next((str(why) for why in world.swap(reason, "pointwise: ready") if why is not None), None)


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def _line(case: Case, task: Task, system: str, samples: Samples | None, reason: str | None) -> Line:
    keys: Line = {
        "case": case.name,
        "workload": case.job.workload,
        "op": task.op,
        "backend": system,
        "ranks": case.job.world.ranks,
        "tokens": task.sizes.tokens,
        "hidden": task.sizes.width,
        "dtype": task.sizes.dtype,
        "sms": task.sms if system in LIMITED else None,
        "stages": task.stages if system == OURS else None,
    }
    if samples is None:
        return keys | {"samples": 0, "skipped": reason}
    line = result_line(case, task.op, Traffic(0, 0), samples, 0) | keys
    us = float(str(line["us_p50"]))
    # A cold time is a difference of two samples, which may be negative for a few rows.
    return line | {
        "bytes_wire": None,
        "bytes_memory": task.nbytes,
        "gbps_memory": task.nbytes / us / 1e3 if us > 0 else None,
    }


class RowStep:
    """One sample of a system."""

    def __init__(self, world: World, system: str, task: Task, clock: RowClock) -> None:
        self._world, self._system, self._task, self._clock = world, system, task, clock
        self._sample = clock.ready(lambda: SYSTEMS[system](task))

    def __call__(self, index: int, *, verify: bool) -> Step:  # noqa: ARG002  (all steps have the same tensors)
        us = self._sample()
        return Step((us,), self._error() if verify else None)

    def _error(self) -> float:
        results = self._clock.results()
        if self._system in COPIES:
            return 0.0 if bool((results[0] == 1).all()) else torch.inf
        return error_of(self._task.op, results, self._task.tensors, self._task.sizes)


class CpuClock:
    """Times a function on a CPU rank, by the host's clock."""

    captured = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._compute: Compute | None = None

    def ready(self, make: Callable[[], Compute]) -> Callable[[], float]:
        self._compute = make()
        self._computed()
        return self._sample

    def _sample(self) -> float:
        self._world.barrier("pointwise: start")
        started = perf_counter_ns()
        self._results = self._computed()
        return (perf_counter_ns() - started) / 1e3

    def _computed(self) -> Results:
        assert self._compute is not None
        return self._compute()

    def results(self) -> Results:
        for tensor in self._results:
            poison(tensor)
        return self._computed()

    def close(self) -> None: ...
