"""A result of a dispatch tells the rows that it needed, also where they did not fit, by every backend and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.errors import DataRefused
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.emulator.build import compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, small, spec_for, workspaces
from tests.gpu.exchange_ranks import rows_needed
from tests.unit.exchange.domains.emulated_inside import between_domains
from tests.unit.exchange.emulated_tokens import EmulatedTokens
from tests.unit.exchange.exchange_cases import Case, batches, open_exchange
from tests.unit.exchange.exchange_judge import judge_needed, plan_needed
from tests.unit.exchange.test_exchange import BACKENDS, ON_TENSORS
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool

__all__ = ["groups"]  # a fixture
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

LAYOUTS = ("expert", "rank", "token")
ROUTINGS = ("uniform", "one", "skewed", "none", "one", "masked")
KERNELS = ("fused", "staged", "copied", "ll", "few")
IN_SLOTS = ("fused", "staged", "copied")
"""The kernels that have layout rank."""


def case_of(ranks: int, backend: str, layout: str, **fields: Any) -> Case:
    """Make a case whose uniform steps fit. Where all rows are for one expert, they do not."""
    spec = ExchangeSpec(tokens=12, hidden=16, experts=4 * ranks, topk=2, alignment=4, layout=layout, **fields)
    spec = replace(spec, capacity=ranks * spec.tokens * (1 if layout == "token" else 2) - 1)
    return Case(ranks, spec, backend, ROUTINGS, seed=5, ragged=False, weighted=layout != "token")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_rows_needed_equal_the_plan(pool: RankPool, backend: str, layout: str) -> None:
    case = case_of(3, backend, layout)
    judge_needed(case, pool.run(3, rows_needed, case))


def needed_in_domains(_rank: int, case: Case) -> list[tuple[int, int, str]]:
    with World.of(domain=2, timeout_s=20) as world:
        return rows_needed(world, case)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["auto", "collective", "tensor allgather"])
def test_rows_needed_between_domains_equal_the_plan(groups: Any, backend: str, layout: str) -> None:
    case = case_of(4, backend, layout)
    judge_needed(case, groups(4, needed_in_domains, case))


def restored(exchange: Exchange, got: Dispatched, ids: Ids) -> Dispatched:
    """Make the result again from its metadata, as operators do in a backward pass."""
    of = exchange._backend
    return of.unpack(of.pack(got).clone(), got.x, got.weights, ids)


def needed_again(world: World, case: Case) -> list[list[int]]:
    """Return the rows needed of each of several outstanding dispatches, and of the same from their metadata."""
    with open_exchange(world, replace(case, spec=replace(case.spec, depth=len(case.routing)))) as exchange:
        sent = [batches(case, step)[world.rank] for step in range(len(case.routing))]
        gots = [exchange.dispatch(batch.x, batch.ids, batch.weights) for batch in sent]
        again = [restored(exchange, got, Ids(batch.ids)) for got, batch in zip(gots, sent, strict=True)]
        return [[int(got.rows_needed()) for got in each] for each in (gots, again)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["expert", "token"])
@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_each_result_keeps_its_own_number_also_in_its_metadata(pool: RankPool, backend: str, layout: str) -> None:
    case = case_of(2, backend, layout)
    want = [plan_needed(case, batches(case, step)) for step in range(len(case.routing))]
    for rank, both in enumerate(pool.run(2, needed_again, case)):
        assert both == [[needed[rank] for needed in want]] * 2


def needed_with_a_wrong_id(world: World, case: Case) -> tuple[int, int]:
    with open_exchange(world, case) as exchange:
        batch = batches(case, 0)[world.rank]
        if world.rank == 1:
            batch.ids[2, 1] = 77
        got = exchange.dispatch(batch.x, batch.ids, batch.weights)
        with pytest.raises(DataRefused, match="expert 77"):
            exchange.combine(got.x, got)
            exchange.check()
        return int(got.rows_needed()), int(got.expert_offsets[-1])


@pytest.mark.parametrize("backend", [*BACKENDS, *ON_TENSORS])
def test_another_cause_does_not_pass_for_a_number_of_rows(pool: RankPool, backend: str) -> None:
    for needed, placed in pool.run(2, needed_with_a_wrong_id, case_of(2, backend, "expert")):
        assert needed == placed


def needed_by_kernels(emulator: Emulator, kind: str, case: Case, bad: bool = False) -> list[list[tuple[int, int]]]:
    """Dispatch each step by kernels over NVLink; return for each step and rank the rows needed and the last offset."""
    found = []
    owners = [backend(kind, space, case.spec, small) for space in workspaces(emulator, case.spec)]
    for step in range(len(case.routing)):
        gots = []
        for owner, batch in zip(owners, batches(case, step), strict=True):
            if bad and owner.world.rank == 1:
                batch.ids[2, 1] = 77
            shape = case.spec.rows(case.ranks), case.spec.hidden
            out = owner.new(shape, batch.x.dtype, "out") if case.spec.layout == "expert" else None
            count = torch.tensor([batch.num_tokens], dtype=torch.int32)
            gots.append(owner.dispatch(Tokens(batch.x, batch.ids, batch.weights, count), out))
        emulator.run(step)
        found.append([(int(got.rows_needed()), int(got.expert_offsets[-1])) for got in gots])
        again = [
            owner.unpack(got._saved.memory, got.x, got.weights, Ids(got.weights))
            for owner, got in zip(owners, gots, strict=True)
        ]
        assert [int(got.rows_needed()) for got in again] == [needed for needed, _ in found[-1]]
    return found


@needs_compiler
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "layout"), [*((kind, "expert") for kind in KERNELS), *((kind, "rank") for kind in IN_SLOTS)]
)
def test_kernels_over_nvlink_tell_the_rows_needed(kind: str, layout: str) -> None:
    spec = spec_for(kind, layout=layout, alignment=4, capacity=2 * 20 * 3 - 1)
    case, outcomes = Case(2, spec, "auto", ROUTINGS, seed=5, ragged=False), set()
    with Emulator(2) as emulator:
        for step, found in enumerate(needed_by_kernels(emulator, kind, case)):
            want = plan_needed(case, batches(case, step))
            assert found == [(rows, rows if rows <= spec.capacity else 0) for rows in want]
            outcomes |= {rows <= spec.capacity for rows in want}
    assert outcomes == {False, True}


@needs_compiler
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_over_nvlink_do_not_take_a_wrong_id_for_a_number_of_rows(kind: str) -> None:
    case = Case(2, spec_for(kind, capacity=64, alignment=1), "auto", ("uniform", "one"), ragged=False)
    with Emulator(2) as emulator:
        (fits, does_not) = needed_by_kernels(emulator, kind, case, bad=True)
    assert all(needed == placed > 0 for needed, placed in fits)
    assert does_not == [(0, 0), (0, 0)]


@needs_compiler
@pytest.mark.parametrize("kind", ["fused", "ll"])
def test_kernels_over_nvlink_tell_the_tokens_needed(kind: str) -> None:
    spec = ExchangeSpec(12, 64, experts=6, topk=3, layout="token", capacity=23)
    case = Case(2, spec, "auto", ROUTINGS, seed=5, ragged=False)
    with Emulator(2) as emulator:
        tokens = EmulatedTokens(emulator, kind, spec)
        needed = []
        for step in range(len(case.routing)):
            gots = tokens.dispatch(batches(case, step), seed=step)
            needed.append([int(got.rows_needed()) for got in gots])
            assert needed[-1] == plan_needed(case, batches(case, step))
    assert max(map(max, needed)) > 23


def needed_around_kernels(rank: int, case: Case) -> list[int]:
    """Return the rows needed of each step, with one emulated GPU in each domain."""
    needed = []
    with World.of(domain=1, timeout_s=60) as world, between_domains(world, case.spec, "fused") as hierarchical:
        for step in range(len(case.routing)):
            batch = batches(case, step)[rank]
            out = torch.empty(case.spec.rows(case.ranks), case.spec.hidden, dtype=batch.x.dtype)
            got = hierarchical.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
            needed.append(int(got.rows_needed()))
    return needed


@needs_compiler
def test_kernels_inside_a_domain_tell_the_rows_needed(groups: Any) -> None:
    case = case_of(2, "auto", "expert")
    want = [plan_needed(case, batches(case, step)) for step in range(len(case.routing))]
    assert max(map(max, want)) > case.spec.rows(2) >= max(want[0])
    assert list(zip(*groups(2, needed_around_kernels, case), strict=True)) == [tuple(rows) for rows in want]
