"""Every backend equals the plan where rows are only moved, and is near the oracle where they are summed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.unit.exchange import plan
from tests.unit.exchange.exchange_cases import (
    BOUND,
    ROUTINGS,
    Case,
    Result,
    apply_experts,
    batches,
    expert_map,
    open_exchange,
    run_case,
    run_step,
)
from tests.unit.exchange.exchange_judge import judge, judge_combine
from tests.unit.ranks import RankPool

BACKENDS = ("host", "collective", "allgather")
ON_TENSORS = ("tensor collective", "tensor allgather")
"""The NCCL backends of GPU ranks, on CPU ranks: everything except NCCL's own calls."""


@st.composite
def cases(draw: st.DrawFn, backend: str) -> Case:
    ranks = draw(st.integers(1, 4))
    experts = ranks * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(sorted(BOUND)))
    spec = ExchangeSpec(
        tokens=draw(st.integers(1, 9)),
        hidden=(4 if dtype == "float32" else 8) * draw(st.integers(1, 5)),
        experts=experts,
        topk=draw(st.integers(1, min(4, experts))),
        dtype=dtype,
        wire={"combine": draw(st.sampled_from([dtype, dtype, *sorted(BOUND)]))},
        layout=draw(st.sampled_from(["expert", "rank"])),
        padding=draw(st.sampled_from(["any", "zero"])),
        alignment=draw(st.sampled_from([1, 3, 8, 16])),
    )
    flags = [draw(st.booleans()) for _ in range(6)]
    routing = tuple(draw(st.lists(st.sampled_from(ROUTINGS), min_size=1, max_size=4)))
    return Case(ranks, spec, backend, routing, draw(st.integers(0, 2**16)), *flags)


@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_generated_cases_match_plan_and_oracle(pool: RankPool, backend: str) -> None:
    @settings(max_examples=40 if backend == "host" else 15)
    @given(case=cases(backend))
    def hold(case: Case) -> None:
        judge(case, pool.run(case.ranks, run_case, case))

    hold()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
@pytest.mark.parametrize("dtype", sorted(BOUND))
def test_a_larger_case_matches_plan_and_oracle(pool: RankPool, backend: str, dtype: str) -> None:
    spec = ExchangeSpec(tokens=96, hidden=256, experts=16, topk=4, dtype=dtype)
    case = Case(4, spec, backend, ("uniform", "masked", "one", "uniform"), seed=5)
    judge(case, pool.run(4, run_case, case))


WIRES = (
    ("float32", "float16", 4),
    ("float32", "bfloat16", 12),
    ("bfloat16", "float32", 8),
    ("bfloat16", "float16", 24),
)
"""A dtype, the combine wire, and elements of a row. On the wire, 4 and 12 elements do not fill pieces of 16 bytes."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
@pytest.mark.parametrize("topk", [1, 4])
def test_sums_are_rounded_once_to_the_combine_wire(pool: RankPool, backend: str, topk: int) -> None:
    """Compare bit by bit. Weights are used only where nothing is added: a product may be added unrounded."""
    for dtype, wire, hidden in WIRES:
        spec = ExchangeSpec(20, hidden, experts=6, topk=topk, dtype=dtype, wire={"combine": wire}, alignment=1)
        case = Case(3, spec, backend, ("uniform",), seed=7, weighted=topk == 1)
        wants = combined(case, getattr(torch, wire))
        for result, want in zip(pool.run(3, run_case, case), wants, strict=True):
            assert np.array_equal(result[0].y, want.float().numpy())
        plain = combined(case, getattr(torch, dtype))
        differs = any(not torch.equal(*pair) for pair in zip(wants, plain, strict=True))
        assert differs == (wire != "float32" or topk > 1), "float32 on the wire changes nothing for a single sum"


def combined(case: Case, wire: torch.dtype) -> list[torch.Tensor]:
    """Return the plan's y of the first step, for all ranks."""
    sent, local = batches(case, 0), case.spec.local_experts(case.ranks)
    plans = [plan.plan([batch.ids for batch in sent], rank, local, case.spec.alignment) for rank in range(case.ranks)]
    rows = []
    for rank, theirs in enumerate(plans):
        x = plan.dispatch([batch.x for batch in sent], theirs, case.spec.rows(case.ranks))
        first, results = rank * local, x.double().numpy()
        for expert, (start, count) in enumerate(zip(theirs.offsets[:-1], theirs.counts, strict=True)):
            results[start : start + count] = expert_map(first + expert, results[start : start + count])
        rows.append(torch.from_numpy(results).to(x.dtype))
    weights = [batch.weights if case.weighted else None for batch in sent]
    return [plan.combine(rows, plans, weights, source, len(batch.x), wire) for source, batch in enumerate(sent)]


def repeated(world: World, case: Case) -> list[bool]:
    """Run the same step several times, with other steps between; return whether each repeat equals the first."""
    same = []
    with open_exchange(world, case) as exchange:
        first = run_step(exchange, case, batches(case, 0)[world.rank])
        for _ in range(3):
            run_step(exchange, case, batches(case, 1)[world.rank])
            again = run_step(exchange, case, batches(case, 0)[world.rank])
            same.append(first.x.tobytes() == again.x.tobytes() and first.y.tobytes() == again.y.tobytes())
    return same


@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_results_repeat_bit_for_bit(pool: RankPool, backend: str) -> None:
    spec = ExchangeSpec(tokens=24, hidden=64, experts=8, topk=4, alignment=1)
    case = Case(4, spec, backend, ("repeated", "skewed"), seed=3)
    assert pool.run(4, repeated, case) == [[True] * 3] * 4


