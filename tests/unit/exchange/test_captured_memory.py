"""Which tensors of a captured call live on: those of an exchange's own calls, and none of the operators of raymoe.moe.

A graph of torch has a memory pool. `torch.compile(mode="reduce-overhead")` raises where anything but the graph's
results keeps memory of the pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch
from raymoe.moe.layer import LayerForm, MoELayer
from tests.unit.worlds import wired

SPEC = ExchangeSpec(tokens=4, hidden=8, experts=2, topk=2, dtype="float32", depth=0)
IDS, WEIGHTS = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)


@pytest.fixture
def world() -> Iterator[World]:
    (alone,) = wired(1)
    with alone:
        yield alone


@contextmanager
def captured(exchange: Exchange) -> Iterator[None]:
    """Let the exchange find its stream captured."""
    with (
        mock.patch.object(exchange._backend, "capturable", True),
        mock.patch("raymoe.exchange.exchange.capturing", return_value=True),
    ):
        yield


def through_operators(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    got = dispatch(exchange, x, IDS, WEIGHTS)
    return combine(exchange, torch.tanh(got.x), got)


def as_a_layer_does(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(SPEC.rows(1), SPEC.hidden)
    got = exchange.dispatch_unkept(Tokens(x, IDS, WEIGHTS, None), out)
    return exchange.combine_unkept(torch.tanh(got.x), got, weighted=True)


@pytest.mark.parametrize("call", [through_operators, as_a_layer_does])
@pytest.mark.parametrize("grad", [False, True])
def test_captured_operators_keep_nothing(
    world: World, call: Callable[[Exchange, torch.Tensor], torch.Tensor], grad: bool
) -> None:
    with Exchange(world, SPEC) as exchange, torch.set_grad_enabled(grad), captured(exchange):
        leaf = torch.ones(4, 8, requires_grad=grad)
        x = 2 * leaf
        y = call(exchange, x)
        if grad and y.requires_grad:
            y.sum().backward()
            assert leaf.grad is not None
        memory = [weakref.ref(tensor) for tensor in (x, y)]
        del x, y
        assert exchange._captured_memory == []
        assert [tensor() for tensor in memory] == [None, None]


@pytest.mark.parametrize("grad", [False, True])
def test_a_captured_layer_keeps_nothing(world: World, grad: bool) -> None:
    layer = MoELayer(world, SPEC, LayerForm(ffn=4))
    with torch.set_grad_enabled(grad), captured(layer.exchange):
        y = layer(torch.ones(4, 8, requires_grad=grad))
        if grad:
            y.sum().backward()
        assert layer.exchange._captured_memory == []


def test_captured_calls_of_an_exchange_keep_their_tensors_until_it_is_closed(world: World) -> None:
    """A capture that torch does not know of has no memory pool."""
    with Exchange(world, SPEC) as exchange:
        x, out = torch.ones(4, 8), torch.zeros(SPEC.rows(1), SPEC.hidden)
        with captured(exchange):
            got = exchange.dispatch(x, IDS, WEIGHTS, out=out)
            y = exchange.combine(got.x, got)
        memory = [weakref.ref(argument) for argument in (x, out, got, y)]
        del x, out, got, y
        assert all(argument() is not None for argument in memory)
        del exchange._captured_memory[:]
        assert [argument() for argument in memory] == [None] * 4
