"""The kernels, compiled for this CPU and run by an emulated machine.

A seed decides how ranks, threads and memory interleave. tests/emulator/ describes what the machine may do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raymoe.cuda.launch import Shape
from raymoe.cuda.structs import Watch
from raymoe.errors import Aborted, DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.refusal import Cause
from raymoe.transport.copy_kernel import COPY, THREADS, Spread, Transfer, copy_params
from tests.emulator.build import Change, compiler
from tests.emulator.cases import KINDS, MESSAGES, RUNS, SPREADS, delivered, refused
from tests.emulator.copies import Mail
from tests.emulator.injected_bugs import BY_ERROR, COPYING, INJECTED_BUGS, REFUSING, TWINS
from tests.emulator.machine import Emulator, EmulatorError
from tests.emulator.ranks import backend, small, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange.exchange_cases import Batch, Case, batches, expert_major, result_of
from tests.unit.exchange.exchange_judge import judge_dispatch, judge_odd_blocks, odd_blocks

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

SHORT_S = 2e-3


@pytest.mark.one_in(9)
@pytest.mark.parametrize("number", range(len(RUNS)), ids=RUNS)
def test_rows_arrive_as_planned_and_return_summed(number):
    """The seed also draws the types and counts, so that neighbouring runs differ in them."""
    list(RUNS.values())[number].judged(seed=number)


def test_a_seed_determines_the_interleaving():
    run = replace(RUNS["fused on 2"], routings=("uniform", "skewed"))
    assert run.judged(5) == run.judged(5) != run.judged(6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["whole", "known"])
@pytest.mark.parametrize("kinds", [("fused", "staged"), ("ll", "fused"), ("copied", "fused")])
def test_two_exchanges_of_one_workspace_are_correct_in_turns(kinds, form):
    """The two specs have overlapping slots and one count of epochs."""
    sizes = ((12, 64), (20, 24))
    specs = [
        spec_for(kind, tokens=tokens, hidden=hidden, experts=8, topk=2)
        for kind, (tokens, hidden) in zip(kinds, sizes, strict=True)
    ]
    for seed in range(3):
        cases = [Case(2, spec, "auto", ("uniform",) * 4, seed=seed + i) for i, spec in enumerate(specs)]
        with Emulator(2) as emulator:
            spaces = workspaces(emulator, *specs)
            both = [
                Steps(emulator, case, [backend(kind, space, case.spec, small) for space in spaces])
                for kind, case in zip(kinds, cases, strict=True)
            ]
            for step in range(4):
                for steps in both:
                    steps.enqueue(step, form)
            emulator.run(seed)
            for steps in both:
                steps.judge()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("output", ["raw", "dequantised"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["fused", "staged", "ll"])
def test_an_element_that_is_hard_to_scale_changes_no_other(kind, dtype, output):
    """A finite element arrives finite, an infinity as the largest number of its block, NaN as NaN."""
    x = odd_blocks(getattr(torch, dtype)).view(1, -1)
    spec = spec_for(
        kind, tokens=1, hidden=x.shape[1], experts=1, topk=1, dtype=dtype, wire="float8_e4m3", output=output
    )
    with Emulator(1) as emulator:
        (owner,) = (backend(kind, space, spec, small) for space in workspaces(emulator, spec))
        out = owner.new((spec.rows(1), spec.hidden), getattr(torch, spec.output_dtype), "out")
        got = owner.dispatch(Tokens(x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), None), out)
        emulator.run(0)
        owner.check()
        judge_odd_blocks(x, got.x[:1], None if got.scales is None else got.scales[:1])


@pytest.mark.parametrize("kind", [*KINDS, "few"])
def test_a_call_may_leave_gaps_as_they_are(kind):
    """The call after it gets its zeros again."""
    spec = spec_for(kind, tokens=5, hidden=64, experts=3, topk=1, padding="zero", alignment=4)
    ids, x = torch.tensor([[0], [2], [0], [2], [2]]), torch.rand(5, 64) + 1
    x = x.to(getattr(torch, spec.dtype))
    with Emulator(1) as emulator:
        (owner,) = (backend(kind, space, spec, small) for space in workspaces(emulator, spec, stamped=False))
        out = owner.new((spec.rows(1), spec.hidden), x.dtype, "out")
        for seed, zero_gaps in enumerate((False, True, False)):
            out.fill_(7.0)
            got = owner.dispatch(Tokens(x, ids, torch.ones(5, 1), None, zero_gaps=zero_gaps), out)
            emulator.run(seed)
            owner.check()
            assert got.expert_offsets.tolist() == [0, 4, 4, 8]
            assert torch.equal(got.x[[0, 1, 4, 5, 6]], x[[0, 2, 1, 3, 4]])
            assert set(got.x[[2, 3, 7]].flatten().tolist()) == {0.0 if zero_gaps else 7.0}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sms", [2, 3, 4, 5])
@pytest.mark.parametrize("form", ["whole", "halves"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_launch_has_more_blocks_than_the_given_sms(kind, form, sms):
    spec = spec_for(kind)
    case = Case(2, spec, "auto", ("uniform",), seed=sms)
    with Emulator(2) as emulator:
        launched, launch = [], emulator.launch

        def recorded(rank: int, function: Any, shape: Shape, params: Any) -> None:
            launched.append(shape.blocks)
            launch(rank, function, shape, params)

        emulator.launch = recorded
        spaces = workspaces(emulator, spec, stamped=False)
        steps = Steps(emulator, case, [backend(kind, space, spec, sms=sms) for space in spaces])
        steps.enqueue(0, form)
        emulator.run(sms)
        steps.judge()
        for each in steps.backends:
            assert max(launched) <= each.sms <= sms
            assert each.sms == max(launched) or (kind, form) != ("staged", "whole")


# ---- data that is refused -------------------------------------------------------------------------------------------


def _bad_id(rank, batch):
    if rank == 1:
        batch.ids[2, 1] = 77


def _too_many(rank, batch):
    if rank == 1:
        batch.num_tokens = len(batch.x) + 3


def _below_zero(rank, batch):
    if rank == 1:
        batch.num_tokens = -1


FAULTS = {
    "id": (_bad_id, {}, "rank 1 asked for expert 77 for its token 2"),
    "tokens": (_too_many, {}, "num_tokens is 23 on rank 1"),
    "tokens below 0": (_below_zero, {}, "num_tokens is -1 on rank 1; x has 20 rows, so 0 to 20 can be sent"),
    "capacity": (None, {"capacity": 64, "alignment": 1}, "120 rows, gaps included, came to rank 1; its capacity is 64"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "whole") for kind in KINDS), ("fused", "known"), ("staged", "known"), ("few", "whole"), ("few", "known")],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_refuse_the_same_step_and_the_next_one_works(kind, form, fault):
    change, fields, told = FAULTS[fault]
    spec = spec_for(kind, **fields)
    routings = ("masked", "one" if fault == "capacity" else "uniform", "none", "masked")
    case = Case(2, spec, "auto", routings, ragged=False, prefix=fault.startswith("tokens"), seed=3)
    for seed in range(3):
        with Emulator(2) as emulator:
            spaces = workspaces(emulator, spec)
            steps = Steps(emulator, case, [backend(kind, space, spec, small) for space in spaces])
            steps.enqueue(0, form)
            steps.enqueue(1, form, change)
            emulator.run(seed)
            for rank, each in enumerate(steps.backends):
                with pytest.raises(DataRefused, match=told):
                    each.check()
                assert np.isnan(steps.results[1][rank].y).all()
            steps.enqueue(2, form)
            steps.enqueue(3, form)
            emulator.run(seed + 100)
            steps.judge(first=2)


@pytest.mark.parametrize("kind", KINDS)
def test_refusals_go_to_a_record_on_the_device_where_one_is_asked_for(kind):
    """The exchange between domains reads them there (raymoe/exchange/domains/hierarchical_gpu.py)."""
    spec = spec_for(kind)
    case = Case(2, spec, "auto", ("masked", "uniform", "none"), ragged=False, seed=3)
    with Emulator(2) as emulator:
        steps = Steps(emulator, case, [backend(kind, space, spec, small) for space in workspaces(emulator, spec)])
        records = [each.refusal_record() for each in steps.backends]
        for step, change in enumerate((None, _bad_id, None)):
            steps.enqueue(step, change=change)
            emulator.run(step)
            for each, record in zip(steps.backends, records, strict=True):
                each.check()  # refused data is left to the reader of the record
                each.check_waits()
                assert bool(record[0]) == (step == 1)
                statuses = record[2:6].tolist()
                assert step != 1 or statuses == [1 << 32, 2, Cause.ID + (2 << 32), 77]
                record[0] = 0
        assert all(np.isnan(result.y).all() for result in steps.results[1])


def _dispatched(owner: Any, batch: Batch) -> Dispatched:
    return owner.dispatch(*_handed_over(owner, batch))


def _combined(owner: Any, got: Dispatched, weighted: bool = True, form: str = "whole") -> torch.Tensor:
    """Combine rows that are all 1; return y."""
    rows = owner.new((owner.spec.rows(owner.world.size), owner.spec.hidden), torch.bfloat16, "expert rows")
    y = owner.new((got.tokens, owner.spec.hidden), torch.bfloat16, "y")
    rows.fill_(1), y.fill_(7)
    if form == "whole":
        owner.combine(rows, got, weighted, y)
    else:
        owner.combine_send(rows, got, weighted, y)
        owner.combine_receive(rows, got, weighted, y)
    return y


DIFFERENT = {
    "dispatch": "rank 0 combines its dispatch 2 and rank 2 its dispatch 1; all ranks combine the same dispatch",
    "weighted": "rank 0 combines dispatch 2 with weighted=True and rank 2 with weighted=False; all ranks give the same",
    "site": "rank 0 combines rows of call site 536870911 and rank 2 rows of no call site; all ranks call the same",
}


def _combine_differently(kind: str, form: str, how: str, seed: int, *changes: Change) -> None:
    """Rank 2 combines another of two dispatches than ranks 0 and 1, or without weights. Then run a good step."""
    case = Case(3, spec_for(kind), "auto", ("uniform", "skewed", "masked"), ragged=False, seed=seed)
    with Emulator(3, changes=changes) as emulator:
        spaces = workspaces(emulator, case.spec, timeout_s=5 * SHORT_S)
        owners = [backend(kind, space, case.spec, small) for space in spaces]
        gots = [[_dispatched(each, batches(case, step)[each.world.rank]) for each in owners] for step in range(2)]
        ys = []
        for rank, each in enumerate(owners):
            odd = rank == 2
            got = gots[0 if odd and how == "dispatch" else 1][rank]
            got.site = 2**29 - 1 if how == "site" and not odd else 0
            ys.append(_combined(each, got, not (odd and how == "weighted"), form))
        emulator.run(seed)
        for each, y in zip(owners, ys, strict=True):
            with pytest.raises(DataRefused, match=DIFFERENT[how]):
                each.check()
            each.check()  # the error is raised once
            assert y.isnan().all()
        steps = Steps(emulator, replace(case, routing=("masked",)), owners)
        steps.enqueue(0)
        emulator.run(seed)
        steps.judge()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("how", DIFFERENT)
@pytest.mark.parametrize("form", ["whole", "halves"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_refuse_combines_that_differ(kind, form, how):
    for seed in range(2):
        _combine_differently(kind, form, how, seed)


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ("dispatch", Change("combine.cuh", "<< 32, left.high};", "<< 32, 0};")),
        ("dispatch", Change("beginning.cuh", "Refusal{CAUSE_NONE, 0, epoch}", "Refusal{CAUSE_NONE, 0, 1}")),
        (
            "weighted",
            Change("combine.cuh", ": static_cast<u64>(p.weighted | CARRIES << 1 | p.site << SITE_SHIFT) << 32", ": 0"),
        ),
        ("site", Change("combine.cuh", " | p.site << SITE_SHIFT", "")),
        ("site", Change("combine.cuh", "p.site << SITE_SHIFT", "p.site << SITE_SHIFT & 0xFFFF0000")),
    ],
    ids=["no number said", "no number left", "nothing said of weights", "nothing said of sites", "half of a site"],
)
def test_a_bug_injected_in_the_check_of_combines_is_found(how, change):
    with pytest.raises((AssertionError, RaymoeError, pytest.fail.Exception)):  # the last: no rank refused
        _combine_differently("fused", "whole", how, 0, change)


@pytest.mark.parametrize("kind", ["fused", "ll"])
def test_a_replay_combines_the_dispatch_that_was_replayed_last(kind):
    """A graph repeats the parameters; the dispatch's number is read where the dispatch has left it."""
    case = Case(2, spec_for(kind), "auto", ("uniform", "skewed"), ragged=False)
    with Emulator(2) as emulator:
        owners = [backend(kind, space, case.spec, small) for space in workspaces(emulator, case.spec)]
        launches, launch = [], emulator.launch
        emulator.launch = lambda *args: (launches.append(args), launch(*args))
        gots = [_dispatched(each, batches(case, 0)[each.world.rank]) for each in owners]
        captured, emulator.launch = list(launches), launch
        for rank, *rest in captured * 2:
            launch(rank, *rest)
        ys = [_combined(each, got) for each, got in zip(owners, gots, strict=True)]
        emulator.run(0)
        for each, y in zip(owners, ys, strict=True):
            each.check()
            assert y.isfinite().all()
        for rank, *rest in captured:
            if rank == 0:
                launch(rank, *rest)
        other = _dispatched(owners[1], batches(case, 1)[1])
        ys = [_combined(owners[0], gots[0]), _combined(owners[1], gots[1])]
        emulator.run(1)
        for each, y in zip(owners, ys, strict=True):
            with pytest.raises(DataRefused, match="rank 0 combines its dispatch 4 and rank 1 its dispatch 3;"):
                each.check()
            assert y.isnan().all()
        ys = [_combined(owners[0], gots[0]), _combined(owners[1], other)]
        emulator.run(2)
        for each, y in zip(owners, ys, strict=True):
            each.check()
            assert y.isfinite().all()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
