"""Launch the gradients of the norms: rms_norm_backward.cu or layer_norm_backward.cu, then sum_partials.cu.

The first kernel writes dx, and for each group of warps its sums of the vectors' gradients. The second adds these in a
fixed order. So gradients are the same in every run on a GPU, and change only with the number of SMs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from raymoe.device.jit import KernelSource
from raymoe.device.params import F32, U32, Address, Params
from raymoe.device.pipe_launch import KernelCall, gpu_sms, launch
from raymoe.device.pipe_shape import Limits, RowWork, row_shape
from raymoe.device.pipe_tensors import (
    PipeRows,
    PipeWork,
    check_hidden,
    in_stage,
    one_dtype,
    registers_of,
    row_type,
    rows_of,
    vector_of,
    work_of,
)
from raymoe.errors import ConfigError

if TYPE_CHECKING:
    import torch

COLUMNS, SUM_THREADS = 128, 512
"""Columns that a block of sum_partials.cu adds at a time, and its threads: a row of sums for each warp is shared."""


@dataclass(frozen=True)
class NormBackwardParams(Params):
    """Twin of the struct in kernels/include/raymoe/pipe/gradients.cuh."""

    inputs: Annotated[tuple[PipeRows, ...], PipeRows.array(3)]
    dx: PipeRows
    work: PipeWork
    weight: Address
    partials: Address
    eps: F32
    unused: U32 = 0


@dataclass(frozen=True)
class SumPartialsParams(Params):
    partials: Address
    out: Annotated[tuple[int, ...], ctypes.c_uint64 * 2]
    rows: U32
    hidden: U32
    parts: U32
    vectors: U32


@dataclass(frozen=True)
class RmsNormBackward:
    """From dy and x [T, H] to dx and d_weight [H]. `eps` is that of the forward call; nothing else of it is needed.

    After a forward call with a residual, `x` is x + residual, and `d_total` its own gradient, which is added to dx.
    Then dx is the gradient of both x and the residual.
    """

    dy: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    dx: torch.Tensor
    d_weight: torch.Tensor
    eps: float = 1e-6
    d_total: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerNormBackward:
    """The same for LayerNorm, with d_bias [H] too."""

    dy: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    dx: torch.Tensor
    d_weight: torch.Tensor
    d_bias: torch.Tensor
    eps: float = 1e-5


def rms_norm_backward(call: RmsNormBackward, limits: Limits | None = None) -> None:
    """Launch both kernels on the current stream."""
    _run(backward_calls(call, _limits_of(call, limits)), call)


def layer_norm_backward(call: LayerNormBackward, limits: Limits | None = None) -> None:
    """Launch both kernels on the current stream."""
    _run(backward_calls(call, _limits_of(call, limits)), call)


@dataclass(frozen=True)
class BackwardCalls:
    """The two kernels, and the memory between them. With no rows, only the second one is launched."""

    gradients: KernelCall
    sums: KernelCall
    partials: torch.Tensor
    sms: int


def backward_calls(call: RmsNormBackward | LayerNormBackward, limits: Limits) -> BackwardCalls:
    """The kernels, shapes and parameters of a backward, on `limits.sms` SMs."""
    import torch

    if limits.sms is None:
        raise ConfigError("the number of SMs of a backward must be known, because its groups have memory each")
    vectors = [call.d_weight, *([call.d_bias] if isinstance(call, LayerNormBackward) else [])]
    rows, hidden = call.x.shape
    total = call.d_total if isinstance(call, RmsNormBackward) else None
    inputs = [call.dy, call.x, *([] if total is None else [total])]
    one_dtype([*inputs, call.dx])
    one_dtype([call.weight, *vectors])
    # x, dy and a weight, and float32 sums of each vector's gradient
    registers = 2 * registers_of(call.x) + registers_of(call.weight) + 8 * len(vectors)
    eight_bytes = 8 * len(inputs) * call.x.element_size()
    shape = row_shape(
        RowWork(rows, check_hidden(hidden), eight_bytes, len(inputs), registers, gradients=len(vectors)), limits
    )
    placed = in_stage(inputs, shape)
    work = work_of(shape, rows, hidden)
    stem = "rms_norm_backward" if len(vectors) == 1 else "layer_norm_backward"
    added = () if total is None else (("ADD", "1"),)
    types = (("HIDDEN", str(hidden)), ("ROW_TYPE", row_type(call.x)), ("WEIGHT_TYPE", row_type(call.weight)))
    source = KernelSource(stem, (NormBackwardParams, PipeRows, PipeWork), (*types, *shape.defines, *added))
    groups = shape.blocks(work.tiles, limits.sms) * shape.groups  # none without rows
    partials = torch.empty(len(vectors), groups, hidden, dtype=torch.float32, device=call.x.device)
    dx = rows_of(call.dx, "dx", call.x.shape, placed[1].offset)
    weight = vector_of(call.weight, hidden, "weight")
    params = NormBackwardParams(placed, dx, work, weight, partials.data_ptr(), call.eps)
    gradients = KernelCall.of(source, shape, params, work.tiles)
    parts = -(-hidden // COLUMNS)
    out = [vector_of(each, hidden, "the gradient of a vector") for each in vectors]
    summing = SumPartialsParams(partials.data_ptr(), (*out, 0)[:2], groups, hidden, parts, len(vectors))
    summed = KernelSource("sum_partials", (SumPartialsParams,), types[2:])
    shared_bytes = SUM_THREADS // 32 * COLUMNS * 4
    sums = KernelCall(summed, SUM_THREADS, shared_bytes, summing, parts * len(vectors), early=bool(rows))
    return BackwardCalls(gradients, sums, partials, limits.sms)


def _limits_of(call: RmsNormBackward | LayerNormBackward, limits: Limits | None) -> Limits:
    limits, most = limits or Limits(), gpu_sms(call.x.device)
    return Limits(min(limits.sms or most, most), limits.stages, limits.loading)


def _run(calls: BackwardCalls, call: RmsNormBackward | LayerNormBackward) -> None:
    launch(calls.gradients, calls.sms, call.x.device)
    launch(calls.sums, calls.sms, call.x.device)
