"""Exchanges over slots: random placements of any number of experts on any ranks, by every backend and layout."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import ConfigError, DataRefused
from raymoe.exchange import slots as slots_module
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.cpu.cpu_backend import SavedPlacement
from raymoe.exchange.cpu.host import HostSlots
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.slots import SlotTable, even_experts, token_hash
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import Placement, differentiable, plan_placement
from raymoe.moe.expert_rows import Groups
from tests.unit.exchange import test_token_rows
from tests.unit.exchange.exchange_cases import (
    BOUND,
    ROUTINGS,
    Batch,
    Case,
    Result,
    batches,
    expert_major,
    open_exchange,
    result_of,
    standing,
)
from tests.unit.exchange.exchange_judge import judge_bytes, judge_combine, judge_dispatch
from tests.unit.exchange.test_exchange import BACKENDS, ON_TENSORS
from tests.unit.exchange.test_exchange_arguments import SplitOnCpu
from tests.unit.memory.test_world_of import groups
from tests.unit.moe.gradient_cases import loss_weights, reference, scales_of
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

__all__ = ["groups"]  # a fixture
SPEC = ExchangeSpec(tokens=9, hidden=8, experts=5, topk=3, dtype="float32", alignment=4, slots=4)


@dataclass(frozen=True)
class PlacedCase:
    """A case, and the placement of each step: numbers of random ones; -1: the first one, which nobody places."""

    case: Case
    placements: tuple[int, ...]


def drawn_experts(case: Case, number: int) -> torch.Tensor:
    """Draw a placement: each expert in a slot, the other slots empty or with copies, some on one rank."""
    spec = case.spec
    assert spec.slots is not None
    if number < 0:
        return even_experts(spec.experts, case.ranks, spec.slots)
    rng = np.random.default_rng((case.seed, number))
    every = case.ranks * spec.slots
    held = np.concatenate([np.arange(spec.experts), rng.integers(-1, spec.experts, every - spec.experts)])
    return torch.from_numpy(rng.permutation(held).astype(np.int32)).view(case.ranks, spec.slots)


def slot_of(experts: torch.Tensor, expert: int, rank: int, token: int) -> int:
    """Return the slot that a token takes: by the hash of its rank and number, among the copies in ascending order."""
    if expert < 0:
        return expert
    copies = [slot for slot, held in enumerate(experts.flatten().tolist()) if held == expert]
    mixed = (token * 0x9E3779B1 + rank * 0x85EBCA6B) % 2**32
    mixed = (mixed ^ mixed >> 16) * 0x7FEB352D % 2**32
    mixed = (mixed ^ mixed >> 15) * 0x846CA68B % 2**32
    return copies[(mixed ^ mixed >> 16) * len(copies) >> 32]


def in_slots(sent: list[Batch], experts: torch.Tensor) -> list[Batch]:
    """Return the batches of all ranks with numbers of slots in the place of ids."""
    placed = []
    for rank, batch in enumerate(sent):
        ids = [[slot_of(experts, each, rank, token) for each in row] for token, row in enumerate(batch.ids.tolist())]
        placed.append(replace(batch, ids=torch.tensor(ids, dtype=torch.int64).view(batch.ids.shape)))
    return placed


def run_step(exchange: Exchange, case: Case, step: int) -> Result:
    spec, world = case.spec, exchange.world
    batch = batches(case, step)[world.rank].on(world.device)
    count: Any = batch.num_tokens
    if case.wide_topk_idx:
        count = torch.tensor([count], dtype=torch.int32, device=world.device)
    got = exchange.dispatch(batch.x, batch.ids, batch.weights, count)
    x = expert_major(got)
    y = exchange.combine(apply_placed(exchange, got, x), got, weighted=case.weighted)
    exchange.check()
    assert len(got.expert_counts) == spec.slots
    return result_of(got, x, y)


def apply_placed(exchange: Exchange, got: Dispatched, x: torch.Tensor) -> torch.Tensor:
    """Return the rows of the experts that this rank's slots hold. Other rows are NaN and must not change the result."""
    local, there = standing(got)
    held = exchange.placement()[exchange.world.rank].to(x.device)
    expert = held.long()[local].double()[:, None]
    return torch.where(there[:, None], x.double() * (0.5 + expert / 8) + (expert - 2.25) / 4, torch.nan).to(x.dtype)