def test_dispatches_by_different_placements_are_refused_and_the_next_step_works(kind):
    spec = replace(spec_for(kind), experts=8, slots=4).over_slots(3)
    case = Case(3, spec, "auto", ("uniform",) * 3, ragged=False)
    with Emulator(3) as emulator:
        owners = [backend(kind, space, spec, small) for space in workspaces(emulator, spec)]
        for step, digests in enumerate(((7, 7, 7), (8, 7, 8), (9, 9, 9), (9, 9, 9))):
            sent = batches(case, min(step, 2))
            if step == 3:  # an id without an expert, which became one without a slot
                sent[1].ids[0, 0] = 13
            gots = [_dispatched(each, sent[each.world.rank]) for each in owners]
            for each, got, digest in zip(owners, gots, digests, strict=True):
                each.mark(got, each.place(torch.tensor([digest], dtype=torch.int32)))
            ys = [_combined(each, got) for each, got in zip(owners, gots, strict=True)]
            emulator.run(step)
            for each, y in zip(owners, ys, strict=True):
                if step % 2:
                    with pytest.raises(DataRefused) as refusal:
                        each.check()
                    says = "rank 0 dispatched by placement 00000008 and rank 1 by placement 00000007;"
                    assert str(refusal.value).startswith(says if step == 1 else "rank 1 asked for expert 9 for its")
                    assert y.isnan().all()
                else:
                    each.check()
                    assert y.isfinite().all()


