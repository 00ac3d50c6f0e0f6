"""Time dispatch and combine, with no other work between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from raymoe.config import Case
from raymoe.config.sections import OTHER_SYSTEMS
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.differentiable import expert_major
from raymoe.moe.placement import Placement
from raymoe.moe.weights import generator
from raymoe.workload.exchange.placed import ExpertsOfSlots, PlacedDraws
from raymoe.workload.exchange.received import sum_experts
from raymoe.workload.inputs import Inputs, Routing
from raymoe.workload.measure import (
    Line,
    Samples,
    Step,
    Steps,
    Timeline,
    WorkloadStep,
    aborting,
    load_keys,
    measure,
    result_line,
    runs_of,
    shape_keys,
)
from raymoe.workload.memory_needed import spec_of
from raymoe.workload.oracle import AffineExperts, bound_of, error_of
from raymoe.workload.p2p.link import link_gbps
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import domain_keys, expert_load, traffic_of, work_of

ROW_PUSH, NCCL_BARE = "row_push", "nccl_bare"
SENDING, QUANTISATION = ("dispatch", "exchange"), "quantisation"
"""The operations that send rows to experts, and what they leave out where rows are quantised before."""


class TracedStep(WorkloadStep, Protocol):
    """A step of an exchange, or of its baseline. `keys` has the `backend` among others."""

    def timelines(self) -> dict[str, Timeline]:
        """Return when blocks of the slowest rank came to each point, for operations whose kernels record it.

        All ranks call this together, after the steps.
        """


def run_exchange(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return lines for `dispatch`, `combine` and `exchange`, which is both; on GPUs each with cold and warm L2 cache.

    Baselines and other systems have operations of their own.
    """
    job = case.job
    if job.exchange.backend in OTHER_SYSTEMS:
        from raymoe.workload.compare.other_systems import run_other

        return run_other(case, world, progress)
    if job.exchange.backend == NCCL_BARE:
        from raymoe.workload.compare.nccl_bare import run_nccl_bare

        return run_nccl_bare(case, world, progress)
    dtype: torch.dtype = getattr(torch, job.shape.dtype)
    inputs = Inputs(Routing.of(job), world.rank, job.shape.hidden, dtype, world.device)
    spec = spec_of(job)
    verify = job.steps.verify and job.exchange.backend != ROW_PUSH
    steps = Steps(job.steps.warmup, job.steps.count, verify, bound_of(spec))
    placed = PlacedDraws.of(world, inputs.draws, spec)
    with _opening(case, world, spec, inputs, placed.placement) as step:
        keys = step.keys
        label = f"{case.name}: exchange by {keys['backend']}"
        traffic = traffic_of(world, placed.draws, placed.spec)
        ops = [(op, {"backend": str(keys["backend"]), "l2": l2}) for op, l2 in step.ops]
        load = expert_load(world, placed.draws, placed.spec)
        work = work_of(world, placed.draws, load, traffic, ops)
        samples = measure(world, steps, step, step_listener(progress, steps.total, work=work), label)
        with aborting(world):
            timelines = step.timelines()
    limits = link_gbps(case, world, traffic)
    return [
        result_line(case, op, traffic.by_op[op], samples, index)
        | shape_keys(case, str(keys["backend"]))
        | load_keys(load, index)
        | ({"leaves_out": QUANTISATION} if op in SENDING and job.exchange.quantised else {})
        | keys  # row push leaves out more, and says it
        | {"gbps_link": limits.get(op)}
        | {"l2": l2, "timeline": timelines.get(op) if l2 == "cold" else None}
        | {"runs": runs_of(spec.tokens, keys.get("graph"), l2)}
        | host_times(samples, index)
        | domain_keys(world, spec, op)
        for index, (op, l2) in enumerate(step.ops)
    ]


def host_times(samples: Samples, index: int) -> Line:
    """Return the median time of an operation's calls on the host, of the rank with the longest calls.

    Empty if host times were not measured beside the GPU's.
    """
    if index >= len(samples.host_us):
        return {}
    return {"host_us_p50": max(median(times) for times in samples.host_us[index])}


