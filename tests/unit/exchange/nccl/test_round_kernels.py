"""The kernels around NCCL's collectives equal the plan bit by bit (emulated, with all ranks in one process)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.cuda.launch import Shape
from raymoe.errors import DataRefused
from raymoe.exchange.backend import Tokens
from raymoe.exchange.nccl.rounds import MOST_EXPERTS, SPREAD, Sizes, SpreadParams
from raymoe.exchange.refusal import Cause, Refusal, raise_first
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import Change
from tests.emulator.machine import EmulatorError
from tests.gpu.exchange_ranks import refuse_and_go_on
from tests.gpu.mixed_ranks import left_out_backward, mixed_backward, mixed_combines
from tests.unit.exchange import plan
from tests.unit.exchange.exchange_cases import Case, batches
from tests.unit.exchange.exchange_judge import advice, judge_combine
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher
from tests.unit.exchange.nccl.emulated_rounds import (
    Ranks,
    drawn,
    judge_places,
    judge_step,
    judge_traffic,
    read_now,
    tokens_of,
)
from tests.unit.exchange.test_exchange import ON_TENSORS, cases
from tests.unit.ranks import RankPool


@st.composite
def wide_cases(draw: st.DrawFn) -> Case:
    """Draw a case of `cases`, with up to 16 ids for a token, rows of several pieces, and groups of experts."""
    case = draw(cases("none"))
    topk = draw(st.sampled_from([case.spec.topk, 16]))
    experts = case.ranks * draw(st.sampled_from([-(-16 // case.ranks), 17])) if topk == 16 else case.spec.experts
    hidden = draw(st.sampled_from([case.spec.hidden, 1032]))
    group = draw(st.sampled_from([size for size in (1, 2, 3, 17) if experts // case.ranks % size == 0]))
    return replace(case, spec=replace(case.spec, topk=topk, experts=experts, hidden=hidden, expert_group=group))


@pytest.mark.parametrize("compact", [True, False], ids=["collective", "allgather"])
def test_dispatch_and_combine_equal_the_plan(compact: bool) -> None:
    @settings(max_examples=40)
    @given(wide_cases())
    def hold(case: Case) -> None:
        judge_step(case, compact, EmulatedLauncher())

    hold()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compact", [True, False], ids=["collective", "allgather"])
@pytest.mark.parametrize(("ranks", "local", "group"), [(1, 700, 1), (1, 700, 2), (4, 150, 3), (16, 1, 1)])
def test_many_experts_and_ranks_are_correct_on_blocks_of_8_warps(
    ranks: int, local: int, group: int, compact: bool
) -> None:
    """Several warps number a run, and there are more experts than threads in a block."""
    launcher = EmulatedLauncher()
    launcher.threads, launcher.sms = 256, 2 * ranks
    spec = ExchangeSpec(40, 8, ranks * local, topk=min(16, ranks * local), alignment=3, expert_group=group)
    case = Case(ranks, spec, "none", ("repeated",), seed=ranks, ragged=False)
    sent = batches(case, 0)
    ids = [batch.ids for batch in sent]
    for rank, result in enumerate(Ranks(case, compact, launcher).dispatch([tokens_of(batch) for batch in sent])):
        judge_places(case, sent, plan.plan(ids, rank, local, 3, group), result.got)
        judge_traffic(case, ids, rank, result, compact)


INJECTED_BUGS = {
    "ids of tokens that are not there": Change(
        "publish_routing.cu", "if (entry < there) {", "if (entry < p.x_rows * 3) {"
    ),
    "entries are stored before all are counted": Change(
        "count_entries.cu",
        "__syncthreads();\n    for (u32 i = threadIdx.x; i < words",
        "for (u32 i = threadIdx.x; i < words",
    ),
    "runs before this one are forgotten": Change(
        "numbering.cuh", "before += first + i * warps_ < blockIdx.x ? counts[i] : 0;", ""
    ),
    "tokens of runs before this one are forgotten": Change(
        "numbering.cuh", "over_runs(p_, run_.source, run_.number, memory_.local + way)", "0"
    ),
    "warps before this one are forgotten": Change("numbering.cuh", "begin += warp < warp_ ? sums_[warp] : 0;", ""),
    "marks are read before all are written": Change(
        "numbering.cuh", "mark(ways, first_way);\n            __syncthreads();", "mark(ways, first_way);"
    ),
    "gaps keep their weights": Change("numbering.cuh", "ptx::store_4(p_.out_weights + (begin + i) * 4ull, 0);", ""),
    "every expert of a group is aligned": Change("numbering.cuh", "if ((expert + 1) % p_.group == 0) {", "{"),
    "a group is of the number of experts": Change("numbering.cuh", "(expert + 1) % p_.group == 0", "expert % 2 == 1"),
    "a group's gap is that of its last expert": Change(
        "numbering.cuh", "rows += totals_[last - i];", "rows = totals_[last];"
    ),
    "no place is told from another": Change(
        "numbering.cuh",
        "return begin + before;\n    }\n\n    __device__ __forceinline__ void place_entry",
        "return begin;\n    }\n\n    __device__ __forceinline__ void place_entry",
    ),
    "own rows in the place of another's": Change("spread_rows.cu", "place - p.first_row", "place"),
    "the last vectors of a row": Change(
        "spread_rows.cu", "vectors = p.row_bytes / 16;", "vectors = p.row_bytes / 16 - 1;"
    ),
    "a sum of weights alone": Change("sum_entries.cu", "there && p.weighted", "there"),
    "a status in the place of another's": Change(
        "sum_entries.cu", "ptx::load_4(record->rows_from + rank)", "ptx::load_4(record->rows_to + rank)"
    ),
    "the own sums out of what came": Change(
        "sum_ranks.cu", "rank == p.memory.rank ? p.outgoing : p.returned", "p.returned"
    ),
    "a number of every entry": Change("sum_entries.cu", "ptx::load_4_if(place != NOWHERE,", "ptx::load_4_if(true,"),
    "numbers of the first entry": Change(
        "sum_entries.cu", "p.saved + memory.places + entry * 4ull", "p.saved + memory.places"
    ),
    "the own numbers out of what came": Change(
        "sum_ranks.cu", "rank == memory.rank ? p.outgoing_numbers : p.returned_numbers", "p.returned_numbers"
    ),
    "the numbers of one rank": Change("sum_ranks.cu", "number |= ptx", "number = ptx"),
    "numbers in the place of another rank's": Change(
        "sum_ranks.cu", "block + static_cast<u64>(rank) * p.number_stride + entry * 4ull", "block + entry * 4ull"
    ),
    "sums in the place of another block's": Change(
        "sum_entries.cu", "p.outgoing + skew_of(source, p.skew) +", "p.outgoing +"
    ),
    "a status in the place of another block's": Change(
        "sum_entries.cu", "p.outgoing + skew_of(rank, p.skew) +", "p.outgoing +"
    ),
    "blocks without their numbers": Change("sum_ranks.cu", " + skew_of(rank, p.skew);", ";"),
    "the pass after another's weights": Change(
        "rounds.cuh", "(entries() * 8 + 15) / 16 * 16 + sizeof(Status)", "entries() * 8"
    ),
    "sums of ranks in which a token has no expert": Change(
        "sum_ranks.cu", "entry * 4, NOWHERE);", "entry * 4, NOWHERE) & 0xFFFF;"
    ),
}
"""Each fault must be found in at least one of 24 cases."""


@pytest.mark.parametrize("bug", INJECTED_BUGS.values(), ids=INJECTED_BUGS)
def test_an_injected_bug_is_found(bug: Change) -> None:
    for seed in range(24):
        try:
            drawn(seed, (bug,))
        except (EmulatorError, AssertionError):
            return
    pytest.fail("24 cases are all right with it")


def test_the_same_cases_are_correct_without_the_faults() -> None:
    for seed in range(24):
        drawn(seed)


def test_the_most_experts_leave_one_numbering_warp() -> None:
    assert Sizes(16, 4096, 8, MOST_EXPERTS, True).numbering_warps() == 1


SPEC = ExchangeSpec(tokens=4, hidden=8, experts=6, topk=2, alignment=4)
IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5]])


def given_tokens(ids: torch.Tensor, count: int | None = None) -> Tokens:
    number = None if count is None else torch.tensor([count], dtype=torch.int32)
    return Tokens(torch.ones(len(ids), 8, dtype=torch.bfloat16), ids, torch.ones(ids.shape), number)


def two_ranks(compact: bool, spec: ExchangeSpec = SPEC) -> Ranks:
    return Ranks(Case(2, spec, "none", ("uniform",)), compact)


@pytest.fixture(params=[True, False], ids=["collective", "allgather"])
def compact(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({(1, 0): 6}, Refusal(Cause.ID, 1, 6)),
        ({(2, 1): -2, (3, 0): 9}, Refusal(Cause.ID, 2, -2)),
        ({(0, 0): 2**40}, Refusal(Cause.ID, 0, 2**40)),
        ({(0, 0): -(2**40)}, Refusal(Cause.ID, 0, -(2**40))),
        ({"count": 5}, Refusal(Cause.TOKENS, 4, 5)),
        ({"count": -1}, Refusal(Cause.TOKENS, 4, -1)),
        ({"count": 2, (3, 0): 9}, None),
        ({"count": 0, (0, 0): 9}, None),
        ({"count": None, (3, 1): 9}, Refusal(Cause.ID, 3, 9)),
    ],
    ids=str,
)
def test_all_ranks_refuse_bad_data_of_one_and_the_next_step_works(
    compact: bool, change: dict[Any, Any], says: Refusal | None
) -> None:
    ids = IDS.clone()
    for at, bad in change.items():
        if at != "count":
            ids[at] = bad
    ranks = two_ranks(compact)
    rows = [torch.ones(SPEC.rows(2), 8, dtype=torch.bfloat16)] * 2
    for step, tokens in enumerate((given_tokens(ids, change.get("count", 4)), given_tokens(IDS))):
        results = ranks.dispatch([given_tokens(IDS.int()), tokens])
        ys = ranks.combine(results, rows, [True, True])
        refused = says if step == 0 else None
        for y, rank in zip(ys, results, strict=True):
            assert bool(y.isnan().all()) is bool(y.isnan().any()) is bool(refused)
            statuses = rank.kernels.take_refused(read_now)
            assert statuses == ([Refusal(Cause.NONE, 1, 1), refused] if refused else [])


def test_the_first_refusal_is_kept_until_it_is_taken(compact: bool) -> None:
    ranks = two_ranks(compact)
    rows = [torch.ones(SPEC.rows(2), 8, dtype=torch.bfloat16)] * 2
    for bad in (6, 7):
        ids = IDS.clone()
        ids[0, 0] = bad
        results = ranks.dispatch([given_tokens(IDS), given_tokens(ids)])
        ranks.combine(results, rows, [True, True])
    for rank in results:
        assert [status.number for status in rank.kernels.take_refused(read_now)] == [1, 6]
        assert rank.kernels.take_refused(read_now) == []


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_more_rows_than_the_capacity_are_refused_by_all_ranks(compact: bool, layout: str) -> None:
    spec = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1, alignment=4, capacity=7, layout=layout)
    ranks = two_ranks(compact, spec)
    results = ranks.dispatch([given_tokens(torch.full((4, 1), 1))] * 2)
    got = results[1].got
    assert (got.expert_counts.tolist(), got.expert_offsets.tolist()) == ([0], [0, 0])
    assert got.x.isnan().all() if layout == "expert" else (got.index == 8).all()
    for y in ranks.combine(results, [torch.ones(7, 8, dtype=torch.bfloat16)] * 2, [True, True]):
        assert y.isnan().all()
    for rank in results:
        assert rank.kernels.take_refused(read_now) == [Refusal(Cause.NONE, 1, 1), Refusal(Cause.CAPACITY, 0, 8)]


def test_combines_that_differ_are_refused_by_all_ranks() -> None:
    ranks = two_ranks(compact=False)
    first, second = (ranks.dispatch([given_tokens(IDS)] * 2) for _ in range(2))
    rows = [torch.ones(SPEC.rows(2), 8, dtype=torch.bfloat16)] * 2
    for mixed, weighted, sentence in (
        (
            [first[0], second[1]],
            [True, True],
            "rank 0 combines its dispatch 1 and rank 1 its dispatch 2",
        ),
        (second, [True, False], "rank 0 combines dispatch 2 with weighted=True and rank 1 with weighted=False"),
    ):
        assert all(y.isnan().all() for y in ranks.combine(mixed, rows, weighted))
        for rank in mixed:
            with pytest.raises(DataRefused, match=sentence):
                raise_first(rank.kernels.take_refused(read_now), SPEC)
    assert not any(y.isnan().any() for y in ranks.combine(second, rows, [False, False]))


def test_entries_without_a_row_are_not_read() -> None:
    """Entries 1 and 3 have no row, and there is no memory after the source's last row."""
    rows = torch.arange(64, dtype=torch.uint8).view(2, 32)
    saved = torch.tensor([0, 2**32 - 1, 1, 3, 0, 2, 7, 2**32 - 1], dtype=torch.int64).to(torch.int32)
    out = torch.full((4, 32), 200, dtype=torch.uint8)
    params = SpreadParams(source=0, to=16, count=4, stride=1, width=1, row_bytes=32, pieces=1)
    saved[:4] = torch.tensor([0, -1, 1, -1])
    saved[4:] = torch.tensor([3, 0, 1, 2])
    EmulatedLauncher().ready(SPREAD, Shape(2, 64), params, rows=rows, out=out, saved=saved)(0)
    assert out.tolist() == [[200] * 32, rows[1].tolist(), [200] * 32, rows[0].tolist()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ON_TENSORS)