# ---- peers that stop ------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("end", ["deadline", "abort"])
@pytest.mark.parametrize("kind", [*KINDS, "few"])
def test_a_stopped_peer_ends_every_wait_and_later_steps_store_nothing(kind, end):
    spec = spec_for(kind)
    case = Case(3, spec, "auto", ("uniform", "uniform", "uniform"), ragged=False)
    for seed in range(3):
        with Emulator(3) as emulator:
            spaces = workspaces(emulator, spec, timeout_s=SHORT_S if end == "deadline" else 60.0)
            steps = Steps(emulator, case, [backend(kind, space, spec, small) for space in spaces], frozenset({2}))
            steps.enqueue(0)
            if end == "abort":
                for space in spaces:
                    space.error.abort("rank 2 is gone")
            emulator.run(seed)
            for rank in (0, 1):
                with pytest.raises(PeerTimeout if end == "deadline" else Aborted, match="rank 2"):
                    steps.backends[rank].check()
                assert steps.results[0][rank].counts == [0] * 4
                assert np.isnan(steps.results[0][rank].y).all()
            before = [_written_to_others(space) for space in spaces]
            _enqueue_unchecked(steps, 1)
            emulator.run(seed)
            for space, then in zip(spaces, before, strict=True):
                for name, region in _written_to_others(space).items():
                    assert torch.equal(region, then[name]), f"{name} of rank {space.world.rank}"
            assert all(np.isnan(steps.results[1][rank].y).all() for rank in (0, 1))


