"""The arithmetic of GPU backends as tensor operations, on CPU tensors: held to the plan, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from raymoe.exchange import plan
from raymoe.exchange.backend import Tokens
from raymoe.exchange.nccl_allgather import NcclAllgather
from raymoe.exchange.nccl_collective import Counted
from raymoe.exchange.refusal import Cause, Refusal
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.tensor_plan import Heard, Places, refusals_of, sum_blocks, sum_rows, tell
from raymoe.memory.world import World
from tests.gpu.exchange_ranks import refuse_and_go_on
from tests.unit.exchange_cases import BOUND, Batch, Case, batches
from tests.unit.exchange_judge import judge_combine
from tests.unit.ranks import RankPool
from tests.unit.test_exchange import ON_TENSORS, cases


def heard_from(case: Case, sent: list[Batch]) -> Heard:
    told = []
    for batch in sent:
        count = torch.tensor([batch.num_tokens], dtype=torch.int32)
        told.append(tell(Tokens(batch.x, batch.ids, batch.weights, count), case.spec))
    return Heard.of(torch.stack(told), case.spec)


@settings(max_examples=60)
@given(cases("none"))
def test_what_each_rank_works_out_alone_is_the_plan(case: Case) -> None:
    """Dispatch and combine of all ranks in one process, through tables of N tokens."""
    spec, ranks, local = case.spec, case.ranks, case.spec.local_experts(case.ranks)
    sent, wire = batches(case, 0), getattr(torch, spec.combine_wire)
    heard, ids = heard_from(case, sent), [batch.ids[: batch.num_tokens] for batch in sent]
    assert not heard.any_refused
    plans = [plan.plan(ids, rank, local, spec.alignment) for rank in range(ranks)]
    rows, sums = [], []
    for rank, theirs in enumerate(plans):
        places = Places.of(heard, rank, spec)
        assert (places.counts.tolist(), places.offsets.tolist()) == (theirs.counts, theirs.offsets)
        wanted = [
            ranks * spec.tokens if entry is None else entry[0] * spec.tokens + entry[1] for entry in theirs.entries
        ]
        assert places.token.tolist()[: len(wanted)] == wanted
        assert set(places.token.tolist()[len(wanted) :]) <= {ranks * spec.tokens}
        for place, entry in enumerate(theirs.entries):
            weight = 0.0 if entry is None else sent[entry[0]].weights[entry[1], entry[2]]
            assert places.weights[place] == weight
        drawn = np.random.default_rng((case.seed, rank)).uniform(-2, 2, (spec.rows(ranks), spec.hidden))
        rows.append(torch.from_numpy(drawn).to(sent[0].x.dtype))
        nan_in_gaps = rows[rank].clone()
        nan_in_gaps[[i for i in range(len(drawn)) if i >= len(theirs.entries) or theirs.entries[i] is None]] = torch.nan
        sums.append(torch.full((ranks * spec.tokens, spec.hidden), torch.nan, dtype=wire))
        sum_rows(nan_in_gaps, places.of_pair, heard.weights.flatten(0, 1) if case.weighted else None, sums[rank])
    weights = [batch.weights if case.weighted else None for batch in sent]
    for source, batch in enumerate(sent):
        blocks = torch.stack([theirs.view(ranks, spec.tokens, -1)[source] for theirs in sums])
        y = torch.full((len(batch.x), spec.hidden), torch.nan, dtype=batch.x.dtype)
        sum_blocks(blocks, y)
        want = plan.combine(rows, plans, weights, source, len(batch.x), wire)
        assert torch.equal(y, want)


@settings(max_examples=40)
@given(cases("none"))
def test_who_sends_which_rows_to_whom(case: Case) -> None:
    spec, ranks, local = case.spec, case.ranks, case.spec.local_experts(case.ranks)
    sent = batches(case, 0)
    heard = heard_from(case, sent)
    for rank in range(ranks):
        counted = Counted.of(heard, Places.of(heard, rank, spec), rank, spec)
        traffic, filled = counted.known(counted.numbers.tolist())
        ids = [batch.ids[: batch.num_tokens] for batch in sent]
        to = [plan.rank_rows(ids[rank], peer, local) for peer in range(ranks)]
        come = [plan.rank_rows(ids[peer], rank, local) for peer in range(ranks)]
        assert (traffic.giving, traffic.taking) == ([len(rows) for rows in to], [len(rows) for rows in come])
        assert traffic.tokens.tolist() == [token for rows in to for token in rows]
        arrived = [peer * spec.tokens + token for peer, rows in enumerate(come) for token in rows]
        assert traffic.arrived.tolist() == arrived
        nowhere = ranks * spec.tokens
        wanted = [arrived.index(token) if token in arrived else nowhere for token in range(nowhere)]
        assert traffic.row_of.tolist() == [*wanted, nowhere]
        home = [[nowhere] * ranks for _ in range(spec.tokens)]
        for row, (peer, token) in enumerate((peer, token) for peer, rows in enumerate(to) for token in rows):
            home[token][peer] = row
        assert traffic.home.tolist() == home
        assert filled == plan.plan(ids, rank, local, spec.alignment).offsets[-1]


class Silent:
    """Rounds of a world of one that nothing waits for."""

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        out.view(mine.shape).copy_(mine)

    def all_to_all(self, out: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None:
        for into, rows in zip(out, blocks, strict=True):
            into.copy_(rows)

    def wait(self, op: str) -> None:
        raise AssertionError(f"{op} waits")

    wait_for_all = wait


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("wide", [True, False])
def test_allgather_reads_no_tensor_on_the_host(layout: str, wide: bool) -> None:
    """Tensors without contents raise where their contents are asked for, as a capture would."""
    home = {"combine": "float32"} if wide else None
    spec = ExchangeSpec(tokens=5, hidden=8, experts=3, topk=2, layout=layout, wire=home)
    with World.open(0, 1) as world, FakeTensorMode():
        backend = NcclAllgather(world, spec, Silent())
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        ids = torch.empty(4, 2, dtype=torch.int64 if wide else torch.int32)
        tokens = Tokens(x, ids, torch.empty(4, 2), torch.empty(1, dtype=torch.int32))
        rows = torch.empty(spec.rows(1), 8, dtype=torch.bfloat16)
        got = backend.dispatch(tokens, rows if layout == "expert" else None)
        for weighted in (True, False):
            backend.combine(rows, got, weighted, torch.empty_like(x))
        with pytest.raises(DataDependentOutputException):
            int(got.expert_counts[0])


SPEC = ExchangeSpec(tokens=4, hidden=8, experts=6, topk=2, alignment=4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({(1, 0): 6}, Refusal(Cause.ID, 1, 6)),
        ({(2, 1): -2, (3, 0): 9}, Refusal(Cause.ID, 2, -2)),
        ({(0, 0): 2**40}, Refusal(Cause.ID, 0, 2**40)),
        ({(0, 0): -(2**40)}, Refusal(Cause.ID, 0, -(2**40))),
        ({"count": 5}, Refusal(Cause.TOKENS, 4, 5)),
        ({"count": -1}, Refusal(Cause.TOKENS, 4, -1)),
        ({"count": 2, (3, 0): 9}, Refusal()),
        ({"count": 0, (0, 0): 9}, Refusal()),
        ({"count": None, (3, 1): 9}, Refusal(Cause.ID, 3, 9)),
    ],
    ids=str,
)
def test_what_is_refused_counts_for_nothing(change: dict[Any, Any], says: Refusal) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5]])
    for at, bad in change.items():
        if at != "count":
            ids[at] = bad
    count = change.get("count", 4)
    given = Tokens(
        torch.zeros(4, 8, dtype=torch.bfloat16),
        ids,
        torch.ones(4, 2),
        None if count is None else torch.tensor([count], dtype=torch.int32),
    )
    honest = Tokens(given.x, torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5]], dtype=torch.int32), given.weights, None)
    heard = Heard.of(torch.stack([tell(honest, SPEC), tell(given, SPEC)]), SPEC)
    assert refusals_of(heard.status) == [Refusal(), says]
    assert bool(heard.any_refused) is bool(says)
    if says:
        assert (heard.ids[1] == -1).all()
        assert Places.of(heard, 0, SPEC).counts.tolist() == [2, 1, 1]


def test_more_rows_than_the_capacity_are_seen_by_all() -> None:
    spec = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, alignment=4, capacity=7)
    all_here = torch.full((4, 1), 1)
    given = Tokens(torch.zeros(4, 8, dtype=torch.bfloat16), all_here, torch.ones(4, 1), None)
    heard = Heard.of(torch.stack([tell(given, spec)] * 2), spec)
    assert refusals_of(heard.status) == [Refusal(), Refusal(Cause.CAPACITY, 0, 8)]
    places = Places.of(heard, 1, spec)
    assert (places.counts.tolist(), places.offsets.tolist()) == ([0], [0, 0])
    assert set(places.of_pair.flatten().tolist()) == {7}, "nothing has a place"


@pytest.mark.parametrize("dtype", sorted(BOUND))
def test_sums_in_pieces_are_the_sums(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(rng.uniform(-2, 2, (20, 8))).to(getattr(torch, dtype))
    at, weights = torch.from_numpy(rng.integers(0, 30, (13, 3))), torch.rand(13, 3)
    whole, pieces = torch.empty(13, 8, dtype=rows.dtype), torch.empty(13, 8, dtype=rows.dtype)
    sum_rows(rows, at, weights, whole)
    monkeypatch.setattr("raymoe.exchange.tensor_plan._PIECE_BYTES", 5 * 4 * 8)
    sum_rows(rows, at, weights, pieces)
    assert torch.equal(whole, pieces)
    sum_rows(rows[:0], at, weights, whole)
    assert not whole.any()


@pytest.mark.parametrize("backend", ON_TENSORS)
@pytest.mark.parametrize("fault", [("id", 6), ("id", -2), ("id", 2**40), ("capacity", 0)], ids=str)
def test_refused_data_is_told_by_all_and_the_next_step_works(
    pool: RankPool, backend: str, fault: tuple[str, int]
) -> None:
    spec = ExchangeSpec(
        tokens=6, hidden=16, experts=6, topk=2, alignment=4, capacity=32 if fault[0] == "capacity" else "worst"
    )
    middle = "one" if fault[0] == "capacity" else "uniform"
    case = Case(3, spec, backend, ("masked", middle, "masked"), seed=8, ragged=False)
    says = "36 rows, gaps included, came to rank 2; its capacity is 32: raise exchange.capacity"
    if fault[0] == "id":
        says = f"rank 2 asked for expert {fault[1]} for its token 2; ids are -1 to 5"
    for rank, (found, after) in enumerate(pool.run(3, refuse_and_go_on, case, fault)):
        assert found["told"] == says
        assert found["nan"]
        assert found["outside"]
        judge_combine(case, batches(case, 2)[rank], after.y)
