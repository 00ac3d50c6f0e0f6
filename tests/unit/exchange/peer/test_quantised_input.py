"""Rows that are already quantised cross unchanged, values and scales, in every kernel that carries them (emulated)."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.arguments import Arguments
from raymoe.exchange.backend import Tokens
from raymoe.exchange.spec import ExchangeSpec
from tests.emulator.build import compiler
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, workspaces
from tests.unit.exchange import plan

RANKS = 2
FP8 = torch.float8_e4m3fn
compiled = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles the kernels for the CPU")


def pair(spec: ExchangeSpec, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    values = torch.randn(spec.tokens, spec.hidden, generator=source).to(FP8)
    return values, torch.rand(spec.tokens, spec.scales, generator=source) + 0.5


@compiled
@pytest.mark.parametrize("kind", ["fused", "ll"])
@pytest.mark.parametrize("output", ["raw", "dequantised"])
@pytest.mark.parametrize("hidden", [16, 384, 2064])
def test_values_and_scales_arrive_unchanged(kind, output, hidden):
    spec = ExchangeSpec(
        tokens=9, hidden=hidden, experts=6, topk=2, dtype="float32", wire="float8_e4m3", output=output, alignment=4
    )
    given = [pair(spec, rank) for rank in range(RANKS)]
    ids = [torch.randint(-1, spec.experts, (spec.tokens, spec.topk)) for _ in range(RANKS)]
    with Emulator(RANKS) as emulator:
        backends = [backend(kind, space, spec) for space in workspaces(emulator, spec, stamped=False)]
        got = []
        for rank, each in enumerate(backends):
            values, scales = given[rank]
            tokens = Tokens(values, ids[rank], torch.ones(spec.tokens, spec.topk), None, scales)
            dtype = getattr(torch, spec.output_dtype)
            got.append(each.dispatch(tokens, each.new((spec.rows(RANKS), hidden), dtype, "out")))
        emulator.run(seed=hidden)
        for rank, each in enumerate(backends):
            each.check()
            entries = plan.plan(ids, rank, spec.local_experts(RANKS), spec.alignment).entries
            assert any(entries)
            for place, entry in enumerate(entries):
                if entry is None:
                    continue
                source, token, _ = entry
                values, scales = given[source][0][token], given[source][1][token]
                found = got[rank]
                if output == "raw":
                    assert found.scales is not None
                    assert torch.equal(found.x[place].view(torch.uint8), values.view(torch.uint8))
                    assert torch.equal(found.scales[place], scales)
                else:
                    assert torch.equal(found.x[place], values.float() * scales.repeat_interleave(128)[:hidden])


def arguments(**changed: object) -> Arguments:
    spec = {"tokens": 4, "hidden": 32, "experts": 4, "topk": 1, "wire": "float8_e4m3", **changed}
    return Arguments(ExchangeSpec(**spec), RANKS, torch.device("cpu"))


def dispatch(of: Arguments, x: object) -> Tokens:
    return of.dispatch(x, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), None)


def test_values_and_scales_must_match_the_spec():
    values, scales = torch.zeros(4, 32, dtype=FP8), torch.ones(4, 1)
    found = dispatch(arguments(), (values, scales))
    assert (found.x.dtype, found.scales is scales or torch.equal(found.scales, scales)) == (FP8, True)
    assert dispatch(arguments(), torch.zeros(4, 32, dtype=torch.bfloat16)).scales is None
    for x, said in (
        ((values,), "a tuple of 1"),
        ((values.float(), scales), "x is torch.float32"),
        ((values, scales.double()), "scales is torch.float64"),
        ((values, torch.ones(4, 2)), r"scales has shape \[4, 2\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            dispatch(arguments(), x)
    with pytest.raises(ConfigError, match="rows cross as bfloat16"):
        dispatch(arguments(wire=None), (values, scales))
    with pytest.raises(ConfigError, match="pieces of 16"):
        dispatch(arguments(hidden=24), (values[:, :24].contiguous(), scales))