@pytest.mark.parametrize("fault", [("id", 6), ("id", -2), ("id", 2**40), ("capacity", 0)], ids=str)
def test_all_ranks_report_refused_data_and_the_next_step_works(
    pool: RankPool, backend: str, fault: tuple[str, int]
) -> None:
    spec = ExchangeSpec(
        tokens=6, hidden=16, experts=6, topk=2, alignment=4, capacity=32 if fault[0] == "capacity" else "worst"
    )
    middle = "one" if fault[0] == "capacity" else "uniform"
    case = Case(3, spec, backend, ("masked", middle, "masked"), seed=8, ragged=False)
    says = "36 rows, gaps included, came to rank 2; its capacity is 32: " + advice(36)
    if fault[0] == "id":
        says = f"rank 2 asked for expert {fault[1]} for its token 2; ids are -1 to 5"
    for rank, (report, after) in enumerate(pool.run(3, refuse_and_go_on, case, fault)):
        assert report["told"] == says
        assert report["nan"]
        assert report["outside"]
        judge_combine(case, batches(case, 2)[rank], after.y)


UNLIKE = {
    "dispatch": "rank 0 combines its dispatch 1 and rank 2 its dispatch 2",
    "weighted": "rank 0 combines dispatch 1 with weighted=True and rank 2 with weighted=False",
    "site": "rank 0 combines rows of call site 5 and rank 2 rows of call site 7; all ranks call the same layers",
}
"""The error for ranks whose combines differ, by the difference."""


