"""Layout `token`: a row for each token and rank, its choices, and a combine of the ranks' sums, by every backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import ConfigError, DataRefused
from raymoe.exchange import token_rows
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.layer import LayerForm, MoELayer
from tests.emulator.build import compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import KINDS
from tests.unit.exchange import plan
from tests.unit.exchange.emulated_tokens import EmulatedTokens
from tests.unit.exchange.exchange_cases import BOUND, ROUTINGS, Batch, Case, batches, open_exchange
from tests.unit.exchange.exchange_judge import advice
from tests.unit.exchange.test_exchange import BACKENDS, ON_TENSORS
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

__all__ = ["groups"]  # a fixture
SPEC = ExchangeSpec(tokens=5, hidden=8, experts=4, topk=2, dtype="float32", layout="token")


@dataclass
class TokenResult:
    """The output of one rank in one step, and the sums that it gave to combine."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    sources: torch.Tensor
    offsets: list[int]
    counts: list[int]
    sums: torch.Tensor
    y: torch.Tensor


def sums_for(got_x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Draw a sum for each of C rows. It says nothing about experts: combine only adds."""
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(got_x.shape, generator=source).to(got_x.device, got_x.dtype)


def run_step(exchange: Exchange, case: Case, step: int) -> TokenResult:
    device = exchange.world.device
    rank, batch = exchange.world.rank, batches(case, step)[exchange.world.rank].on(device)
    shape = case.spec.rows(case.ranks), case.spec.hidden
    out = torch.full(shape, torch.nan, dtype=batch.x.dtype, device=device) if case.given else None
    count: Any = batch.num_tokens
    if case.wide_topk_idx:
        count = torch.tensor([count], dtype=torch.int32, device=device)
    got = exchange.dispatch(batch.x, batch.ids, batch.weights, count, out=out)
    assert got.index is None and (out is None or got.x is out)
    sums = sums_for(got.x, rank, step)
    rows = sums[: len(got.exact().x)].clone() if case.exact else sums
    result = result_of(got, sums, exchange.combine(rows, got, weighted=False))
    exchange.check()
    return result


def result_of(got: Dispatched, sums: torch.Tensor, y: torch.Tensor) -> TokenResult:
    """Copy the rows that came; those after them have no choices."""
    assert got.topk_idx is not None and got.sources is not None
    there = got.count()
    assert (got.topk_idx[there:] == -1).all() and (got.weights[there:] == 0).all() and (got.sources[there:] == -1).all()
    rows = (each[:there].clone().cpu() for each in (got.x, got.topk_idx, got.weights, got.sources))
    return TokenResult(*rows, got.expert_offsets.tolist(), got.expert_counts.tolist(), sums[:there].cpu(), y.cpu())


def run_case(world: World, case: Case) -> list[TokenResult]:
    with open_exchange(world, case) as exchange:
        return [run_step(exchange, case, step) for step in range(len(case.routing))]


def judge_step(case: Case, sent: list[Batch], results: list[TokenResult]) -> None:
    """Compare rows bit by bit, and sums up to the last bit of their terms: domains round between, and CPUs up."""
    local, spec = case.spec.local_experts(case.ranks), case.spec
    ids = [batch.ids[: batch.num_tokens] for batch in sent]
    plans = [plan.token_plan(ids, [batch.weights for batch in sent], rank, local) for rank in range(case.ranks)]
    for theirs, result in zip(plans, results, strict=True):
        assert result.offsets == [0, len(theirs.rows)]
        assert list(map(tuple, result.sources.tolist())) == theirs.rows
        for (source, token), row in zip(theirs.rows, result.x, strict=True):
            assert torch.equal(row, sent[source].x[token])
        assert torch.equal(result.topk_idx, theirs.topk_idx.int())
        assert torch.equal(result.weights, theirs.weights)
        assert result.counts == [int((theirs.topk_idx == expert).sum()) for expert in range(local)]
    sums, wire = [result.sums for result in results], getattr(torch, spec.combine_wire)
    for source, batch in enumerate(sent):
        want = plan.combine_sums(sums, plans, source, len(batch.x), wire)
        terms = plan.combine_sums([rows.abs() for rows in sums], plans, source, len(batch.x), wire).float()
        error = (results[source].y.float() - want.float()).abs()
        assert (error <= torch.finfo(want.dtype).eps * terms).all()


def judge(case: Case, results: list[list[TokenResult]]) -> None:
    for step in range(len(case.routing)):
        judge_step(case, batches(case, step), [theirs[step] for theirs in results])


@st.composite
def cases(draw: st.DrawFn, backend: str) -> Case:
    ranks = draw(st.integers(1, 4))
    experts = ranks * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(sorted(BOUND)))
    spec = ExchangeSpec(
        tokens=draw(st.integers(1, 9)),
        hidden=(4 if dtype == "float32" else 8) * draw(st.integers(1, 5)),
        experts=experts,
        topk=draw(st.integers(1, min(5, experts))),
        dtype=dtype,
        wire={"combine": draw(st.sampled_from([dtype, dtype, *sorted(BOUND)]))},
        layout="token",
    )
    ragged, prefix, given_out, wide, exact = (draw(st.booleans()) for _ in range(5))
    routing = tuple(draw(st.lists(st.sampled_from(ROUTINGS), min_size=1, max_size=4)))
    seed = draw(st.integers(0, 2**16))
    return Case(ranks, spec, backend, routing, seed, ragged, prefix, False, given_out, wide, exact)


@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_generated_cases_equal_the_plan(pool: RankPool, backend: str) -> None:
    @settings(max_examples=20 if backend == "host" else 8)
    @given(case=cases(backend))
    def hold(case: Case) -> None:
        judge(case, pool.run(case.ranks, run_case, case))

    hold()


def run_in_domains(_rank: int, case: Case) -> list[TokenResult]:
    with World.of(domain=2, timeout_s=20) as world:
        return run_case(world, case)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["auto", "allgather", "tensor allgather"])
def test_rows_by_token_cross_domains(groups: Any, backend: str) -> None:
    spec = ExchangeSpec(tokens=6, hidden=16, experts=8, topk=3, layout="token")
    case = Case(4, spec, backend, ROUTINGS, seed=4, prefix=True)
    judge(case, groups(4, run_in_domains, case))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("chunks")])
def test_kernels_over_nvlink_give_rows_by_token(kind: str, ranks: int) -> None:
    """Both parts on one workspace, emulated: dispatches, experts and combines of several steps."""
    transport = "copy_engine" if kind == "copied" else "auto"
    spec = ExchangeSpec(12, 64, experts=2 * ranks, topk=min(3, 2 * ranks), layout="token", transport=transport)
    case = Case(ranks, spec, "auto", ("uniform", "repeated", "masked", "none", "one"), seed=ranks, prefix=True)
    with Emulator(ranks) as emulator:
        tokens = EmulatedTokens(emulator, kind, spec)
        for step in range(len(case.routing)):
            sent = batches(case, step)
            gots = tokens.dispatch(sent, seed=step)
            sums = [sums_for(got.x, rank, step) for rank, got in enumerate(gots)]
            ys = tokens.combine(gots, sums, seed=step)
            results = [result_of(*each) for each in zip(gots, sums, ys, strict=True)]
            judge_step(case, sent, results)
        tokens.check()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("kind", ["fused", "ll"])
def test_kernels_over_nvlink_send_gradients_by_token(kind: str) -> None:
    """From the packed metadata, as operators do it: rows to the places of a dispatch, and its combine."""
    spec = replace(SPEC, tokens=9, hidden=64, experts=6, topk=3)
    case = Case(2, spec, "auto", ("repeated",), seed=2)
    with Emulator(2) as emulator:
        tokens, sent = EmulatedTokens(emulator, kind, spec), batches(case, 0)
        gots = tokens.dispatch(sent, seed=0)
        again = tokens.restored(gots, sent)
        moved = tokens.dispatch_gradients([-2 * batch.x for batch in sent], again, seed=1)
        ys = [y.clone() for y in tokens.combine(gots, [got.x for got in gots], seed=2)]
        for got, rows, y, batch, its in zip(
            gots, moved, tokens.combine(again, [got.x for got in gots], seed=3), sent, ys, strict=True
        ):
            there = int(got.expert_offsets[1])
            assert there
            assert torch.equal(rows[:there], -2 * got.x[:there])
            to_ranks = sum(((batch.ids // 3) == rank).any(1).int() for rank in range(2))
            assert torch.equal(y, its)
            torch.testing.assert_close(y, batch.x * to_ranks[:, None])
        tokens.check()


def refused(world: World, spec: ExchangeSpec, backend: str, bad: str) -> list[str]:
    """Run three steps, of which all ranks refuse the second; return what the combines said."""
    said = []
    with Exchange(world, spec, backend) as exchange:
        for step in range(3):
            ids = torch.arange(10).reshape(5, 2) % 4
            spoiled, count = step == 1 and world.rank == 1, None
            if spoiled and bad == "id":
                ids[3, 1] = 9
            if spoiled and bad == "negative":
                ids[2, 0] = -3
            if spoiled and bad == "tokens":
                count = torch.tensor([7], dtype=torch.int32)
            if step == 1 and bad == "rows":
                ids[:] = torch.tensor([2, 3])
            if step != 1 and bad == "rows":
                ids[2:] = -1
            got = exchange.dispatch(torch.ones(5, 8), ids, torch.ones(5, 2), count)
            try:
                exchange.combine(got.x, got, weighted=False)
                said.append("")
            except DataRefused as error:
                said.append(str(error))
            exchange.check()  # once, and by the combine
    return said


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("id", "rank 1 asked for expert 9 for its token 3; ids are -1 to 3"),
        ("negative", "rank 1 asked for expert -3 for its token 2; ids are -1 to 3"),
        (
            "tokens",
            "num_tokens is 7 on rank 1; x has 5 rows, so 0 to 5 can be sent: make the exchange with more tokens",
        ),
        ("rows", "10 rows, gaps included, came to rank 1; its capacity is 8: " + advice(10)),
    ],
)
def test_refused_data_are_named_as_the_caller_gave_them(pool: RankPool, backend: str, bad: str, says: str) -> None:
    spec = replace(SPEC, capacity=8) if bad == "rows" else SPEC
    assert pool.run(2, refused, spec, backend, bad) == [["", says, ""]] * 2


def test_a_rank_can_refuse_in_the_place_of_combine() -> None:
    (world,) = wired(1)
    with world, Exchange(world, SPEC) as exchange:
        got = exchange.dispatch(torch.ones(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
        with pytest.raises(DataRefused, match="ended the work of its experts"):
            exchange.refuse(got)


@pytest.mark.parametrize("captured", [False, True])
def test_the_number_of_rows_is_that_of_the_last_replay(captured: bool) -> None:
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        with Exchange(world, SPEC) as exchange:
            got = exchange.dispatch(torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
            got.captured = captured
            assert got.count() == len(got.exact().x) == 3
            got.expert_offsets[-1] = 2  # as a replay writes it
            assert got.count() == len(got.exact().x) == (2 if captured else 3)


def test_a_captured_dispatch_allocates_where_no_other_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays write to the memory of a capture, also to that of results which it freed."""
    inside, entered = [False], []

    @contextmanager
    def memory() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(token_rows.CapturedMemory, "__call__", lambda _: memory())
    for name in ("tokens_of", "result_of"):
        made = getattr(token_rows.TokenBackend, name)

        def call(*given: Any, made: Any = made) -> Any:
            entered.append(inside[0])
            return made(*given)

        monkeypatch.setattr(token_rows.TokenBackend, name, call)
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        with Exchange(world, SPEC) as exchange:
            exchange.dispatch(torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    assert entered == [True, True] and not inside[0]


def test_capacity_counts_tokens() -> None:
    assert SPEC.rows(ranks=2) == 10
    assert replace(SPEC, capacity=0.7).rows(ranks=2) == 7  # of 5 tokens on min(K, R) ranks
    assert replace(SPEC, capacity=3.0).rows(ranks=2) == 10
    assert replace(SPEC, capacity=6).rows(ranks=2) == 6
    assert replace(SPEC, tokens=4096, topk=8, experts=8).rows(4) * 8 == 4 * 4096 * 8, "a K-th of layout expert's rows"


def test_calls_that_layout_token_does_not_have_are_refused() -> None:
    (world,) = wired(1)
    ids, weights = torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
    with world, Exchange(world, SPEC) as exchange:
        got = exchange.dispatch(torch.ones(5, 8), ids, weights)
        with pytest.raises(ConfigError, match="weighted is True with layout token, where combine takes sums of rows"):
            exchange.combine(got.x, got)
        with pytest.raises(ConfigError, match="dispatch_send asked for; with layout token operations are not split"):
            exchange.dispatch_send(torch.ones(5, 8), ids, weights)
        with pytest.raises(ConfigError, match="layout is token; the experts of a layer take rows by expert"):
            MoELayer(world, SPEC, LayerForm(ffn=16))
        np.testing.assert_array_equal(exchange.combine(got.x, got, weighted=False).numpy(), np.ones((5, 8)))
