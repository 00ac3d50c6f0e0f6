"""Time the products of experts by every system, in turns, on the same tensors, and verify each against float64.

In a step each system computes once, one after the other, so that all of them see the same clocks of the GPU. Each step
has another order: a product runs slower after one that made the GPU hot. A sample is on a cold L2 cache, replayed from
a CUDA graph on GPUs. Each rank works alone on its own tensors, and the slowest
rank's time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from random import Random
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from raymoe.config import Case
from raymoe.errors import one_line
from raymoe.memory.world import World
from raymoe.workload.measure import Line, Samples, Step, Steps, measure, result_line
from raymoe.workload.oracle import BOUNDS
from raymoe.workload.products.prepared import Prepared, Unavailable
from raymoe.workload.products.systems import OWN, SYSTEMS
from raymoe.workload.products.tasks import OPS, ProductSizes, Task
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import Traffic

SWIGLU_SLACK = 2
"""Some systems round gate and up before SwiGLU, which adds their errors."""


class ProductClock(Protocol):
    """Times the functions of systems, on CPU ranks or GPU ranks."""

    captured: bool

    def ready(self, make: Callable[[], Prepared]) -> TimedProduct:
        """Make a system's function and prepare it to be timed, on the stream that is timed."""

    def close(self) -> None: ...


class TimedProduct(Protocol):
    """A system that is ready to be timed."""

    @property
    def prepared(self) -> Prepared: ...

    def sample(self) -> float:
        """Compute once on a cold L2 cache; return microseconds."""

    def result(self) -> Tensor:
        """Compute once more in the same way, into memory that held NaN."""


def run_products(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return a line for each operation and system: its times, or why it has none."""
    sizes = ProductSizes.of(case.job)
    lines: list[Line] = []
    for index, op in enumerate(OPS):
        task = Task.drawn(op, sizes, world.rank, world.device)
        with closing(_clock(world, case)) as clock:
            lines += _Turns(case, world, task, clock).lines(progress, index)
    return lines


def order_of_step(index: int, systems: list[str]) -> list[str]:
    """Return the order in which systems compute in a step, which is the same on all ranks.

    >>> order_of_step(0, ["a", "b", "c"]), order_of_step(1, ["a", "b", "c"])
    (['b', 'c', 'a'], ['a', 'c', 'b'])
    """
    return Random(index).sample(systems, len(systems))


def _clock(world: World, case: Case) -> ProductClock:
    if world.device.type == "cpu":
        return CpuClock(world)
    from raymoe.workload.products.gpu_clock import GpuClock

    return GpuClock(world, case.job.steps.graph)


class _Turns:
    """All systems of one operation, and the step in which each computes once."""

    def __init__(self, case: Case, world: World, task: Task, clock: ProductClock) -> None:
        self._case, self._world, self._task, self._clock = case, world, task, clock
        steps = case.job.steps
        self._bound = BOUNDS[task.x.dtype] * (SWIGLU_SLACK if task.gated else 1)
        self._steps = Steps(steps.warmup, steps.count, steps.verify, self._bound)
        self._reasons: dict[str, str] = {}
        self._errors: dict[str, float] = {}
        self._systems: dict[str, TimedProduct] = {}
        for name in SYSTEMS:
            self._prepare(name)

    def _prepare(self, name: str) -> None:
        """Make a system ready. An error of one in OWN ends the run. Another's is the reason why its line has no times,
        and so is a wrong result."""
        reason = None
        try:
            system = self._clock.ready(lambda: SYSTEMS[name](self._task))
            if name not in OWN and (wrong := system.prepared.error(system.result())) > self._bound:
                reason = f"its result has an error of {wrong:.3g}, and the bound is {self._bound:.3g}"
        except Unavailable as error:
            reason = str(error)
        except Exception as error:
            if name in OWN:
                raise
            reason = f"{type(error).__name__}: {one_line(str(error))}"
        reasons = self._world.swap(reason, "products: ready")
        first = next((str(why) for why in reasons if why is not None), None)
        if first is None:
            self._systems[name] = system
        else:
            self._reasons[name] = first

    def __call__(self, index: int, *, verify: bool) -> Step:
        times = {name: self._systems[name].sample() for name in order_of_step(index, list(self._systems))}
        us = tuple(times[name] for name in self._systems)
        if not verify:
            return Step(us)
        for name, system in self._systems.items():
            error = system.prepared.error(system.result())
            self._errors[name] = max(error, self._errors.get(name, 0.0))
        return Step(us, max(self._errors.values()))

    def lines(self, progress: Callable[[Progress], None], index: int) -> list[Line]:
        """Run all steps; return the lines of all systems."""
        total = len(OPS) * self._steps.total
        report = step_listener(progress, total, index * self._steps.total)
        label = f"{self._case.name}: {self._task.op} by {', '.join(self._systems)}"
        samples = measure(self._world, self._steps, self, report, label)
        errors = self._world.swap([self._errors.get(name) for name in self._systems], "products: errors")
        for place, name in enumerate(self._systems):
            of_ranks = [answer[place] for answer in errors]  # type: ignore[index]
            if None not in of_ranks:
                self._errors[name] = max(of_ranks)
        return [self._line(name, samples) for name in SYSTEMS]

    def _line(self, name: str, samples: Samples) -> Line:
        task, job, on_gpu = self._task, self._case.job, self._world.device.type == "cuda"
        keys: Line = {
            "case": self._case.name,
            "workload": job.workload,
            "op": task.op,
            "backend": name,
            "graph": self._clock.captured,
            "l2": "cold" if on_gpu else None,
            "ranks": job.world.ranks,
            "tokens": task.rows,
            "rows": job.products.rows,
            "hidden": task.sizes.hidden,
            "ffn": task.sizes.ffn,
            "experts": len(task.sizes.counts),
            "dtype": task.sizes.dtype,
            "routing": job.products.kind,
            "bytes_weights": task.weight_bytes,
            "device": torch.cuda.get_device_name(self._world.device) if on_gpu else "cpu",
        }
        if name in self._reasons:
            return keys | {"samples": 0, "skipped": self._reasons[name]}
        line = result_line(self._case, task.op, Traffic(0, 0), samples, list(self._systems).index(name)) | keys
        us = float(str(line["us_p50"]))
        copies = name == "copy"
        own_bytes = self._systems[name].prepared.nbytes
        nbytes = task.weight_bytes if copies else task.nbytes if own_bytes is None else own_bytes
        return line | {
            "bytes_wire": None,
            "bytes_memory": nbytes,
            "gbps_memory": nbytes / us / 1e3,
            "tflops": None if copies else task.flops / us / 1e6,
            "max_error": self._errors.get(name),
        }


class CpuClock:
    """Times functions on a CPU rank, by the host's clock."""

    captured = False

    def __init__(self, world: World) -> None:
        self._world = world

    def ready(self, make: Callable[[], Prepared]) -> TimedProduct:
        prepared = make()
        prepared.compute()
        return _CpuProduct(self._world, prepared)

    def close(self) -> None: ...


@dataclass(frozen=True)
class _CpuProduct:
    world: World
    prepared: Prepared

    def sample(self) -> float:
        self.world.barrier("products: start")
        started = perf_counter_ns()
        self.prepared.compute()
        return (perf_counter_ns() - started) / 1e3

    def result(self) -> Tensor:
        return self.prepared.compute()