_TO_ALL = "if (threadIdx.x < p.peers.ranks) {"
LEFT_OUT = {
    ("ll", "rows"): Change("dispatch_ll.cu", "mask = all &", "mask = p_.peers.rank == RANK && epoch == 3 ? 0 : all &"),
    ("ll", "routing entries"): Change(
        "routing_ll.cuh",
        "if (entry < entries) {",
        "if (entry < entries && !(p_.peers.rank == RANK && words.epoch == 3)) {",
    ),
    ("ll", "counts"): Change(
        "routing_ll.cuh", "if (end >= entries) {", "if (end >= entries && !(p_.peers.rank == RANK && epoch == 3)) {"
    ),
    ("ll", "statuses"): Change("statuses_ll.cuh", _TO_ALL, f"if (!(p.peers.rank == RANK && epoch == 3)) {_TO_ALL}"),
    ("ll", "sums"): Change(
        "sums_ll.cuh", "if (hits == 0) {", "if (hits == 0 || (p_.peers.rank == RANK && epoch == 3)) {"
    ),
    ("fused", "words of rows"): Change(
        "sending.cuh",
        "ptx::store_relaxed_sys(p_.arrival_at(",
        "if (!(p_.peers.rank == RANK && epoch_ == 3)) ptx::store_relaxed_sys(p_.arrival_at(",
    ),
    ("fused", "heads"): Change(
        "routing.cuh", " announce();", " if (!(p_.peers.rank == RANK && epoch_ == 3)) announce();"
    ),
    ("fused", "done"): Change(
        "sending.cuh",
        "if (thread < p.ranks_through_slots()) {",
        "if (thread < p.ranks_through_slots() && !(p.peers.rank == RANK && epoch == 3)) {",
    ),
    ("fused", "statuses"): Change("combine.cu", _TO_ALL, f"if (!(p.peers.rank == RANK && epoch == 3)) {_TO_ALL}"),
    ("fused", "sums"): Change(
        "local_reduction.cuh", "if (hits != 0) {", "if (hits != 0 && !(p_.peers.rank == RANK && epoch_ == 3)) {"
    ),
    ("fused", "done of sums"): Change(
        "local_reduction.cuh",
        "if (threadIdx.x + 1 < p.peers.ranks) {",
        "if (threadIdx.x + 1 < p.peers.ranks && !(p.peers.rank == RANK && epoch == 3)) {",
    ),
}
LEFT_OUT[("staged", "done")] = LEFT_OUT[("copied", "done")] = LEFT_OUT[("fused", "done")]
"""For each kind of backend, a part that rank RANK does not send in its third run; it sends all other parts."""
SILENT = [
    pytest.param(kind, what, rank, marks=() if rank == number % 3 else pytest.mark.soak)
    for number, (kind, what) in enumerate(LEFT_OUT)
    for rank in range(3)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "what", "silent"), SILENT)
