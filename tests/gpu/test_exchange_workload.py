"""Test workload exchange on GPU ranks: complete lines, verified, eager and replayed. No test is about speed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from raymoe.config import Job  # noqa: E402
from raymoe.errors import ConfigError, RaymoeError, WrongResult  # noqa: E402
from raymoe.exchange.exchange import Exchange  # noqa: E402
from raymoe.exchange.peer.trace import POINTS  # noqa: E402
from raymoe.exchange.peer.workspace import FEW_TOKENS  # noqa: E402
from raymoe.memory.world import World  # noqa: E402
from raymoe.report.results import complete  # noqa: E402
from raymoe.workload import run_case  # noqa: E402
from raymoe.workload.compare.nccl_bare import LEFT_OUT  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.unit.exchange.peer.timeline_judge import judge_timeline  # noqa: E402

pytestmark = NEEDS_GPU

RANKS = max(2, min(4, GPUS))
SHAPE = {"tokens": 200, "hidden": 512, "experts": 8, "topk": 3}
NCCL = pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each rank; {GPUS} here")
OPS = [(op, l2) for op in ("dispatch", "combine", "exchange") for l2 in ("cold", "warm")]


def job(size: int, **sections: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {
        "name": "test",
        "workload": "exchange",
        "world": {"ranks": size, "device": "cuda", "share_gpu": size > GPUS},
        "shape": SHAPE,
        "steps": {"warmup": 1, "count": 2},
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return given


def run(world: World, given: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for case in Job.model_validate(given).cases() for line in run_case(case, world, lambda _: None)]


def lines_of(ranks, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines, which must be the same on all ranks and fit results.jsonl."""
    answers = ranks.run(given["world"]["ranks"], run, given)
    assert all(lines == answers[0] for lines in answers)
    lines = [complete(line, run="r", generation=0, commit=None) for line in answers[0]]
    for line in lines:
        assert line["us_p50"] > 0 and line["device"] == torch.cuda.get_device_name(0)
    return lines


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("layout", ["expert", "rank", "token"])
@pytest.mark.parametrize("backend", ["fused", "staged", pytest.param("allgather", marks=NCCL)])
def test_every_line_is_complete_and_verified(ranks, backend, layout, graph):
    exchange = {"backend": backend, "layout": layout}
    lines = lines_of(ranks, job(RANKS, exchange=exchange, steps={"graph": graph}))
    assert [(line["op"], line["l2"]) for line in lines] == OPS
    for line in lines:
        assert (line["verified"], line["samples"], line["graph"]) == (True, 2, graph)
        assert 0 < line["max_error"] <= 1e-2
        assert (line["backend"], line["layout"], line["leaves_out"]) == (backend, layout, None)
        assert line["gbps_wire"] > 0
        assert (line["gbps_link"] or 0.0) > 0 if RANKS <= GPUS else line["gbps_link"] is None
        assert len(line["us_by_rank"]) == RANKS and line["rows_busiest"] <= line["rows_capacity"]
        assert (line["host_us_p50"] is None) == graph and (graph or 0 < line["host_us_p50"] < 5000)
    if backend != "allgather":
        assert all(line["sms"] >= 1 for line in lines)


@NCCL
def test_collective_runs_eagerly_and_refuses_graphs(ranks):
    lines = lines_of(ranks, job(RANKS, exchange={"backend": "collective"}, steps={"graph": "auto"}))
    assert {(line["graph"], line["verified"]) for line in lines} == {(False, True)}
    given = job(RANKS, exchange={"backend": "collective"}, steps={"graph": True})
    for error in ranks.outcomes(RANKS, run, given):
        assert isinstance(error, ConfigError) and "cannot be captured" in str(error)


@pytest.mark.parametrize("layout", ["expert", "token"])
def test_few_tokens_are_timed_in_samples_of_many_runs(ranks, layout):
    exchange = {"backend": "fused", "layout": layout}
    lines = lines_of(ranks, job(2, shape={"tokens": 3}, exchange=exchange, steps={"graph": True}))
    assert [(line["op"], line["l2"], line["verified"]) for line in lines] == [(*op, True) for op in OPS]


@pytest.mark.parametrize(
    "routing",
    [{"kind": "zipf", "alpha": 1.2}, {"ragged": True, "masked": 0.3}, {"masked": 1.0}],
    ids=["zipf", "ragged", "nothing"],
)
def test_every_kind_of_routing_is_verified(ranks, routing):
    lines = lines_of(ranks, job(RANKS, routing=routing, exchange={"backend": "fused"}))
    assert all(line["verified"] for line in lines)
    assert all((line["bytes_wire"] == 0) == (routing == {"masked": 1.0}) for line in lines)


@pytest.mark.parametrize(
    ("output", "layout", "quantised"),
    [("raw", "expert", False), ("raw", "expert", True), ("raw", "rank", False), ("dequantised", "expert", False)],
)
def test_float8_moves_fewer_bytes_to_the_experts_and_as_many_home(ranks, output, layout, quantised):
    both = [
        lines_of(ranks, job(RANKS, exchange={"backend": "fused", "layout": layout, **wire}))
        for wire in ({}, {"wire": {"dispatch": "float8_e4m3"}, "output": output, "quantised": quantised})
    ]
    for plain, fp8 in zip(*both, strict=True):
        assert fp8["leaves_out"] == ("quantisation" if quantised and fp8["op"] != "combine" else None)
        assert fp8["verified"] and 1e-3 < fp8["max_error"] <= 6e-2
        assert fp8["wire"] == "float8_e4m3/bfloat16"
        share = fp8["bytes_wire"] / plain["bytes_wire"]
        row = (512 + 16) / 1024
        assert share == pytest.approx({"dispatch": row, "combine": 1, "exchange": (row + 1) / 2}[fp8["op"]], rel=1e-4)