def run_placed(world: World, placed: PlacedCase) -> list[Any]:
    case, results = placed.case, []
    with open_exchange(world, case) as exchange:
        for step, number in enumerate(placed.placements):
            if number >= 0:
                exchange.place(Placement(drawn_experts(case, number)))
            if case.spec.by_token:
                results.append(test_token_rows.run_step(exchange, case, step))
            else:
                results.append(run_step(exchange, case, step))
    return results


def judge_placed(placed: PlacedCase, results: list[list[Any]]) -> None:
    case, experts = placed.case, drawn_experts(placed.case, -1)
    for step, number in enumerate(placed.placements):
        experts = experts if number < 0 else drawn_experts(case, number)
        sent = batches(case, step)
        over_slots = in_slots(sent, experts)
        theirs = [ranks_results[step] for ranks_results in results]
        if case.spec.by_token:
            test_token_rows.judge_step(case, over_slots, theirs)
            continue
        for rank in range(case.ranks):
            judge_dispatch(case, over_slots, rank, theirs[rank])
            judge_combine(case, sent[rank], theirs[rank].y)
        judge_bytes(replace(case, spec=case.spec.over_slots(case.ranks)), over_slots)


@st.composite
def placed_cases(draw: st.DrawFn, backend: str) -> PlacedCase:
    ranks = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(sorted(BOUND)))
    spec = ExchangeSpec(
        tokens=draw(st.integers(1, 9)),
        hidden=(4 if dtype == "float32" else 8) * draw(st.integers(1, 5)),
        experts=experts,
        topk=draw(st.integers(1, min(4, experts))),
        dtype=dtype,
        layout=draw(st.sampled_from(["expert", "rank", "token"])),
        padding=draw(st.sampled_from(["any", "zero"])),
        alignment=draw(st.sampled_from([1, 3, 16])),
        slots=-(-experts // ranks) + draw(st.integers(0, 3)),
    )
    routing = tuple(draw(st.lists(st.sampled_from(ROUTINGS), min_size=1, max_size=3)))
    placements = tuple(draw(st.integers(-1, 3)) for _ in routing)
    flags = [draw(st.booleans()) for _ in range(3)]
    case = Case(ranks, spec, backend, routing, draw(st.integers(0, 2**16)), *flags, wide_topk_idx=draw(st.booleans()))
    return PlacedCase(replace(case, weighted=case.weighted and not spec.by_token), placements)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_generated_placements_match_plan_and_oracle(pool: RankPool, backend: str) -> None:
    @settings(max_examples=8)
    @given(placed=placed_cases(backend))
    def hold(placed: PlacedCase) -> None:
        judge_placed(placed, pool.run(placed.case.ranks, run_placed, placed))

    hold()


# Between domains.


def run_in_domains(_rank: int, placed: list[PlacedCase]) -> Any:
    with World.of(domain=2, timeout_s=30) as world:
        return [run_placed(world, each) for each in placed]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["host", "tensor allgather"])
def test_placements_between_domains_match_plan_and_oracle(groups: Any, backend: str) -> None:
    specs = [SPEC, replace(SPEC, experts=7, slots=2, layout="rank"), replace(SPEC, experts=3, topk=2, layout="token")]
    cases = [Case(4, spec, backend, ("uniform", "skewed"), seed, weighted=False) for seed, spec in enumerate(specs)]
    placed = [PlacedCase(case, (1, 2)) for case in cases]
    results = groups(4, run_in_domains, placed)
    for number, each in enumerate(placed):
        judge_placed(each, [theirs[number] for theirs in results])


# Gradients.


@dataclass
class SlotGradients:
    """The gradients of one rank, and those of its experts by expert: the sum over its slots."""

    y: torch.Tensor
    x: torch.Tensor
    weights: torch.Tensor
    scale: torch.Tensor