def test_a_rank_that_leaves_out_a_message_is_named_by_all_others(kind, what, silent):
    """The error holds the epoch that was found instead. Every token goes to every rank, so all ranks wait."""
    change = LEFT_OUT[kind, what]
    change = replace(change, new=change.new.replace("RANK", str(silent)))
    case = Case(3, spec_for(kind, experts=3), "auto", ("uniform",) * 3, ragged=False)
    with Emulator(3, changes=(change,)) as emulator:
        spaces = workspaces(emulator, case.spec, timeout_s=SHORT_S)
        steps = Steps(emulator, case, [backend(kind, space, case.spec, small) for space in spaces])
        for step in range(3):
            steps.enqueue(step)
        emulator.run(silent)
        for rank in {0, 1, 2} - {silent}:
            with pytest.raises(PeerTimeout) as caught:
                steps.backends[rank].check()
            told = caught.value
            assert (told.rank, told.peer, told.epoch, told.expected) == (rank, silent, 3, 3)
            assert told.op == ("combine" if what in ("statuses", "sums", "done of sums") else "dispatch")
            assert told.seen == (1 if kind == "ll" else 2)  # lines and words of few tokens have two parities


@pytest.mark.parametrize("kind", ["fused", "staged"])
def test_a_rank_that_misses_a_dispatch_of_known_routing_is_named(kind):
    """Rank 1 does not take part. The results of the dispatch before stay as they are; later calls return at once."""
    case = Case(2, spec_for(kind), "auto", ("uniform",), ragged=False)
    with Emulator(2) as emulator:
        spaces = workspaces(emulator, case.spec, timeout_s=SHORT_S)
        owners = [backend(kind, space, case.spec, small) for space in spaces]
        sent = batches(case, 0)
        gots = [_dispatched(each, batch) for each, batch in zip(owners, sent, strict=True)]
        emulator.run(0)
        saved: Any = gots[0]._saved
        before, rows = (
            saved.memory.clone(),
            owners[0].new((case.spec.rows(2), case.spec.hidden), torch.bfloat16, "rows"),
        )
        owners[0].dispatch_known(sent[0].x, gots[0], rows)
        emulator.run(1)
        assert torch.equal(saved.memory, before)
        with pytest.raises(PeerTimeout) as caught:
            owners[0].check()
        assert (caught.value.op, caught.value.rank, caught.value.peer, caught.value.epoch) == ("dispatch", 0, 1, 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("kind", ["fused", "staged", "copied"])
def test_a_rank_that_gives_up_does_not_overwrite_what_a_slow_rank_reads(kind, layout):
    for seed in range(3):
        _give_up_on_a_slow_rank(kind, layout, seed)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_an_injected_pack_after_giving_up_is_found(layout):
    change = Change("pack.cu", "if (!may || !await_heads(p, epoch)) {", "if (await_heads(p, epoch) && false) {")
    with pytest.raises((AssertionError, RaymoeError)):
        _give_up_on_a_slow_rank("copied", layout, 0, change)


def _give_up_on_a_slow_rank(kind: str, layout: str, seed: int, *changes: Change) -> None:
    """Rank 0 gives up in its second dispatch, before rank 1 has placed the rows of the first.

    Rank 0's replays continue, because nothing has checked for errors.
    """
    case = Case(2, spec_for(kind, layout=layout), "auto", ("uniform", "repeated", "skewed"), ragged=False)
    with Emulator(2, changes=changes) as emulator:
        spaces = workspaces(emulator, case.spec, timeout_s=SHORT_S)
        gives_up, slow = (backend(kind, space, case.spec, small) for space in spaces)
        sent = [batches(case, step) for step in range(3)]
        for step in range(3):
            gives_up.dispatch(*_handed_over(gives_up, sent[step][0]))
        tokens, out = _handed_over(slow, sent[0][1])
        got = slow.dispatch_send(tokens, out)
        emulator.run(seed)
        with pytest.raises(PeerTimeout, match="rank 1"):
            gives_up.check()
        slow.dispatch_receive(got, tokens)
        emulator.run(seed)
        slow.check()
        judge_dispatch(case, sent[0], 1, result_of(got, expert_major(got), torch.zeros(0)))


def _handed_over(owner: Any, batch: Batch) -> tuple[Tokens, torch.Tensor | None]:
    shape = (owner.spec.rows(owner.world.size), owner.spec.hidden)
    out = owner.new(shape, batch.x.dtype, "out") if owner.spec.layout == "expert" else None
    return Tokens(batch.x, batch.ids, batch.weights, None), out


def _written_to_others(space: Any) -> dict[str, torch.Tensor]:
    names = [each.region.name for each in space.heap.layout.placed if not each.region.name.startswith(("own", "gap"))]
    return {name: space.heap.tensor(name).clone() for name in names}


def _enqueue_unchecked(steps: Steps, step: int) -> None:
    """Enqueue a step as a replay does, without a check of the error word."""
    for each in steps.backends:
        each.workspace.error.check = lambda: None
    steps.enqueue(step)


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("both_ways", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("protocol", ["put", "get"])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_messages_arrive_complete_before_they_are_announced(spread, protocol, both_ways):
    for seed in range(2):
        delivered(spread, seed, protocol, both_ways)


def test_a_message_to_a_stopped_peer_fails_by_its_deadline():
    with Emulator(2) as emulator:
        mail = Mail(emulator, MESSAGES, SPREADS["in turn"], timeout_s=SHORT_S, absent=frozenset({1}))
        mail.enqueue(2)
        emulator.run(0)
        assert isinstance(mail.errors[0].error(), PeerTimeout) and mail.seen == [0, 0]
        assert not any(mail.bytes(1, "target", number).any() for number in range(len(MESSAGES)))


# ---- injected bugs --------------------------------------------------------------------------------------------------


def test_every_rule_keeps_a_bug_in_make_test():
    assert set(TWINS) | set(TWINS.values()) <= set(INJECTED_BUGS) and not set(TWINS) & set(TWINS.values())


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=pytest.mark.thorough if name in TWINS else ()) for name, bug in INJECTED_BUGS.items()],
    ids=INJECTED_BUGS,
)
def test_an_injected_bug_is_found(bug):
    run = bug.run()
    for seed in range(60):
        try:
            run.judged((bug.seed + seed) % 60)
        except (EmulatorError, AssertionError, RaymoeError):
            return
    pytest.fail("60 interleavings are all right with it")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bug", REFUSING)
