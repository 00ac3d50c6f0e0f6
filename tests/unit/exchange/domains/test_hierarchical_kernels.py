"""The exchange between domains of one GPU rank, around emulated kernels: rows as fp8, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import DataRefused
from raymoe.exchange.backend import Dispatched, Ids, Tokens
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, FP8_BLOCK, quantise
from raymoe.memory.world import World
from raymoe.net.gloo_rail import GlooRail
from raymoe.workload.traffic import bytes_between_domains
from tests.emulator.build import compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, workspaces
from tests.unit.exchange import plan
from tests.unit.exchange.domains.emulated_inside import between_domains
from tests.unit.exchange.exchange_cases import Batch, Case, apply_experts, batches, expert_major
from tests.unit.exchange.exchange_judge import judge_combine
from tests.unit.memory.test_world_of import groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")


def awkward_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows of many magnitudes, with zeros, infinities, NaN and numbers below the normal ones."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(24, 272, generator=source) * torch.logspace(-30, 30, 24)[:, None]
    x[0], x[1, :128], x[2, 5], x[3, 200], x[4, 7], x[5, 130:] = 0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.inf
    x[6] = 1e-40
    return x.to(dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["fused", "ll"])
def test_rows_quantised_by_torch_are_those_of_the_kernels(kind: str, dtype: str) -> None:
    x = awkward_rows(getattr(torch, dtype))
    spec = ExchangeSpec(*x.shape, experts=1, topk=1, dtype=dtype, wire=FP8, output="raw", alignment=1)
    with Emulator(1) as emulator:
        (space,) = workspaces(emulator, spec, stamped=False)
        emulated = backend(kind, space, spec)
        tokens = Tokens(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1), None)
        got = emulated.dispatch(tokens, emulated.new(tuple(x.shape), torch.float8_e4m3fn, "out"))
        emulator.run(seed=1)
        values, scales = quantise(x)
        assert got.scales is not None
        assert torch.equal(got.scales.view(torch.int32), scales.view(torch.int32))
        assert torch.equal(got.x.float().nan_to_num(nan=999.0), values.float().nan_to_num(nan=999.0))
        numbers = ~values.float().isnan()
        assert torch.equal(got.x.view(torch.uint8)[numbers], values.view(torch.uint8)[numbers])


def given_rows(case: Case, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of a batch, which has rows of very different magnitudes."""
    return quantise(scaled(case, batch).x)


def scaled(case: Case, batch: Batch) -> Batch:
    factors = torch.logspace(-3, 3, case.spec.tokens)[: len(batch.x), None]
    return replace(batch, x=(batch.x.float() * factors).to(batch.x.dtype))


def dequantised(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.float() * scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]).to(dtype)


