"""Experts in several slots: the sum of their gradients, and the slots that count each expert once."""

from __future__ import annotations

import torch
from torch import nn

from raymoe.memory.world import World
from raymoe.moe.experts import local
from raymoe.moe.layer import MoELayer, layers_of
from raymoe.moe.slot_parts import Slot, gather_slots


@torch.no_grad()
def add_copy_gradients(model: nn.Module) -> None:
    """Give all copies of an expert the sum of their gradients. All ranks call it, once a step.

    Call it after the backward pass of a step's last micro-batch and `average_expert_gradients`, before `clip_grad_norm`
    and the optimizer. The sum is in float32, in the order of ranks and slots, and is rounded once. So copies get the
    same bits and stay equal. Where several worlds train the layers, all place the same experts.
    Nothing waits for the device, except where no process group has the ranks of the layers' world.

    >>> from raymoe import ExchangeSpec, World
    >>> from raymoe.moe import LayerForm
    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     spec = ExchangeSpec(tokens=4, hidden=4, experts=2, topk=1, dtype="float32", slots=3)
    ...     layer = MoELayer(world, spec, LayerForm(ffn=8))
    ...     layer.place(torch.tensor([[0, 1, 0]]))
    ...     layer(torch.randn(4, 4)).sum().backward()
    ...     add_copy_gradients(layer)
    >>> torch.equal(layer.experts.down_proj.grad[0], layer.experts.down_proj.grad[2])
    True
    """
    for layer in layers_of(model).values():
        if layer.exchange.spec.slots is None:
            continue
        copies = _copies(layer.exchange.placement(layer.number))
        for parameter in layer.experts.parameters() if copies else ():
            if parameter.requires_grad:
                _add(layer.world, parameter, copies)


def _copies(experts: torch.Tensor) -> dict[int, list[Slot]]:
    """Return the slots of each expert that has several, in ascending order.

    >>> _copies(torch.tensor([[0, 1, -1], [1, 2, -1]]))
    {1: [(0, 1), (1, 0)]}
    """
    slots: dict[int, list[Slot]] = {}
    for rank, held in enumerate(experts.tolist()):
        for slot, expert in enumerate(held):
            if expert >= 0:
                slots.setdefault(expert, []).append((rank, slot))
    return {expert: places for expert, places in slots.items() if len(places) > 1}


def _add(world: World, parameter: nn.Parameter, copies: dict[int, list[Slot]]) -> None:
    if parameter.grad is None:  # other ranks may have one, and all take part
        parameter.grad = torch.zeros_like(parameter)
    gradient = local(parameter.grad)
    assert gradient is not None
    parts = gather_slots(world, gradient, [place for places in copies.values() for place in places])
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    for places in copies.values():
        own = [slot for rank, slot in places if rank == world.rank]
        if own:
            total = parts[places[0]].to(wide)
            for place in places[1:]:
                total = total + parts[place]
            for slot in own:
                gradient[slot] = total


def first_slots(layer: MoELayer) -> list[int]:
    """Return this rank's slots that hold the first copy of an expert: all ranks' together have each expert once."""
    seen: set[int] = {-1}
    slots = []
    for rank, held in enumerate(layer.exchange.placement(layer.number).tolist()):
        for slot, expert in enumerate(held):
            if expert not in seen and rank == layer.world.rank:
                slots.append(slot)
            seen.add(expert)
    return slots
