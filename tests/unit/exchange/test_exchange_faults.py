"""Refused data, and peers that are slow, dead or send wrong metadata: each rank's error, and the steps after it."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.errors import Aborted, DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.cpu.cpu_backend import CpuBackend
from raymoe.exchange.cpu.host import HostSlots
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch
from tests.unit.exchange.exchange_cases import Batch, Case, apply_experts, batches, run_step
from tests.unit.exchange.exchange_judge import advice
from tests.unit.exchange.test_exchange import BACKENDS, judge_combine
from tests.unit.ranks import RankPool
from tests.unit.worlds import inner_world

SPEC = ExchangeSpec(tokens=6, hidden=16, experts=6, topk=2, dtype="float32", alignment=4)


def slots_of(exchange: Exchange) -> HostSlots:
    assert isinstance(exchange._backend, CpuBackend)
    carrier = exchange._backend._carrier
    assert isinstance(carrier, HostSlots)
    return carrier


def refused_step(exchange: Exchange, case: Case, batch: Batch) -> dict[str, Any]:
    """Run a step that must be refused; return what was raised where, and the state of the caller's memory."""
    rows = case.spec.rows(case.ranks)
    guarded = torch.full((rows + 8, case.spec.hidden), torch.nan)
    y = torch.ones_like(batch.x)
    got = exchange.dispatch(batch.x, batch.ids, batch.weights, out=guarded[4 : 4 + rows])
    report = {"local": "", "combine": "", "kind": ""}
    try:
        exchange.check()
    except DataRefused as error:
        report["local"] = str(error)
    try:
        exchange.combine(apply_experts(exchange, got, got.x), got, out=y)
    except RaymoeError as error:
        report |= {"combine": str(error), "kind": type(error).__name__}
    exchange.check()  # it does not raise combine's error again
    outside = torch.cat([guarded[:4], guarded[4 + rows :]])
    return report | {
        "outside": bool(outside.isnan().all()),
        "nan": bool(y.isnan().all()),
        "counts": got.expert_counts.tolist(),
    }


def refuse_then_go_on(world: World, case: Case, bad: int) -> tuple[dict[str, Any], Any]:
    """Run a step in which rank 1 names expert `bad`, between two good steps."""
    with Exchange(world, case.spec, backend=case.backend) as exchange:
        run_step(exchange, case, batches(case, 0)[world.rank])
        batch = batches(case, 1)[world.rank]
        if world.rank == 1:
            batch.ids[2, 1] = bad
        report = refused_step(exchange, case, batch)
        return report, run_step(exchange, case, batches(case, 2)[world.rank]).y


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [6, -2, 2**40])
def test_all_ranks_raise_on_an_id_out_of_range(pool: RankPool, backend: str, bad: int) -> None:
    case = Case(3, SPEC, backend, ("uniform",) * 3, seed=8, ragged=False)
    for rank, (report, y) in enumerate(pool.run(3, refuse_then_go_on, case, bad)):
        assert report["kind"] == "DataRefused"
        assert report["combine"] == f"rank 1 asked for expert {bad} for its token 2; ids are -1 to 5"
        assert report["local"] == (report["combine"] if rank == 1 else "")
        assert report["outside"]
        assert report["nan"]
        judge_combine(case, batches(case, 2)[rank], y)