def test_a_bug_injected_in_a_refused_step_is_found(bug):
    kind = bug.split(",")[0]
    refused(kind, 0)
    for seed in range(60):
        try:
            refused(kind, seed, REFUSING[bug])
        except (EmulatorError, AssertionError, RaymoeError):
            return
    pytest.fail("60 interleavings are all right with it")


def test_lines_that_arrive_in_halves_give_wrong_values():
    """Rows of few tokens need lines of 128 bytes that arrive whole; a link that does not keep this is refused."""
    torn = replace(RUNS["ll on 2"], stamped=False, routings=("uniform",) * 3, torn_lines=True)
    for seed in range(60):
        try:
            torn.judged(seed)
        except AssertionError:
            return
    pytest.fail("60 interleavings are all right with torn lines")


@pytest.mark.thorough
def test_the_same_runs_are_correct_without_the_faults():
    for bug in {replace(each, changes=(), seed=0) for each in INJECTED_BUGS.values()}:
        bug.run().judged(0)


@pytest.mark.parametrize("change", COPYING.values(), ids=COPYING)
def test_a_bug_injected_in_a_copy_is_found(change):
    for seed in range(24):
        for protocol in ("put", "get"):
            try:
                delivered(SPREADS["own blocks" if seed % 2 else "in turn"], seed, protocol, False, (change,))
            except (EmulatorError, AssertionError):
                return
    pytest.fail("24 interleavings are all right with it")


