"""Other systems under the clock of our backends: each a case like any other, or a line that says why it was not run.

They run in a process of their own beside each rank (`apart.py`), because most of them end the process where they meet
what they cannot do, none gives its memory back before the process ends, and each wants settings that are nobody else's.
What they cannot do, or do wrong, is told in the results and ends no run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from raymoe.job import Case, Job
from raymoe.memory.world import World
from raymoe.workload.apart import ApartStep
from raymoe.workload.inputs import draws_of
from raymoe.workload.lines import Line, result_line, shape_keys
from raymoe.workload.measure import Steps, measure
from raymoe.workload.progress import Progress, telling
from raymoe.workload.room import spec_of
from raymoe.workload.routing import Routing
from raymoe.workload.traffic import traffic_of

PACKAGES = {"nvshmem": "torch", "deep_ep": "deep_ep", "deep_ep_v2": "deep_ep", "hybrid_ep": "deep_ep"}
"""What must be installed, by backend. Whether it can do what is wanted is found out by whoever loads it."""


def run_other(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """The lines of one system's operations, each cold and warm, or one line that says why there are none."""
    job = case.job
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, bound=0.0)
    reason = _first(world, refusal(job))
    if reason is None:
        step = ApartStep(world, job)
        try:
            reason = step.begin()
            if reason is None:
                what = f"{case.name}: exchange by {job.exchange.backend}"
                measured = measure(world, steps, step, telling(progress, steps.total), what)
                reason = _first(world, step.trouble)
        finally:
            step.close()
    if reason is not None:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        return [skipped_line(case, reason) | {"device": device}]
    spec = spec_of(job)
    by_op = traffic_of(world, draws_of(Routing.of(job), world.rank), spec).by_op
    shared = shape_keys(case, job.exchange.backend) | step.keys
    return [
        result_line(case, op, by_op[op], measured, place) | shared | {"l2": l2, "leaves_out": step.left_out[op]}
        for place, (op, l2) in enumerate(step.ops)
    ]


def refusal(job: Job) -> str | None:
    """Why a case is not even begun, as far as one rank can tell by itself."""
    backend = job.exchange.backend
    if job.world.ranks == 1:
        return "one rank has no peer to send to"
    if job.world.share_gpu:
        return f"ranks share a GPU; {backend} wants one a rank"
    if job.exchange.wire.dispatch is not None and job.exchange.wire.dispatch != job.shape.dtype:
        return f"rows as {job.exchange.wire.dispatch}; {backend} is run with rows of the dtype and quantises nothing"
    if job.exchange.wire.combine is not None and job.exchange.wire.combine != job.shape.dtype:
        return f"sums as {job.exchange.wire.combine}; {backend} is run with sums of the dtype"
    if find_spec(PACKAGES[backend]) is None:
        return f"package {PACKAGES[backend]} is not installed"
    return None


def skipped_line(case: Case, reason: str) -> Line:
    """A line without figures."""
    said = {"case": case.name, "workload": case.job.workload, "op": "exchange", "ranks": case.job.world.ranks}
    return said | shape_keys(case, case.job.exchange.backend) | {"samples": 0, "skipped": reason}


def _first(world: World, reason: str | None) -> str | None:
    """The first rank's reason that has one; the same on all ranks."""
    reasons = world.swap(reason, "another system: reason")
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