@contextmanager
def _opening(
    case: Case, world: World, spec: ExchangeSpec, inputs: Inputs, placement: Placement | None
) -> Iterator[TracedStep]:
    """Open the exchange of a case, and its step. `placement` is that of its slots, if it has some."""
    section, steps = case.job.exchange, case.job.steps
    if section.backend == ROW_PUSH:
        from raymoe.workload.compare.row_push import RowPushStep

        with closing(RowPushStep(world, spec, inputs, case.job)) as push:
            yield push
        return
    limits: dict[str, Any] = {"sms": section.sms, "chunk": section.net.chunk}
    with ExitStack() as stack:
        if world.device.type == "cpu":
            exchange = stack.enter_context(Exchange(world, spec, section.backend, **limits))
            if placement is not None:
                exchange.place(placement)
            yield ExchangeStep(world, exchange, inputs)
            return
        from raymoe.exchange.peer.workspace import Workspace
        from raymoe.workload.exchange.gpu_exchange import GpuExchangeStep

        traced = None
        if steps.trace and not spec.by_copy_engine and not spec.by_token and world.domains == 1:
            traced = stack.enter_context(Workspace(world, spec, traced=True))
        exchange = stack.enter_context(Exchange(world, spec, section.backend, workspace=traced, **limits))
        if placement is not None:
            exchange.place(placement)
        yield stack.enter_context(
            closing(GpuExchangeStep(world, exchange, inputs, steps.graph, traced, section.quantised))
        )


class ExchangeStep:
    """Times one dispatch and one combine, each after a barrier of its own."""

    ops = (("dispatch", None), ("combine", None), ("exchange", None))

    def __init__(self, world: World, exchange: Exchange, inputs: Inputs) -> None:
        self.world, self.exchange, self.inputs = world, exchange, inputs
        spec = exchange.spec
        self.experts = AffineExperts(spec.hidden, inputs.dtype, inputs.routing.seed)
        self.slots = ExpertsOfSlots(self.experts, exchange)
        # Combine sends these on steps that are not verified. Written once: to read unwritten pages would cost nothing.
        self.rows = torch.empty(spec.rows(world.size), spec.hidden, dtype=inputs.dtype)
        self.rows.uniform_(-1, 1, generator=generator("rows", world.rank))
        self.last: Dispatched | None = None

    @property
    def keys(self) -> Line:
        return {"backend": self.exchange.backend, "chunks": self.exchange.chunks}

    def __call__(self, index: int, *, verify: bool) -> Step:
        batch = self.inputs.at(index, fresh=verify)
        if verify:
            self._poison()
        self.world.barrier("dispatch: start")
        started = perf_counter_ns()
        self.last = dispatched = self.exchange.dispatch(batch.x, batch.ids, batch.weights)
        dispatch = (perf_counter_ns() - started) / 1e3
        rows = self._through_experts(dispatched) if verify else self.rows
        self.world.barrier("combine: start")
        started = perf_counter_ns()
        y = self.exchange.combine(rows, dispatched, weighted=not self.exchange.spec.by_token)
        combine = (perf_counter_ns() - started) / 1e3
        error = error_of(y, batch, self.experts) if verify else None
        return Step((dispatch, combine, dispatch + combine), error)

    def timelines(self) -> dict[str, Timeline]:
        return {}

    def close(self) -> None: ...

    def _poison(self) -> None:
        """Poison the rows of the last step, so that they cannot pass for those of the next one; but not slots."""
        if self.last is not None and self.last.index is None:
            self.last.x.fill_(torch.nan)

    def _through_experts(self, dispatched: Dispatched) -> torch.Tensor:
        """Return the rows that this rank's experts make of those that came; a row of no expert stays NaN."""
        x, rows = expert_major(dispatched), torch.full_like(self.rows, torch.nan)
        first = self.world.rank * len(dispatched.expert_counts)
        if self.exchange.spec.by_token:
            sums = sum_experts(dispatched, self.slots, first)
            rows[: len(sums)] = sums.to(rows.dtype)
            return rows
        for local, count in enumerate(dispatched.expert_counts.tolist()):
            start = int(dispatched.expert_offsets[local])
            rows[start : start + count] = self.slots(first + local, x[start : start + count]).to(rows.dtype)
        return rows