def run_gradients(world: World, case: Case) -> list[SlotGradients]:
    """Run forward and backward of each step. Between the two, another placement is written."""
    found = []
    with open_exchange(world, case) as exchange:
        for step in range(len(case.routing)):
            exchange.place(drawn_experts(case, step))
            held = exchange.placement()[world.rank].long()
            batch = batches(case, step)[world.rank]
            x, weights = batch.x.requires_grad_(), batch.weights.requires_grad_()
            none = torch.ones(1, case.spec.hidden, dtype=torch.float64)  # of empty slots
            held = torch.where(held < 0, case.spec.experts, held)
            scale = torch.cat([scales_of(case), none])[held].float().requires_grad_()
            got = differentiable.dispatch(exchange, x, batch.ids, weights)
            expert = Groups(got.expert_offsets, got.expert_counts).expert_of_row(len(got.x))
            there, slot = (expert < len(scale))[:, None], expert.clamp(max=len(scale) - 1)
            rows = torch.where(there, torch.tanh(got.x * scale[slot]) + (held[slot] / 8)[:, None], 0.0)
            y = differentiable.combine(exchange, rows, got)
            exchange.place(drawn_experts(case, step + 10))
            (y.double() * loss_weights(case, world.rank, len(x))).sum().backward()
            assert x.grad is not None and weights.grad is not None and scale.grad is not None
            by_expert = torch.zeros(case.spec.experts + 1, case.spec.hidden).index_add_(0, held, scale.grad)
            found.append(SlotGradients(y.detach(), x.grad, weights.grad, by_expert[:-1]))
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["host", "collective", "tensor collective", "tensor allgather"])
def test_gradients_with_copies_are_those_of_the_experts(pool: RankPool, backend: str) -> None:
    case = Case(3, SPEC, backend, ("uniform", "masked"), seed=4)
    found = pool.run(3, run_gradients, case)
    for step in range(2):
        total = torch.zeros(case.spec.experts, case.spec.hidden, dtype=torch.float64)
        for rank, batch in enumerate(batches(case, step)):
            y, x, weights, scale = reference(batch, scales_of(case), loss_weights(case, rank, len(batch.x)))
            total += scale
            have = found[rank][step]
            for one, want in ((have.y, y), (have.x, x), (have.weights, weights)):
                torch.testing.assert_close(one.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            sum(found[rank][step].scale for rank in range(3)).double(), total, rtol=1e-4, atol=1e-5
        )


# Placements that differ between ranks.


def one_stale(world: World, case: Case, how: str) -> list[str]:
    """Let rank 1 miss the second of three placements; return what each step's combine says. `how`: an injected bug."""
    says = []
    with open_exchange(world, case) as exchange:
        for step in range(3):
            stale = world.rank == 1 and step == 1
            if not stale:
                exchange.place(drawn_experts(case, step))
            elif how != "not placed":
                bug = mock.patch.object(SlotTable, "_packed", partial(packed_with_bug, how, exchange._tables[0]))
                with bug:
                    exchange.place(drawn_experts(case, step))
            try:
                run_step(exchange, case, step)
                says.append("")
            except DataRefused as error:
                says.append(str(error))
    return says


def packed_with_bug(how: str, table: SlotTable, experts: torch.Tensor) -> torch.Tensor:
    """Return the words of a write that is left out, or of one that writes the digest alone."""
    words = table.words.clone().cpu()
    if how == "only the digest":
        words[0] = zlib.crc32(experts.flatten().numpy().tobytes()) & 0x7FFFFFFF
    return words


@pytest.mark.one_in(5)
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
@pytest.mark.parametrize("how", ["not placed", "not written"])
def test_a_stale_table_is_refused_on_all_ranks_and_the_next_step_works(pool: RankPool, backend: str, how: str) -> None:
    case = Case(3, SPEC, backend, ("uniform",) * 3, seed=6)
    first, second, third = zip(*pool.run(3, one_stale, case, how), strict=True)
    assert set(first) == set(third) == {""}
    (said,) = set(second)
    assert said.startswith("rank 0 dispatched by placement ") and said.endswith(
        "all ranks place the same experts before the same dispatch"
    )
    assert "and rank 1 by placement" in said


def with_bug(world: World, placed: PlacedCase, how: str) -> list[Any]:
    if world.rank == 1:
        return with_bug_here(world, placed, how)
    return run_placed(world, placed)


def with_bug_here(world: World, placed: PlacedCase, how: str) -> list[Any]:
    """Write on this rank only the digest of the second placement; or take all tokens' copies by another hash."""
    whole = SlotTable._packed

    def packed(table: SlotTable, experts: torch.Tensor) -> torch.Tensor:
        second = torch.equal(experts, drawn_experts(placed.case, placed.placements[1]))
        return packed_with_bug("only the digest", table, experts) if second else whole(table, experts)

    hashes = mock.patch.object(slots_module, "token_hash", lambda rank, tokens: token_hash(rank + 1, tokens))
    with mock.patch.object(SlotTable, "_packed", packed) if how == "stale" else hashes:
        return run_placed(world, placed)


