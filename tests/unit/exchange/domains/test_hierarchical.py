"""Exchanges of two domains with two CPU ranks each, pretended on one machine, against the plan and the oracle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raymoe.errors import ConfigError, DataRefused, PeerTimeout
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import differentiable
from raymoe.net.gloo_rail import GlooRail
from raymoe.workload.traffic import bytes_between_domains
from tests.unit.exchange.exchange_cases import ROUTINGS, Case, apply_experts, batches, open_exchange, run_case, run_step
from tests.unit.exchange.exchange_judge import advice, judge, judge_combine
from tests.unit.memory.test_world_of import error_of, groups, with_group
from tests.unit.moe.gradient_cases import judge_gradients, run_gradients
from tests.unit.ranks import RankPool

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture

SPEC = ExchangeSpec(tokens=7, hidden=16, experts=12, topk=3)


def run_cases(_rank: int, cases: list[Case], domain: int = 2) -> Any:
    with World.of(domain=domain, timeout_s=20) as world:
        return [run_case(world, case) for case in cases]


def judge_all(groups: Groups, cases: list[Case], ranks: int = 4, domain: int = 2) -> None:
    results = groups(ranks, run_cases, cases, domain)
    for number, case in enumerate(cases):
        judge(case, [theirs[number] for theirs in results])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["auto", "collective", "allgather"])
def test_every_routing_matches_plan_and_oracle(groups: Groups, backend: str) -> None:
    specs = [
        SPEC,
        ExchangeSpec(9, 8, experts=8, topk=4, dtype="float32", layout="rank", padding="zero", alignment=3),
        ExchangeSpec(5, 24, experts=4, topk=2, dtype="float16", wire={"combine": "float32"}, alignment=1),
        ExchangeSpec(6, 12, experts=4, topk=4, dtype="float32", wire={"combine": "bfloat16"}),
    ]
    flags = [(True, False, True, False, True), (True, True, False, True, False), (False, True, True, False, True)]
    cases = [
        Case(4, spec, backend, ROUTINGS, 3 + number, *flags[number % len(flags)]) for number, spec in enumerate(specs)
    ]
    judge_all(groups, cases)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ranks", "domain"), [(3, 1), (4, 1), (2, 1)])
def test_domains_of_one_rank_match_plan_and_oracle(groups: Groups, ranks: int, domain: int) -> None:
    spec = ExchangeSpec(tokens=6, hidden=8, experts=ranks * 2, topk=2, alignment=4)
    judge_all(groups, [Case(ranks, spec, "auto", ROUTINGS, seed=8)], ranks, domain)


def outstanding(_rank: int, case: Case) -> Any:
    """Call three dispatches, then their combines in another order; then a step again, bit by bit."""
    with World.of(domain=2, timeout_s=20) as world, Exchange(world, case.spec, case.backend) as exchange:
        gots = []
        for step in range(3):
            batch = batches(case, step)[world.rank]
            out = torch.full((case.spec.rows(world.size), case.spec.hidden), torch.nan, dtype=batch.x.dtype)
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights, out=out))
        ys = {}
        for step in (1, 2, 0):
            got = gots[step]
            ys[step] = exchange.combine(apply_experts(exchange, got, got.x), got).float().numpy()
        first, again = (run_step(exchange, case, batches(case, 0)[world.rank]) for _ in range(2))
        same = first.x.tobytes() == again.x.tobytes() and first.y.tobytes() == again.y.tobytes()
        return [ys[step] for step in range(3)], same


@pytest.mark.thorough
def test_several_dispatches_may_be_outstanding_and_results_repeat(groups: Groups) -> None:
    case = Case(4, SPEC, "auto", ("uniform", "masked", "repeated"), seed=11)
    for rank, (ys, same) in enumerate(groups(4, outstanding, case)):
        assert same
        for step, y in enumerate(ys):
            judge_combine(case, batches(case, step)[rank], y)


def step_of(exchange: Exchange, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Run a step; return y and the sentence of the refusal, if there is one."""
    x = torch.ones(len(ids), exchange.spec.hidden)
    y = torch.zeros_like(x)
    got = exchange.dispatch(x, ids, torch.ones(ids.shape))
    try:
        exchange.combine(got.x, got, out=y)
    except DataRefused as error:
        return y, str(error)
    return y, ""


