"""The gradients of a model with layers: averaged over the ranks, measured and clipped, each expert counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.copies import first_slots
from raymoe.moe.data_ranks import DataRanks
from raymoe.moe.experts import local
from raymoe.moe.layer import MoELayer, layers_of


@torch.no_grad()
def average_expert_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Turn the experts' gradients into means over the ranks, as DDP and FSDP do with all others. All ranks call it.

    Call it once a step, after the backward pass of its last micro-batch. `group` has all ranks that train these layers,
    by default those of torch's default process group. Where they are several worlds, with a copy of the experts each,
    the copies' gradients are added. The first such call makes a process group, so it cannot be captured in a graph.
    Nothing waits for the device.

    >>> from raymoe import ExchangeSpec
    >>> from raymoe.moe import LayerForm
    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     layer = MoELayer(world, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), LayerForm(ffn=16))
    ...     layer(torch.ones(3, 8, dtype=torch.bfloat16)).float().sum().backward()
    ...     average_expert_gradients(layer)
    ...     float(clip_grad_norm(layer, max_norm=1.0)) > 1.0, round(float(clip_grad_norm(layer, max_norm=1.0)), 2)
    (True, 1.0)
    """
    for world, layers in by_world(layers_of(model).values()).items():
        ranks = DataRanks.of(world, group)
        gradients = [
            gradient
            for layer in layers
            for parameter in layer.experts.parameters()
            if (gradient := local(parameter.grad)) is not None
        ]
        if not gradients or ranks.size == 1:
            continue
        torch._foreach_div_(gradients, ranks.size)  # before the sum, which so stays in the range of float16
        if (replicas := ranks.replicas()) is not None:
            works: list[Any] = [dist.all_reduce(gradient, group=replicas, async_op=True) for gradient in gradients]
            for work in works:
                work.wait()


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before. All ranks call it.

    The norm is that of the whole model in float32, the same on all ranks, and counts each expert once. Call this after
    all gradients were averaged over the ranks: those of experts by `average_expert_gradients`, the others by DDP, FSDP2
    or the program. Where experts have copies, call `add_copy_gradients` before. Nothing waits for the device, except
    where experts are plain tensors of several ranks.
    """
    layers = {each: layer for layer in layers_of(model).values() for each in layer.experts.parameters()}
    lists: dict[_Shards, list[torch.Tensor]] = {}
    scaled = []
    for parameter in model.parameters():
        if (gradient := local(parameter.grad)) is not None:
            layer = layers.get(parameter)
            counted = lists.setdefault(_shards(parameter, None if layer is None else layer.world), [])
            scaled.append(gradient)
            if layer is None or layer.exchange.spec.slots is None:
                counted.append(gradient)
            else:  # an expert may have several copies, whose gradients are equal
                counted += [gradient[:0], *(gradient[slot] for slot in first_slots(layer))]
    norms = [_over(shards, _norm(gradients, norm_type), norm_type) for shards, gradients in lists.items()]
    if not norms:
        return torch.zeros(())
    total = _norm(norms, norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for alike in _alike(scaled):
        torch._foreach_mul_(alike, factor.to(alike[0].device, non_blocking=True))
    return total


def by_world(layers: Iterable[MoELayer]) -> dict[World, list[MoELayer]]:
    """Return the layers of each world, in their order."""
    worlds: dict[World, list[MoELayer]] = {}
    for layer in layers:
        worlds.setdefault(layer.world, []).append(layer)
    return worlds


@dataclass(frozen=True)
class _Shards:
    """The ranks that hold the other parts of a gradient: those of some process groups, or of a world."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    world: World | None = None


def _shards(parameter: nn.Parameter, world: World | None) -> _Shards:
    """Return the shards of a parameter's gradient. `world` is that of the layer if it belongs to experts."""
    if world is not None:
        # Not the group of the DTensor's mesh: torch caches meshes of groups that were destroyed.
        group = world.process_group if world.size > 1 else None
        return _Shards(() if group is None else (group,), world if group is None and world.size > 1 else None)
    gradient: Any = parameter.grad
    if not hasattr(gradient, "to_local"):
        return _Shards()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ConfigError(
            f"a gradient of shape {list(gradient.shape)} has the placements {gradient.placements}, and was not added "
            "over the ranks yet; clip_grad_norm takes gradients that were"
        )
    spread = enumerate(gradient.placements)
    mesh = gradient.device_mesh
    return _Shards(tuple(mesh.get_group(dim) for dim, placement in spread if not placement.is_replicate()))


def _norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all numbers in some tensors, at least in float32."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norms = [
        norm.to(tensors[0].device, non_blocking=True)
        for alike in _alike(tensor for tensor in tensors if tensor.numel())
        for norm in torch._foreach_norm(alike, norm_type, dtype=wide)
    ]
    if not norms:
        return torch.zeros((), dtype=wide, device=tensors[0].device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _over(shards: _Shards, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of a gradient from the norms of its shards."""
    if shards.world is not None:
        parts = shards.world.swap(float(norm), "a norm over the ranks of a layer")
        return _norm([torch.tensor(parts, dtype=norm.dtype, device=norm.device)], norm_type)
    for group in shards.groups:
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=group)
            norm = norm ** (1.0 / norm_type)
    return norm


def _alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return lists of tensors of one device and dtype, which one kernel takes."""
    lists: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())