@pytest.mark.parametrize("how", ["stale", "another hash"])
def test_wrong_slots_that_no_digest_shows_are_found_by_the_plan(pool: RankPool, how: str) -> None:
    placed = PlacedCase(Case(3, SPEC, "host", ("uniform",) * 2, seed=6, ragged=False), (0, 1))
    judge_placed(placed, pool.run(3, run_placed, placed))
    with pytest.raises(AssertionError):
        judge_placed(placed, pool.run(3, with_bug, placed, how))


def refused_ids(world: World, backend: str, bad: int) -> tuple[str, bool]:
    with Exchange(world, SPEC, backend) as exchange:
        ids = torch.tensor([[0, 1, 2], [3, bad if world.rank == 1 else 4, -1]])
        got = exchange.dispatch(torch.ones(2, SPEC.hidden), ids, torch.ones(2, 3))
        try:
            exchange.combine(got.x, got)
        except DataRefused as error:
            got = exchange.dispatch(torch.ones(2, SPEC.hidden), ids.clamp(-1, 4), torch.ones(2, 3))
            return str(error), bool(exchange.combine(got.x, got).isfinite().all())
    return "", False


@pytest.mark.parametrize("bad", [5, 7, 12, -2, 2**40])
def test_ids_are_checked_against_the_experts_and_not_the_slots(pool: RankPool, bad: int) -> None:
    told = bad if bad < 2**31 else None
    for said, works in pool.run(3, refused_ids, "host", bad):
        assert works and said.startswith("rank 1 asked for expert ") and said.endswith("its token 1; ids are -1 to 4")
        assert told is None or f"expert {told} " in said


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (torch.tensor([[0, 1, 2, 3, 0]]), "leaves out expert 4"),
        (torch.tensor([[0, 1, 2, 3, 5]]), "a placement has expert 5; experts are 0 to 4"),
        (torch.tensor([[0, 1], [2, 3]]), "of shape [2, 2]; this exchange has 5 slots on each of 1 ranks"),
        (torch.tensor([[0.0, 1, 2, 3]]), "a tensor of integers on the CPU"),
        ([[0, 1, 2, 3]], "a tensor of integers on the CPU"),
    ],
)
def test_impossible_placements_are_refused(experts: Any, says: str) -> None:
    (world,) = wired(1)
    with world, Exchange(world, replace(SPEC, experts=5, slots=5)) as exchange:
        with pytest.raises(ConfigError, match=re.escape(says)):
            exchange.place(experts)
        assert torch.equal(exchange.placement(), even_experts(5, 1, 5))


def test_specs_and_calls_without_slots_say_so() -> None:
    (world,) = wired(1)
    with world, Exchange(world, replace(SPEC, slots=None)) as exchange:
        ids = torch.tensor([[0, 1, 2]])
        assert exchange.slots_of(ids) is ids
        for call in (lambda: exchange.place(torch.zeros(1, 5)), exchange.placement):
            with pytest.raises(ConfigError, match="an exchange without slots"):
                call()
    (world,) = wired(1)
    with world, Exchange(world, replace(SPEC, slots=5)) as exchange:
        for wrong, says in ((torch.zeros(10, 3).long(), "10 rows"), (torch.zeros(3, 2).long().T, "be contiguous")):
            with pytest.raises(ConfigError, match=says):
                exchange.slots_of(wrong)
    with pytest.raises(ConfigError, match="5 experts in 2 slots on each of 2 ranks; every expert needs a slot: 3"):
        replace(SPEC, slots=2).check(2)
    with pytest.raises(ConfigError, match=r"5 experts on 2 ranks; .* give slots, at least 3"):
        replace(SPEC, slots=None).check(2)
    with pytest.raises(ConfigError, match="slots is 0"):
        replace(SPEC, slots=0)


def sites(world: World, case: Case) -> list[list[int]]:
    """Place for two call sites and none; return the counts of each."""
    with open_exchange(world, case) as exchange:
        for site in (3, 4):
            exchange.place(drawn_experts(case, site), site=site)
        batch, counts = batches(case, 0)[world.rank], []
        for site in (0, 3, 4):
            tokens = Tokens(batch.x, exchange.slots_of(batch.ids, site), batch.weights, None, site=site)
            got = exchange.dispatch_unkept(tokens, None)
            exchange.combine_unkept(got.x, got, False)
            counts.append(got.expert_counts.tolist())
        return counts