def cross(rank: int, case: Case, kind: str, pairs: bool, chunk: int = 0) -> Any:
    """Return of each step the rows that came, expert by expert, their scales, weights, counts and offsets, and y."""
    spec, results = case.spec, []
    with World.of(domain=1, timeout_s=40) as world, between_domains(world, spec, kind, chunk) as exchange:
        for step in range(len(case.routing)):
            batch = scaled(case, batches(case, step)[rank])
            x, scales = given_rows(case, batches(case, step)[rank]) if pairs else (batch.x, None)
            count = torch.tensor([batch.num_tokens], dtype=torch.int32)
            out = None
            if spec.layout == "expert":
                out = torch.full((spec.rows(2), spec.hidden), torch.nan).to(getattr(torch, spec.output_dtype))
            got = exchange.dispatch(Tokens(x, batch.ids, batch.weights, count, scales), out)
            assert out is None or got.x is out
            rows = expert_major(replace_x(got, got.x.view(torch.uint8))).view(got.x.dtype)
            theirs = None if got.scales is None else expert_major(replace_x(got, got.scales))
            if theirs is not None and spec.layout == "expert":
                assert got.scales.stride() == (1, -(-spec.rows(2) // 4) * 4)
            whole = rows if theirs is None else dequantised(rows, theirs, batch.x.dtype)
            y = torch.zeros_like(batch.x)
            products = apply_experts(SimpleNamespace(world=world), got, whole)  # type: ignore[arg-type]
            exchange.combine(products, got, True, y)
            exchange.check()
            numbers = got.weights.clone(), got.expert_counts.tolist(), got.expert_offsets.tolist()
            results.append((rows.view(torch.uint8).clone(), None if theirs is None else theirs.clone(), *numbers, y))
    return results


def replace_x(got: Dispatched, x: torch.Tensor) -> Dispatched:
    return Dispatched(x, got.weights, got.expert_offsets, got.expert_counts, got.index, got.tokens, None, None)


CASES = [
    ("fused", False, ExchangeSpec(5, 144, experts=4, topk=2, alignment=4, padding="zero", wire=FP8)),
    ("fused", False, ExchangeSpec(5, 144, experts=4, topk=2, alignment=4, wire=FP8, output="raw")),
    ("fused", True, ExchangeSpec(5, 144, experts=4, topk=2, alignment=4, wire=FP8, output="raw", layout="rank")),
    ("ll", True, ExchangeSpec(5, 272, experts=4, topk=2, alignment=8, padding="zero", wire=FP8)),
    ("ll", False, ExchangeSpec(5, 16, experts=6, topk=3, alignment=1, wire=FP8, output="raw", dtype="float32")),
    (
        "staged",
        False,
        ExchangeSpec(4, 48, experts=4, topk=2, alignment=2, wire={"dispatch": FP8, "combine": "float32"}),
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("number", "chunk"), [*((number, 0) for number in range(len(CASES))), (0, 2), (1, 3), (2, 1)])
def test_rows_cross_between_domains_as_they_do_in_one(groups: Groups, number: int, chunk: int) -> None:
    kind, pairs, spec = CASES[number]
    case = Case(2, spec, kind, ("uniform", "masked", "repeated", "none"), seed=number, prefix=True)
    results = groups(2, cross, case, "chunks" if chunk else kind, pairs, chunk)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    for step in range(len(case.routing)):
        sent = batches(case, step)
        inputs = [given_rows(case, batch) for batch in sent]
        ids = [batch.ids[: batch.num_tokens] for batch in sent]
        for rank in range(2):
            rows, scales, weights, counts, offsets, y = results[rank][step]
            theirs = plan.plan(ids, rank, spec.local_experts(2), spec.alignment)
            assert (counts, offsets) == (theirs.counts, theirs.offsets)
            for place, entry in enumerate(theirs.entries):
                if entry is None:
                    assert weights[place] == 0
                    assert spec.padding != "zero" or (rows[place] == 0).all()
                    continue
                source, token, k = entry
                values, theirs_scales = (tensor[token : token + 1] for tensor in inputs[source])
                if spec.output == "raw":
                    assert torch.equal(scales[place], theirs_scales[0])
                    assert torch.equal(rows[place], values[0].view(torch.uint8))
                else:
                    assert torch.equal(rows[place], dequantised(values, theirs_scales, dtype)[0].view(torch.uint8))
                assert weights[place] == sent[source].weights[token, k]
            seen = replace(sent[rank], x=dequantised(*inputs[rank], dtype))
            judge_combine(case, seen, y.float().numpy())


def return_gradients(rank: int, case: Case, kind: str, chunk: int) -> Any:
    """Bring rows and weights home from metadata, and send other rows to the places of the dispatch."""
    spec, results = case.spec, []
    with World.of(domain=1, timeout_s=40) as world, between_domains(world, spec, kind, chunk) as exchange:
        for step in range(len(case.routing)):
            batch = batches(case, step)[rank]
            out = torch.zeros(spec.rows(2), spec.hidden)
            got = exchange.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
            metadata, weights = exchange.pack(got), got.weights.clone()
            assert metadata.shape == (exchange.metadata_words,)
            again = exchange.unpack(metadata, out, weights, Ids(batch.ids))
            products = apply_experts(SimpleNamespace(world=world), got, out).nan_to_num(nan=0.0)  # type: ignore[arg-type]
            y, entries = torch.zeros_like(batch.x), torch.zeros_like(batch.weights)
            exchange.combine_gradients(products, weights, again, y, entries)
            same = None
            if exchange.keeps_places:
                rows = torch.zeros_like(out)
                exchange.dispatch_known(-2 * batch.x, again, rows)
                last = got.expert_offsets[-1]
                same = torch.equal(rows[:last], -2 * out[:last])
            exchange.check()
            results.append((y, entries, same))
    return results


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "alignment", "chunk"),
    [("fused", 1, 0), ("fused", 4, 0), ("ll", 4, 0), ("staged", 1, 0), ("chunks", 1, 3), ("chunks", 4, 1)],
)
def test_gradients_are_returned_through_the_kernels(groups: Groups, kind: str, alignment: int, chunk: int) -> None:
    spec = ExchangeSpec(4, 64, experts=4, topk=2, dtype="float32", alignment=alignment, padding="zero")
    case = Case(2, spec, kind, ("uniform", "masked", "repeated"), seed=3, weighted=False)
    for rank, result in enumerate(groups(2, return_gradients, case, kind, chunk)):
        for step, (y, entries, same) in enumerate(result):
            batch = batches(case, step)[rank]
            judge_combine(case, batch, y.numpy())
            assert torch.equal(entries, torch.where(batch.ids >= 0, batch.weights, 0.0))
            assert same is (None if kind == "ll" else True)


def count_bytes(rank: int, spec: ExchangeSpec) -> int:
    """Return the bytes that this rank sends to the other domain in a dispatch."""
    sent: list[int] = []
    real = GlooRail.gather

    def gather(self: GlooRail, op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        if op == "dispatch":
            sent.append(own.nbytes)
        return real(self, op, out, own)

    with (
        mock.patch.object(GlooRail, "gather", gather),
        World.of(domain=1, timeout_s=40) as world,
        between_domains(world, spec, "fused") as exchange,
    ):
        batch = batches(Case(2, spec, "fused", ("uniform",)), 0)[rank]
        out = torch.zeros(spec.rows(2), spec.hidden, dtype=torch.bfloat16)
        exchange.dispatch(Tokens(batch.x, batch.ids, batch.weights, None), out)
    return sum(sent)


def test_rows_of_fp8_send_half_of_the_bytes(groups: Groups) -> None:
    spec = ExchangeSpec(5, 528, experts=4, topk=2, wire=FP8)
    sent = sum(groups(2, count_bytes, spec))
    assert sent == bytes_between_domains(spec, 2, 2, "cuda")["dispatch"]
    assert sent < 0.6 * bytes_between_domains(replace(spec, wire=None), 2, 2, "cuda")["dispatch"]


def mix_backward(rank: int, case: Case, kind: str, how: str, chunk: int) -> list[tuple[str, bool]]:
    """Run backward passes of two dispatches in another order on rank 1, or a dispatch on rank 1; then right ones.

    Return what `check` says of each, and whether all rows are NaN, or else right.
    """
    spec, reports = case.spec, []
    with World.of(domain=1, timeout_s=40) as world, between_domains(world, spec, kind, chunk) as exchange:
        sent = [batches(case, step)[rank] for step in range(2)]

        def dispatched(batch: Batch, forward: Dispatched | None = None) -> Dispatched:
            out = torch.zeros(spec.rows(2), spec.hidden, dtype=batch.x.dtype)
            tokens = Tokens(batch.x, batch.ids, batch.weights, None)
            return exchange.dispatch(tokens, out) if forward is None else exchange.dispatch_again(tokens, out, forward)

        gots = [dispatched(batch) for batch in sent]
        steps = {"order": ((0, 1), (1, 0)), "left out": ((0, None),), "site": ((0, 0),)}[how]
        for usual, odd in (*steps, (1, 1), (0, 0), (1, 1)):
            step = odd if rank else usual
            gots[0].site = 3 + rank if how == "site" and not reports else 3
            half = replace(sent[usual if step is None else step], x=0.5 * sent[usual if step is None else step].x)
            if step is None:
                rows = dispatched(half).x
            elif exchange.keeps_places:
                rows = torch.zeros_like(gots[step].x)
                exchange.dispatch_known(half.x, gots[step], rows)
            else:
                rows = dispatched(half, gots[step]).x
            said = ""
            try:
                exchange.check()
            except DataRefused as error:
                said = str(error)
            if said:
                right = bool(rows.isnan().all())
            elif step is None:
                right = bool(torch.isfinite(rows).any())
            else:
                end = int(gots[step].expert_offsets[-1])  # rows after it are unspecified
                right = torch.equal(rows[:end], 0.5 * gots[step].x[:end])
            reports.append((said, right))
    return reports


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "chunk"), [("fused", 0), ("ll", 0), ("staged", 0), ("chunks", 2)])
@pytest.mark.parametrize("how", ["order", "left out", "site"])
def test_ranks_of_all_domains_refuse_backward_passes_that_differ(
    groups: Groups, kind: str, chunk: int, how: str
) -> None:
    spec = ExchangeSpec(5, 16, experts=4, topk=2, alignment=4, padding="zero")
    case = Case(2, spec, kind, ("uniform", "masked"), seed=2, ragged=False)
    for rank, report in enumerate(groups(2, mix_backward, case, kind, how, chunk)):
        refused = {"order": 2, "left out": 1 - rank, "site": 1}[how]
        said = [text for text, _ in report if text]
        assert len(said) == refused and all(text.startswith("ranks of this world run the back") for text in said)
        assert [bool(text) for text, _ in report] == [True] * refused + [False] * (len(report) - refused)
        assert all(right for _, right in report)