def test_one_rank_moves_no_bytes_and_is_verified(ranks):
    for line in lines_of(ranks, job(1, exchange={"backend": "fused"})):
        assert (line["verified"], line["bytes_wire"], line["gbps_wire"], line["gbps_link"]) == (True, 0, None, None)


def test_row_push_has_one_operation_and_is_not_verified(ranks):
    lines = lines_of(ranks, job(RANKS, exchange={"backend": "row_push"}))
    assert [(line["op"], line["l2"]) for line in lines] == [("dispatch", "cold"), ("dispatch", "warm")]
    for line in lines:
        assert (line["verified"], line["max_error"], line["graph"]) == (None, None, True)
        assert "routing" in line["leaves_out"] and line["bytes_wire"] > 0


@NCCL
@pytest.mark.parametrize("tokens", [3, 200])
def test_bare_nccl_calls_have_a_line_each_and_are_not_verified(ranks, tokens):
    lines = lines_of(ranks, job(RANKS, shape={"tokens": tokens}, exchange={"backend": "nccl_bare"}))
    assert [(line["op"], line["l2"]) for line in lines] == [(op, l2) for op in LEFT_OUT for l2 in ("cold", "warm")]
    for line in lines:
        assert (line["backend"], line["verified"], line["graph"]) == ("nccl_bare", None, True)
        assert line["leaves_out"] == LEFT_OUT[line["op"]]
        assert (line["bytes_wire"] == 0) == (line["op"] == "copy_rows")


def test_bare_nccl_calls_of_one_rank_are_skipped(ranks):
    [[line]] = ranks.run(1, run, job(1, exchange={"backend": "nccl_bare"}))
    assert (line["samples"], line["skipped"]) == (0, "one rank has no peer to send to")


@pytest.mark.parametrize(
    ("tokens", "wire", "graph"),
    [
        (3, "bfloat16", True),
        (3, "float8_e4m3", False),
        (FEW_TOKENS + 1, "bfloat16", False),
        (FEW_TOKENS + 1, "float8_e4m3", True),
    ],
)
def test_traced_kernels_record_timelines_of_dispatch_and_combine(ranks, tokens, wire, graph):
    exchange, steps = {"backend": "fused", "wire": {"dispatch": wire}}, {"graph": graph, "trace": True}
    lines = lines_of(ranks, job(2, shape={"tokens": tokens}, exchange=exchange, steps=steps))
    assert [(line["op"], line["l2"], line["verified"]) for line in lines] == [(*op, True) for op in OPS]
    timelines = {line["op"]: line["timeline"] for line in lines if line["timeline"]}
    assert list(timelines) == ["dispatch", "combine"]
    for line in lines:
        assert (line["timeline"] is not None) == (line["l2"] == "cold" and line["op"] != "exchange")
    for op, timeline in timelines.items():
        judge_timeline(op, {point: tuple(times) for point, *times in timeline}, slack_us=1.2)
        medians = [median for _, _, median, _ in timeline]
        assert medians == sorted(medians)
        assert {point for point, *_ in timeline} <= set(POINTS[op])
        assert ("arrived" in {point for point, *_ in timeline}) == (tokens > FEW_TOKENS)


def test_backends_without_a_trace_run_beside_a_traced_one(ranks):
    given = job(RANKS, steps={"trace": True}) | {"matrix": {"exchange.backend": ["staged", "row_push", "fused"]}}
    lines = lines_of(ranks, given)
    assert {line["backend"] for line in lines if line["timeline"]} == {"fused"}
    assert {line["backend"] for line in lines} == {"staged", "row_push", "fused"}


def run_with_spoilt_rows(world: World, given: dict[str, Any], fault: str) -> list[dict[str, Any]]:
    """Run a job in which rank 1 spoils the result of its timed dispatch or combine, once the stream is done."""
    real = Exchange.check

    def check_and_spoil(self: Exchange) -> None:
        real(self)
        step = steps[0] if steps else None
        if step is not None:
            if fault == "combine":
                step.y[0] += 1
            else:
                step.dispatched.x[:2] = step.dispatched.x[:2].flip(0)
            torch.cuda.synchronize()

    from raymoe.workload.exchange.gpu_exchange import GpuExchangeStep

    steps: list[GpuExchangeStep] = []
    poison = GpuExchangeStep._poison

    def poison_and_note(self: GpuExchangeStep) -> None:
        poison(self)
        steps.append(self)

    if world.rank == 1:
        Exchange.check, GpuExchangeStep._poison = check_and_spoil, poison_and_note
    try:
        return run(world, given)
    finally:
        Exchange.check, GpuExchangeStep._poison = real, poison


@pytest.mark.parametrize("fault", ["dispatch", "combine"])
def test_spoilt_rows_stop_every_rank(ranks, fault):
    given = job(2, exchange={"backend": "fused"}, steps={"graph": False})
    errors = ranks.outcomes(2, run_with_spoilt_rows, given, fault)
    assert {type(error) for error in errors} == {WrongResult} and len({str(error) for error in errors}) == 1


def test_a_capacity_that_overflows_is_refused_on_all_ranks(ranks):
    given = job(RANKS, routing={"masked": 0.01}, exchange={"backend": "fused", "capacity": 8})
    for error in ranks.outcomes(RANKS, run, given):
        assert isinstance(error, RaymoeError) and error.exit_code == 7