def test_all_parts_of_an_exchange_mark_their_dispatches() -> None:
    """A backend of GPUs makes the kernel that marks a dispatch if its spec says that experts are placed."""
    for layout in ("expert", "rank", "token"):
        parts = replace(SPEC, layout=layout).over_slots(ranks=2).parts(ranks=2)
        assert [part.placed_experts for part in parts] == [5] * (2 if layout == "token" else 1)


def test_call_sites_have_placements_of_their_own(pool: RankPool) -> None:
    case = Case(2, SPEC, "host", ("uniform",), seed=8)
    found = pool.run(2, sites, case)
    for which, number in enumerate((-1, 3, 4)):
        over_slots = in_slots(batches(case, 0), drawn_experts(case, number))
        ids = torch.cat([batch.ids.flatten() for batch in over_slots])
        assert (
            torch.cat([torch.tensor(counts[which]) for counts in found]).tolist()
            == ids.bincount(minlength=2 * 4).tolist()
        )


@pytest.mark.parametrize(("ranks", "bound"), [(2, 1.03), (8, 1.08)])
def test_rows_of_ranks_are_even_by_the_plan_of_the_step_before(ranks: int, bound: float) -> None:
    """Zipf 1.2 over 64 experts, with 12 % more slots: rows of the busiest rank over the mean."""
    spec = ExchangeSpec(tokens=4096, hidden=8, experts=64, topk=8, slots=72 // ranks)
    every: list[Any] = [SimpleNamespace(rank=rank, size=ranks, device=torch.device("cpu")) for rank in range(ranks)]
    scores = -1.2 * torch.randperm(64, generator=torch.Generator().manual_seed(1)).add(1).log()

    def drawn(step: int, rank: int) -> torch.Tensor:
        noise = torch.rand(4096, 64, generator=torch.Generator().manual_seed(100 * step + rank)).log().neg().log().neg()
        return (scores + noise).topk(8).indices

    load = torch.cat([drawn(0, rank) for rank in range(ranks)]).flatten().bincount(minlength=64)
    rows = torch.zeros(ranks, dtype=torch.int64)
    for world in every:
        table = SlotTable(world, spec)
        table.write(plan_placement(load, ranks=ranks, slots=spec.slots).experts)
        rows += (table.slots_of(drawn(1, world.rank)).flatten() // spec.slots).bincount(minlength=ranks)
    assert int(rows.sum()) == ranks * 4096 * 8
    assert int(rows.max()) * ranks / int(rows.sum()) <= bound


def stale_in_a_domain(_rank: int, backend: str) -> list[str]:
    with World.of(domain=2, timeout_s=30) as world:
        return one_stale(world, Case(4, SPEC, backend, ("uniform",) * 3, seed=6), "not placed")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["host", "tensor allgather"])
def test_a_stale_table_is_refused_in_all_domains(groups: Any, backend: str) -> None:
    first, second, third = zip(*groups(4, stale_in_a_domain, backend), strict=True)
    assert set(first) == set(third) == {""}
    (said,) = set(second)
    assert said.startswith("rank 0 dispatched by placement ") and "and rank 1 by placement" in said


def test_split_operations_take_slots_and_refuse_a_placement_between() -> None:
    (world,) = wired(1)
    spec = replace(SPEC, slots=7)
    case = Case(1, spec, "host", ("uniform",), seed=2, ragged=False)
    (batch,) = batches(case, 0)
    inputs = batch.x, batch.ids, batch.weights
    experts, other = drawn_experts(case, 0), drawn_experts(case, 1)
    with world, Exchange(world, spec) as exchange:
        exchange.place(experts)
        whole = exchange.dispatch(*inputs)
        counts, want = whole.expert_counts.tolist(), exchange.combine(whole.x.clone(), whole)
        over_slots = spec.over_slots(1)
        exchange._backend = SplitOnCpu(world, over_slots, HostSlots(world, over_slots))
        got = exchange.dispatch_send(*inputs)
        with pytest.raises(ConfigError, match="place between dispatch_send and dispatch_receive"):
            exchange.place(other)
        exchange.dispatch_receive(got)
        assert got.expert_counts.tolist() == counts and got.saved(SavedPlacement).routes.digest != 0
        assert torch.equal(exchange.combine_receive(exchange.combine_send(got.x.clone(), got)), want)
        exchange.place(other)
