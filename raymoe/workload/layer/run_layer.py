"""Time a whole Mixture-of-Experts layer, and its parts where it has a router of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from time import perf_counter_ns

import torch

from raymoe.config import Case
from raymoe.memory.world import World
from raymoe.workload.inputs import Batch, Draw, Inputs, Routing
from raymoe.workload.layer.passes import LayerPasses
from raymoe.workload.measure import (
    Line,
    Step,
    Steps,
    WorkloadStep,
    load_keys,
    measure,
    result_line,
    runs_of,
    shape_keys,
)
from raymoe.workload.p2p.link import link_gbps
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import Traffic, domain_keys, expert_load, traffic_of, work_of

STEP, DISPATCH, COMBINE = "step", "dispatch", "combine"


def run_layer(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return a line for `step`, and with a router of its own one for each part.

    A part's line has its time in the step; `<part>_alone` its time by itself, and `<part>_backward` that of its
    gradients. Without a router, tokens follow the job's routing.
    """
    job = case.job
    dtype: torch.dtype = getattr(torch, job.shape.dtype)
    inputs = Inputs(Routing.of(job), world.rank, job.shape.hidden, dtype, world.device)
    passes = LayerPasses(job, world)
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, passes.bound)
    draws = draws_of_layer(passes, inputs)
    traffic, load = traffic_of(world, draws, passes.spec), expert_load(world, draws, passes.spec)
    with closing(_step_of(case, world, passes, inputs)) as step:
        backend = passes.layer.exchange.backend
        ops = [(op, {"backend": backend, "l2": l2}) for op, l2 in step.ops]
        report = step_listener(progress, steps.total, work=work_of(world, draws, load, traffic, ops))
        samples = measure(world, steps, step, report, f"{case.name}: layer by {backend}")
    limits = link_gbps(case, world, traffic) if passes.own_router else {}  # else no line has a bandwidth
    bytes_of = {STEP: traffic.both, DISPATCH: traffic.by_op[DISPATCH], COMBINE: traffic.by_op[COMBINE]}
    tokens = sum(map(inputs.routing.tokens_of, range(world.size)))
    lines = []
    for index, (op, l2) in enumerate(step.ops):
        if op != STEP and not passes.own_router:
            continue  # the parts are in the progress that ranks report
        line = result_line(case, op, bytes_of.get(op, Traffic(0, 0)), samples, index) | shape_keys(case, backend)
        if op not in bytes_of or (op == STEP and passes.backward):
            line |= {"bytes_wire": None, "gbps_wire": None}
        if op == STEP:  # its time is that of products above all, so a bandwidth of it would mean nothing
            line |= {"gbps_wire": None, "tokens_per_s": tokens_per_second(tokens, samples.us[index])}
        if line["gbps_wire"]:
            line |= {"gbps_link": limits.get(op)}
        dispatch, combine = passes.spec.dispatch_wire, passes.spec.combine_wire  # 8-bit experts choose it
        line |= {"wire": dispatch if dispatch == combine else f"{dispatch}/{combine}"}
        if passes.own_router:
            line |= {"routing": job.layer.router.kind}
        forward = {STEP: "exchange", DISPATCH: DISPATCH, COMBINE: COMBINE}
        net = domain_keys(world, passes.spec, "" if op == STEP and passes.backward else forward.get(op, ""))
        # The parts inside a step have events of their own, in single runs.
        many = op == STEP or op.endswith("_alone")
        runs = runs_of(job.shape.tokens, step.keys.get("graph"), l2) if many else 1
        lines.append(line | {"l2": l2, "runs": runs} | step.keys | load_keys(load, index) | net)
    return lines


def tokens_per_second(tokens: int, us: Sequence[float]) -> float | None:
    """Divide the tokens of all ranks by the median time of a step.

    >>> tokens_per_second(2048, [1000.0, 900.0, 4000.0])
    2048000.0
    """
    middle = median(us)
    return round(tokens / middle * 1e6, 1) if middle else None


def draws_of_layer(passes: LayerPasses, inputs: Inputs) -> list[Draw]:
    """Return the routing of this rank's batches. All ranks call this together."""
    if not passes.own_router:
        return inputs.draws
    routed = [passes.routing_of(Batch(x, *inputs.empty)) for x in inputs.rows]
    return [Draw(ids.cpu(), weights.cpu()) for ids, weights in routed]


def _step_of(case: Case, world: World, passes: LayerPasses, inputs: Inputs) -> WorkloadStep:
    if world.device.type == "cpu":
        return CpuLayerStep(world, passes, inputs)
    from raymoe.workload.layer.gpu_layer import GpuLayerStep

    return GpuLayerStep(world, passes, inputs, case.job.steps.graph)


def gradient_of(inputs: Inputs, tokens: int) -> torch.Tensor:
    """Draw the gradient of the output, from -1 to 1 as the tokens."""
    return inputs.fresh_of(inputs.rank, -1)[:tokens]


class CpuLayerStep:
    """Times a step and its parts by the host's clock. Parts include their waits for other ranks."""

    def __init__(self, world: World, passes: LayerPasses, inputs: Inputs) -> None:
        self.world, self.passes, self.inputs = world, passes, inputs
        self.keys: Line = {"chunks": passes.layer.exchange.chunks}
        batch = inputs.at(0)
        self.dy = gradient_of(inputs, len(batch.x))
        passes.marks.note = perf_counter_ns if passes.microbatches == 1 else None  # else a part comes several times
        world.barrier("step: start")
        passes.run(batch, self.dy)
        self._parts = list(dict.fromkeys(part for part, _, _ in passes.marks.spans()))
        self.ops = tuple((op, None) for op in (STEP, *self._parts))

    def __call__(self, index: int, *, verify: bool) -> Step:
        batch = self.inputs.at(index, fresh=verify)
        self.world.barrier("step: start")
        started = perf_counter_ns()
        results = self.passes.run(batch, self.dy)
        ended = perf_counter_ns()
        us = dict.fromkeys(self._parts, 0.0)
        for part, begin, end in self.passes.marks.spans():
            if part in us:
                us[part] += (end - begin) / 1e3
        error = self.passes.error_of(results, batch, self.dy) if verify else None
        return Step(((ended - started) / 1e3, *us.values()), error)

    def close(self) -> None: ...