# ---- errors that the machine reports --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", BY_ERROR)
def test_forbidden_operations_of_a_kernel_are_reported(error):
    with pytest.raises(EmulatorError, match=f"(?s)seed 1: .*{error}"):
        replace(RUNS["fused on 2"], changes=(BY_ERROR[error],), most_steps=1_500_000).judged(1)


def _copied(emulator: Emulator, dst: int, src: int) -> None:
    transfer = Transfer(dst, src, 48)
    emulator.launch(0, COPY, Shape(1, THREADS, 64), copy_params([transfer], Spread(), Watch()))


def test_memory_of_a_peer_that_is_not_mapped_is_refused():
    with Emulator(2) as emulator:
        here, there = (emulator.memory(rank, 64, f"memory {rank}").address for rank in (0, 1))
        _copied(emulator, there, here)
        with pytest.raises(
            EmulatorError, match=r"copy on rank 0, block 0, thread 0: .*which only that rank has mapped"
        ):
            emulator.run(0)


def test_a_thread_that_waits_without_end_is_named():
    change = Change(
        "copy.cu",
        "ptx::barrier_of_warps(1, ORDINARY_THREADS);  // hands",
        "ptx::barrier_of_warps(1, ORDINARY_THREADS + 32);  //",
    )
    with Emulator(1, changes=(change,)) as emulator:
        here, there = (emulator.memory(0, 64, name).address for name in ("here", "there"))
        _copied(emulator, there, here + 1)
        with pytest.raises(
            EmulatorError, match=r"(?s)no thread can continue: .*the block's barrier number +\(1\), thread 32 and"
        ):
            emulator.run(0)
