"""SwiGLU over rows: the activation between the two products of an expert, with gradients."""

from __future__ import annotations

from typing import Any, Unpack, overload

import torch
from torch import Tensor

import raymoe.rows.elementwise_kernels as kernels
import raymoe.rows.formulas as formulas
import raymoe.rows.row_launch as row_launch
from raymoe.errors import ConfigError
from raymoe.rows.direct import Computation, backward_directly, directly, needs_gradient
from raymoe.rows.norm import check_columns
from raymoe.rows.operator_definitions import operator
from raymoe.rows.pipe_shape import limits_of
from raymoe.rows.row_arguments import Plain, Quantised, ResultForm, check_rows, form_of, refuse_gradient
from raymoe.rows.row_results import new_halved, new_like, new_quantised, quantised


@overload
def swiglu(
    gate_up: Tensor, expert_offsets: Tensor | None = ..., weights: Tensor | None = ..., **options: Unpack[Plain]
) -> Tensor: ...
@overload
def swiglu(
    gate_up: Tensor, expert_offsets: Tensor | None = ..., **options: Unpack[Quantised]
) -> tuple[Tensor, Tensor]: ...
def swiglu(
    gate_up: Tensor, expert_offsets: Tensor | None = None, weights: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Map gate_up[..., 2F], gate first, to silu(gate) * up [..., F].

    With the `expert_offsets` of a dispatch, rows from the last offset on are not computed: their results and gradients
    are unspecified. The offsets are read on the device.

    With `weights`, float32[...], each row is multiplied by its weight before it is rounded. The backward pass computes
    the gradient of the weights beside that of gate_up.

    >>> swiglu(torch.tensor([[0.0, 1.0, 7.0, 2.0]]))
    tensor([[0.0000, 1.4621]])
    >>> swiglu(torch.tensor([[0.0, 1.0, 7.0, 2.0]]), weights=torch.tensor([0.5]))
    tensor([[0.0000, 0.7311]])
    """
    form = form_of(options)
    check_rows("swiglu", "gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        raise ConfigError(f"swiglu: gate_up has rows of {gate_up.shape[-1]}; gate and up together are an even number")
    if expert_offsets is not None:
        _check_offsets(gate_up, expert_offsets)
    check_columns("swiglu", gate_up, form)
    tensors = [tensor for tensor in (gate_up, expert_offsets, weights) if tensor is not None]
    if weights is not None:
        _check_weights(gate_up, weights, form)
    direct = directly(*tensors)
    if form.quantised:
        refuse_gradient("swiglu", gate_up)
        compute = _compute_swiglu_fp8 if direct else _swiglu_fp8
        pair: tuple[Tensor, Tensor] = compute(gate_up, expert_offsets, form.column, form.sms)
        return pair
    y: Tensor
    if direct and needs_gradient(*tensors):
        y = _Swiglu.of(gate_up, weights, expert_offsets, form.sms)
    elif weights is None:
        y = (_compute_swiglu if direct else _swiglu)(gate_up, expert_offsets, form.sms)
    else:
        y = (_compute_weighted_swiglu if direct else _weighted_swiglu)(gate_up, weights, expert_offsets, form.sms)
    return y


def _check_offsets(gate_up: Tensor, offsets: object) -> None:
    if not isinstance(offsets, Tensor):
        raise ConfigError(f"swiglu: expert_offsets is a {type(offsets).__name__}; a tensor is needed")
    if gate_up.dim() != 2:
        raise ConfigError(f"swiglu: gate_up has shape {list(gate_up.shape)}; with expert_offsets it is [C, 2F]")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ConfigError(
            f"swiglu: expert_offsets is {offsets.dtype} of shape {list(offsets.shape)}; one dimension of int32 or "
            "int64 is needed, as a dispatch gives"
        )
    if offsets.device != gate_up.device:
        raise ConfigError(f"swiglu: expert_offsets is on {offsets.device}; gate_up is on {gate_up.device}")


def _check_weights(gate_up: Tensor, weights: object, form: ResultForm) -> None:
    if not isinstance(weights, Tensor):
        raise ConfigError(f"swiglu: weights is a {type(weights).__name__}; a tensor is needed")
    if form.quantised:
        raise ConfigError(
            f"swiglu: weights with output={form.output!r}; 8-bit results have none: leave out one of both"
        )
    if weights.dtype != torch.float32 or weights.shape != gate_up.shape[:-1] or weights.device != gate_up.device:
        raise ConfigError(
            f"swiglu: weights is {weights.dtype} of shape {list(weights.shape)} on {weights.device}; torch.float32 of "
            f"shape {list(gate_up.shape[:-1])} on {gate_up.device} is needed"
        )


def _compute_swiglu(gate_up: Tensor, offsets: Tensor | None, sms: int | None) -> Tensor:
    if row_launch.takes(gate_up):
        return kernels.swiglu(gate_up, offsets, limits_of(sms))
    y = new_halved(gate_up)
    valid = _valid_rows(gate_up, offsets)
    y[:valid] = formulas.swiglu(gate_up[:valid])
    return _zero_rest(y, valid)


def _valid_rows(gate_up: Tensor, offsets: Tensor | None) -> int | None:
    """Count the rows that are valid; None if the host would have to wait for the device."""
    if offsets is None or gate_up.device.type != "cpu":
        return None
    return min(int(offsets[-1]), gate_up.shape[0])


def _zero_rest(rows: Tensor, valid: int | None) -> Tensor:
    """Zero the rows that are not valid, so that results on CPUs repeat."""
    if valid is not None:
        rows[valid:] = 0
    return rows


_swiglu = operator("swiglu", _compute_swiglu)


@_swiglu.register_fake
def _(gate_up: Tensor, *_: object) -> Tensor:
    return new_halved(gate_up)


def _compute_swiglu_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor | None, sms: int | None) -> Tensor:
    if row_launch.takes(gate_up):
        return kernels.swiglu_backward(dy, gate_up, offsets, limits_of(sms))
    d_gate_up = new_like(gate_up)
    valid = _valid_rows(gate_up, offsets)
    d_gate_up[:valid] = formulas.swiglu_backward(dy[:valid], gate_up[:valid])
    return _zero_rest(d_gate_up, valid)


_swiglu_backward = operator("swiglu_backward", _compute_swiglu_backward)


@_swiglu_backward.register_fake
def _(_dy: Tensor, gate_up: Tensor, *_: object) -> Tensor:
    return new_like(gate_up)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    gate_up, offsets, ctx.sms = inputs
    ctx.save_for_backward(gate_up, offsets)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate_up, offsets = ctx.saved_tensors
    return _swiglu_gradient(dy, gate_up, offsets, ctx.sms), None, None


def _swiglu_gradient(dy: Tensor, gate_up: Tensor, offsets: Tensor | None, sms: int | None) -> Tensor:
    direct = backward_directly(dy, gate_up)
    gradient: Tensor = (_compute_swiglu_backward if direct else _swiglu_backward)(dy, gate_up, offsets, sms)
    return gradient


_swiglu.register_autograd(_differentiate, setup_context=_save)


# SwiGLU with a weight for each row.


def _compute_weighted_swiglu(gate_up: Tensor, weights: Tensor, offsets: Tensor | None, sms: int | None) -> Tensor:
    if row_launch.takes(gate_up):
        return kernels.weighted_swiglu(gate_up, weights, offsets, limits_of(sms))
    y = new_halved(gate_up)
    valid = _valid_rows(gate_up, offsets)
    there = ... if valid is None else slice(valid)
    y[there] = formulas.weighted_swiglu(gate_up[there], weights[there])
    return _zero_rest(y, valid)


_weighted_swiglu = operator("weighted_swiglu", _compute_weighted_swiglu)


@_weighted_swiglu.register_fake
def _(gate_up: Tensor, *_: object) -> Tensor:
    return new_halved(gate_up)


def _compute_weighted_swiglu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor | None, sms: int | None
) -> tuple[Tensor, Tensor]:
    if row_launch.takes(gate_up):
        return kernels.weighted_swiglu_backward(dy, gate_up, weights, offsets, limits_of(sms))
    d_gate_up, d_weights = new_like(gate_up), new_like(weights)
    valid = _valid_rows(gate_up, offsets)
    there = ... if valid is None else slice(valid)
    d_gate_up[there], d_weights[there] = formulas.weighted_swiglu_backward(dy[there], gate_up[there], weights[there])
    return _zero_rest(d_gate_up, valid), _zero_rest(d_weights, valid)


_weighted_swiglu_backward = operator("weighted_swiglu_backward", _compute_weighted_swiglu_backward)


@_weighted_swiglu_backward.register_fake
def _(_dy: Tensor, gate_up: Tensor, weights: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return new_like(gate_up), new_like(weights)


def _save_weighted(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    gate_up, weights, offsets, ctx.sms = inputs
    ctx.save_for_backward(gate_up, weights, offsets)


def _differentiate_weighted(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate_up, weights, offsets = ctx.saved_tensors
    return *_weighted_gradients(dy, gate_up, weights, offsets, ctx.sms), None, None


def _weighted_gradients(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor | None, sms: int | None
) -> tuple[Tensor, Tensor]:
    direct = backward_directly(dy, gate_up, weights)
    compute = _compute_weighted_swiglu_backward if direct else _weighted_swiglu_backward
    gradients: tuple[Tensor, Tensor] = compute(dy, gate_up, weights, offsets, sms)
    return gradients


_weighted_swiglu.register_autograd(_differentiate_weighted, setup_context=_save_weighted)


class _Swiglu(Computation):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, offsets: Tensor | None, sms: int | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights, offsets)
        ctx.sms = sms
        if weights is None:
            return _compute_swiglu(gate_up, offsets, sms)
        return _compute_weighted_swiglu(gate_up, weights, offsets, sms)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gate_up, weights, offsets = ctx.saved_tensors
        if weights is None:
            return _swiglu_gradient(dy, gate_up, offsets, ctx.sms), None, None, None
        return *_weighted_gradients(dy, gate_up, weights, offsets, ctx.sms), None, None


# SwiGLU to 8-bit floats.


def _compute_swiglu_fp8(
    gate_up: Tensor, offsets: Tensor | None, column: bool, sms: int | None
) -> tuple[Tensor, Tensor]:
    if row_launch.takes(gate_up):
        return kernels.swiglu_fp8(gate_up, offsets, column, limits_of(sms))
    valid = _valid_rows(gate_up, offsets)
    rows = formulas.swiglu(gate_up[:valid])
    if valid is not None:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, gate_up.shape[0] - valid))
    return quantised(rows, column)


_swiglu_fp8 = operator("swiglu_fp8", _compute_swiglu_fp8)


@_swiglu_fp8.register_fake
def _(gate_up: Tensor, _offsets: Tensor | None, column: bool, _sms: int | None) -> tuple[Tensor, Tensor]:
    *leading, columns = gate_up.shape
    return new_quantised(torch.Size([*leading, columns // 2]), gate_up.device, column)