def test_numbers_of_one_rank_are_refused_by_all_ranks(compact: bool) -> None:
    ranks = two_ranks(compact)
    results, rows = ranks.dispatch([given_tokens(IDS)] * 2), [torch.ones(SPEC.rows(2), 8, dtype=torch.bfloat16)] * 2
    (first, entries), (second, _) = ranks.combine_with(results, rows, [False, False], [results[0].got.weights, None])
    assert first.isnan().all() and second.isnan().all() and entries.isnan().all()
    for rank in results:
        with pytest.raises(
            DataRefused, match="rank 0 combines dispatch 1 with gradients and rank 1 with weighted=False"
        ):
            raise_first(rank.kernels.take_refused(read_now), SPEC)


@pytest.mark.parametrize("backend", ON_TENSORS)
def test_all_ranks_report_that_only_some_send_gradients(pool: RankPool, backend: str) -> None:
    spec = ExchangeSpec(tokens=9, hidden=16, experts=6, topk=2, alignment=4)
    case = Case(3, spec, backend, ("uniform", "masked"), seed=4)
    for rank, report in enumerate(pool.run(3, mixed_combines, case, "gradients")):
        assert report["told"].startswith("rank 0 combines dispatch 1 with weighted=True and rank 2 with gradients")
        assert report["nan"]
        judge_combine(case, batches(case, 1)[rank], report["y"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ON_TENSORS)
@pytest.mark.parametrize("kind", UNLIKE)
def test_all_ranks_report_combines_that_differ(pool: RankPool, backend: str, kind: str) -> None:
    spec = ExchangeSpec(tokens=9, hidden=16, experts=6, topk=2, alignment=4)
    case = Case(3, spec, backend, ("uniform", "masked"), seed=4)
    for rank, report in enumerate(pool.run(3, mixed_combines, case, kind)):
        assert report["told"].startswith(UNLIKE[kind])
        assert report["nan"]
        judge_combine(case, batches(case, 1)[rank], report["y"])


ORDER = "all ranks run backward passes in one order"
MIXED_BACKWARD = {
    "order": [
        f"rank 0 runs the backward pass of its dispatch 1 and rank 2 of its dispatch 2; {ORDER}",
        f"rank 0 runs the backward pass of its dispatch 2 and rank 2 of its dispatch 1; {ORDER}",
    ],
    "site": [f"rank 0 runs the backward pass of call site 1 and rank 2 of call site 7; {ORDER}"],
}
"""The errors for ranks whose backward passes differ, by the difference."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ON_TENSORS)
@pytest.mark.parametrize("kind", MIXED_BACKWARD)
def test_all_ranks_report_backward_passes_that_differ(pool: RankPool, backend: str, kind: str) -> None:
    spec = ExchangeSpec(tokens=9, hidden=16, experts=6, topk=2, alignment=4)
    case = Case(3, spec, backend, ("uniform", "masked"), seed=4)
    for report in pool.run(3, mixed_backward, case, kind):
        assert report["told"] == MIXED_BACKWARD[kind]
        assert all(report["nan"])
        assert report["right"]


@pytest.mark.parametrize("backend", ON_TENSORS)
def test_a_backward_pass_of_some_ranks_is_refused_by_all_at_once(pool: RankPool, backend: str) -> None:
    spec = ExchangeSpec(tokens=9, hidden=16, experts=6, topk=2, alignment=4)
    case = Case(3, spec, backend, ("uniform", "masked"), seed=4)
    said = "rank 0 runs the backward pass of its dispatch 1 and rank 2 no backward pass; all ranks run the same"
    for rank, report in enumerate(pool.run(3, left_out_backward, case)):
        assert rank == 2 or report["told"][0].startswith(said)
        assert rank != 2 or report["told"][0] == ""
        assert report["told"][1].startswith("rank 0 combines its dispatch 1 and rank 2 its dispatch 2; all ranks")
        assert all(report["nan"])
        judge_combine(case, batches(case, 1)[rank], report["y"])
