"""Workloads on real ranks: their result lines, and that a wrong result stops every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.config.job import Job
from raymoe.errors import Aborted, ConfigError, DataRefused, PeerTimeout, WrongResult
from raymoe.exchange.exchange import Exchange
from raymoe.memory.world import World
from raymoe.report.results import KEYS, complete
from raymoe.transport.channels import Channels
from raymoe.workload import Progress, run_case
from raymoe.workload.inputs import Draw
from raymoe.workload.measure import Step, Steps, measure, result_line
from raymoe.workload.p2p.link import link_gbps
from raymoe.workload.traffic import ExchangeTraffic, Load, Traffic, work_of
from tests.unit.ranks import RankPool

SMALL = {"tokens": 24, "hidden": 32, "experts": 8, "topk": 3, "ffn": 16}
STEPS = {"warmup": 1, "count": 4}
Lines = list[dict[str, Any]]


def job(workload: str, ranks: int = 4, **sections: dict[str, object]) -> dict[str, object]:
    given: dict[str, Any] = {
        "name": "test",
        "workload": workload,
        "world": {"ranks": ranks},
        "shape": SMALL,
        "steps": STEPS,
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return given


def run_cases(world: World, given: dict[str, Any]) -> tuple[Lines, list[Progress]]:
    progress: list[Progress] = []
    lines = [line for case in Job.model_validate(given).cases() for line in run_case(case, world, progress.append)]
    return lines, progress


def run(pool: RankPool, given: dict[str, Any]) -> Lines:
    """Run a job; return its lines, which must be the same on every rank and fit results.jsonl."""
    answers = pool.run(given["world"]["ranks"], run_cases, given)
    lines, progress = answers[0]
    assert all(answer[0] == lines for answer in answers)
    assert progress[-1].done == progress[-1].total
    for before, after in pairwise(progress):
        assert before.done < after.done <= after.total or before.done == before.total
    for line in lines:
        assert set(complete(line, run="r", generation=0, commit=None)) == set(KEYS)
        assert 0 < line["us_min"] <= line["us_p50"] <= line["us_p99"] <= line["us_max"]
        assert line["graph"] is False and line["device"] == "cpu" and line["ranks"] == given["world"]["ranks"]
        assert line["gbps_wire"] is None or math.isfinite(line["gbps_wire"])
    return lines


def failures(pool: RankPool, size: int, function: Any, *args: object) -> list[BaseException]:
    """Return the errors that the ranks raised; every rank must have raised one."""
    found = pool.outcomes(size, function, *args)
    assert all(isinstance(error, BaseException) for error in found), found
    return found


ROUTINGS = {
    "uniform": {},
    "zipf": {"kind": "zipf", "alpha": 1.2},
    "hot": {"kind": "hot", "share": 1.0},
    "masked": {"masked": 0.4},
    "all masked": {"masked": 1.0},
    "ragged": {"ragged": True},
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_exchange_verifies_on_every_routing(pool: RankPool, routing: str) -> None:
    lines = run(pool, job("exchange", routing=ROUTINGS[routing]))
    assert [line["op"] for line in lines] == ["dispatch", "combine", "exchange"]
    for line in lines:
        assert line["verified"] is True and 0 <= line["max_error"] <= 1e-2
        assert line["backend"] == "host" and line["samples"] == 4
        assert line["wire"] == line["dtype"] == "bfloat16"
    assert abs(lines[2]["bytes_wire"] - lines[0]["bytes_wire"] - lines[1]["bytes_wire"]) <= 1  # means, rounded
    assert lines[0]["us_min"] < lines[2]["us_min"]
    load, entries = lines[0]["expert_load"], lines[0]["ranks"] * lines[0]["tokens"] * lines[0]["topk"]
    assert len(load) == lines[0]["experts"] and [line.get("expert_load") for line in lines[1:]] == [None, None]
    assert {line["expert_load_imbalance"] for line in lines} == {round(max(load) * len(load) / (sum(load) or 1), 3)}
    most, capacity = lines[0]["rows_busiest"], lines[0]["rows_capacity"]
    assert max(sum(load[first : first + 2]) for first in range(0, 8, 2)) <= most <= capacity == 4 * 24 * 3 + 32
    assert most % 16 == 0 and (most == 0) == (routing == "all masked")
    dropped = routing in ("masked", "all masked", "ragged")
    assert (sum(load) < entries) if dropped else (sum(load) == pytest.approx(entries, abs=0.01 * len(load)))


def test_the_work_of_a_step_has_the_share_of_its_rank() -> None:
    load, none = Load([6.0, 2.0, 1.0, 3.0], busiest_rows=16, capacity=64), ExchangeTraffic(*[Traffic(0, 0)] * 3)
    draws, worlds = (
        [Draw(torch.zeros(5, 2), torch.zeros(5, 2))],
        [SimpleNamespace(rank=rank, size=2) for rank in (0, 1)],
    )
    works = [work_of(world, draws, load, none, []) for world in worlds]
    assert [(work.tokens, work.imbalance, work.rank_load) for work in works] == [(5, 2.0, 8 / 6), (5, 1.0, 4 / 6)]


@pytest.mark.parametrize("backend", ["collective", "allgather"])
def test_every_backend_reports_the_same_bytes(pool: RankPool, backend: str) -> None:
    ours, theirs = (run(pool, job("exchange", exchange={"backend": b})) for b in ("host", backend))
    assert [line["bytes_wire"] for line in ours] == [line["bytes_wire"] for line in theirs]
    assert {line["backend"] for line in theirs} == {backend}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["expert", "rank", "token"])
def test_every_layout_and_dtype_is_verified(pool: RankPool, layout: str, dtype: str) -> None:
    for workload in ("exchange",) if layout == "token" else ("exchange", "layer"):
        lines = run(pool, job(workload, 2, shape={"dtype": dtype}, exchange={"layout": layout, "padding": "zero"}))
        assert all(line["verified"] and line["layout"] == layout and line["dtype"] == dtype for line in lines)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["expert", "token"])
def test_slots_are_verified_and_even_the_rows_of_ranks(pool: RankPool, layout: str) -> None:
    """Eight experts on four ranks: with two slots a rank there is no copy, and one expert has most rows."""
    asked: dict[str, Any] = {"routing": {"kind": "zipf", "alpha": 1.5}}
    asked["shape"] = {"experts": 8, "topk": 2, "tokens": 200}
    most = {}
    for slots in (2, 3):
        lines = run(pool, job("exchange", **asked, exchange={"layout": layout, "slots": slots}))
        load = lines[0]["expert_load"]
        assert all(line["verified"] for line in lines) and len(load) == 4 * slots
        assert sum(load) == pytest.approx(4 * 200 * 2, abs=0.2)
        most[slots] = max(sum(load[first : first + slots]) for first in range(0, 4 * slots, slots)) / sum(load) * 4
    assert most[3] < 1.1 < 1.3 < most[2]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_16_bit_combine_wire_halves_its_bytes_and_is_verified(pool: RankPool, wire: str) -> None:
    """The bound is that of the coarser dtype; the error is above that of float32."""
    asked: dict[str, Any] = {"shape": {"dtype": "float32"}, "exchange": {"wire": {"combine": wire}}}
    lines = run(pool, job("exchange", **asked))
    assert abs(lines[0]["bytes_wire"] - 2 * lines[1]["bytes_wire"]) <= 1 < lines[1]["bytes_wire"]  # means, rounded
    for line in (*lines, *run(pool, job("layer", 2, **asked))):
        assert line["verified"] and line["max_error"] > 1e-5
        assert line["wire"] == f"float32/{wire}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layer_gives_one_verified_line_for_a_case(pool: RankPool, ranks: int) -> None:
    lines = run(pool, job("layer", ranks, routing={"ragged": True, "masked": 0.1}, steps={"count": 52}))
    assert [line["op"] for line in lines] == ["step"]
    assert lines[0]["verified"] is True and 0 < lines[0]["max_error"] <= 6e-2
    assert lines[0]["gbps_wire"] is None and bool(lines[0]["bytes_wire"]) == (ranks > 1)


def test_a_world_of_one_rank_sends_no_bytes(pool: RankPool) -> None:
    lines = run(pool, job("exchange", 1))
    assert {(line["bytes_wire"], line["gbps_wire"], line["gbps_link"]) for line in lines} == {(0, None, None)}


def test_the_limit_of_the_links_is_beside_each_number(pool: RankPool) -> None:
    """Measured in the same run by plain copies; so a longer copy of as many bytes would lower it."""
    for lines in (run(pool, job("exchange", 4)), run(pool, job("layer", 4, layer={"router": {"kind": "softmax"}}))):
        moved = [line for line in lines if line["gbps_wire"]]
        assert [line["op"] for line in moved][:2] == ["dispatch", "combine"]
        assert all(0 < line["gbps_link"] < 1e3 for line in moved)
        assert all(line.get("gbps_link") is None for line in lines if line not in moved)
    slowed = pool.run(4, limit_of_slow_copies)
    assert all(answer == slowed[0] for answer in slowed)
    plain, slow = slowed[0]
    assert plain.keys() == slow.keys() == {"dispatch", "combine", "exchange"}
    assert all(slow[op] < plain[op] for op in plain) and slow["exchange"] == pytest.approx(slow["dispatch"], rel=0.2)


def test_a_stop_while_the_limit_is_measured_keeps_the_lines_of_the_case(pool: RankPool) -> None:
    for lines, stopped in pool.run(2, stopped_in_the_limit):
        assert [line["op"] for line in lines] == ["dispatch", "combine", "exchange"] and stopped
        assert all(line["samples"] == 4 and line["gbps_link"] is None for line in lines)


def stopped_in_the_limit(world: World) -> tuple[Lines, bool]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Channels, "send", lambda *_: (world.abort("the gang is being stopped"), world.waiter.check()))
        lines, _ = run_cases(world, job("exchange", 2))
    return lines, isinstance(world.waiter.interrupted, Aborted)


def limit_of_slow_copies(world: World) -> tuple[dict[str, float], dict[str, float]]:
    case = Job.model_validate(job("exchange", 4)).cases()[0]
    traffic = ExchangeTraffic.of([[0, 9, 9, 9]] * 4, 1000)
    plain = link_gbps(case, world, traffic)
    real = Channels.send
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Channels, "send", lambda self, *message: (sleep(0.005), real(self, *message)))
        return plain, link_gbps(case, world, traffic)


def test_times_of_ranks_and_over_steps_show_who_was_slow_and_when(pool: RankPool) -> None:
    line = pool.run(2, slow_line)[0]
    assert line["us_by_rank"] == [[10.0, 10.0], [12.0, 90.0]]
    assert line["us_over_steps"] == [12.0] * 7 + [90.0] + [12.0] * 12 and line["us_p99"] == 90.0


def slow_line(world: World) -> dict[str, Any]:
    """A step of rank 1 takes 12 us, and the seventh after the first timed one 90 us."""

    def do_step(index: int, *, verify: bool) -> Step:
        slow = 90.0 if index == 9 else 12.0
        return Step((slow if world.rank else 10.0,), 0.0 if verify else None)

    samples = measure(world, Steps(warmup=2, count=20, verify=True, bound=1.0), do_step, [].append, "test")
    case = Job.model_validate(job("exchange", 2)).cases()[0]
    return result_line(case, "exchange", Traffic(0, 0), samples, 0)


def test_without_verify_lines_have_no_verdict(pool: RankPool) -> None:
    for line in run(pool, job("exchange", 2, steps={"verify": False})):
        assert line["verified"] is None and line["max_error"] is None


def test_cases_of_a_matrix_run_in_order(pool: RankPool) -> None:
    given = job("exchange", 2) | {"matrix": {"shape.tokens": [8, 16]}}
    lines = run(pool, given)
    assert [(line["case"], line["tokens"]) for line in lines[::3]] == [("tokens=8", 8), ("tokens=16", 16)]


SIZES = [1, 4096, 100_003]


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_pairs_are_all_ordered_pairs_with_the_source_changing_slowest(pool: RankPool, protocol: str) -> None:
    lines = run(pool, job("p2p", 3, p2p={"bytes": SIZES, "protocol": protocol}))
    ends = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert [(line["bytes"], line["src"], line["dst"]) for line in lines] == [(n, *pair) for n in SIZES for pair in ends]
    for line in lines:
        assert (line["op"], line["transport"], line["pattern"]) == ("copy", "host", "pairs")
        assert line["verified"] is True and line["max_error"] == 0.0
        assert line["bytes_wire"] == line["bytes"] and line["gbps_wire"] == line["bytes"] / line["us_p50"] / 1e3
        assert line.keys().isdisjoint({"tokens", "backend", "dtype", "routing"})


def test_only_the_named_pairs_are_copied(pool: RankPool) -> None:
    lines = run(pool, job("p2p", 3, p2p={"bytes": SIZES, "pairs": [[2, 0], [0, 1]]}))
    ends = [(2, 0), (0, 1)]
    assert [(line["bytes"], line["src"], line["dst"]) for line in lines] == [(n, *pair) for n in SIZES for pair in ends]
    assert all(line["verified"] for line in lines)


@pytest.mark.parametrize("protocol", ["put", "get"])
def test_all_to_all_gives_one_line_for_each_size(pool: RankPool, protocol: str) -> None:
    lines = run(pool, job("p2p", 4, p2p={"bytes": SIZES, "protocol": protocol, "pattern": "all_to_all"}))
    assert [(line["bytes"], line["src"], line["dst"]) for line in lines] == [(n, None, None) for n in SIZES]
    for line in lines:
        assert line["verified"] is True and line["bytes_wire"] == 12 * line["bytes"]
        assert line["gbps_wire"] == 3 * line["bytes"] / line["us_p50"] / 1e3


def broken_copy(world: World, given: dict[str, Any], fault: str) -> None:
    """Run a job in which rank 1 receives one wrong byte, or an old message, from its fifth message on."""
    real, calls = Channels.receive, [0]

    def spoiled(self: Channels, source: int) -> torch.Tensor:
        calls[0] += 1
        message = real(self, source)
        if calls[0] <= 4:
            kept.append(message.clone())
        elif fault == "byte":
            message[-1] ^= 1
        else:
            message.copy_(kept[-1])
        return message

    kept: list[torch.Tensor] = []
    if world.rank == 1:
        Channels.receive = spoiled  # type: ignore[method-assign]
    try:
        run_cases(world, given)
    finally:
        Channels.receive = real  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", ["byte", "stale"])
def test_a_wrong_or_stale_message_stops_every_rank(pool: RankPool, fault: str) -> None:
    errors = failures(pool, 2, broken_copy, job("p2p", 2, p2p={"bytes": [100_003]}), fault)
    assert {type(error) for error in errors} == {WrongResult} and len({str(error) for error in errors}) == 1
    assert "step 3 on rank 1" in str(errors[0])


def count_bytes(world: World, given: dict[str, Any]) -> tuple[float, list[int]]:
    """Return the workload's byte count for one batch, and the plan's for each rank; every row goes out and back."""
    from raymoe.workload.inputs import Inputs, Routing
    from raymoe.workload.memory_needed import spec_of
    from raymoe.workload.traffic import traffic_of
    from tests.unit.exchange import plan

    asked = Job.model_validate(given)
    inputs = Inputs(Routing.of(asked), world.rank, asked.shape.hidden, torch.bfloat16)
    inputs.draws = inputs.draws[:1]
    spec = spec_of(asked)
    ids = inputs.at(0).ids
    home = plan.bytes_wire(ids, world.rank, world.size, replace(spec, transport="auto"))
    counted = plan.bytes_wire(ids, world.rank, world.size, spec) + home
    total = traffic_of(world, inputs.draws, spec).both.total
    return total, world.swap(counted, "counted")  # type: ignore[return-value]


def test_bytes_on_the_wire_equal_the_plans(pool: RankPool) -> None:
    totals = []
    for transport in ("auto", "copy_engine"):
        given = job("exchange", routing={"masked": 0.2, "ragged": True}, exchange={"transport": transport})
        total, counted = pool.run(4, count_bytes, given)[0]
        assert total == sum(counted) > 0
        totals.append(total)
    assert totals[0] < totals[1]


def broken_exchange(world: World, given: dict[str, Any], fault: str) -> None:
    """Run a job in which rank 1 spoils the result of a combine or a dispatch, from its fourth call on."""
    name = "combine" if fault == "combine" else "dispatch"
    names = name, f"{name}_unkept"  # layers call the second one
    reals, calls = [getattr(Exchange, each) for each in names], [0]

    def spoiled(real: Any, self: Exchange, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        result = real(self, *args, **options)
        if world.rank == 1 and calls[0] > 3:
            if fault == "combine":
                result[0] = result[1]
            elif fault == "stale":
                result.x.copy_(stale)
            else:
                result.x[:2] = result.x[:2].flip(0)
        elif fault == "stale":
            stale.copy_(result.x)
        return result

    stale = torch.empty(1)
    if fault == "stale":
        from raymoe.workload.memory_needed import spec_of

        spec = spec_of(Job.model_validate(given))
        stale = torch.empty(spec.rows(world.size), spec.hidden, dtype=torch.bfloat16)
    for each, real in zip(names, reals, strict=True):
        setattr(Exchange, each, lambda *args, _real=real, **options: spoiled(_real, *args, **options))
    try:
        run_cases(world, given)
    finally:
        for each, real in zip(names, reals, strict=True):
            setattr(Exchange, each, real)


@pytest.mark.parametrize("workload", ["exchange", "layer"])
@pytest.mark.parametrize("fault", ["combine", "dispatch", "stale"])
def test_wrong_rows_stop_every_rank_on_the_same_step(pool: RankPool, workload: str, fault: str) -> None:
    errors = failures(pool, 2, broken_exchange, job(workload, 2), fault)
    assert {type(error) for error in errors} == {WrongResult} and len({str(error) for error in errors}) == 1
    assert "step 3" in str(errors[0]) and ("rank 1" in str(errors[0]) or fault != "combine")
    assert errors[0].exit_code == 6  # type: ignore[attr-defined]


def test_refused_data_raises_data_refused_on_every_rank(pool: RankPool) -> None:
    given = job("exchange", routing={"kind": "hot", "share": 1.0, "masked": 0.01}, exchange={"capacity": 16})
    assert {type(error) for error in failures(pool, 4, run_cases, given)} == {DataRefused}


def test_a_case_for_another_number_of_ranks_is_refused(pool: RankPool) -> None:
    errors = failures(pool, 2, run_cases, job("exchange", 4))
    assert {type(error) for error in errors} == {ConfigError} and "4 ranks" in str(errors[0])


def slow_third_step(world: World) -> list[list[float]]:
    """Measure steps after two warm-up steps; rank 1 is slow in the first measured step, step 2."""

    def do_step(index: int, *, verify: bool) -> Step:
        return Step(
            (100.0 if world.rank == 1 and index == 2 else 10.0 + index, float(world.rank)), 0.0 if verify else None
        )

    progress_steps: list[int] = []
    measured = measure(
        world, Steps(2, 2000, True, 1.0), do_step, lambda block: progress_steps.append(block.done), "test"
    )
    assert progress_steps[-1] == 2002 and measured.verified and measured.max_error == 0.0
    return [measured.us[0][:2], measured.us[1][:2], [len(samples) for samples in measured.us]]


def test_a_sample_is_the_slowest_ranks_time_and_warmup_is_left_out(pool: RankPool) -> None:
    assert pool.run(3, slow_third_step) == [[[100.0, 13.0], [2.0, 2.0], [2000, 2000]]] * 3


def host_times_that_differ(world: World) -> object:
    from raymoe.workload.exchange.run_exchange import host_times

    def do_step(index: int, *, verify: bool) -> Step:
        slow = index % 2 == world.rank % 2  # the ranks take turns in being late
        return Step((1.0,), host_us=(50.0 if slow and index % 3 == 0 else 20.0 + world.rank,))

    measured = measure(world, Steps(1, 30, False, 1.0), do_step, lambda *_: None, "test")
    return [len(samples) for samples in measured.host_us[0]], host_times(measured, 0), host_times(measured, 1)


def test_host_times_are_not_those_of_the_slowest_rank(pool: RankPool) -> None:
    """A rank's call waits for no other rank. The slowest rank of each step would show the noise of all."""
    assert pool.run(2, host_times_that_differ) == [([30, 30], {"host_us_p50": 21.0}, {})] * 2


