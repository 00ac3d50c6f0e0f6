"""Gradients of weights on GPU ranks, on emulated kernels: numbers of entries travel home in rows of any dtype."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from raymoe.errors import CaptureError, ConfigError, DataRefused
from raymoe.exchange.backend import Ids, Tokens
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import Change, compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, workspaces

RANKS = 2
SPEC = ExchangeSpec(tokens=7, hidden=64, experts=6, topk=3, alignment=4)
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")


def check_weights(kind: str, spec: ExchangeSpec, counts: tuple[int, ...], changes: tuple[Change, ...] = ()) -> None:
    """Dispatch so many tokens of each rank, and bring their weights home beside rows of ones; raise if one differs."""
    source, dtype = torch.Generator().manual_seed(4), getattr(torch, spec.dtype)
    transport = "copy_engine" if kind == "copied" else "auto"
    spec = replace(spec, transport=transport)
    with Emulator(len(counts), changes=changes) as emulator:
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec, stamped=False)]
        capacity, slots, given = spec.rows(len(counts)), spec.layout == "rank", []
        for tokens in counts:
            ids = torch.randint(-1, spec.experts, (tokens, spec.topk), generator=source)
            ids[: tokens // 3] = ids[: tokens // 3, :1]  # a token may name an expert several times
            x = torch.ones(tokens, spec.hidden, dtype=dtype)
            given.append(Tokens(x, ids, torch.randn(tokens, spec.topk, generator=source), None))
        got = [
            each.dispatch(tokens, None if slots else each.new((capacity, spec.hidden), dtype, "out"))
            for each, tokens in zip(backends, given, strict=True)
        ]
        emulator.run(seed=1)
        home = []
        for each, tokens, found in zip(backends, given, got, strict=True):
            metadata = each.pack(found)
            assert metadata.dtype == torch.int32 and metadata.numel() == each.metadata_words
            again = each.unpack(metadata, found.x, found.weights, Ids(tokens.topk_idx))
            assert again.expert_offsets.tolist() == found.expert_offsets.tolist()
            rows = each.new((capacity, spec.hidden), dtype, "expert rows")
            rows.fill_(1.0)
            y = each.new((len(tokens.x), spec.hidden), dtype, "y")
            entries = each.new((len(tokens.x), spec.topk), torch.float32, "entries")
            each.combine_gradients(rows, found.weights, again, y, entries)
            home.append((y, entries))
        emulator.run(seed=2)
        for each, tokens, (y, entries) in zip(backends, given, home, strict=True):
            each.check()
            there = tokens.topk_idx >= 0
            assert torch.equal(entries, torch.where(there, tokens.topk_weights, 0.0))
            assert torch.equal(y[:, 0].float(), there.sum(dim=1).float())


@pytest.mark.parametrize("kind", ["fused", "ll", "staged", "copied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_of_a_dispatch_return_to_their_entries(kind: str, dtype: str) -> None:
    check_weights(kind, replace(SPEC, dtype=dtype), (7, 4))


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        (replace(SPEC, hidden=16), (7, 4)),  # rows are no wider than those of bytes, so both have one backend
        (replace(SPEC, topk=1), (5, 7, 0)),
        (replace(SPEC, topk=16, experts=16, hidden=128, dtype="float32"), (0, 3)),
        (replace(SPEC, layout="rank"), (6, 7)),
        (replace(SPEC, dtype="float32", wire={"combine": "bfloat16"}), (7, 1)),
        (replace(SPEC, experts=4), (3, 0, 7, 5)),
        (SPEC, (7,)),
    ],
    ids=["hidden 16", "top-1", "top-16", "layout rank", "home as bfloat16", "four ranks", "one rank"],
)
def test_weights_return_with_other_shapes(spec: ExchangeSpec, counts: tuple[int, ...]) -> None:
    check_weights("fused", spec, counts)


PLANTED = [
    Change("spread_weights.cu", "p.places + static_cast<u64>(entry)", "p.places + static_cast<u64>(token * p.topk)"),
    Change("spread_weights.cu", "p.kept + p.tokens + source * 4ull", "p.kept + p.tokens"),
]


@pytest.mark.parametrize("change", PLANTED, ids=lambda change: change.old)
def test_a_planted_mistake_is_found(change: Change) -> None:
    with pytest.raises(AssertionError):
        check_weights("fused", SPEC, (2, 7), (change,))


@pytest.mark.parametrize("kind", ["fused", "ll", "staged"])
def test_the_weights_of_a_refused_step_are_nan_on_all_ranks(kind: str) -> None:
    with Emulator(RANKS) as emulator:
        backends = [backend(kind, space, SPEC) for space in workspaces(emulator, SPEC, stamped=False)]
        x, weights = torch.ones(SPEC.tokens, SPEC.hidden).bfloat16(), torch.ones(SPEC.tokens, SPEC.topk)
        got = []
        for rank, each in enumerate(backends):
            ids = torch.full((SPEC.tokens, SPEC.topk), rank)
            ids[3, 1] = SPEC.experts if rank == 1 else 0  # no expert has this id
            got.append(each.dispatch(Tokens(x, ids, weights, None), each.new((SPEC.rows(RANKS), 64), x.dtype, "out")))
        emulator.run(seed=3)
        home = []
        for each, found in zip(backends, got, strict=True):
            rows = each.new((SPEC.rows(RANKS), SPEC.hidden), x.dtype, "expert rows")
            home.append(each.new((SPEC.tokens, SPEC.topk), torch.float32, "entries"))
            home[-1].fill_(7.0)
            each.combine_gradients(rows, found.weights, found, each.new(tuple(x.shape), x.dtype, "y"), home[-1])
        emulator.run(seed=4)
        assert all(entries.isnan().all() for entries in home)
        for each in backends:
            with pytest.raises(DataRefused, match="rank 1 asked for expert 6 for its token 3"):
                each.check()


def test_a_first_backward_pass_inside_a_capture_is_refused() -> None:
    with Emulator(1) as emulator:
        (space,) = workspaces(emulator, SPEC, stamped=False)
        made = backend("fused", space, SPEC)
        with (
            mock.patch("raymoe.exchange.fused.capturing", return_value=True),
            pytest.raises(CaptureError, match="first backward pass of an exchange inside a capture"),
        ):
            made._prepared_carrier()
        carrier = made._prepared_carrier()
        with mock.patch("raymoe.exchange.fused.capturing", return_value=True):
            assert made._prepared_carrier() is carrier


def test_rows_too_short_for_the_numbers_are_refused() -> None:
    spec = replace(SPEC, hidden=8)
    with Emulator(1) as emulator:
        (space,) = workspaces(emulator, spec, stamped=False)
        with pytest.raises(ConfigError, match="gradients of 3 weights a token in rows of 8"):
            backend("fused", space, spec)._prepared_carrier()
