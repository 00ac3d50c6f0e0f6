"""The weights of experts in checkpoints. Each rank holds experts of its own, and a checkpoint must hold those of all.

torch.distributed.checkpoint takes plain tensors of one name for replicas, and saves those of one rank. So the weights
are shards of DTensors where the world has a process group; elsewhere `state_dict` raises.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.experts import Experts, local


def shard(experts: Experts, world: World) -> None:
    """Make the experts' parameters shards of DTensors over the world's process group.

    Without a group they stay plain, and `state_dict` refuses where they would be saved as replicas.
    """
    if _are_shards(experts):
        return
    if world.process_group is None:
        if world.size > 1:  # else each rank has all experts
            module: Any = experts  # torch has no types for it
            module.register_state_dict_pre_hook(_refuse_replicas)
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(world.process_group, world.device.type, mesh_dim_names=("ep",))
    for name, parameter in list(experts.named_parameters()):
        mine = local(parameter.detach())
        assert mine is not None
        sharded: Any = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _are_shards(experts: nn.Module) -> bool:
    return any(hasattr(each, "to_local") for each in experts.parameters())


def _refuse_replicas(experts: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001  (torch's signature)
    """Raise where a checkpoint of several ranks would hold the experts of one of them. `prefix` ends with a dot."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several or getattr(experts, "saved_by_rank", False) or _are_shards(experts):
        return
    raise ConfigError(
        f"the state_dict of {prefix.rstrip('.') or 'experts'} was asked for on rank {dist.get_rank()} of "
        f"{dist.get_world_size()}, and its weights are plain tensors, because no process group has the ranks of the "
        "layer's world: torch.distributed.checkpoint would take them for replicas and save those of one rank only. "
        "Make the world by World.of(process_group); or save each rank's state_dict to a file of its own, after "
        "layer.experts.saved_by_rank = True"
    )
