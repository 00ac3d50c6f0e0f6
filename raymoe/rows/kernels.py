"""Compute the functions over rows by kernels: tensors, memory for the results, and the launch.

Each function has the arguments of the operator of its name, but takes `Limits` in the place of `sms`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

import raymoe.rows.launch as launch
from raymoe.rows import pipe, pipe_backward, pipe_pieces
from raymoe.rows.expression import MOST_INPUTS, Expression, parse
from raymoe.rows.operators import code
from raymoe.rows.pipe_shape import Limits
from raymoe.rows.pipe_tensors import ALIGNMENT, takes_hidden
from raymoe.rows.results import new_halved, new_like, new_quantised, new_total

# Tensors as kernels take them: copied only if their memory does not fit.


def as_rows(x: Tensor) -> Tensor:
    """Return x if it is contiguous, else view it as [T, H] with the elements of a row adjacent. Rows begin at multiples
    of 16 bytes: x is copied if they do not."""
    if x.is_contiguous() and not x.data_ptr() % ALIGNMENT:
        return x
    rows = x.reshape(-1, x.shape[-1])
    fits = rows.stride(1) == 1 and rows.stride(0) * rows.element_size() % ALIGNMENT == 0
    return rows if fits and rows.data_ptr() % ALIGNMENT == 0 else rows.clone(memory_format=torch.contiguous_format)


def as_vector(vector: Tensor) -> Tensor:
    """View a tensor as a vector that begins at a multiple of 16 bytes."""
    fits = vector.is_contiguous() and not vector.data_ptr() % ALIGNMENT
    return vector if fits else vector.clone(memory_format=torch.contiguous_format)


def _flat(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 else rows.view(-1, rows.shape[-1])


@functools.lru_cache(maxsize=256)
def limits_of(sms: int | None) -> Limits:
    """The limits of a call that may take so many SMs."""
    return Limits(sms)


# Norms.


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, limits: Limits) -> tuple[Tensor, Tensor]:
    if residual is None:
        return plain_rms_norm(x, weight, eps, limits), new_total(x, None)
    y, total = new_like(x), new_like(x)
    pipe.rms_norm(pipe.RmsNorm(as_rows(x), as_vector(weight), y, eps, None, as_rows(residual), total), limits)
    return y, total


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, limits: Limits) -> Tensor:
    y = new_like(x)
    pipe.rms_norm(pipe.RmsNorm(as_rows(x), as_vector(weight), y, eps), limits)
    return y


def rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, column: bool, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = new_quantised(x.shape, x.device, column)
    total = new_total(x, residual)
    added = (None, None) if residual is None else (as_rows(residual), total)
    call = pipe.RmsNorm(as_rows(x), as_vector(weight), values, eps, _flat(scales), *added)
    pipe.rms_norm(call, limits)
    return values, scales, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, limits: Limits) -> Tensor:
    y = new_like(x)
    pipe.layer_norm(pipe.LayerNorm(as_rows(x), as_vector(weight), as_vector(bias), y, eps), limits)
    return y


def layer_norm_fp8(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, column: bool, limits: Limits
) -> tuple[Tensor, Tensor]:
    values, scales = new_quantised(x.shape, x.device, column)
    call = pipe.LayerNorm(as_rows(x), as_vector(weight), as_vector(bias), values, eps, _flat(scales))
    pipe.layer_norm(call, limits)
    return values, scales


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, rows: Tensor, weight: Tensor, eps: float, limits: Limits
) -> tuple[Tensor, Tensor]:
    drows, dweight = new_like(rows), new_like(weight)
    added = None if dtotal is None else as_rows(dtotal)
    call = pipe_backward.RmsNormBackward(as_rows(dy), as_rows(rows), as_vector(weight), drows, dweight, eps, added)
    pipe_backward.rms_norm_backward(call, limits)
    return drows, dweight


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = new_like(x), new_like(weight), new_like(weight)
    call = pipe_backward.LayerNormBackward(as_rows(dy), as_rows(x), as_vector(weight), dx, dweight, dbias, eps)
    pipe_backward.layer_norm_backward(call, limits)
    return dx, dweight, dbias


# SwiGLU.


def swiglu(gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    y = new_halved(gate_up)
    pipe_pieces.swiglu(pipe_pieces.Swiglu(as_rows(gate_up), y, _as_offsets(offsets)), limits)
    return y


def swiglu_fp8(gate_up: Tensor, offsets: Tensor | None, column: bool, limits: Limits) -> tuple[Tensor, Tensor]:
    *leading, width = gate_up.shape
    values, scales = new_quantised(torch.Size([*leading, width // 2]), gate_up.device, column)
    pipe_pieces.swiglu(pipe_pieces.Swiglu(as_rows(gate_up), values, _as_offsets(offsets), _flat(scales)), limits)
    return values, scales


def weighted_swiglu(gate_up: Tensor, weights: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    y = new_halved(gate_up)
    call = pipe_pieces.Swiglu(as_rows(gate_up), y, _as_offsets(offsets), weights=weights.contiguous())
    pipe_pieces.swiglu(call, limits)
    return y


def weighted_swiglu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor | None, limits: Limits
) -> tuple[Tensor, Tensor]:
    into, rows, offsets = new_like(gate_up), as_rows(gate_up), _as_offsets(offsets)
    sums = pipe_pieces.new_piece_sums(rows, offsets, limits)
    call = pipe_pieces.SwigluBackward(as_rows(dy), rows, into, offsets, weights.contiguous(), sums)
    pipe_pieces.swiglu_backward(call, limits)
    d_weights = sums.view(-1) if len(sums) == 1 else sums.sum(dim=0)
    return into, d_weights.view(weights.shape)


def swiglu_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    into = new_like(gate_up)
    call = pipe_pieces.SwigluBackward(as_rows(dy), as_rows(gate_up), into, _as_offsets(offsets))
    pipe_pieces.swiglu_backward(call, limits)
    return into


def _as_offsets(offsets: Tensor | None) -> Tensor | None:
    return offsets if offsets is None or offsets.dtype is torch.int32 else offsets.to(torch.int32)


# Expressions.


def adds(terms: Sequence[Tensor]) -> bool:
    """Whether the kernel adds these terms of one shape and dtype."""
    return len(terms) <= MOST_INPUTS and takes_hidden(terms[0].shape[-1]) and launch.takes(terms[0])


def pointwise(expression: str, names: str, inputs: Sequence[Tensor], limits: Limits) -> Tensor:
    given = dict(zip(names.split(","), inputs, strict=True))
    full = max(inputs, key=lambda each: (each.dim(), each.numel(), each.shape[-1]))
    return evaluated(parse(expression), given, full, limits)


def evaluated(expression: Expression, given: dict[str, Tensor], full: Tensor, limits: Limits) -> Tensor:
    """Compute an expression from inputs by name. The result is as large as `full`."""
    return computed(code(expression), [given[name] for name in expression.names], full, limits)


def computed(expression: str, inputs: Sequence[Tensor], full: Tensor, limits: Limits) -> Tensor:
    """Compute an expression in C++, `code` of `raymoe.rows.operators`."""
    out = new_like(full)
    shape = full.shape
    rows = [as_rows(each) if each.shape == shape else _as_spread(each, shape) for each in inputs]
    pipe_pieces.pointwise(pipe_pieces.Pointwise(expression, rows, out), limits)
    return out


def _as_spread(vector: Tensor, full: torch.Size) -> Tensor:
    if vector.shape == full[-1:]:
        return as_vector(vector)
    return vector if vector.is_contiguous() else vector.reshape(-1, 1)
