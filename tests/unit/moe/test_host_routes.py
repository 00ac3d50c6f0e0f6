"""Routes at the routers of transformers: recorded, and replayed with weights that have gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raymoe.memory.world import World
from raymoe.moe import MoELayer, count_routes, record_routes, replay_routes
from tests.unit.moe.bits import assert_same_bits
from tests.unit.moe.gradient_cases import close
from tests.unit.moe.test_moe_blocks import FAMILIES, batch_of, block_of, run

TOKENS = 10


def gate_of(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_and_a_layer_compute_the_same_from_the_same_routes(family: str) -> None:
    """Four tokens were not recorded, and both route them live."""
    block, (x, dy) = block_of(family), batch_of(0, (2, 5))
    topk, experts = gate_of(block).top_k, gate_of(block).num_experts
    ids = torch.rand(1, TOKENS, experts, generator=torch.Generator().manual_seed(2)).topk(topk).indices.to(torch.int16)
    ids[0, [0, 3, 4, 9]] = -1
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        layer = MoELayer.from_block(block, world, tokens=16)
        outcomes = []
        for module in (block, layer):
            with replay_routes(module, ids), record_routes(module, tokens=16) as routes:
                outcomes.append((run(module, x.detach().requires_grad_(), dy), routes.ids().sort(-1).values))
        live = run(block, x.detach().requires_grad_(), dy)
    (theirs, their_ids), (ours, our_ids) = outcomes
    assert torch.equal(their_ids, our_ids) and not torch.equal(theirs["y"], live["y"])
    assert theirs.keys() == ours.keys()
    for name, wanted in theirs.items():
        close(name, ours[name], wanted.double(), 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_of_its_own_routes_has_the_same_bits(family: str) -> None:
    block, (x, dy) = block_of(family), batch_of(0, (2, 5))
    with record_routes(block, tokens=16) as routes, count_routes(block) as counted:
        wanted = run(block, x.detach().requires_grad_(), dy)
    assert int(counted.load().sum()) == TOKENS * gate_of(block).top_k
    with replay_routes(block, routes.ids()):
        found = run(block, x.detach().requires_grad_(), dy)
    for name, tensor in wanted.items():
        assert_same_bits(found[name], tensor)
