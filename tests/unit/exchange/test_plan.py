"""The fast arithmetic that the CPU backends share equals the reference arithmetic of plan.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymoe.config.job import Job
from raymoe.errors import ConfigError
from raymoe.exchange.cpu.cpu_rows import ArrivedRows, Bags, Placement, RowSums, SendPlan
from raymoe.exchange.refusal import Cause, Refusal
from raymoe.exchange.spec import ExchangeSpec
from tests.unit.exchange import plan


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, list[np.ndarray]]:
    """Draw ranks, local experts, and the ids of every rank."""
    ranks, local, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    ids = [rng.integers(-1, ranks * local, (draw(st.integers(0, 7)), topk)) for _ in range(ranks)]
    return ranks, local, ids


@given(routings())
def test_sending_has_one_row_for_each_token_and_rank(routing: tuple[int, int, list[np.ndarray]]) -> None:
    ranks, local, ids = routing
    for own_ids in ids:
        weights = np.arange(own_ids.size, dtype=np.float32).reshape(own_ids.shape)
        source_plan = SendPlan.of(own_ids, weights, ranks, ranks * local)
        pairs = list(zip(source_plan.ranks.tolist(), source_plan.tokens.tolist(), strict=True))
        assert pairs == [(r, t) for r in range(ranks) for t in plan.rank_rows(torch.from_numpy(own_ids), r, local)]
        assert source_plan.counts.tolist() == [sum(rank == r for rank, _ in pairs) for r in range(ranks)]
        for (rank, token), there, sent in zip(pairs, source_plan.ids, source_plan.weights, strict=True):
            globally = np.where(there >= 0, there + rank * local, -1)
            here = (own_ids[token] // local == rank) & (own_ids[token] >= 0)
            assert np.array_equal(globally, np.where(here, own_ids[token], -1))
            assert np.array_equal(sent, weights[token])


@given(routings(), st.integers(1, 9))
def test_placement_equals_the_plan(routing: tuple[int, int, list[np.ndarray]], alignment: int) -> None:
    ranks, local, ids = routing
    weights = [np.random.default_rng(7).random(own.shape, dtype=np.float32) for own in ids]
    source_plans = [SendPlan.of(own, w, ranks, ranks * local) for own, w in zip(ids, weights, strict=True)]
    for rank in range(ranks):
        theirs = plan.plan([torch.from_numpy(own) for own in ids], rank, local, alignment)
        own = [source_plan.ranks == rank for source_plan in source_plans]
        rows = [(s, t) for s, source_plan in enumerate(source_plans) for t in source_plan.tokens[own[s]].tolist()]
        arrived = ArrivedRows(
            torch.empty(0),
            np.arange(len(rows)),
            np.concatenate([source_plan.ids[own[s]] for s, source_plan in enumerate(source_plans)]),
            np.concatenate([source_plan.weights[own[s]] for s, source_plan in enumerate(source_plans)]),
            np.array([source_plan.counts[rank] for source_plan in source_plans]),
            zero_row=len(rows),
        )
        placed = Placement.of(arrived, local, alignment, capacity=10_000)
        assert placed.counts.tolist() == theirs.counts
        assert placed.offsets.tolist() == theirs.offsets
        assert all(offset % alignment == 0 for offset in theirs.offsets)
        for place, entry in enumerate(theirs.entries):
            row = int(placed.index[place])
            assert (None if row == len(rows) else rows[row]) == (entry and entry[:2])
            if entry:
                assert placed.weights[place] == weights[entry[0]][entry[1], entry[2]]
        home = placed.sums_to_send(weighted=True)
        for row, (source, token) in enumerate(rows):
            places = home.index[home.starts[row] : home.starts[row + 1]].tolist()
            wanted = [i for i, entry in enumerate(theirs.entries) if entry and entry[:2] == (source, token)]
            assert sorted(places) == wanted
            ks = [theirs.entries[place][2] for place in places]  # type: ignore[index]
            assert ks == sorted(ks)


@pytest.mark.parametrize("capacity", [15, 16])
def test_capacity_includes_gaps(capacity: int) -> None:
    ids = np.array([[0], [1]])
    arrived = ArrivedRows(torch.empty(0), np.arange(2), ids, np.ones((2, 1), np.float32), np.array([2]), zero_row=2)
    placed = Placement.of(arrived, experts=2, alignment=8, capacity=capacity)
    assert placed.refusal == (Refusal() if capacity == 16 else Refusal(Cause.CAPACITY, 0, 16))
    if placed.refusal:
        assert placed.offsets.tolist() == [0, 0, 0]


def test_an_id_of_no_local_expert_is_refused() -> None:
    ids = np.array([[0], [1], [2]])
    weights, counts = np.ones((3, 1), np.float32), np.array([1, 0, 2])
    arrived = ArrivedRows(torch.empty(0), np.arange(3), ids, weights, counts, zero_row=3)
    assert Placement.of(arrived, experts=2, alignment=1, capacity=9).refusal == Refusal(Cause.EXPERT, 2, 2)


@pytest.mark.parametrize("number", [-(2**62), -1, 0, 2**62])
def test_a_refusal_survives_packing_in_16_bytes(number: int) -> None:
    refusal = Refusal(Cause.ID, 77, number)
    assert len(refusal.pack()) == Refusal.NBYTES == 16
    assert Refusal.unpack(refusal.pack()) == refusal


DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@given(st.integers(0, 2**16), DTYPES, DTYPES, st.booleans())
def test_sums_equal_float64_sums_rounded_once(seed: int, dtype: str, to: str, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    table = torch.from_numpy(rng.uniform(-2, 2, (9, 16))).to(getattr(torch, dtype))
    sizes = rng.integers(0, 5, 6)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    index = rng.integers(0, 9, int(sizes.sum()))
    weights = rng.uniform(-1, 1, len(index)).astype(np.float32) if weighted else None
    out = torch.full((6, 16), torch.nan, dtype=getattr(torch, to))
    RowSums(table, Bags(index, starts, weights), out.dtype).write(0, 6, out)
    for bag in range(6):
        piece = slice(starts[bag], starts[bag + 1])
        rows = table[index[piece]].double().numpy() * (1 if weights is None else weights[piece, None].astype(float))
        eps = torch.finfo(out.dtype).eps / 2
        slack = eps * np.abs(rows.sum(0)) + 8 * 2**-23 * np.abs(rows).sum(0) + 1e-7
        assert np.all(np.abs(out[bag].double().numpy() - rows.sum(0)) <= slack)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 32))
def test_the_worst_capacity_holds_the_worst_routings(T: int, L: int, K: int, R: int, alignment: int) -> None:
    spec = ExchangeSpec(tokens=T, hidden=8, experts=R * L, topk=min(K, R * L), alignment=alignment)
    rows = R * T * spec.topk
    for counts in ([rows] + [0] * (L - 1), [rows // L + (e < rows % L) for e in range(L)], [1] * (L - 1) + [rows]):
        if sum(counts) <= rows:
            assert plan.expert_offsets(counts, alignment)[-1] <= spec.rows(R)


@pytest.mark.parametrize(
    ("factor", "rows"),
    [(1.0, 24 + 2 * 3), (1.25, 30 + 2 * 3), (1.26, 31 + 2 * 3), (3.0, 72 + 2 * 3), (100.0, 72 + 2 * 3)],
)
def test_a_capacity_as_a_factor_is_of_the_rows_of_a_rank_plus_gaps(factor: float, rows: int) -> None:
    spec = ExchangeSpec(tokens=12, hidden=16, experts=6, topk=2, alignment=4, capacity=factor)
    assert spec.rows(3) == -(-rows // 4) * 4 == spec.counted(3).capacity == spec.counted(3).rows(3)
    assert ExchangeSpec(tokens=12, hidden=16, experts=6, topk=2, capacity=1).rows(3) == 1
    with pytest.raises(ConfigError, match="count its rows first"):
        spec.inside(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": 0}, "tokens is 0; a whole number of at least 1"),
        ({"topk": True}, "topk is True"),
        ({"topk": 9}, "topk is 9 with 8 experts"),
        ({"hidden": 12}, "12 bfloat16 is 24 bytes; a multiple of 16"),
        ({"dtype": "float8"}, "dtype is 'float8'; it is one of bfloat16, float16, float32"),
        ({"layout": "tokens"}, "layout is 'tokens'; it is one of expert, rank, token"),
        ({"padding": "one"}, "padding is 'one'; it is one of any, zero"),
        ({"wire": "float16"}, "wire is 'float16' with dtype bfloat16; dispatch sends rows as bfloat16 or float8_e4m3"),
        ({"wire": {"combine": "float8_e4m3"}}, "wire of combine is 'float8_e4m3'"),
        ({"wire": {"both": "bfloat16"}}, "wire names both; its directions are dispatch and combine"),
        ({"wire": {1: "bfloat16", "both": "bfloat16"}}, "wire names 1, both; its directions are dispatch and combine"),
        ({"wire": ("float8_e4m3", "float16")}, "give a dtype, or a mapping with dispatch and combine"),
        ({"output": "raw"}, "output is 'raw' with rows that cross as bfloat16"),
        ({"output": "values"}, "output is 'values'; it is one of dequantised, raw"),
        ({"depth": -1}, "depth is -1"),
        ({"capacity": "best"}, "capacity is 'best'"),
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 0.0}, "capacity is 0.0"),
        ({"capacity": float("nan")}, "or a factor of the mean: a float above 0"),
        ({"capacity": 2**31}, "capacity is 2147483648; it is 'worst' or a number of rows, 1 to 2147483647"),
        ({"alignment": -4}, "alignment is -4"),
        ({"alignment": 1 << 30, "capacity": 64}, "alignment is 1073741824; at most 65536 is supported"),
        ({"tokens": 2**24 + 1}, "tokens is 16777217; at most 16777216 is supported"),
        ({"hidden": 2**20 + 8}, "hidden is 1048584; at most 1048576 is supported"),
        ({"experts": 2**16 + 1}, "experts is 65537; at most 65536 is supported"),
        ({"experts": 512, "topk": 257}, "topk is 257; at most 256 is supported"),
    ],
)
def test_impossible_specs_are_refused(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExchangeSpec(**({"tokens": 4, "hidden": 16, "experts": 8, "topk": 2} | change))


def test_a_spec_that_its_ranks_cannot_hold_is_refused() -> None:
    ExchangeSpec(tokens=4, hidden=16, experts=8, topk=2).check(4)
    with pytest.raises(ConfigError, match="8 experts on 3 ranks"):
        ExchangeSpec(tokens=4, hidden=16, experts=8, topk=2).check(3)
    with pytest.raises(ConfigError, match="2147483648 rows on a rank, gaps included; 2147483647 is the most"):
        ExchangeSpec(tokens=2**24, hidden=16, experts=32, topk=32, alignment=1).check(4)
    # A small capacity does not help: the offsets wrap before they are compared with it.
    with pytest.raises(ConfigError, match="int32 offsets"):
        ExchangeSpec(tokens=4, hidden=16, experts=2**16, topk=2, alignment=2**16, capacity=64).check(1)


def test_config_and_library_have_the_same_bounds() -> None:
    schema = Job.model_json_schema()["$defs"]
    shape = schema["ShapeSection"]["properties"]
    bounds = {
        **{name: shape[name]["maximum"] for name in ("tokens", "hidden", "experts", "topk")},
        "alignment": schema["ExchangeSection"]["properties"]["alignment"]["maximum"],
    }
    fits = {"tokens": 8, "hidden": 64, "experts": 512, "topk": 8, "alignment": 16}
    for name, most in bounds.items():
        ExchangeSpec(**(fits | ({"experts": most} if name == "topk" else {}) | {name: most}))
        with pytest.raises(ConfigError, match=f"{name} is {2 * most}; at most {most}"):
            ExchangeSpec(**(fits | {name: 2 * most}))


INF, NAN = float("inf"), float("nan")
SPECIAL = (INF, -INF, NAN, -0.0, 0.0, 1.0, -2.5, 3.3e38, 1e-40)


def special_sums(weights: Sequence[float], values: Sequence[float], dtype: torch.dtype) -> tuple[torch.Tensor, Bags]:
    """Return a table of these values, and bags of its rows with these weights."""
    rng = np.random.default_rng(7)
    table = torch.tensor(values)[torch.from_numpy(rng.integers(0, len(values), (64, 16)))].to(dtype)
    starts = np.concatenate([[0], np.sort(rng.integers(0, 1201, 399)), [1200]])
    drawn = np.array(weights, np.float32)[rng.integers(0, len(weights), 1200)]
    return table, Bags(rng.integers(0, 64, 1200), starts, drawn)


def summed(table: torch.Tensor, bags: Bags, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(bags), table.shape[1], dtype=dtype)
    RowSums(table, bags, dtype).write(0, len(bags), out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_infinities_equal_float64_sums(dtype: torch.dtype) -> None:
    """A weight of 1 is split into 1, 0 and 0, and 0 times an infinity is NaN."""
    table, bags = special_sums([1.0, 0.5, 1 / 3, -2.0], [INF, -INF, NAN, -0.0, 1.0, 1.0, -2.5, -2.5, 1.0, 1.0], dtype)
    assert bags.weights is not None
    with np.errstate(invalid="ignore"):
        products = table.double().numpy()[bags.index] * bags.weights[:, None]
        want = torch.tensor(np.stack([products[begin:end].sum(axis=0) for begin, end in pairwise(bags.starts)]))
    sums = summed(table, bags, dtype).double()
    assert min(int(kind.sum()) for kind in (want.isnan(), want.isposinf(), want.isneginf(), want.isfinite())) > 50
    torch.testing.assert_close(sums, want, rtol=2e-2, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weights", [[INF, 1.0], [-INF, NAN, 1.0], [3.2e38, -3.2e38, 1.0], [0.0, -0.0, 0.5]])
def test_special_sums_in_bfloat16_equal_those_in_float32(weights: Sequence[float]) -> None:
    for values in (SPECIAL, (1.0, -2.5, -0.0), (INF, 1.0, 1.0, 1.0)):
        table, bags = special_sums(weights, values, torch.bfloat16)
        sums, want = summed(table, bags, torch.bfloat16), summed(table.float(), bags, torch.float32).bfloat16()
        torch.testing.assert_close(sums, want, rtol=1e-2, atol=1e-37, equal_nan=True)


def test_an_infinite_sum_does_not_change_other_sums() -> None:
    """Compare bit by bit, also within the same piece."""
    rng = np.random.default_rng(3)
    table = torch.from_numpy(rng.normal(size=(50, 64))).bfloat16()
    index, starts = rng.integers(0, 40, 300), np.arange(0, 301, 3)
    bags = Bags(index, starts, rng.random(300).astype(np.float32))
    before, after = torch.empty(100, 64, dtype=torch.bfloat16), torch.empty(100, 64, dtype=torch.bfloat16)
    RowSums(table, bags, torch.bfloat16).write(0, 100, before)
    index[30], table[45, 5] = 45, torch.inf  # in bag 10
    RowSums(table, bags, torch.bfloat16).write(0, 100, after)
    assert after[10, 5] == torch.inf
    after[10] = before[10]
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