def outstanding(world: World, case: Case) -> list[np.ndarray]:
    """Call three dispatches, then their combines in another order."""
    with open_exchange(world, case) as exchange:
        gots = []
        for step in range(3):
            batch = batches(case, step)[world.rank]
            out = torch.full((case.spec.rows(world.size), case.spec.hidden), torch.nan, dtype=batch.x.dtype)
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights, out=out))
        ys = {}
        for step in (1, 2, 0):
            got = gots[step]
            ys[step] = exchange.combine(apply_experts(exchange, got, got.x), got).float().numpy()
        return [ys[step] for step in range(3)]


@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_several_dispatches_may_be_outstanding(pool: RankPool, backend: str) -> None:
    spec = ExchangeSpec(tokens=12, hidden=32, experts=6, topk=3, dtype="float32")
    case = Case(3, spec, backend, ("uniform", "masked", "repeated"), seed=11)
    ys = pool.run(3, outstanding, case)
    for rank in range(3):
        for step in range(3):
            judge_combine(case, batches(case, step)[rank], ys[rank][step])


def any_order(world: World, case: Case, program: list[int]) -> dict[int, np.ndarray]:
    """Dispatch where the program holds 0, else combine an outstanding dispatch. Every rank has its own pace."""
    pace = np.random.default_rng((case.seed, world.rank))
    ys: dict[int, np.ndarray] = {}
    outstanding: list[tuple[int, Any, torch.Tensor]] = []
    with open_exchange(world, case) as exchange:
        for step, choice in enumerate(program):
            time.sleep(float(pace.exponential(0.001)) if pace.random() < 0.3 else 0)
            if choice == 0 or not outstanding:
                batch = batches(case, step)[world.rank]
                got = exchange.dispatch(batch.x, batch.ids, batch.weights)
                x = got.x if got.index is None else got.x[got.index]
                outstanding.append((step, got, apply_experts(exchange, got, x)))
            else:
                number, got, rows = outstanding.pop(choice % len(outstanding))
                ys[number] = exchange.combine(rows, got).float().numpy()
    return ys


@settings(max_examples=15)
@given(
    program=st.lists(st.integers(0, 3), min_size=4, max_size=24),
    seed=st.integers(0, 2**16),
    layout=st.sampled_from(["expert", "rank"]),
)
def test_dispatches_and_combines_in_any_order_give_correct_sums(
    pool: RankPool, program: list[int], seed: int, layout: str
) -> None:
    spec = ExchangeSpec(tokens=7, hidden=16, experts=6, topk=2, dtype="float32", layout=layout)
    case = Case(3, spec, "host", ("uniform", "masked", "skewed", "none", "one", "repeated") * 4, seed)
    for rank, ys in enumerate(pool.run(3, any_order, case, program)):
        for step, y in ys.items():
            judge_combine(case, batches(case, step)[rank], y)


def two_exchanges(world: World, cases: list[Case]) -> list[list[Result]]:
    """Run the steps of two exchanges with different specs in turns."""
    with Exchange(world, cases[0].spec, cases[0].backend) as a, Exchange(world, cases[1].spec, cases[1].backend) as b:
        results: list[list[Result]] = [[], []]
        for step in range(2):
            for which, exchange in enumerate((a, b)):
                case = cases[which]
                results[which].append(run_step(exchange, case, batches(case, step)[world.rank]))
        return results


def test_two_exchanges_in_one_world_give_correct_results(pool: RankPool) -> None:
    small = Case(2, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), "auto", ("uniform", "one"), seed=1)
    large = Case(2, ExchangeSpec(tokens=30, hidden=64, experts=8, topk=4), "auto", ("skewed", "masked"), seed=2)
    results = pool.run(2, two_exchanges, [small, large])
    for which, case in enumerate((small, large)):
        judge(case, [theirs[which] for theirs in results])


def rank_layout_slots(world: World, case: Case) -> dict[str, Any]:
    with Exchange(world, case.spec, backend="host") as exchange:
        addresses, indices = [], []
        for step in range(3):
            batch = batches(case, step)[world.rank]
            got = exchange.dispatch(batch.x, batch.ids, batch.weights)
            assert got.index is not None
            addresses.append(got.x.data_ptr())
            indices.append(got.index[: int(got.expert_offsets[-1])].tolist())
            zeros = got.x[-1].abs().sum().item()
        return {"addresses": addresses, "indices": indices, "zeros": zeros, "backend": exchange.backend}


def test_layout_rank_keeps_one_address_and_its_indices_select_the_parity(pool: RankPool) -> None:
    spec = ExchangeSpec(tokens=5, hidden=16, experts=2, topk=1, layout="rank", alignment=1)
    case = Case(2, spec, "host", ("uniform",) * 3, seed=4, ragged=False)
    for slots in pool.run(2, rank_layout_slots, case):
        assert len(set(slots["addresses"])) == 1
        assert slots["zeros"] == 0
        parity_rows = 2 * spec.tokens
        for step, index in enumerate(slots["indices"]):
            parity = (step + 1) % 2
            assert all(parity * parity_rows <= i < (parity + 1) * parity_rows for i in index), (step, index)


def test_the_oracle_is_not_linear_through_zero() -> None:
    zero = np.zeros((1, 4))
    offsets = {float(expert_map(expert, zero)[0, 0]) for expert in range(12)}
    assert len(offsets) == 12
    assert 0.0 not in offsets