def count_too_many_then_go_on(world: World, case: Case, count: int) -> tuple[list[str], Any]:
    """Run steps in which rank 1 asks to send `count` of its tokens, the second by the operators with gradients."""
    with Exchange(world, replace(case.spec, depth=2), backend=case.backend) as exchange:
        said = []
        for step in range(2):
            batch = batches(case, step)[world.rank]
            num_tokens = torch.tensor([count if world.rank == 1 else 2], dtype=torch.int32)
            try:
                if step == 0:
                    got = exchange.dispatch(batch.x, batch.ids, batch.weights, num_tokens)
                    exchange.combine(apply_experts(exchange, got, got.x), got)
                else:
                    rows = dispatch(exchange, batch.x, batch.ids, batch.weights, num_tokens)
                    combine(exchange, rows.x, rows)
            except DataRefused as error:
                said.append(str(error))
        return said, run_step(exchange, case, batches(case, 2)[world.rank]).y


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "way_out"), [(7, ": make the exchange with more tokens"), (-1, "")])
def test_all_ranks_raise_on_a_number_of_tokens_out_of_range(
    pool: RankPool, backend: str, count: int, way_out: str
) -> None:
    case = Case(3, SPEC, backend, ("uniform",) * 3, seed=8, ragged=False)
    sentence = f"num_tokens is {count} on rank 1; x has 6 rows, so 0 to 6 can be sent{way_out}"
    for rank, (said, y) in enumerate(pool.run(3, count_too_many_then_go_on, case, count)):
        assert said == [sentence, sentence]
        judge_combine(case, batches(case, 2)[rank], y)


def refuse_in_place_of_combine(world: World, case: Case) -> tuple[str, Any]:
    with Exchange(world, case.spec, backend=case.backend) as exchange:
        batch, said = batches(case, 0)[world.rank], ""
        got = exchange.dispatch(batch.x, batch.ids, batch.weights)
        try:
            if world.rank == 1:
                exchange.refuse(got)
            else:
                exchange.combine(apply_experts(exchange, got, got.x), got)
        except DataRefused as error:
            said = str(error)
        return said, run_step(exchange, case, batches(case, 1)[world.rank]).y


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_whose_experts_failed_lets_all_refuse_the_combine(pool: RankPool, backend: str) -> None:
    case = Case(3, SPEC, backend, ("uniform",) * 2, seed=8, ragged=False)
    for rank, (said, y) in enumerate(pool.run(3, refuse_in_place_of_combine, case)):
        assert said == "an exception, which rank 1 reports, ended the work of its experts"
        judge_combine(case, batches(case, 1)[rank], y)


def overflow_then_go_on(world: World, case: Case) -> tuple[dict[str, Any], Any]:
    with Exchange(world, case.spec, backend=case.backend) as exchange:
        report = refused_step(exchange, case, batches(case, 0)[world.rank])
        return report, run_step(exchange, case, batches(case, 1)[world.rank]).y


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_raise_on_more_rows_than_the_capacity(pool: RankPool, backend: str) -> None:
    # Step 0 sends everything to the last expert: 3 ranks x 6 tokens x 2 = 36 rows for rank 2.
    case = Case(3, replace(SPEC, capacity=32), backend, ("one", "uniform"), seed=8, ragged=False)
    for rank, (report, y) in enumerate(pool.run(3, overflow_then_go_on, case)):
        assert report["combine"].startswith("36 rows, gaps included, came to rank 2; its capacity is 32")
        assert report["local"] == (report["combine"] if rank == 2 else "")
        assert report["outside"]
        assert report["nan"]
        assert report["counts"] == [0, 0]
        judge_combine(case, batches(case, 1)[rank], y)


def overflow_by_two_ranks(world: World) -> tuple[int, int, int | None, str]:
    """Let rank 0 receive 12 rows and rank 1 36, in an exchange whose capacity is a factor."""
    spec = ExchangeSpec(tokens=12, hidden=8, experts=2, topk=2, dtype="float32", alignment=1, capacity=0.25)
    with Exchange(world, spec) as exchange:
        ids = torch.tensor([[0, 1], [1, 1]]).repeat(6, 1)
        got = exchange.dispatch(torch.ones(12, 8), ids, torch.ones(12, 2))
        with pytest.raises(DataRefused) as refused:
            exchange.combine(torch.zeros(exchange.spec.rows(2), 8), got)
        none = torch.full((1, 2), 2)
        with pytest.raises(DataRefused) as other:
            exchange.combine(
                torch.zeros(exchange.spec.rows(2), 8), exchange.dispatch(torch.ones(1, 8), none, torch.ones(1, 2))
            )
        assert other.value.rows_needed is None
        needed = pickle.loads(pickle.dumps(refused.value)).rows_needed
    return exchange.spec.rows(2), len(got.weights), needed, str(refused.value)


