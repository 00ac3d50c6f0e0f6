"""The experts of one rank: two products over the rows of each expert, with an activation between them.

The rows of all experts are in one tensor, expert by expert. On GPUs `torch.nn.functional.grouped_mm` multiplies them
by offsets that stay on the device; few rows without gradients go through few_rows.cu. On CPUs an operator of this file
multiplies one expert's rows after the other's, and reads no other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import raymoe.moe.few_rows as few_rows
from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups, add_expert_bias, gated_activation
from raymoe.rows.activation import swiglu


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype in which a CPU multiplies rows of `dtype`.

    Weights are rounded to `dtype` before, so the choice changes results by rounding only.

    Rates in GFLOP/s on one core of an AMD EPYC (torch 2.13, 256 x 1024 -> 1024, 2026-11-21): with AVX512_BF16 bfloat16
    219, float32 99, float16 21; with AVX2 only bfloat16 22, float32 the same.
    """
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


# Products.


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each expert's rows [C, N] by its `weight[e]`, [M, N], and add its `bias[e]`. Other rows are unspecified.

    >>> rows, weight = torch.ones(3, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> grouped_linear(rows, weight, Groups(torch.tensor([0, 1, 3]), torch.tensor([1, 2]))).tolist()
    [[3.0], [7.0], [7.0]]
    """
    if rows.device.type == "cpu":
        y: torch.Tensor = _ops.grouped_product(rows, weight, groups.offsets, groups.counts)
    else:
        y = multiply_by_offsets(rows, weight, groups.offsets)
    return y if bias is None else add_expert_bias(y, bias, groups)


_SCHEMAS = {
    "grouped_product": "(Tensor rows, Tensor weight, Tensor offsets, Tensor counts) -> Tensor",
    "grouped_outer": "(Tensor dy, Tensor rows, Tensor offsets, Tensor counts) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"raymoe::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::grouped_product", "cpu")
def _grouped_product(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Multiply on a CPU. The result has the dtype of the weights; rows of no expert are zero."""
    y = torch.empty(len(rows), weight.shape[1], dtype=weight.dtype)
    arithmetic, end = arithmetic_dtype(weight.dtype), 0
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        y[end:start].zero_()
        end = start + count
        if count:
            part = slice(start, end)
            with torch.autocast("cpu", enabled=False):  # the fake has the dtype of the weights
                y[part] = nn.functional.linear(rows[part].to(arithmetic), weight[expert].to(arithmetic))
    y[end:].zero_()
    return y


def _fake_grouped_product(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    del offsets, counts
    return weight.new_empty(rows.shape[0], weight.shape[1])


@torch.library.impl("raymoe::grouped_outer", "cpu")
def _grouped_outer(dy: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the weights: for each expert, its rows of `dy` transposed times its `rows`."""
    d_weight = torch.zeros(len(counts), dy.shape[1], rows.shape[1], dtype=dy.dtype)
    arithmetic = arithmetic_dtype(dy.dtype)
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        if count:
            part = slice(start, start + count)
            with torch.autocast("cpu", enabled=False):
                d_weight[expert] = dy[part].to(arithmetic).T @ rows[part].to(arithmetic)
    return d_weight


def _fake_grouped_outer(
    dy: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    del offsets
    return dy.new_empty(counts.shape[0], dy.shape[1], rows.shape[1])


def _save_for_product(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)
    del output


def _product_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weight, offsets, counts = ctx.saved_tensors
    needs_rows, needs_weight = ctx.needs_input_grad[:2]
    drows = _ops.grouped_product(dy, weight.transpose(1, 2), offsets, counts).to(rows.dtype) if needs_rows else None
    return drows, _ops.grouped_outer(dy, rows, offsets, counts) if needs_weight else None, None, None


torch.library.register_fake("raymoe::grouped_product", _fake_grouped_product)
torch.library.register_fake("raymoe::grouped_outer", _fake_grouped_outer)
torch.library.register_autograd("raymoe::grouped_product", _product_backward, setup_context=_save_for_product)


def multiply_by_offsets(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply on a GPU, by offsets that the host never reads.

    Gaps between experts are multiplied too. Where they are zero, they add nothing to the gradients of weights. Rows
    from the last offset on are not touched, and the result's are unspecified.
    """
    if rows.dtype != torch.bfloat16:
        raise ConfigError(
            f"experts over {rows.dtype} on a GPU; torch multiplies dtypes other than bfloat16 with a wait for the "
            "host: take bfloat16"
        )
    product: Any = torch.nn.functional.grouped_mm
    y: torch.Tensor = product(rows, weight.transpose(-2, -1), offs=offsets[1:])
    return y


# Activations.


@dataclass(frozen=True)
class Activation:
    """SwiGLU, silu(gate) * up, or the clamped variant of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1).

    `interleaved`: gate and up take turns in the columns; else all of gate comes first. `limit` clamps gate from above
    and up from both sides.

    >>> Activation()(torch.tensor([[1.0, 3.0]])).item() == float(torch.tensor(1.0).sigmoid() * 3)
    True
    """

    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_plus: float = 0.0

    def __call__(
        self,
        gate_up: torch.Tensor,
        expert_offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [C, 2F] to [C, F], times the `weights`, float32[C], of the rows.

        With SwiGLU on GPUs rows from the last of `expert_offsets` on are left out, and one kernel does it all.
        """
        if self == SWIGLU and _in_kernels(gate_up):
            return swiglu(gate_up, expert_offsets, weights)
        h = self._unweighted(gate_up)
        return h if weights is None else (h.float() * weights[:, None]).to(h.dtype)

    def of_experts(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, groups: Groups, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Map rows of experts, plus the bias of their expert, in the same way.

        On GPUs one kernel does it all, and leaves out rows from the last offset on, in the backward pass too.
        """
        plain = self == SWIGLU and bias is None  # torch.compile knows no != of dataclasses
        if _in_kernels(gate_up) and not plain:
            limit = inf if self.limit is None else self.limit
            form = ActivationForm(self.interleaved, self.alpha, limit, self.up_plus)
            return gated_activation(form, gate_up, bias, groups, weights)
        return self(gate_up if bias is None else add_expert_bias(gate_up, bias, groups), groups.offsets, weights)

    def _unweighted(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        gated = nn.functional.silu(gate) if self.alpha == 1.0 else gate * torch.sigmoid(gate * self.alpha)
        return gated * (up + self.up_plus if self.up_plus else up)


def _in_kernels(rows: torch.Tensor) -> bool:
    """Whether an activation is one operator. On a CPU torch's functions one after the other take less time.

    Backward of SwiGLU, 2048 rows of 2 x 2048 bfloat16 with weights, one core of an AMD EPYC: 16 ms, and 50 by its
    formula (2026-11-23).
    """
    return rows.device.type != "cpu"


SWIGLU = Activation()
GPT_OSS = Activation(interleaved=True, alpha=1.702, limit=7.0, up_plus=1.0)


@dataclass
class ModelWeights:
    """The weights of some experts as a model has them; `transposed`: [E, H, 2F] and [E, F, H], inputs first."""

    gate_up_proj: torch.Tensor  # [E, 2F, H]
    down_proj: torch.Tensor  # [E, H, F]
    gate_up_proj_bias: torch.Tensor | None = None  # [E, 2F]
    down_proj_bias: torch.Tensor | None = None  # [E, H]
    transposed: bool = False


FEW_ROWS = 16
"""Rows of an expert, on average, up to which few_rows.cu is faster than grouped_mm (docs/experiments/few_rows.md)."""


class Experts(nn.Module):
    """The experts of one rank, with the parameters' names and layout of the model that they come from."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None
    saved_by_rank = False
    """Whether the program saves each rank's experts in a file of its own. Then `state_dict` gives them as plain tensors
    also where torch.distributed.checkpoint would take them for replicas."""

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
        *,
        expected_rows: float = inf,
    ) -> torch.Tensor:
        """Map x[C, H] to rows[C, H]. Local expert i has `counts[i]` rows from `offsets[i]` on; others are unspecified.

        With `weights`, float32[C], each result is multiplied by its weight. That is done between the products, where
        rows are F wide. `expected_rows` is the caller's guess of an expert's rows, by which the kernel is chosen.
        """
        capacity = len(x)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            there = int(offsets[-1])  # the host may read it there, and elementwise operations skip the other rows
            x, weights = x[:there], None if weights is None else weights[:there]
        y = self._compute(x, Groups(offsets, counts), weights, expected_rows).to(x.dtype)
        if len(y) == capacity:
            return y
        if y.requires_grad:
            return nn.functional.pad(y, (0, 0, 0, capacity - len(y)))
        rows = y.new_empty(capacity, y.shape[1])
        rows[: len(y)] = y
        return rows

    def _compute(
        self, x: torch.Tensor, groups: Groups, weights: torch.Tensor | None, expected_rows: float
    ) -> torch.Tensor:
        gate_up_proj, down_proj = self._outputs_first(self.gate_up_proj), self._outputs_first(self.down_proj)
        if weights is None and self.streams_weights(x, expected_rows):
            places = groups.offsets, groups.counts
            h = few_rows.multiply_few_rows(x, gate_up_proj, *places, gated=True)
            return few_rows.multiply_few_rows(h, down_proj, *places, gated=False)
        gate_up = grouped_linear(x, gate_up_proj, groups)
        h = self.activation.of_experts(gate_up, local(self.gate_up_proj_bias), groups, weights)
        y = grouped_linear(h, down_proj, groups)
        bias = local(self.down_proj_bias)
        return y if bias is None else add_expert_bias(y, bias, groups, weights)

    def streams_weights(self, x: torch.Tensor, expected_rows: float) -> bool:
        """Whether kernels/moe/few_rows.cu computes a forward pass over rows like `x`, without weights.

        It has SwiGLU alone, no biases and no gradients.
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or expected_rows > FEW_ROWS:
            return False
        if self.activation != SWIGLU or self.gate_up_proj_bias is not None or self.down_proj_bias is not None:
            return False
        weights = self._outputs_first(self.gate_up_proj), self._outputs_first(self.down_proj)
        return few_rows.multiplies_few_rows(x, *weights)

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
