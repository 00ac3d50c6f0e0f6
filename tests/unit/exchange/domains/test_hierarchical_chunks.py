"""The exchange between domains of one GPU rank, around emulated kernels whose rows come late, in chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from raymoe.errors import DataRefused
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.domains.domain_kernels import EnterDomainParams
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu
from raymoe.exchange.domains.rail_rows import RailRows
from raymoe.exchange.peer.fused_chunks import RAIL_OP
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.emulator.build import compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, spec_for, workspaces
from tests.gpu import exchange_ranks as on_rank
from tests.unit.exchange.domains.emulated_inside import between_domains
from tests.unit.exchange.exchange_cases import ROUTINGS, Case, apply_experts, batches, expert_major, result_of
from tests.unit.exchange.exchange_judge import judge_combine, judge_dispatch
from tests.unit.memory.test_world_of import error_of, groups

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
    products = apply_experts(SimpleNamespace(world=exchange._world), got, rows)  # type: ignore[arg-type]
    exchange.combine(products, got, case.weighted, y)
    return got, copy.deepcopy(result_of(got, rows, y))  # the machine's memory goes with it


def run_cases(rank: int, cases: list[Case], chunk: int) -> Any:
    reports = []
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
                reports.append(results)
    return reports


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("ranks", "chunk"), [(3, 4), (2, 1), (2, 4), (3, 8)])
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
    results = groups(ranks, run_cases, cases, chunk)
    for number, case in enumerate(cases):
        for step in range(len(case.routing)):
            sent = batches(case, step)
            if case.prefix:
                sent = [on_rank.padded(batch, case.spec.tokens) for batch in sent]
            for rank in range(ranks):
                judge_dispatch(case, sent, rank, results[rank][number][step])
                judge_combine(case, sent[rank], results[rank][number][step].y)


def refuse(rank: int, fault: tuple[str, int, int]) -> Any:
    """Give rank 1 a bad id for one of its tokens, or a bad number of tokens, in the second of three steps."""
    kind, token, value = fault
    case = Case(2, replace(SPEC, dtype="float32"), "fused", ("uniform",) * 3, seed=2, ragged=False)
    with World.of(domain=1, timeout_s=40) as world, between_domains(world, case.spec, "chunks", 4) as exchange:
        reports = []
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
            reports.append((said, bool(y.isnan().all())))
        return reports


FAULTS = [
    *(
        (("id", token, 8), f"rank 1 asked for expert 8 for its token {token}; ids are -1 to 7")
        for token in (0, 3, 4, 8)
    ),
    (
        ("count", 0, 10),
        "num_tokens is 10 on rank 1; x has 9 rows, so 0 to 9 can be sent: make the exchange with more tokens",
    ),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fault", "says"), FAULTS)
def test_refusals_name_the_token_and_the_rank(groups: Groups, fault: tuple[str, int, int], says: str) -> None:
    for report in groups(2, refuse, fault):
        assert report == [("", False), (says, True), ("", False)]


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

    params = "raymoe.exchange.domains.rail_entries.EnterDomainParams"
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
    results = groups(2, number_wrongly, how)
    with pytest.raises(AssertionError):
        for rank in range(2):
            judge_dispatch(case, batches(case, 0), rank, results[rank])


class Again(torch.autograd.Function):
    """Calls a function in the backward pass, as activation checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> Any:
        ctx.call()
        return dy[0], None


def dispatch_in_both_passes(rank: int) -> Any:
    """Dispatch in a forward pass, in a backward pass, and to known places; return which ran beside their rows."""
    case = Case(2, replace(SPEC, dtype="float32"), "fused", ("uniform",), seed=2, ragged=False)
    real, beside = RailRows.crossing, []

    def crossing(self: RailRows, op: str, **options: bool) -> Any:
        beside.append(options["beside"])
        return real(self, op, **options)

    with (
        World.of(domain=1, timeout_s=40) as world,
        between_domains(world, case.spec, "chunks", 4) as exchange,
        mock.patch.object(RailRows, "crossing", crossing),
    ):
        batch = batches(case, 0)[rank]
        tokens, shape = Tokens(batch.x, batch.ids, batch.weights, None), (case.spec.rows(2), 24)
        first, again, known = (torch.zeros(shape) for _ in range(3))
        got = exchange.dispatch(tokens, first)
        Again.apply(torch.zeros(1, requires_grad=True), lambda: exchange.dispatch(tokens, again)).backward()  # type: ignore[no-untyped-call]
        got = exchange.unpack(exchange.pack(got), first, got.weights, Ids(batch.ids))
        exchange.dispatch_known(2 * batch.x, got, known)
        exchange.check()
        rows = torch.cat([torch.arange(a, a + n) for a, n in zip(got.expert_offsets, got.expert_counts, strict=False)])
        return beside, torch.equal(again[rows], first[rows]), torch.equal(known[rows], 2 * first[rows]), len(rows)


def test_dispatches_of_backward_passes_begin_after_all_chunks(groups: Groups) -> None:
    for beside, again, known, rows in groups(2, dispatch_in_both_passes):
        assert beside == [True, False, False]
        assert again and known and rows


@pytest.mark.parametrize("beside", [True, False])
def test_rows_cross_on_a_stream_of_their_own_only_beside_a_dispatch(beside: bool) -> None:
    events: list[object] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    own, side = Stream("own"), Stream("side")
    now = [own]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    rail_rows, words = RailRows.__new__(RailRows), torch.zeros(3, dtype=torch.int64)
    rail_rows.rows, rail_rows.words, rail_rows._blocks, rail_rows._side = torch.zeros(4, 2), words, [words, words], side  # type: ignore[assignment]
    rail_rows._advance = lambda _, chunk: events.append(f"word {chunk} on {now[-1].name}")  # type: ignore[assignment]
    rail_rows._gather = lambda *_: events.append(f"chunk on {now[-1].name}")  # type: ignore[assignment]
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda _: now[-1]),
        mock.patch.object(torch.cuda, "stream", on),
        rail_rows.crossing("dispatch", beside=beside),
    ):
        events.append("dispatch")
    chunks = ["chunk on {0}", "word 0 on {0}", "chunk on {0}", "word 1 on {0}"]
    if beside:
        wanted = ["side waits for own", *(event.format("side") for event in chunks), "dispatch", "own waits for side"]
    else:
        wanted = [*(event.format("own") for event in chunks), "dispatch"]
    assert events == wanted
    assert words.tolist() == [1, 0, 0]


def test_every_launch_takes_only_the_sms_of_the_caller() -> None:
    """In both passes: the others are left to kernels of NCCL."""
    spec = spec_for("chunks")
    with Emulator(4) as emulator:
        (space, _) = workspaces(emulator, spec, ranks=2)
        assert space.world.gpu.sms == 6
        for sms in (2, 4):
            made = backend("chunks", space, spec, sms=sms)
            for name in ("combine_gradients", "dispatch_known", "dispatch_again"):
                made.later_operation(name)
            assert {launch.sms for launch in made._launches.values()} <= set(range(1, sms + 1))


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
        assert [shape.source_of(number) for number in range(N * T)] == [divmod(int(token), T) for token in inside]
        assert torch.equal(shape.inside(torch.stack((tokens, tokens), -1))[:, 1], inside)
        out = torch.full_like(tokens, -1)
        shape.by_domain(inside, out)
        assert torch.equal(out, tokens)
        for source in range(N):  # so rows keep the order of the contract
            numbers = [number for number in range(N * T) if shape.source_of(number)[0] == source]
            assert np.all(np.diff([shape.source_of(number)[1] for number in numbers]) == 1)
