"""The experts of one rank: two products over the rows of each expert, with an activation between them.

The rows of all experts are in one tensor, expert by expert. On GPUs the operators of product_operators.py multiply them
by offsets that stay on the device, the activation and the biases included. On CPUs torch multiplies one expert's rows
after the other's, and reads no other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.activation import GPT_OSS as GPT_OSS
from raymoe.moe.activation import SWIGLU as SWIGLU
from raymoe.moe.activation import Activation as Activation
from raymoe.moe.activation import in_kernels as _in_kernels
from raymoe.moe.expert_rows import Groups, add_expert_bias
from raymoe.moe.kept_rows import RowSources
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts
from raymoe.moe.recomputed_product import Gated, activate, multiply_gated
from raymoe.moe.taken_over import OwnOfRank
from raymoe.moe.torch_products import multiply_by_torch


@dataclass
class ModelWeights:
    """The weights of some experts as a model has them; `transposed`: [E, H, 2F] and [E, F, H], inputs first."""

    gate_up_proj: torch.Tensor  # [E, 2F, H]
    down_proj: torch.Tensor  # [E, H, F]
    gate_up_proj_bias: torch.Tensor | None = None  # [E, 2F]
    down_proj_bias: torch.Tensor | None = None  # [E, H]
    transposed: bool = False


class ExpertsOfRank(OwnOfRank):
    """The experts of one rank, with weights of any format. Dimension 0 of each parameter is that of the experts."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None
    activation: Activation
    saved_by_rank = False
    """Whether the program saves each rank's experts in a file of its own. Then `state_dict` gives them as plain tensors
    also where torch.distributed.checkpoint would take them for replicas."""
    numbers: Sequence[int] = ()
    """The numbers of its experts among those of all ranks, of `of` in all. A layer sets them."""
    of = 0
    epoch = 0
    """How many loads there were (`MoELayer.load`)."""
    recomputes = False
    """Whether the backward pass computes the rows between the products again from the first product."""
    by_row = False
    """Whether the bits of a result depend on its row and its expert alone (docs/reproducibility.md)."""

    def put(self, place: int, weights: ModelWeights | None) -> None:
        """Give a place the weights of one expert, `[1, ...]`; None puts zeros there."""
        raise NotImplementedError(f"{type(self).__name__} has no put")


