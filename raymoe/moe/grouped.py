"""Products of experts' rows, for a layer of one's own: `grouped_linear` and `grouped_swiglu`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups
from raymoe.moe.product_fp8_operators import Scaled, ScaledOperands, gate_scaled, multiply_scaled
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts


class LinearOptions(TypedDict, total=False):
    """The options of `grouped_linear`."""

    bias: Tensor | None
    row_weights: Tensor | None
    expected_rows: float | None
    main_grad: Tensor | None


class SwigluOptions(LinearOptions, total=False):
    """The options of `grouped_swiglu`, besides `return_gate_up`."""

    limit: float | None
    interleaved: bool


@dataclass(frozen=True)
class _Linear:
    bias: Tensor | None = None
    row_weights: Tensor | None = None
    expected_rows: float | None = None
    main_grad: Tensor | None = None

    @property
    def added(self) -> Added:
        return Added(self.bias, self.row_weights, main_grad=self.main_grad)


@dataclass(frozen=True)
class _Swiglu(_Linear):
    limit: float | None = None
    interleaved: bool = False


def grouped_linear(
    x: Tensor | Scaled,
    weight: Tensor | Scaled,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    **options: Unpack[LinearOptions],
) -> Tensor:
    """Multiply each expert's rows of x[C, K] by its `weight[e]`, [N, K], to [C, N].

    Expert e has `expert_counts[e]` rows from `expert_offsets[e]` on, as a dispatch gives them. By name it takes:

    - `bias`, [L, N], which is added to the rows of its expert;
    - `row_weights`, float32[C]: each row is multiplied by its weight, after the bias, and rounded once;
    - `expected_rows`, the rows that an expert has on average: a hint for kernels that would need one. None does today;
    - `main_grad`, float32[L, N, K]: a backward pass adds the weight's gradient to it, and the weight gets none. Several
      micro-batches add to one.

    Rows of no expert are unspecified. Where gradients are needed, they are zero from an expert's count to the next
    multiple of 16, or to the next expert, and so are those of the gradient of x. On GPUs other than Hopper, starts are
    then multiples of 8.

    x and weight may both be pairs of float8_e4m3fn values and float32 scales: `(values, scales)` of a dispatch with
    `output: raw`, scales [C, ceil(K / 128)], and of `quantise_experts`, scales [L, ceil(N / 128), ceil(K / 128)]. The
    result is bfloat16, and has no gradient.

    >>> x, weight = torch.ones(3, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> grouped_linear(x, weight, torch.tensor([0, 1, 3]), torch.tensor([1, 2])).tolist()
    [[3.0], [7.0], [7.0]]
    """
    groups, given = Groups(expert_offsets, expert_counts), _Linear(**options)
    if isinstance(x, tuple) or isinstance(weight, tuple):
        operands = ScaledOperands.of("grouped_linear", x, weight)
        _check("grouped_linear", operands.x, operands.weight, groups, given)
        return multiply_scaled(operands, groups, given.added)
    _refuse_values_alone("grouped_linear", x)
    _check("grouped_linear", x, weight, groups, given)
    return multiply_experts(x, weight, groups, given.added)


@overload
def grouped_swiglu(
    x: Tensor | Scaled,
    gate_up: Tensor | Scaled,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    return_gate_up: Literal[False] = ...,
    output: None = ...,
    **options: Unpack[SwigluOptions],
) -> Tensor: ...
@overload
def grouped_swiglu(
    x: Scaled,
    gate_up: Scaled,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    output: Literal["float8_e4m3"],
    **options: Unpack[SwigluOptions],
) -> Scaled: ...
@overload
def grouped_swiglu(
    x: Tensor,
    gate_up: Tensor,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    return_gate_up: Literal[True],
    output: None = ...,
    **options: Unpack[SwigluOptions],
) -> tuple[Tensor, Tensor]: ...
def grouped_swiglu(
    x: Tensor | Scaled,
    gate_up: Tensor | Scaled,
    expert_offsets: Tensor,
    expert_counts: Tensor,
    *,
    return_gate_up: bool = False,
    output: str | None = None,
    **options: Unpack[SwigluOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply as `grouped_linear` does by `gate_up[e]`, [2F, K], and return silu(gate) * up, [C, F].

    Besides the names of `grouped_linear` it takes:

    - `interleaved`: gate and up rows take turns in `gate_up` and in `bias`, [L, 2F]; else all gate rows come first;
    - `limit`, which bounds gate from above, and up on both sides;
    - `return_gate_up`: return the products with their biases too, [C, 2F], in the order of the weights. They have no
      gradient.
    - `output`: "float8_e4m3", where x and gate_up are pairs, for a pair: values [C, F] and scales [C, ceil(F / 128)],
      which the next product takes. Its kernel quantises them.

    >>> x, gate_up = torch.ones(1, 1), torch.tensor([[[1.0], [2.0]]])
    >>> grouped_swiglu(x, gate_up, torch.tensor([0, 1]), torch.tensor([1]))
    tensor([[1.4621]])
    """
    groups, given = Groups(expert_offsets, expert_counts), _Swiglu(**options)
    if isinstance(x, tuple) or isinstance(gate_up, tuple):
        operands = ScaledOperands.of("grouped_swiglu", x, gate_up)
        _check("grouped_swiglu", operands.x, operands.weight, groups, given)
        form = _swiglu_form(operands.weight, given)
        if output not in (None, FP8) or return_gate_up:
            asked = "return_gate_up" if return_gate_up else f"output={output!r}"
            raise ConfigError(f"grouped_swiglu: {asked} of 8-bit rows; their output is None (bfloat16) or {FP8!r}")
        y, scales = gate_scaled(operands, groups, given.added, form, output == FP8)
        return (y, scales) if output == FP8 else y
    _refuse_values_alone("grouped_swiglu", x)
    if output is not None:
        raise ConfigError(f"grouped_swiglu: output={output!r} of {x.dtype}; it needs x and gate_up as (values, scales)")
    _check("grouped_swiglu", x, gate_up, groups, given)
    y, products = gate_experts(x, gate_up, groups, given.added, _swiglu_form(gate_up, given), return_gate_up)
    return (y, products) if return_gate_up else y


def _swiglu_form(gate_up: Tensor, given: _Swiglu) -> ActivationForm:
    if gate_up.shape[1] % 2:
        raise ConfigError(f"grouped_swiglu: {gate_up.shape[1]} rows of gate_up; gate and up have as many each")
    limit = given.limit
    if limit is not None and not limit > 0:
        raise ConfigError(f"grouped_swiglu: limit is {limit!r}; a number above 0 is needed, or None")
    return ActivationForm(given.interleaved, limit=inf if limit is None else float(limit))


def _refuse_values_alone(name: str, x: Tensor) -> None:
    if x.dtype == torch.float8_e4m3fn:
        raise ConfigError(f"{name}: x is {x.dtype} without scales; give x and the weights as (values, scales)")


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
    _check_main_grad(name, weight, given.main_grad)
    if expected_rows is not None and not expected_rows >= 0:
        raise ConfigError(f"{name}: expected_rows is {expected_rows!r}; a number of rows is needed, or None")
    for what, tensor in (
        ("weight", weight),
        ("expert_offsets", groups.offsets),
        ("expert_counts", groups.counts),
        ("main_grad", given.main_grad),
    ):
        if tensor is not None and tensor.device != x.device:
            raise ConfigError(f"{name}: {what} is on {tensor.device}; x is on {x.device}")


def _check_main_grad(name: str, weight: Tensor, main_grad: Tensor | None) -> None:
    if main_grad is None:
        return
    if main_grad.dtype != torch.float32 or main_grad.shape != weight.shape or main_grad.requires_grad:
        raise ConfigError(
            f"{name}: main_grad is {main_grad.dtype} {list(main_grad.shape)}; float32 {list(weight.shape)} without a "
            "gradient of its own is needed"
        )