def refuse(rank: int, backend: str, bad: str) -> Any:
    spec = ExchangeSpec(4, 8, experts=8, topk=1, dtype="float32", alignment=1, capacity=8 if bad == "rows" else "worst")
    with World.of(domain=2, timeout_s=20) as world, Exchange(world, spec, backend) as exchange:
        good = torch.arange(4)[:, None]
        wrong = {"id": torch.tensor([[0], [8], [1], [1]]), "rows": torch.full((4, 1), 7)}[bad]
        reports = [step_of(exchange, wrong if bad == "rows" or rank == 2 else good)]
        reports += [step_of(exchange, good), step_of(exchange, good.flip(0))]
        return [(y.numpy(), said) for y, said in reports]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["host", "collective", "allgather"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("id", "rank 2 asked for expert 8 for its token 1; ids are -1 to 7"),
        ("rows", "16 rows, gaps included, came to rank 3; its capacity is 8: " + advice(16)),
    ],
)
def test_refused_data_raises_on_all_ranks_of_all_domains_and_the_next_step_works(
    groups: Groups, backend: str, bad: str, says: str
) -> None:
    for first, second, third in groups(4, refuse, backend, bad):
        assert first[1] == says
        assert np.isnan(first[0]).all()
        for y, said in (second, third):
            assert said == ""
            assert (y == 1).all()


def disagree(rank: int, different: list[int]) -> Any:
    """Let some ranks combine, or use another exchange, while the others dispatch."""
    case = Case(4, SPEC, "auto", ("uniform",) * 4, seed=2, ragged=False)
    with World.of(domain=2, timeout_s=20) as world, Exchange(world, SPEC) as one, Exchange(world, SPEC) as other:
        batch = batches(case, 0)[rank]
        got = one.dispatch(batch.x, batch.ids, batch.weights)
        rows = apply_experts(one, got, got.x)
        there = rank in different
        wrong = [
            error_of(lambda: one.combine(rows, got) if there else one.dispatch(batch.x, batch.ids, batch.weights)),
            error_of(lambda: (other if there else one).dispatch(batch.x, batch.ids, batch.weights)),
        ]
        rows = apply_experts(one, got, got.x)
        return wrong, one.combine(rows, got).float().numpy(), run_case(world, case)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("different", [[3], [2, 3], [0, 2]])
def test_ranks_in_different_operations_all_raise_and_the_next_one_works(groups: Groups, different: list[int]) -> None:
    case = Case(4, SPEC, "auto", ("uniform",) * 4, seed=2, ragged=False)
    reports = groups(4, disagree, different)
    if different == [3]:
        assert "ranks of domain 1 are in different operations" in reports[0][0][0][1]
    for rank, (wrong, y, _) in enumerate(reports):
        for kind, said in wrong:
            assert kind == ConfigError.__name__
            assert "call the same operations in one order on all ranks" in said
        judge_combine(case, batches(case, 0)[rank], y)
    judge(case, [results for _, _, results in reports])


def combine_another(rank: int) -> Any:
    with World.of(domain=2, timeout_s=20) as world, Exchange(world, SPEC) as exchange:
        batch = batches(Case(4, SPEC, "auto", ("uniform",), ragged=False), 0)[rank]
        gots = [
            exchange.dispatch(batch.x, batch.ids, batch.weights, out=torch.zeros(SPEC.rows(4), SPEC.hidden).bfloat16())
            for _ in range(2)
        ]
        got = gots[1 if rank > 1 else 0]
        return error_of(lambda: exchange.combine(got.x, got))


def test_domains_that_combine_different_dispatches_are_refused(groups: Groups) -> None:
    says = "rank 0 combines its dispatch 1 and rank 2 its dispatch 2; all ranks combine the same dispatch"
    assert groups(4, combine_another) == [("DataRefused", says)] * 4


LATE_S, PATIENCE_S = 0.6, 2.0


def run_late(rank: int, case: Case, slow: tuple[int, ...]) -> Any:
    """Run all steps, on ranks of `slow` each later than on the others, by less than the deadline."""
    results, took = [], []
    with World.of(domain=2, timeout_s=PATIENCE_S) as world, open_exchange(world, case) as exchange:
        for step in range(len(case.routing)):
            batch, start = batches(case, step)[rank], time.monotonic()
            if rank in slow:
                time.sleep(LATE_S)
            results.append(run_step(exchange, case, batch))
            took.append(time.monotonic() - start)
    return results, took


def test_a_slow_host_is_waited_for_in_every_step_and_spoils_none(groups: Groups) -> None:
    """All steps together are later than the deadline of one: it begins anew with each wait."""
    case = Case(4, SPEC, "auto", ("uniform", "skewed") * 2, 5)
    ran = groups(4, run_late, case, (2, 3))
    judge(case, [result for result, _ in ran])
    for _, took in ran:
        assert min(took) > 0.9 * LATE_S and sum(took) > PATIENCE_S


