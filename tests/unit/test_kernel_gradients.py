"""Gradients of weights on GPU ranks, on emulated kernels: numbers of entries travel home in rows of any dtype."""

from __future__ import annotations

import pytest
import torch

from raymoe.exchange.backend import Ids, Tokens
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.weight_bytes import byte_spec, gather_bytes, spread_bytes
from tests.emulator.build import compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, workspaces

RANKS = 2
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: it compiles kernels for the CPU")


@pytest.mark.parametrize("kind", ["fused", "ll", "staged"])
@pytest.mark.parametrize(("dtype", "small"), [("bfloat16", False), ("bfloat16", True), ("float32", True)])
def test_weights_of_a_dispatch_return_to_their_entries(kind: str, dtype: str, small: bool) -> None:
    spec = ExchangeSpec(tokens=7, hidden=64, experts=6, topk=3, dtype=dtype, alignment=4)
    source = torch.Generator().manual_seed(4)
    sent = []
    for tokens in (7, 4):
        ids = torch.randint(-1, spec.experts, (tokens, spec.topk), generator=source)
        sent.append((ids, torch.randn(tokens, spec.topk, generator=source)))
    with Emulator(RANKS) as emulator:
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec, stamped=False)]
        given, got, home = [], [], []
        for each, (ids, weights) in zip(backends, sent, strict=True):
            x = torch.ones(len(ids), spec.hidden, dtype=getattr(torch, dtype))
            given.append(Tokens(x, ids, weights, None))
            got.append(each.dispatch(given[-1], each.new((spec.rows(RANKS), spec.hidden), x.dtype, "out")))
        emulator.run(seed=1)
        for each, tokens, found in zip(backends, given, got, strict=True):
            metadata = each.pack(found)
            assert metadata.dtype == torch.int32 and metadata.numel() == each.metadata_words
            again = each.unpack(metadata, found.x, found.weights, Ids(tokens.topk_idx))
            assert again.expert_offsets.tolist() == found.expert_offsets.tolist()
            of_bytes = backend("fused", each.workspace, byte_spec(spec)) if small else each
            width = of_bytes.spec.hidden
            rows = each.new((spec.rows(RANKS), width), found.x.dtype, "expert rows")
            rows.copy_(spread_bytes(found.weights, each._k_of_row(again), spec.topk, rows))
            home.append(each.new((len(tokens.x), width), found.x.dtype, "y"))
            of_bytes.combine(rows, again, False, home[-1])
        emulator.run(seed=2)
        for each, (ids, weights), carried in zip(backends, sent, home, strict=True):
            each.check()
            found = torch.empty_like(weights)
            gather_bytes(carried, found)
            assert torch.equal(found, torch.where(ids >= 0, weights, 0.0))
