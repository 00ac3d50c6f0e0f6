"""Derivatives by torch.func are refused with a sentence: jvp gave zero tangents without an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import raymoe
from raymoe import Exchange, ExchangeSpec
from raymoe.errors import ConfigError
from raymoe.moe import combine, dispatch, layer_norm, rms_norm, swiglu
from tests.unit.worlds import wired

Function = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.ones(16)
FUNCTIONS: dict[str, Function] = {
    "rms_norm": lambda x: rms_norm(x, WEIGHT),
    "layer_norm": lambda x: layer_norm(x, WEIGHT, WEIGHT),
    "swiglu": swiglu,
    "pointwise": lambda x: raymoe.pointwise("silu(a) * a", a=x),
}
TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], object]] = {
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "grad": lambda function, x: torch.func.grad(lambda leaf: function(leaf).sum())(x),
    "vjp": lambda function, x: torch.func.vjp(function, x),
    "jvp in vmap": lambda function, x: torch.func.vmap(lambda row: torch.func.jvp(function, (row,), (row,)))(x[None]),
}
SAID = r"inside torch\.func\.grad, vjp or jvp, for which it has no rule; call torch\.autograd\.grad or backward"


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_by_transforms_are_refused(function: str, transform: str) -> None:
    with pytest.raises(ConfigError, match=SAID):
        TRANSFORMS[transform](FUNCTIONS[function], torch.randn(4, 16))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_an_exchange_are_refused(transform: str) -> None:
    (world,) = wired(1)
    spec = ExchangeSpec(tokens=4, hidden=16, experts=2, topk=1, dtype="float32", depth=0)
    ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    with world, Exchange(world, spec) as exchange:

        def function(x: torch.Tensor) -> torch.Tensor:
            got = dispatch(exchange, x, ids, weights)
            return combine(exchange, got.x, got)

        with pytest.raises(ConfigError, match=SAID):
            TRANSFORMS[transform](function, torch.randn(4, 16))


def test_a_compiled_jvp_is_refused() -> None:
    def tangent(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(FUNCTIONS["rms_norm"], (x,), (x,))[1]

    with pytest.raises(Exception, match=SAID):
        torch.compile(tangent, backend="aot_eager")(torch.randn(4, 16))


def test_norms_of_a_batch_can_be_mapped() -> None:
    x = torch.randn(3, 4, 16)
    torch.testing.assert_close(torch.func.vmap(FUNCTIONS["rms_norm"])(x), FUNCTIONS["rms_norm"](x))
