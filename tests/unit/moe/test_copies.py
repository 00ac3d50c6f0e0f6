"""Layers over slots: copies of experts train as the experts themselves do, and weights follow a placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import (
    LayerForm,
    MoELayer,
    RouterForm,
    add_copy_gradients,
    clip_grad_norm,
    copies,
    move_slots,
    plan_placement,
    routing_stats,
    update_router_bias,
)
from raymoe.moe.experts import local
from raymoe.moe.layer_form import empty_parts
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool
from tests.unit.worlds import wired

__all__ = ["groups"]  # a fixture
H, TOKENS, EXPERTS, STEPS = 8, 12, 5, 4
SPEC = ExchangeSpec(tokens=TOKENS, hidden=H, experts=EXPERTS, topk=2, dtype="float32", depth=0, slots=4)
FORM = LayerForm(ffn=8, router=RouterForm(EXPERTS, 2, score="sigmoid"), norm=1e-6, residual=True, biases=True)
LOADS = torch.tensor([60, 1, 2, 3, 40]), torch.tensor([1, 50, 2, 60, 30])
"""The second is placed in the middle of the training."""


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(10 * step + rank))


def train(world: World, spec: ExchangeSpec, batches: list[list[torch.Tensor]]) -> list[float]:
    """Train two layers by Adam on this rank's batches; return the norm of the gradients and the loss of each step."""
    layers = nn.Sequential(*[MoELayer(world, spec, FORM, seed=seed) for seed in (0, 1)])
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.02)
    numbers = []
    for step, batch in enumerate(batches):
        if spec.slots is not None and step in (0, STEPS // 2):
            place(world, layers, optimizer, LOADS[step > 0])
        loss = sum((layers(x) - x.roll(1, 1)).square().sum() for x in batch)
        loss.backward()
        add_copy_gradients(layers)
        for parameter in (each for layer in layers for each in others(layer)):
            total = sum(torch.tensor(row) for row in world.swap(parameter.grad.tolist(), "gradients"))
            parameter.grad.copy_(total)
        numbers += [float(clip_grad_norm(layers, max_norm=1.0)), float(loss.detach())]
        optimizer.step()
        optimizer.zero_grad()
        update_router_bias(layers, speed=0.01)
    return numbers


def others(layer: MoELayer) -> list[nn.Parameter]:
    """Return the parameters that every rank has."""
    experts = {id(parameter) for parameter in layer.experts.parameters()}
    return [parameter for parameter in layer.parameters() if id(parameter) not in experts]


def place(world: World, layers: nn.Sequential, optimizer: torch.optim.Optimizer, load: torch.Tensor) -> None:
    placement = plan_placement(load, ranks=world.size, slots=SPEC.slots)
    for layer in layers:
        before = layer.exchange.placement(layer.number)
        layer.place(placement)
        for parameter in layer.experts.parameters():
            for state in optimizer.state[parameter].values():
                if state.dim():
                    move_slots(world, state, before, placement.experts)


def reference(ranks: int) -> list[float]:
    """Train on one rank, without slots, on the tokens of all ranks."""
    (world,) = wired(1)
    with world:
        batches = [[tokens_of(rank, step) for rank in range(ranks)] for step in range(STEPS)]
        return train(world, replace(SPEC, slots=None), batches)


def with_world_of(_rank: int, body: Callable[[World], Any]) -> Any:
    with World.of(timeout_s=30) as world:
        assert world.process_group is not None
        return body(world)


def judge(found: list[list[float]], want: list[float]) -> None:
    """Compare norms with those of the reference, and the ranks' losses, added, with its losses."""
    for numbers in found:
        torch.testing.assert_close(numbers[::2], want[::2], rtol=1e-4, atol=1e-6)
    losses = [sum(ranks) for ranks in zip(*(numbers[1::2] for numbers in found), strict=True)]
    torch.testing.assert_close(losses, want[1::2], rtol=1e-4, atol=1e-6)


def numbers_of(world: World) -> list[float]:
    return train(world, SPEC, [[tokens_of(world.rank, step)] for step in range(STEPS)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grouped", [False, True])
def test_training_with_copies_has_the_losses_of_training_without(pool: RankPool, groups: Any, grouped: bool) -> None:
    found = groups(2, with_world_of, numbers_of) if grouped else pool.run(2, numbers_of)
    judge(found, reference(2))


def with_bug(world: World, bug: str) -> list[float]:
    """Train without adding copies' gradients; or with the gradient of each expert's last copy lost."""
    if bug == "not added":
        changed = mock.patch(f"{__name__}.add_copy_gradients", lambda _: None)
    elif bug == "one lost":
        changed = mock.patch.object(copies, "_copies", lambda experts: but_last(whole_copies(experts)))
    elif bug == "counted twice":
        changed = mock.patch("raymoe.moe.training.first_slots", lambda layer: range(layer.exchange.spec.slots))
    else:  # weights stay where they were
        changed = mock.patch("raymoe.moe.layer.move_slots", lambda *_: None)
    with changed:
        return numbers_of(world)


whole_copies = copies._copies


def but_last(slots: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {expert: places[:-1] for expert, places in slots.items()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bug", ["one lost", "not added", "counted twice", "not moved"])
def test_lost_gradients_and_weights_of_copies_are_found(pool: RankPool, bug: str) -> None:
    with pytest.raises(AssertionError):
        judge(pool.run(2, with_bug, bug), reference(2))


def weights_of(world: World) -> dict[str, Any]:
    """Return what the slots hold at first, after a placement, and after the parameters are drawn again."""
    layer = MoELayer(world, SPEC, FORM, seed=3)
    held = [layer.exchange.placement(layer.number)]
    weights = [local(layer.experts.down_proj.detach()).clone()]
    layer.place(plan_placement(LOADS[0], ranks=world.size, slots=4))
    held.append(layer.exchange.placement(layer.number))
    weights.append(local(layer.experts.down_proj.detach()).clone())
    layer.reset_parameters()
    weights.append(local(layer.experts.down_proj.detach()).clone())
    layer.train()
    routed = layer(tokens_of(world.rank, 0), return_routing=True)[1].topk_idx
    stats = routing_stats(nn.Sequential(layer))["0"].load
    return {"held": held, "weights": weights, "ids": routed, "load": stats}


def test_weights_follow_a_placement_and_loads_are_by_expert(pool: RankPool) -> None:
    (world,) = wired(1)
    with world:
        whole = MoELayer(world, replace(SPEC, slots=None), FORM, seed=3).experts.down_proj.detach()
    found = pool.run(3, weights_of)
    for rank, result in enumerate(found):
        for held, weights in zip([*result["held"], result["held"][1]], result["weights"], strict=True):
            for slot, expert in enumerate(held[rank].tolist()):
                assert expert < 0 or torch.equal(weights[slot], whole[expert])
    ids = torch.cat([result["ids"].flatten() for result in found])
    assert all(result["load"] == ids.bincount(minlength=EXPERTS).tolist() for result in found)


def bits(world: World, dtype: str) -> tuple[bool, bool]:
    """Whether copies have the same gradients, bit for bit, and are the sum in float32 in the order of slots."""
    form = replace(FORM, router=None)
    layer = MoELayer(world, replace(SPEC, dtype=dtype), form, seed=3)
    layer.place(torch.tensor([[0, 1, 2, 0], [0, 3, 4, 1]]))
    layer(tokens_of(world.rank, 0).to(layer.experts.down_proj.dtype)).float().square().sum().backward()
    own = layer.experts.down_proj.grad.clone()
    every = [torch.tensor(rows) for rows in world.swap(own.float().tolist(), "gradients")]
    add_copy_gradients(layer)
    after = [torch.tensor(rows) for rows in world.swap(layer.experts.down_proj.grad.float().tolist(), "sums")]
    slots = {0: [(0, 0), (0, 3), (1, 0)], 1: [(0, 1), (1, 3)]}
    exact = True
    for places in slots.values():
        total = torch.zeros_like(every[0][0])
        for rank, slot in places:
            total = total + every[rank][slot]
        exact &= all(torch.equal(after[rank][slot], total.to(own.dtype).float()) for rank, slot in places)
    single = all(torch.equal(after[rank][slot], every[rank][slot]) for rank, slot in [(0, 2), (1, 1), (1, 2)])
    return exact, single


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_copies_are_in_float32_in_the_order_of_slots(pool: RankPool, dtype: str) -> None:
    assert pool.run(2, bits, dtype) == [(True, True)] * 2


def compiled_and_not(world: World) -> bool:
    """Whether a compiled layer, after another placement too, computes what one does that is not, with gradients."""
    layer = MoELayer(world, SPEC, FORM, seed=3)
    compiled = torch.compile(layer, backend="aot_eager")
    same = True
    for load in LOADS:
        layer.place(plan_placement(load, ranks=world.size, slots=4))
        x = tokens_of(world.rank, 0).requires_grad_()
        results = []
        for call in (layer, compiled):
            y = call(x)
            (gradient,) = torch.autograd.grad(y.square().sum(), x)
            with torch.no_grad():
                results.append((y.detach(), gradient, call(x)))
        same &= all(torch.allclose(plain, traced, atol=1e-5) for plain, traced in zip(*results, strict=True))
    return same


@pytest.mark.thorough
def test_compiled_layers_take_what_was_placed_last(pool: RankPool) -> None:
    assert pool.run(2, compiled_and_not) == [True, True]


def test_parts_of_a_block_get_no_slots() -> None:
    (world,) = wired(1)
    with world:
        parts = empty_parts(SPEC, FORM, 4, torch.device("cpu"))
        with pytest.raises(
            ConfigError, match="slots is 4 with the parts of a layer; only layers from a form have slots"
        ):
            MoELayer(world, SPEC, parts)