def test_a_rank_that_is_told_to_stop_keeps_its_samples_and_the_error() -> None:
    """Those of the block that it was in are lost: the other ranks' times of them are not known."""

    def stepping(at: int, world: World) -> Callable[..., Step]:
        def step(index: int, *, verify: bool) -> Step:
            if index == at:
                world.abort("the gang is being stopped")
                world.waiter.check(peer=3)
            return Step((float(index),))

        return step

    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        stopped = measure(world, Steps(1, 10**6, False, 0.0), stepping(1500, world), lambda *_: None, "a")
    assert 0 < len(stopped.us[0]) < 1500 and stopped.us[0][0] == 1.0
    assert world.waiter.interrupted is not None and world.waiter.interrupted.peer == 3
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        with pytest.raises(Aborted, match="the gang is being stopped"):
            measure(world, Steps(1, 10**6, False, 0.0), stepping(0, world), lambda *_: None, "a")
        assert world.waiter.interrupted is None


def test_a_peer_timeout_in_a_step_aborts_the_world() -> None:
    def step(index: int, *, verify: bool) -> Step:
        raise PeerTimeout("copy", 1, 3, 1, 0, waited_s=2.0, rank=0)

    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        with pytest.raises(PeerTimeout):
            measure(world, Steps(0, 1, False, 0.0), step, lambda *_: None, "a test")
        with pytest.raises(Aborted, match=r"waited 2\.0 s for rank 3 in copy"):
            world.waiter.check()
