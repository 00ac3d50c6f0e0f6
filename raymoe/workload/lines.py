"""What a case's result lines have in common."""

from __future__ import annotations

from raymoe.job import Case
from raymoe.workload.measure import Measured
from raymoe.workload.samples import on_wire, spread
from raymoe.workload.traffic import Traffic

Line = dict[str, object]


def result_line(case: Case, op: str, traffic: Traffic, measured: Measured, place: int) -> Line:
    """The line of one operation, whose samples are `measured.us[place]`; keys that do not apply are left to the caller
    or out."""
    times = spread(measured.us[place])
    return {
        "case": case.name,
        "workload": case.job.workload,
        "op": op,
        "graph": False,
        "ranks": case.job.world.ranks,
        **times,
        **on_wire(traffic.total, traffic.busiest, float(str(times["us_p50"]))),
        "verified": measured.verified,
        "max_error": measured.max_error,
        "device": "cpu",
    }


def shape_keys(case: Case, backend: str) -> Line:
    """The keys that workloads with an exchange add."""
    shape, exchange = case.job.shape, case.job.exchange
    dispatch, combine = (way or shape.dtype for way in (exchange.wire.dispatch, exchange.wire.combine))
    return {
        "backend": backend,
        "wire": dispatch if dispatch == combine else f"{dispatch}/{combine}",
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "experts": shape.experts,
        "topk": shape.topk,
        "dtype": shape.dtype,
        "routing": case.job.routing.kind,
        "seed": case.job.routing.seed,
        "layout": exchange.layout,
        "alignment": exchange.alignment,
        "padding": exchange.padding,
    }
