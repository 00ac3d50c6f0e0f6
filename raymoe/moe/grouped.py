"""Products of experts' rows, for a layer of one's own: `grouped_linear` and `grouped_swiglu`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts


class LinearOptions(TypedDict, total=False):
    """The options of `grouped_linear`."""

    bias: Tensor | None
    row_weights: Tensor | None
    expected_rows: float | None


class SwigluOptions(LinearOptions, total=False):
    """The options of `grouped_swiglu`, besides `return_gate_up`."""

    limit: float | None
    interleaved: bool


@dataclass(frozen=True)
class _Linear:
    bias: Tensor | None = None
    row_weights: Tensor | None = None
    expected_rows: float | None = None

    @property
    def added(self) -> Added:
        return Added(self.bias, self.row_weights, inf if self.expected_rows is None else self.expected_rows)


@dataclass(frozen=True)
class _Swiglu(_Linear):
    limit: float | None = None
    interleaved: bool = False


def grouped_linear(
    x: Tensor, weight: Tensor, expert_offsets: Tensor, expert_counts: Tensor, **options: Unpack[LinearOptions]
) -> Tensor:
    """Multiply each expert's rows of x[C, K] by its `weight[e]`, [N, K], to [C, N].

    Expert e has `expert_counts[e]` rows from `expert_offsets[e]` on, as a dispatch gives them. By name it takes:

    - `bias`, [L, N], which is added to the rows of its expert;
    - `row_weights`, float32[C]: each row is multiplied by its weight, after the bias, and rounded once;
    - `expected_rows`, the rows that an expert has on average. It chooses the kernel; a wrong guess costs time only.

    Rows of no expert are unspecified. Where gradients are needed, they are zero from an expert's count to the next
    multiple of 16, or to the next expert. On GPUs starts are then multiples of 8.

    >>> x, weight = torch.ones(3, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> grouped_linear(x, weight, torch.tensor([0, 1, 3]), torch.tensor([1, 2])).tolist()
    [[3.0], [7.0], [7.0]]
    """
    groups, given = Groups(expert_offsets, expert_counts), _Linear(**options)
    _check("grouped_linear", x, weight, groups, given)
    return multiply_experts(x, weight, groups, given.added)


@overload
def grouped_swiglu(
    x: Tensor,
    gate_up: Tensor,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    return_gate_up: Literal[False] = ...,
    **options: Unpack[SwigluOptions],
) -> Tensor: ...
@overload
def grouped_swiglu(
    x: Tensor,
    gate_up: Tensor,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    return_gate_up: Literal[True],
    **options: Unpack[SwigluOptions],
) -> tuple[Tensor, Tensor]: ...
def grouped_swiglu(
    x: Tensor,
    gate_up: Tensor,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    return_gate_up: bool = False,
    **options: Unpack[SwigluOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply as `grouped_linear` does by `gate_up[e]`, [2F, K], and return silu(gate) * up, [C, F].

    Besides the names of `grouped_linear` it takes:

    - `interleaved`: gate and up rows take turns in `gate_up` and in `bias`, [L, 2F]; else all gate rows come first;
    - `limit`, which bounds gate from above, and up on both sides;
    - `return_gate_up`: return the products with their biases too, [C, 2F], in the order of the weights. They have no
      gradient.

    >>> x, gate_up = torch.ones(1, 1), torch.tensor([[[1.0], [2.0]]])
    >>> grouped_swiglu(x, gate_up, torch.tensor([0, 1]), torch.tensor([1]))
    tensor([[1.4621]])
    """
    groups, given = Groups(expert_offsets, expert_counts), _Swiglu(**options)
    _check("grouped_swiglu", x, gate_up, groups, given)
    if gate_up.shape[1] % 2:
        raise ConfigError(f"grouped_swiglu: {gate_up.shape[1]} rows of gate_up; gate and up have as many each")
    limit = given.limit
    if limit is not None and not limit > 0:
        raise ConfigError(f"grouped_swiglu: limit is {limit!r}; a number above 0 is needed, or None")
    form = ActivationForm(given.interleaved, limit=inf if limit is None else float(limit))
    y, products = gate_experts(x, gate_up, groups, given.added, form, return_gate_up)
    return (y, products) if return_gate_up else y


def _check(name: str, x: Tensor, weight: Tensor, groups: Groups, given: _Linear) -> None:
    """Refuse tensors that do not belong together. Values are not read."""
    bias, row_weights, expected_rows = given.bias, given.row_weights, given.expected_rows
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ConfigError(
            f"{name}: x {list(x.shape)} by weights {list(weight.shape)}; [C, K] and [experts, outputs, K] are needed"
        )
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ConfigError(f"{name}: x of {x.dtype} by weights of {weight.dtype}; both have one floating dtype")
    experts, outputs, _ = weight.shape
    for what, places, size in (
        ("expert_offsets", groups.offsets, experts + 1),
        ("expert_counts", groups.counts, experts),
    ):
        if places.dtype not in (torch.int32, torch.int64) or tuple(places.shape) != (size,):
            raise ConfigError(
                f"{name}: {what} is {places.dtype} of shape {list(places.shape)}; int32 or int64 [{size}] is needed"
            )
    if bias is not None and tuple(bias.shape) != (experts, outputs):
        raise ConfigError(f"{name}: bias {list(bias.shape)}; [{experts}, {outputs}] is needed")
    if row_weights is not None and (row_weights.dtype != torch.float32 or tuple(row_weights.shape) != (x.shape[0],)):
        raise ConfigError(
            f"{name}: row_weights is {row_weights.dtype} {list(row_weights.shape)}; float32 [{x.shape[0]}] is needed"
        )
    if expected_rows is not None and not expected_rows >= 0:
        raise ConfigError(f"{name}: expected_rows is {expected_rows!r}; a number of rows is needed, or None")
    for what, tensor in (("weight", weight), ("expert_offsets", groups.offsets), ("expert_counts", groups.counts)):
        if tensor.device != x.device:
            raise ConfigError(f"{name}: {what} is on {tensor.device}; x is on {x.device}")