def leave(rank: int, missing: int) -> Any:
    world = World.of(domain=2, timeout_s=1)
    exchange = Exchange(world, SPEC)
    batch = batches(Case(4, SPEC, "auto", ("uniform",), ragged=False), 0)[rank]
    start = time.monotonic()
    try:
        if rank == missing:
            time.sleep(2.5)
            return None
        with pytest.raises(PeerTimeout) as caught:
            exchange.dispatch(batch.x, batch.ids, batch.weights)
        again = error_of(lambda: exchange.dispatch(batch.x, batch.ids, batch.weights))
        return caught.value.rank, caught.value.peer, time.monotonic() - start, again[1] == str(caught.value)
    finally:
        exchange.close(together=False)
        world.close(together=False)


def test_a_missing_rank_ends_the_step_of_all_ranks_and_is_named(groups: Groups) -> None:
    missing = 3
    errors = groups(4, leave, missing)
    # Rank 0 waits for rank 2, which waits for rank 3.
    assert [error and error[:2] for error in errors] == [(0, 3), (1, 3), (2, 3), None]
    for error in errors[:3]:
        assert 0.9 < error[2] < 4
        assert error[3], "the exchange is unusable"


def differentiate(_rank: int, case: Case, domain: int) -> Any:
    with World.of(domain=domain, timeout_s=20) as world:
        return run_gradients(world, case)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["host", "collective", "allgather"])
@pytest.mark.parametrize(("ranks", "domain", "layout"), [(4, 2, "expert"), (4, 2, "rank"), (3, 1, "expert")])
def test_gradients_between_domains_equal_autograd_in_float64(
    groups: Groups, backend: str, ranks: int, domain: int, layout: str
) -> None:
    spec = ExchangeSpec(6, 8, experts=12, topk=3, dtype="float32", layout=layout, alignment=3, depth=domain - 1)
    case = Case(ranks, spec, backend, ROUTINGS, seed=5, weighted=layout == "expert")
    judge_gradients(case, groups(ranks, differentiate, case, domain), bound=2e-6)


def refuse_then_differentiate(rank: int, backend: str) -> Any:
    """Name an expert that does not exist on rank 2, then take a good step forward and backward."""
    with (
        World.of(domain=2, timeout_s=20) as world,
        Exchange(world, replace(SPEC, dtype="float32"), backend) as exchange,
    ):
        ids = torch.arange(9).reshape(3, 3)
        x, weights = torch.ones(3, SPEC.hidden, requires_grad=True), torch.ones(3, 3, requires_grad=True)
        wrong = differentiable.dispatch(exchange, x, ids + 99 if rank == 2 else ids, weights)
        refused = error_of(lambda: differentiable.combine(exchange, wrong.x, wrong))
        got = differentiable.dispatch(exchange, x, ids, weights)
        differentiable.combine(exchange, got.x, got).sum().backward()
        assert x.grad is not None and weights.grad is not None
        return refused, x.grad.tolist(), weights.grad.tolist()


@pytest.mark.parametrize("backend", ["host", "collective"])
def test_a_refused_step_with_gradients_raises_in_all_domains_and_the_next_one_works(
    groups: Groups, backend: str
) -> None:
    for (kind, said), x, weights in groups(4, refuse_then_differentiate, backend):
        assert kind == "DataRefused" and "rank 2 asked for expert" in said
        assert x == [[3.0] * SPEC.hidden] * 3  # three experts return the row, each with weight 1
        assert weights == [[float(SPEC.hidden)] * 3] * 3


def step_until_lost(outer: World, store: str, lost: int, signum: int) -> Any:
    """Let rank `lost` end or stop itself after a step. Rank 1 kills a stopped one in the end."""
    return with_group(outer, store, _step_until_lost, lost, signum)


