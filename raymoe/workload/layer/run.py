"""Time a whole Mixture-of-Experts layer: dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch

from raymoe.config import Case
from raymoe.memory.world import World
from raymoe.moe.experts import arithmetic_dtype
from raymoe.moe.layer import LayerForm, MoELayer
from raymoe.moe.weights import ExpertShape
from raymoe.workload.inputs import Inputs, Routing
from raymoe.workload.measure import Line, Step, Steps, load_keys, measure, result_line, shape_keys
from raymoe.workload.memory_needed import spec_of
from raymoe.workload.oracle import LAYER_SLACK, SwigluExperts, bound_of, error_of
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import expert_load, traffic_of, work_of


def run_layer(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return one line, for `step`. Tokens follow the job's routing, not the layer's own router."""
    job = case.job
    dtype: torch.dtype = getattr(torch, job.shape.dtype)
    inputs = Inputs(Routing.of(job), world.rank, job.shape.hidden, dtype)
    spec, seed = spec_of(job), job.routing.seed
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, LAYER_SLACK * bound_of(spec))
    layer = MoELayer(world, spec, LayerForm(job.shape.ffn), backend=job.exchange.backend, seed=seed)
    layer.experts.to(arithmetic_dtype(dtype))  # converted once, not in each step
    oracle = SwigluExperts(ExpertShape(spec.hidden, job.shape.ffn, dtype), seed)
    backend, do_step = layer.exchange.backend, LayerStep(world, layer, inputs, oracle)
    traffic = traffic_of(world, inputs.draws, spec)
    ops = [(op, {"backend": backend}) for op in LayerStep.ops]
    load = expert_load(world, inputs.draws, spec.experts)
    work = work_of(world, inputs.draws, load, traffic, ops)
    report = step_listener(progress, steps.total, work=work)
    measured = measure(world, steps, do_step, report, f"{case.name}: layer by {backend}")
    return [result_line(case, "step", traffic.both, measured, 0) | shape_keys(case, backend) | load_keys(load, 0)]


class LayerStep:
    """Times one pass through the layer, and in it the dispatch and the combine, each with its wait for other ranks."""

    ops = ("step", "dispatch", "combine")

    def __init__(self, world: World, layer: MoELayer, inputs: Inputs, oracle: SwigluExperts) -> None:
        self.world, self.layer, self.inputs, self.oracle = world, layer, inputs, oracle
        self._dispatched_at = self._applied_at = 0
        layer.experts.register_forward_pre_hook(self._note_dispatched)
        layer.experts.register_forward_hook(self._note_applied)

    def __call__(self, index: int, *, verify: bool) -> Step:
        batch = self.inputs.at(index, fresh=verify)
        self.world.barrier("step: start")
        started = perf_counter_ns()
        with torch.no_grad():
            y = self.layer.routed(batch.x, batch.ids, batch.weights)
        ended = perf_counter_ns()
        times = (ended - started, self._dispatched_at - started, ended - self._applied_at)
        us = tuple(ns / 1e3 for ns in times)
        return Step(us, error_of(y, batch, self.oracle, by_row=True) if verify else None)

    def _note_dispatched(self, *_: object) -> None:
        self._dispatched_at = perf_counter_ns()

    def _note_applied(self, *_: object) -> None:
        self._applied_at = perf_counter_ns()