def test_refused_data_tells_the_most_rows_that_a_rank_needed(pool: RankPool) -> None:
    says = "12 rows, gaps included, came to rank 0; its capacity is 6: " + advice(36)
    assert pool.run(2, overflow_by_two_ranks) == [(6, 6, 36, says)] * 2


def combine_differently(world: World, case: Case, how: str) -> tuple[dict[str, Any], Any]:
    """Dispatch twice. Rank 2 combines another dispatch than its peers, or without weights. Then run a good step."""
    rows = case.spec.rows(case.ranks)
    with Exchange(world, case.spec, backend=case.backend) as exchange:
        sent = [batches(case, step)[world.rank] for step in range(2)]
        gots = [
            exchange.dispatch(batch.x, batch.ids, batch.weights, out=torch.zeros(rows, case.spec.hidden))
            for batch in sent
        ]
        odd = world.rank == 2
        got = gots[0 if odd and how == "dispatch" else 1]
        y = torch.ones(got.tokens, case.spec.hidden)
        report = ""
        try:
            products = apply_experts(exchange, got, got.x)
            exchange.combine(products, got, weighted=not (odd and how == "weighted"), out=y)
        except DataRefused as error:
            report = str(error)
        exchange.check()
        return {"message": report, "nan": bool(y.isnan().all())}, run_step(
            exchange, case, batches(case, 2)[world.rank]
        ).y


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["host", "collective", "allgather"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dispatch", "rank 0 combines its dispatch 2 and rank 2 its dispatch 1; all ranks combine the same dispatch"),
        (
            "weighted",
            "rank 0 combines dispatch 2 with weighted=True and rank 2 with weighted=False; all ranks give the",
        ),
    ],
)
def test_all_ranks_raise_when_their_combines_differ(pool: RankPool, backend: str, how: str, says: str) -> None:
    case = Case(3, SPEC, backend, ("uniform",) * 3, seed=5)
    for rank, (report, y) in enumerate(pool.run(3, combine_differently, case, how)):
        assert report["message"].startswith(says)
        assert report["nan"]
        judge_combine(case, batches(case, 2)[rank], y)


def send_wrong_metadata(world: World, case: Case, tampered: str) -> tuple[dict[str, Any], Any]:
    """In one dispatch, rank 1 changes the metadata it sent its peers just before it raises its flags."""
    with Exchange(world, case.spec, backend="host") as exchange:
        backend = slots_of(exchange)
        real_fence = world.waiter.fence

        def tamper() -> None:
            for _, at in backend._peers:
                if tampered == "count":
                    at.dispatch_head[1, 1, 1] = 10**12
                else:
                    at.ids[1, 1, 0, 0] = 77

        if world.rank == 1:
            world.waiter.fence = tamper
        batch = batches(case, 0)[world.rank]
        original = backend.combine
        # Only the dispatch is tampered with.
        backend.combine = lambda *args: (setattr(world.waiter, "fence", real_fence), original(*args))[1]  # type: ignore[method-assign]
        report = refused_step(exchange, case, batch)
        world.waiter.fence = real_fence
        return report, run_step(exchange, case, batches(case, 1)[world.rank]).y


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("tampered", "says"),
    [
        ("count", "rank 1 announced 1000000000000 rows to rank 0; 0 to 6 can be sent"),
        ("id", "rank 1 sent rank 0 a row for its expert 77; it has 2"),
    ],
)
def test_wrong_metadata_of_a_peer_is_refused(pool: RankPool, tampered: str, says: str) -> None:
    case = Case(3, SPEC, "host", ("uniform", "uniform"), seed=3, ragged=False)
    for rank, (report, y) in enumerate(pool.run(3, send_wrong_metadata, case, tampered)):
        assert report["combine"] == says
        assert report["outside"]
        assert report["nan"]
        judge_combine(case, batches(case, 1)[rank], y)