def _step_until_lost(rank: int, lost: int, signum: int) -> Any:
    world = World.of(domain=2, timeout_s=1)
    pids = world.swap(os.getpid(), "pids")
    exchange, case = Exchange(world, SPEC), Case(4, SPEC, "auto", ("uniform",), ragged=False)
    run_step(exchange, case, batches(case, 0)[rank])
    if rank == lost:
        os.kill(os.getpid(), signum)
    start, errors = time.monotonic(), []
    for call in (lambda: run_step(exchange, case, batches(case, 0)[rank]), lambda: world.barrier("after")):
        with pytest.raises(PeerTimeout) as caught:
            call()
        errors.append((caught.value.rank, caught.value.peer))
    took = time.monotonic() - start
    exchange.close(together=False)
    world.close(together=False)
    if rank == 1 and signum == signal.SIGSTOP:
        time.sleep(1.5)  # the others have left by then
        os.kill(int(str(pids[lost])), signal.SIGKILL)
    return errors, took


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("lost", "signum"), [(2, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_rank_ends_the_waits_of_all_ranks(tmp_path: Path, lost: int, signum: int) -> None:
    """A stopped rank 0 answers no question to the store that it serves."""
    with RankPool(4) as own:
        outcomes = own.outcomes(4, step_until_lost, str(tmp_path / "store"), lost, signum)
    assert isinstance(outcomes[lost], (EOFError, ConnectionResetError))
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
    named = [peer for errors, _ in left for _, peer in errors]
    assert lost in named
    for errors, took in left:
        assert all(rank != peer for rank, peer in errors)
        assert took < 8


def use_rail(rank: int) -> Any:
    with World.of(domain=1, timeout_s=5) as world:
        rail = world.shared(GlooRail)
        gathered, swapped = torch.zeros(6), torch.zeros(3, 2)
        rail.gather("gather", gathered, torch.tensor([rank, -rank]).float())()
        rail.swap("swap", swapped, torch.tensor([[rank, peer] for peer in range(3)]).float())()
        with World.of() as plain:
            said = error_of(lambda: plain.shared(GlooRail))[1]
        return gathered.tolist(), swapped.tolist(), rail.capturable, rail.lagging(), said


def test_a_rail_gathers_and_swaps_in_the_order_of_domains(groups: Groups) -> None:
    for rank, (gathered, swapped, capturable, lagging, said) in enumerate(groups(3, use_rail)):
        assert gathered == [0, 0, 1, -1, 2, -2]
        assert swapped == [[domain, rank] for domain in range(3)]
        assert not capturable
        assert lagging in {0, 1, 2} - {rank}
        assert said == "a rail was asked for in a world of 1 domain; rails are between domains"


def abort_a_rail(rank: int) -> Any:
    """Abort the rail of rank 0, which waits for rank 1. Return what its wait raises, its time, and a later error."""
    with World.of(domain=1, timeout_s=20) as world:
        rail, blocks, start = world.shared(GlooRail), torch.zeros(2, 2), time.monotonic()
        if rank == 0:
            threading.Timer(0.3, rail.abort).start()
            waited = error_of(rail.swap("swap", blocks.clone(), blocks))
            took = time.monotonic() - start
            rail.abort()
            report = waited, took, error_of(lambda: rail.swap("next", blocks.clone(), blocks))
        world.barrier("aborted")
        world.close(together=False)
        return report if rank == 0 else None


def test_an_abort_of_a_rail_ends_its_wait_and_refuses_later_calls(groups: Groups) -> None:
    waited, took, later = groups(2, abort_a_rail)[0]
    assert waited == ("WiringError", "swap: this process group is aborted or closed")
    assert later == ("WiringError", "next: this process group is aborted or closed")
    assert 0.2 < took < 5


def counted_bytes(_rank: int, spec: ExchangeSpec) -> Any:
    """Return the bytes that this rank's rail sends in a dispatch and in a combine, and the bytes that a step counts."""
    sent: list[int] = []
    with World.of(domain=2, timeout_s=20) as world, Exchange(world, spec) as exchange:
        rail = world.shared(GlooRail)
        gather, swap, others = rail.gather, rail.swap, world.domains - 1

        def counting_gather(op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
            sent.append(own.nbytes * others)
            return gather(op, out, own)

        def counting_swap(op: str, received: torch.Tensor, blocks: torch.Tensor) -> Callable[[], None]:
            sent.append(blocks.nbytes // world.domains * others)
            return swap(op, received, blocks)

        rail.gather, rail.swap = counting_gather, counting_swap  # type: ignore[method-assign]
        ids = torch.arange(3 * spec.topk).reshape(3, spec.topk) % spec.experts
        got = exchange.dispatch(torch.ones(3, spec.hidden, dtype=torch.bfloat16), ids, torch.ones(3, spec.topk))
        dispatched = sum(sent)
        exchange.combine(got.x, got)
        counted = bytes_between_domains(spec, world.size, world.domains)
        return world.swap((dispatched, sum(sent) - dispatched), "sent"), counted


@pytest.mark.parametrize("wire", [None, {"combine": "float32"}])
def test_the_bytes_between_domains_are_those_that_rails_send(groups: Groups, wire: dict[str, str] | None) -> None:
    sent, counted = groups(4, counted_bytes, replace(SPEC, wire=wire))[0]
    dispatch, combine = (sum(counts) for counts in zip(*sent, strict=True))
    assert counted == {"dispatch": dispatch, "combine": combine, "exchange": dispatch + combine}
