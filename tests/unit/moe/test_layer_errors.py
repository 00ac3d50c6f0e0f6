"""Errors of layers that name the mistake of a training program, and the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymoe.errors import DataRefused, PeerTimeout
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import LayerForm, MoELayer
from tests.unit.exchange.exchange_judge import advice
from tests.unit.ranks import RankPool
from tests.unit.worlds import each, wired

SPEC = ExchangeSpec(tokens=16, hidden=32, experts=4, topk=2, dtype="float32", depth=0)
FORM = LayerForm(ffn=16)


# A layer that one rank does not call.


def timeout_of(world: World, where: str) -> str:
    """Leave out the second layer, or its backward pass, on rank 1; return what rank 0 raises."""
    layers = [MoELayer(world, SPEC, FORM) for _ in range(2)]
    x = torch.ones(5, 32, requires_grad=True)
    run = torch.compile(layers[1], backend="aot_eager", fullgraph=True) if where == "compiled" else layers[1]
    with torch.set_grad_enabled(where != "no gradients"):
        y = layers[0](x)
        y = run(y) if where == "backward" or world.rank == 0 else y
        if where == "backward" and world.rank == 0:
            y.sum().backward()
    return ""


@pytest.mark.parametrize("where", ["forward", "no gradients", "backward", "compiled"])
def test_a_timeout_asks_whether_all_ranks_called_the_layer(where: str) -> None:
    worlds = wired(2, timeout_s=0.5)
    error, _ = each(worlds, lambda world: timeout_of(world, where))
    for world in worlds:
        world.close(together=False)
    assert isinstance(error, PeerTimeout) and error.peer == 1
    asked = "did all ranks call this layer, number 2, and those before it, in the backward pass too?"
    assert str(error).endswith(f": {asked}") and str(error).count(asked) == 1


# More rows than the capacity.


def grown(world: World) -> tuple[str, bool]:
    """Refuse a step, then take an exchange with more capacity; return the error, and whether the step then is right."""
    layer, roomy = (MoELayer(world, replace(SPEC, capacity=rows), FORM, seed=1) for rows in (16, "worst"))
    x = torch.ones(16, 32)
    try:
        layer(x)
    except DataRefused as error:
        rows, message = error.rows_needed, str(error)
    layer.exchange = world.exchange(replace(layer.exchange.spec, capacity=rows))
    return message, torch.equal(layer(x), roomy(x))


def test_a_refusal_names_the_capacity_that_a_layer_then_takes(pool: RankPool) -> None:
    """All tokens choose the same two experts, which are on one rank."""
    for message, right in pool.run(2, grown):
        assert message.endswith(f"its capacity is 16: {advice(64)}") and right