class Experts(ExpertsOfRank):
    """The experts of one rank, with the parameters' names and layout of the model that they come from."""

    casts = False
    """Whether the weights are wider than the rows, and are cast to their dtype in each forward pass."""

    def __init__(self, weights: ModelWeights, activation: Activation = SWIGLU) -> None:
        super().__init__()
        self.activation, self.transposed = activation, weights.transposed
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            value = getattr(weights, name)
            ready = value is None or isinstance(value, nn.Parameter)
            self.register_parameter(name, value if ready else nn.Parameter(value))

    def forward(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        weights: torch.Tensor | None = None,
        sources: RowSources | None = None,
    ) -> torch.Tensor:
        """Map x[C, H] to rows[C, H]. Local expert i has `counts[i]` rows from `offsets[i]` on; others are unspecified.

        With `weights`, float32[C], each result is multiplied by its weight. That is done between the products, where
        rows are F wide.
        Where gradients are needed, x, the weights and the gradients of results are zero in gaps. With `sources`, the
        dispatch that brought x, no row of x is kept for them: a backward pass copies it from its token's.
        """
        capacity = len(x)
        if not _in_kernels(x) and not torch.compiler.is_compiling():
            there = int(offsets[-1])  # the host may read it there, and elementwise operations skip the other rows
            x, weights = x[:there], None if weights is None else weights[:there]
        y = self._compute(x, Groups(offsets, counts), weights, sources).to(x.dtype)
        if len(y) == capacity:
            return y
        if y.requires_grad:
            return nn.functional.pad(y, (0, 0, 0, capacity - len(y)))
        rows = y.new_empty(capacity, y.shape[1])
        rows[: len(y)] = y
        return rows

    def put(self, place: int, weights: ModelWeights | None) -> None:
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            part = local(getattr(self, name))
            if part is None:
                continue
            if weights is None:
                part[place].zero_()
            else:
                part[place] = getattr(weights, name)[0]

    def _compute(
        self, x: torch.Tensor, groups: Groups, weights: torch.Tensor | None, sources: RowSources | None
    ) -> torch.Tensor:
        gate_up_proj, down_proj = self._outputs_first(self.gate_up_proj), self._outputs_first(self.down_proj)
        if self.casts:  # biases are added in float32 as they are
            gate_up_proj, down_proj = gate_up_proj.to(x.dtype), down_proj.to(x.dtype)
        gate_up_bias, bias = local(self.gate_up_proj_bias), local(self.down_proj_bias)
        recomputes, of_gate = self.recomputes and torch.is_grad_enabled(), (weights, gate_up_bias is not None)
        needed = torch.is_grad_enabled() and self.gate_up_proj.requires_grad
        # By torch on a GPU the host would wait for the number of rows.
        keeps = sources if needed and (_in_kernels(x) or x.device.type == "cpu") else None
        kept = None if keeps is None else keeps.keep(x, groups)
        if _in_kernels(x):
            gated = Added(gate_up_bias, weights, self.by_row, gaps_are_zero=True, kept=kept)
            h, gate_up = gate_experts(x, gate_up_proj, groups, gated, self.activation.form)
            last_bias = bias if weights is None else None
            added = Added(last_bias, None, self.by_row, zero_gaps=False, gaps_are_zero=True)
            if recomputes and h.requires_grad:
                y = multiply_gated(Gated(h, gate_up, self.activation, *of_gate), down_proj, groups, added)
            else:
                y = multiply_experts(h, down_proj, groups, added)
            return y if bias is None or weights is None else add_expert_bias(y, bias, groups, weights)
        if kept is None:
            gate_up = multiply_by_torch(x, gate_up_proj, groups, self.by_row)
        else:
            gate_up = multiply_experts(
                x, gate_up_proj, groups, Added(by_row=self.by_row, gaps_are_zero=True, kept=kept)
            )
        gate_up = gate_up if gate_up_bias is None else add_expert_bias(gate_up, gate_up_bias, groups)
        if recomputes:
            h = activate(self.activation, gate_up, groups.offsets, weights, self.by_row)
            rows = Gated(h, gate_up, self.activation, *of_gate, by_torch=True)
            y = multiply_gated(rows, down_proj, groups, Added(by_row=self.by_row))
        else:
            h = self.activation(gate_up, groups.offsets, weights, by_row=self.by_row)
            y = multiply_by_torch(h, down_proj, groups, self.by_row)
        return y if bias is None else add_expert_bias(y, bias, groups, weights)

    def _outputs_first(self, parameter: nn.Parameter) -> torch.Tensor:
        weight = local(parameter)
        assert weight is not None
        return weight.transpose(1, 2) if self.transposed else weight


def local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a parameter, with gradients."""
    if parameter is None or not hasattr(type(parameter), "to_local"):  # torch.compile hides methods of the DTensor
        return parameter
    sharded: Any = parameter
    part: torch.Tensor = sharded.to_local()
    return part


# Checkpoints. Each rank holds experts of its own, and a checkpoint must hold those of all. torch.distributed.checkpoint
# takes plain tensors of one name for replicas, and saves those of one rank. So the weights are shards of DTensors where
# the world has a process group; elsewhere `state_dict` raises.


def shard(experts: ExpertsOfRank, world: World) -> None:
    """Make the experts' parameters shards of DTensors over the world's process group.

    Without a group they stay plain, and `state_dict` refuses where they would be saved as replicas.
    """
    experts.spread = world.size > 1
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
        part = local(parameter.detach())
        assert part is not None
        sharded: Any = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _are_shards(experts: nn.Module) -> bool:
    return any(hasattr(parameter, "to_local") for parameter in experts.parameters())


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
