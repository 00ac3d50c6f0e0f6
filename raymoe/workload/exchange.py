"""Dispatch and combine, with nothing between them on the clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch

from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.job import Case
from raymoe.memory.world import World
from raymoe.moe.layer import expert_major
from raymoe.moe.seeds import generator
from raymoe.workload.inputs import Inputs
from raymoe.workload.lines import Line, result_line, shape_keys
from raymoe.workload.measure import Step, Steps, measure
from raymoe.workload.oracle import BOUNDS, AffineExperts, error_of
from raymoe.workload.progress import Progress, telling
from raymoe.workload.room import spec_of
from raymoe.workload.routing import Routing
from raymoe.workload.traffic import Traffics, rows_for


def run_exchange(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Lines for `dispatch`, `combine` and `exchange`, which is both."""
    job = case.job
    dtype: torch.dtype = getattr(torch, job.shape.dtype)
    inputs = Inputs(Routing.of(job), world.rank, job.shape.hidden, dtype)
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, BOUNDS[dtype])
    spec = spec_of(job)
    with Exchange(world, spec, job.exchange.backend) as exchange:
        backend, do_step = exchange.backend, ExchangeStep(world, exchange, inputs)
        measured = measure(world, steps, do_step, telling(progress, steps.total), f"{case.name}: exchange by {backend}")
    traffics = traffic_of(world, inputs, spec.row_bytes)
    ops = (("dispatch", traffics.one_way), ("combine", traffics.one_way), ("exchange", traffics.both))
    keys = shape_keys(case, backend)
    return [result_line(case, op, traffic, measured, place) | keys for place, (op, traffic) in enumerate(ops)]


def traffic_of(world: World, inputs: Inputs, row_bytes: int) -> Traffics:
    """The traffic of an average step."""
    counts = [rows_for(draw.ids, world.size, inputs.routing.experts) for draw in inputs.draws]
    mean = [sum(to_peer) / len(counts) for to_peer in zip(*counts, strict=True)]
    rows: list[list[float]] = world.swap(mean, "traffic")  # type: ignore[assignment]
    return Traffics.of(rows, row_bytes)


class ExchangeStep:
    """One dispatch and one combine, each behind a barrier of its own."""

    def __init__(self, world: World, exchange: Exchange, inputs: Inputs) -> None:
        self.world, self.exchange, self.inputs = world, exchange, inputs
        spec = exchange.spec
        self.experts = AffineExperts(spec.hidden, inputs.dtype, inputs.routing.seed)
        # What combine sends on steps that nobody checks. Written once: reading pages that never were costs nothing.
        self.rows = torch.empty(spec.rows(world.size), spec.hidden, dtype=inputs.dtype)
        self.rows.uniform_(-1, 1, generator=generator("rows", world.rank))
        self.last: Dispatched | None = None

    def __call__(self, index: int, *, verify: bool) -> Step:
        batch = self.inputs.at(index, fresh=verify)
        if verify:
            self._poison()
        self.world.barrier("dispatch: start")
        started = perf_counter_ns()
        self.last = got = self.exchange.dispatch(batch.x, batch.ids, batch.weights)
        dispatched = perf_counter_ns()
        rows = self._through_experts(got) if verify else self.rows
        self.world.barrier("combine: start")
        resumed = perf_counter_ns()
        y = self.exchange.combine(rows, got)
        dispatch, combine = (dispatched - started) / 1e3, (perf_counter_ns() - resumed) / 1e3
        error = error_of(y, batch, self.experts) if verify else None
        return Step((dispatch, combine, dispatch + combine), error)

    def _poison(self) -> None:
        """What the last step left must not be taken for what the next one brings. Slots are not ours to write to."""
        if self.last is not None and self.last.index is None:
            self.last.x.fill_(torch.nan)

    def _through_experts(self, got: Dispatched) -> torch.Tensor:
        """What this rank's experts make of what came; a row that none of them owns stays NaN."""
        x, rows = expert_major(got), torch.full_like(self.rows, torch.nan)
        first = self.world.rank * len(got.expert_counts)
        for local, count in enumerate(got.expert_counts.tolist()):
            start = int(got.expert_offsets[local])
            rows[start : start + count] = self.experts(first + local, x[start : start + count]).to(rows.dtype)
        return rows
