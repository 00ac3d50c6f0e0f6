"""The exchange between domains of one GPU rank, around emulated kernels whose rows come late, in chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from raymoe.device.domains import EnterDomainParams
from raymoe.errors import DataRefused
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.domain_shape import DomainShape
from raymoe.exchange.fused_chunks import RAIL_OP
from raymoe.exchange.hierarchical_gpu import HierarchicalGpu
from raymoe.exchange.rail_rows import RailRows
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.emulator.build import compiler
from tests.gpu import exchange_ranks as on_rank
from tests.unit.emulated_inside import between_domains
from tests.unit.exchange_cases import ROUTINGS, Case, apply_experts, batches, expert_major, result_of
from tests.unit.exchange_judge import judge_combine, judge_dispatch
from tests.unit.test_world_of import error_of, groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")

SPEC = ExchangeSpec(tokens=9, hidden=24, experts=8, topk=3, alignment=8)


def step_of(exchange: HierarchicalGpu, case: Case, batch: Any) -> tuple[Dispatched, Any]:
    """Run one step; return the dispatch, and the rows that came and y."""
    spec = case.spec
    count = torch.tensor([batch.num_tokens], dtype=torch.int32) if case.prefix else None
    dtype: torch.dtype = getattr(torch, spec.dtype)
    out = torch.full((spec.rows(case.ranks), spec.hidden), torch.nan, dtype=dtype) if spec.layout == "expert" else None
    got = exchange.dispatch(Tokens(batch.x, batch.ids, batch.weights, count), out)
    rows, y = expert_major(got), torch.full_like(batch.x, torch.nan)
    made = apply_experts(SimpleNamespace(world=exchange._world), got, rows)  # type: ignore[arg-type]
    exchange.combine(made, got, case.weighted, y)
    return got, copy.deepcopy(result_of(got, rows, y))  # the machine's memory goes with it


def run_cases(rank: int, cases: list[Case], chunk: int) -> Any:
    found = []
    with World.of(domain=1, timeout_s=40) as world:
        for case in cases:
            with between_domains(world, case.spec, "chunks", chunk) as exchange:
                results = []
                for step in range(len(case.routing)):
                    batch = batches(case, step)[rank]
                    if case.prefix:
                        batch = on_rank.padded(batch, case.spec.tokens)
                    results.append(step_of(exchange, case, batch)[1])
                    exchange.check()
                    assert exchange._rail_rows.words.tolist() == [step + 2] * len(exchange._rail_rows.words)
                found.append(results)
    return found


@pytest.mark.parametrize(("ranks", "chunk"), [(2, 1), (2, 4), (3, 4), (3, 8)])
def test_every_routing_matches_plan_and_oracle(groups: Groups, ranks: int, chunk: int) -> None:
    specs = [
        replace(SPEC, experts=4 * ranks),
        replace(SPEC, experts=2 * ranks, topk=2, alignment=1, layout="rank"),
        replace(SPEC, experts=2 * ranks, topk=2, alignment=1, dtype="float32", wire={"combine": "bfloat16"}),
    ]
    cases = [
        Case(ranks, spec, "fused", ROUTINGS, seed=number, ragged=number != 2, prefix=number == 1)
        for number, spec in enumerate(specs)
    ]
    found = groups(ranks, run_cases, cases, chunk)
    for number, case in enumerate(cases):
        for step in range(len(case.routing)):
            sent = batches(case, step)
            if case.prefix:
                sent = [on_rank.padded(batch, case.spec.tokens) for batch in sent]
            for rank in range(ranks):
                judge_dispatch(case, sent, rank, found[rank][number][step])
                judge_combine(case, sent[rank], found[rank][number][step].y)


def refuse(rank: int, fault: tuple[str, int, int]) -> Any:
    """Give rank 1 a bad id for one of its tokens, or a bad number of tokens, in the second of three steps."""
    kind, token, value = fault
    case = Case(2, replace(SPEC, dtype="float32"), "fused", ("uniform",) * 3, seed=2, ragged=False)
    with World.of(domain=1, timeout_s=40) as world, between_domains(world, case.spec, "chunks", 4) as exchange:
        found = []
        for step in range(3):
            batch, said = batches(case, step)[rank], ""
            count = torch.tensor([9], dtype=torch.int32)
            if step == 1 and rank == 1 and kind == "id":
                batch.ids[token, 1] = value
            elif step == 1 and rank == 1:
                count[0] = value
            out, y = torch.zeros(case.spec.rows(2), 24), torch.zeros(9, 24)
            got = exchange.dispatch(Tokens(batch.x, batch.ids, batch.weights, count), out)
            exchange.combine(out, got, True, y)
            try:
                exchange.check()
            except DataRefused as error:
                said = str(error)
            found.append((said, bool(y.isnan().all())))
        return found


FAULTS = [
    *(
        (("id", token, 8), f"rank 1 asked for expert 8 for its token {token}; ids are -1 to 7")
        for token in (0, 3, 4, 8)
    ),
    (("count", 0, 10), "num_tokens is 10 on rank 1; x has 9 rows, so 0 to 9 can be sent"),
]


@pytest.mark.parametrize(("fault", "says"), FAULTS)
def test_refusals_name_the_token_and_the_rank(groups: Groups, fault: tuple[str, int, int], says: str) -> None:
    for found in groups(2, refuse, fault):
        assert found == [("", False), (says, True), ("", False)]


def number_wrongly(_rank: int, how: str) -> Any:
    """Run a step with a mistake in the chunks."""
    case = Case(2, replace(SPEC, dtype="float32"), "fused", ("uniform",), seed=2, ragged=False)
    real = RailRows._cross

    def cross(self: RailRows, op: str, stream: int) -> None:
        real(self, op, stream)
        if how == "rows of another chunk":
            self.rows.copy_(self.rows.roll(1, 0))

    def in_one_chunk(**fields: int) -> EnterDomainParams:
        return EnterDomainParams(**fields | {"chunk": fields["tokens"]})

    params = "raymoe.exchange.rail_entries.EnterDomainParams"
    order = mock.patch(params, in_one_chunk) if how == "order" else nullcontext()
    with (
        World.of(domain=1, timeout_s=40) as world,
        mock.patch.object(RailRows, "_cross", cross),
        order,
        between_domains(world, case.spec, "chunks", 4) as exchange,
    ):
        return step_of(exchange, case, batches(case, 0)[world.rank])[1]


@pytest.mark.parametrize("how", ["order", "rows of another chunk"])
def test_a_wrong_order_of_tokens_is_found(groups: Groups, how: str) -> None:
    case = Case(2, replace(SPEC, dtype="float32"), "fused", ("uniform",), seed=2, ragged=False)
    found = groups(2, number_wrongly, how)
    with pytest.raises(AssertionError):
        for rank in range(2):
            judge_dispatch(case, batches(case, 0), rank, found[rank])


def lose_a_chunk(rank: int) -> Any:
    """Let a chunk of rank 0's second dispatch come never. Return what it raises, and what a later call raises."""
    case = Case(2, SPEC, "fused", ("uniform",) * 2, seed=2, ragged=False)
    with World.of(domain=1, timeout_s=40) as world, between_domains(world, case.spec, "chunks", 4) as exchange:
        step_of(exchange, case, batches(case, 0)[rank])
        inside: Any = exchange._inside
        if rank == 0:
            inside.lose(2)
        batch = batches(case, 1)[rank]
        out = torch.zeros(case.spec.rows(2), 24, dtype=torch.bfloat16)
        exchange.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
        return error_of(exchange.check) if rank == 0 else None


def test_a_chunk_that_never_comes_is_a_timeout_that_names_the_rail(groups: Groups) -> None:
    kind, says = groups(2, lose_a_chunk)[0]
    assert kind == "PeerTimeout"
    assert RAIL_OP in says and "rank 1" in says, says


def test_the_numbers_of_tokens_inside_and_back() -> None:
    for N, T, chunk in ((2, 9, 4), (3, 5, 5), (4, 7, 1), (2, 6, 3), (3, 5, 0)):
        shape = DomainShape(N, 1, 0, T, 1, chunk)
        tokens = torch.arange(N * T).view(N, T)
        inside = shape.inside(tokens)
        assert [shape.source_of(number) for number in range(N * T)] == [divmod(int(each), T) for each in inside]
        assert torch.equal(shape.inside(torch.stack((tokens, tokens), -1))[:, 1], inside)
        out = torch.full_like(tokens, -1)
        shape.by_domain(inside, out)
        assert torch.equal(out, tokens)
        for source in range(N):  # so rows keep the order of the contract
            numbers = [number for number in range(N * T) if shape.source_of(number)[0] == source]
            assert np.all(np.diff([shape.source_of(number)[1] for number in numbers]) == 1)