def wait_in_vain(outer: World, case: Case) -> Any:
    """Rank 1 leaves out a dispatch. The other ranks time out, and must not write to rank 1 afterwards."""
    with inner_world(outer) as world, Exchange(world, case.spec, backend="host") as exchange:
        run_step(exchange, case, batches(case, 0)[world.rank])
        batch, report = batches(case, 1)[world.rank], []
        if world.rank != 1:
            world.waiter.timeout_s = 0.3
            for _ in range(3):
                start = time.monotonic()
                with pytest.raises(PeerTimeout) as caught:
                    exchange.dispatch(batch.x, batch.ids, batch.weights)
                report.append((caught.value.op, caught.value.peer, caught.value.epoch, time.monotonic() - start))
            with pytest.raises(PeerTimeout):
                exchange.check()
        outer.barrier("over")
        backend = slots_of(exchange)
        return report, [backend._own.dispatch_flag[rank] for rank in range(3)]


def test_a_late_peer_is_named_and_not_written_to_again(pool: RankPool) -> None:
    case = Case(3, SPEC, "host", ("uniform",) * 2, seed=1)
    outcomes = pool.run(3, wait_in_vain, case)
    for rank, (report, flags) in enumerate(outcomes):
        assert flags == [1, 1, 1]  # from the good step: no flag is raised before all ranks have entered
        if rank != 1:
            assert [timeout[:3] for timeout in report] == [("dispatch", 1, 3)] * 3  # the third operation of the world
            assert max(timeout[3] for timeout in report[1:]) < 0.2
    # The first rank to give up has waited so long; it tells the other one, which may have begun a moment later.
    assert max(outcomes[rank][0][0][3] for rank in (0, 2)) >= 0.3


def dispatch_until_killed(world: World, case: Case) -> Any:
    world.waiter.timeout_s = world.timeout_s = 1.0
    with Exchange(world, case.spec, backend=case.backend) as exchange:
        run_step(exchange, case, batches(case, 0)[world.rank])
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        batch, start = batches(case, 1)[world.rank], time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            exchange.dispatch(batch.x, batch.ids, batch.weights)
        waited = time.monotonic() - start
        start = time.monotonic()
        with pytest.raises(PeerTimeout):
            exchange.dispatch(batch.x, batch.ids, batch.weights)
        error = caught.value
        raise_again = time.monotonic() - start
    return error.peer, error.rank, waited, raise_again


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_peer_is_named(backend: str) -> None:
    with RankPool(2) as own:
        first, second = own.outcomes(2, dispatch_until_killed, Case(2, SPEC, backend, ("uniform",) * 2))
    assert isinstance(second, (EOFError, ConnectionResetError))
    peer, rank, waited, again = first
    assert (peer, rank) == (1, 0)
    assert waited < 5
    assert again < 0.2


def dispatch_until_aborted(world: World, case: Case) -> Any:
    """Rank 1 leaves out a dispatch; another thread aborts rank 0."""
    exchange = Exchange(world, case.spec, backend=case.backend)
    run_step(exchange, case, batches(case, 0)[world.rank])
    if world.rank == 1:
        world.abort("test over")
        time.sleep(1.0)
        exchange.close(together=False)
        return None
    batch, aborted_at = batches(case, 1)[world.rank], [0.0]

    def stop() -> None:
        while world.waiting is None or world.waiting[0] != "dispatch":
            time.sleep(0.001)
        aborted_at[0] = time.monotonic()
        world.abort("rank 1 died")

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Aborted, match="rank 0 was told to stop: rank 1 died"):
        exchange.dispatch(batch.x, batch.ids, batch.weights)
    took = time.monotonic() - aborted_at[0]
    thread.join(5)
    with pytest.raises(Aborted):
        exchange.dispatch(batch.x, batch.ids, batch.weights)
    exchange.close(together=False)
    return took


@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_ends_a_waiting_dispatch_within_0_5_s(backend: str) -> None:
    with RankPool(2) as own:
        took, _ = own.outcomes(2, dispatch_until_aborted, Case(2, SPEC, backend, ("uniform",) * 2))
    assert isinstance(took, float), took
    assert took < 0.5
