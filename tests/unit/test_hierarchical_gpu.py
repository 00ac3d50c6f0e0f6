"""The exchange between domains of GPU ranks, on CPU ranks: Gloo replaces NCCL, and the emulator replaces the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from raymoe.errors import DataRefused
from raymoe.exchange.backend import Backend, Tokens
from raymoe.exchange.choice import Choice
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.hierarchical_gpu import HierarchicalGpu, Parts
from raymoe.exchange.nccl import NcclAllgather
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.net.gloo_rail import GlooRail
from tests.unit.emulated_launcher import EmulatedLauncher
from tests.unit.exchange_cases import ROUTINGS, Case, apply_experts, batches, expert_major, result_of
from tests.unit.exchange_judge import judge, judge_combine
from tests.unit.gloo_rounds import GlooRounds
from tests.unit.test_world_of import error_of, groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture

SPEC = ExchangeSpec(tokens=5, hidden=16, experts=8, topk=3, alignment=4)


def between_domains(choice: Choice, world: World, spec: ExchangeSpec, workspace: None) -> Backend:
    """Make the backend between domains on CPU ranks, with `allgather` of GPU ranks inside."""
    assert choice.backend == "allgather" and workspace is None
    launcher, domain = world.shared(EmulatedLauncher), world.domain
    rounds = domain.shared(GlooRounds)
    inside = NcclAllgather(domain, spec.inside(world.domains), rounds, domain.shared(EmulatedLauncher))
    return HierarchicalGpu(world, spec, Parts(launcher, world.shared(GlooRail), inside))


def opened(world: World, spec: ExchangeSpec) -> Exchange:
    with (
        mock.patch("raymoe.exchange.exchange.make_backend", between_domains),
        mock.patch("raymoe.exchange.nccl_kernels.ENTRIES_A_RUN", 8),
    ):
        return Exchange(world, spec, "allgather")


def run_step(exchange: Exchange, case: Case, step: int) -> Any:
    """Run a step with `num_tokens` in a tensor; behind it are NaN and ids that no code may read."""
    batch, count = batches(case, step)[exchange.world.rank], None
    x, ids, weights = batch.x.clone(), batch.ids.clone(), batch.weights.clone()
    if case.prefix:
        count = torch.tensor([batch.num_tokens], dtype=torch.int32)
        x[batch.num_tokens :], ids[batch.num_tokens :], weights[batch.num_tokens :] = torch.nan, 1_000_000, torch.nan
    got = exchange.dispatch(x, ids, weights, count)
    rows = expert_major(got)
    y = exchange.combine(apply_experts(exchange, got, rows), got, weighted=case.weighted)
    exchange.check()
    return result_of(got, rows, y)


def run_cases(_rank: int, cases: list[Case], domain: int) -> Any:
    with World.of(domain=domain, timeout_s=30) as world:
        found = []
        for case in cases:
            with opened(world, case.spec) as exchange:
                for rows in exchange._own:
                    rows.fill_(torch.nan)
                found.append([run_step(exchange, case, step) for step in range(len(case.routing))])
        return found


SPECS = [
    SPEC,
    ExchangeSpec(4, 8, experts=4, topk=4, dtype="float32", layout="rank", padding="zero", alignment=3),
    ExchangeSpec(4, 24, experts=4, topk=2, dtype="float16", alignment=1, wire={"combine": "float32"}),
    ExchangeSpec(4, 16, experts=8, topk=2, layout="rank", alignment=1, wire={"combine": "float16"}),
    ExchangeSpec(3, 8, experts=8, topk=2, alignment=16, padding="zero"),
]
FLAGS = [(True, False, True, False, True), (True, True, False, False, False), (False, True, True, False, True)]


THREE = ExchangeSpec(4, 8, experts=6, topk=2, alignment=2)


@pytest.mark.parametrize(("ranks", "domain", "specs"), [(4, 2, SPECS), (2, 1, SPECS[:3]), (3, 1, [THREE])])
def test_every_routing_matches_plan_and_oracle(
    groups: Groups, ranks: int, domain: int, specs: list[ExchangeSpec]
) -> None:
    cases = [
        Case(ranks, spec, "allgather", ROUTINGS, 3 + number, *FLAGS[number % len(FLAGS)])
        for number, spec in enumerate(specs)
    ]
    found = groups(ranks, run_cases, cases, domain)
    for number, case in enumerate(cases):
        judge(case, [theirs[number] for theirs in found])


def refuse(rank: int, fault: tuple[str, int]) -> Any:
    """Give rank 2 of four bad data in two of five steps, or all ranks too many rows for rank 3."""
    kind, value = fault
    spec = ExchangeSpec(
        4, 8, experts=8, topk=1, dtype="float32", alignment=1, capacity=12 if kind == "rows" else "worst"
    )
    with World.of(domain=2, timeout_s=30) as world, opened(world, spec) as exchange:
        found = []
        for bad in (False, True, False, True, False):
            ids = torch.arange(4)[:, None] + 2
            if bad and kind == "rows":
                ids[:] = value
            elif bad and rank == 2:
                ids[1] = value
            x, y, said = torch.ones(4, 8), torch.zeros(4, 8), ""
            got = exchange.dispatch(x, ids, torch.ones(4, 1))
            exchange.combine(got.x, got, out=y)
            try:
                exchange.check()
            except DataRefused as error:
                said = str(error)
            found.append((y.numpy(), said))
        return found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (("id", 8), "rank 2 asked for expert 8 for its token 1; ids are -1 to 7"),
        (("id", -2), "rank 2 asked for expert -2 for its token 1; ids are -1 to 7"),
        (("id", 2**40), f"rank 2 asked for expert {2**40} for its token 1; ids are -1 to 7"),
        (("rows", 7), "16 rows, gaps included, came to rank 3; its capacity is 12: raise exchange.capacity"),
    ],
)
def test_refused_data_raises_on_all_ranks_of_all_domains_and_the_next_step_works(
    groups: Groups, fault: tuple[str, int], says: str
) -> None:
    for first, second, third, fourth, fifth in groups(4, refuse, fault):
        for y, said in (second, fourth):
            assert said == says
            assert np.isnan(y).all()
        for y, said in (first, third, fifth):
            assert said == ""
            assert (y == 1).all()


def count_too_many(rank: int, count: int) -> Any:
    """Let the exchange of rank 1 send `count` of its three tokens. On GPUs nothing checks that before."""
    spec = ExchangeSpec(4, 8, experts=8, topk=2, dtype="float32", alignment=4)
    with World.of(domain=2, timeout_s=30) as world, opened(world, spec) as exchange:
        found = []
        for asked in (2, count if rank == 1 else 2, 2):
            x, ids = torch.ones(3, 8), torch.arange(6).reshape(3, 2)
            tokens = Tokens(x, ids, torch.full((3, 2), 0.5), torch.tensor([asked], dtype=torch.int32))
            got, y = exchange._backend.dispatch(tokens, exchange._own[0]), torch.zeros(3, 8)
            exchange._backend.combine(exchange._own[0], got, True, y)
            found.append((error_of(exchange.check)[1] if y.isnan().any() else "", y.numpy()))
        return found


@pytest.mark.parametrize("count", [4, -1, 2**31 - 1])
def test_a_number_of_tokens_out_of_range_is_refused_by_all(groups: Groups, count: int) -> None:
    for first, second, third in groups(4, count_too_many, count):
        assert second[0] == f"num_tokens is {count} on rank 1; x has 3 rows, so 0 to 3 can be sent"
        assert np.isnan(second[1]).all()
        for said, y in (first, third):
            assert said == ""
            assert y[:, 0].tolist() == [1, 1, 0]


def combine_differently(rank: int, kind: str, different: list[int]) -> Any:
    """Let some ranks combine another dispatch, or without weights; then combine the second one on all."""
    case = Case(4, ExchangeSpec(4, 8, experts=8, topk=2, depth=2), "allgather", ("uniform", "masked"), seed=4)
    with World.of(domain=2, timeout_s=30) as world, opened(world, case.spec) as exchange:
        gots, rows = [], []
        for step in range(2):
            batch = batches(case, step)[rank]
            gots.append(exchange.dispatch(batch.x, batch.ids, batch.weights))
            rows.append(apply_experts(exchange, gots[-1], gots[-1].x))
        there = rank in different
        which = 1 if kind == "dispatch" and there else 0
        y = exchange.combine(rows[which], gots[which], weighted=not (kind == "weighted" and there))
        said = error_of(exchange.check)
        good = exchange.combine(rows[1], gots[1])
        exchange.check()
        first = exchange.combine(rows[0], gots[0])
        exchange.check()
        return said, bool(y.isnan().all()), [each.float().numpy() for each in (first, good)]


@pytest.mark.parametrize("different", [[3], [2, 3], [1], [1, 3]])
@pytest.mark.parametrize("kind", ["dispatch", "weighted"])
def test_combines_that_differ_between_ranks_or_domains_are_refused_by_all(
    groups: Groups, kind: str, different: list[int]
) -> None:
    case = Case(4, ExchangeSpec(4, 8, experts=8, topk=2, depth=2), "allgather", ("uniform", "masked"), seed=4)
    first = different[0]
    says = f"rank 0 combines its dispatch 1 and rank {first} its dispatch 2; all ranks combine the same dispatch"
    if kind == "weighted":
        says = (
            f"rank 0 combines dispatch 1 with weighted=True and rank {first} with weighted=False; all ranks give the "
            "same weighted"
        )
    for rank, (said, nan, ys) in enumerate(groups(4, combine_differently, kind, different)):
        assert said == ("DataRefused", says)
        assert nan
        for step, y in enumerate(ys):
            judge_combine(case, batches(case, step)[rank], y)


def ask_for_what_is_missing(_rank: int) -> Any:
    with World.of(domain=1, timeout_s=30) as world, opened(world, SPEC) as exchange:
        assert not exchange.capturable  # Gloo
        batch = batches(Case(2, SPEC, "allgather", ("uniform",)), 0)[world.rank]
        got = exchange.dispatch(batch.x, batch.ids, batch.weights)
        calls = [
            lambda: exchange.pack(got),
            lambda: exchange.combine_gradients(got.x, got.weights, got),
            lambda: exchange.dispatch_send(batch.x, batch.ids, batch.weights),
        ]
        return [error_of(call) for call in calls]


def test_gradients_and_halves_are_refused(groups: Groups) -> None:
    for gradients, combined, halves in groups(2, ask_for_what_is_missing):
        assert gradients == combined
        assert gradients[0] == halves[0] == "ConfigError"
        assert gradients[1].startswith("gradients of an exchange between 2 domains of GPU ranks")
        assert "between 2 domains operations are not split" in halves[1]
