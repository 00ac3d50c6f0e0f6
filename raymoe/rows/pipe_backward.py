"""Launch the gradients of the norms: rms_norm_backward.cu or layer_norm_backward.cu, then sum_partials.cu.

The first kernel writes dx, and for each group of warps its sums of the vectors' gradients. The second adds these in a
fixed order. So gradients are the same in every run on a GPU, and change only with the number of SMs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.launch import KernelCall, Prepared, PreparedRows, RowsDevice, device_of
from raymoe.rows.pipe_shape import NO_LIMITS, Limits, RowWork, row_breaks, row_shape
from raymoe.rows.pipe_tensors import (
    PipeRows,
    PipeWork,
    addresses_of,
    as_matrix,
    check_hidden,
    in_stage,
    one_dtype,
    registers_of,
    row_type,
    rows_in,
    rows_of,
    vector_of,
    work_of,
)

if TYPE_CHECKING:
    import torch

COLUMNS, SUM_THREADS = 128, 512
"""Columns that a block of sum_partials.cu adds at a time, and its threads: a row of sums for each warp is shared."""


@dataclass(frozen=True)
class NormBackwardParams(Params):
    """Twin of the struct in kernels/include/raymoe/rows/gradients.cuh."""

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


@dataclass(slots=True)
class RmsNormBackward:
    """From dy and x [..., H] to dx and d_weight [H]. `eps` is that of the forward call; nothing else of it is needed.

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


@dataclass(slots=True)
class LayerNormBackward:
    """The same for LayerNorm, with d_bias [H] too."""

    dy: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    dx: torch.Tensor
    d_weight: torch.Tensor
    d_bias: torch.Tensor
    eps: float = 1e-5


def rms_norm_backward(call: RmsNormBackward, limits: Limits = NO_LIMITS) -> None:
    """Launch both kernels on the current stream."""
    rows = (call.dy, call.x, call.dx) if call.d_total is None else (call.dy, call.x, call.dx, call.d_total)
    _launch(call, limits, rows, (call.weight, call.d_weight))


def layer_norm_backward(call: LayerNormBackward, limits: Limits = NO_LIMITS) -> None:
    """Launch both kernels on the current stream."""
    _launch(call, limits, (call.dy, call.x, call.dx), (call.weight, call.d_weight, call.d_bias))


ROWS = ("inputs[0].at", "inputs[1].at", "dx.at", "inputs[2].at")
OUT = ("out[0]", "out[1]")
"""The parameters that each call sets, beside the address of the weight and that of the memory between the kernels."""


@dataclass(frozen=True)
class _Prepared:
    """The two kernels; `groups` are those of a block of the first, `tiles` those of the second."""

    gradients: PreparedRows
    sums: Prepared
    groups: int
    tiles: int

    @classmethod
    def of(cls, device: RowsDevice, calls: BackwardCalls, rows: int) -> _Prepared:
        gradients = PreparedRows(device, calls.gradients, calls.sms, ("weight", "partials", *ROWS[:rows]))
        sums = Prepared(device, calls.sums, calls.sms, ("partials", "rows", *OUT[: len(calls.partials)]))
        return cls(gradients, sums, calls.groups, calls.sums.tiles)


def _launch(
    call: RmsNormBackward | LayerNormBackward,
    limits: Limits,
    rows: tuple[torch.Tensor, ...],
    vectors: tuple[torch.Tensor, ...],
) -> None:
    x = call.x
    count, hidden = rows_in(x), x.shape[-1]
    kind: list[Any] = [type(call), limits.key, call.eps, hidden]
    addresses = addresses_of(vectors, rows, kind)
    device, key = device_of(x.get_device()), tuple(kind)
    prepared: _Prepared | None = device.find(key, count) if count else None
    if prepared is None or addresses is None:
        made = backward_calls(call, Limits(device.sms(limits.sms), limits.stages, limits.loading))
        assert addresses is not None, "tensors that are not aligned are refused"
        if not made.gradients.tiles:
            device.run(made.sums, made.sms)  # zeros
            return
        prepared = _Prepared.of(device, made, len(rows))
        device.keep(key, count, made.gradients.breaks, prepared)
    tiles = prepared.gradients.tiles(count)
    groups = prepared.gradients.blocks(tiles) * prepared.groups
    first_of_rows = len(vectors)
    partials = x.new_empty((first_of_rows - 1, groups, hidden), dtype=device.float32)
    at = partials.data_ptr()
    prepared.gradients(tiles, [addresses[0], at, *addresses[first_of_rows:], count, tiles])
    prepared.sums(prepared.tiles, [at, groups, *addresses[1:first_of_rows]])


@dataclass(frozen=True)
class BackwardCalls:
    """The two kernels, and the memory between them. With no rows, only the second one is launched.

    `groups` are the groups of a block of the first kernel.
    """

    gradients: KernelCall
    sums: KernelCall
    partials: torch.Tensor
    sms: int
    groups: int


def backward_calls(call: RmsNormBackward | LayerNormBackward, limits: Limits) -> BackwardCalls:
    """The kernels, shapes and parameters of a backward, on `limits.sms` SMs."""
    import torch

    if limits.sms is None:
        raise ConfigError("the number of SMs of a backward must be known, because its groups have memory each")
    vectors = [call.d_weight, *([call.d_bias] if isinstance(call, LayerNormBackward) else [])]
    x, total = as_matrix(call.x), call.d_total if isinstance(call, RmsNormBackward) else None
    rows, hidden = x.shape
    inputs = [as_matrix(call.dy), x, *([] if total is None else [as_matrix(total)])]
    given = as_matrix(call.dx)
    one_dtype([*inputs, given])
    one_dtype([call.weight, *vectors])
    # x, dy and a weight, and float32 sums of each vector's gradient
    registers = 2 * registers_of(x) + registers_of(call.weight) + 8 * len(vectors)
    eight_bytes = 8 * len(inputs) * x.element_size()
    cut = RowWork(rows, check_hidden(hidden), eight_bytes, len(inputs), registers, gradients=len(vectors))
    shape = row_shape(cut, limits)
    placed = in_stage(inputs, shape)
    work = work_of(shape, rows, hidden)
    stem = "rms_norm_backward" if len(vectors) == 1 else "layer_norm_backward"
    added = () if total is None else (("ADD", "1"),)
    types = (("HIDDEN", str(hidden)), ("ROW_TYPE", row_type(x)), ("WEIGHT_TYPE", row_type(call.weight)))
    source = KernelSource(f"rows/{stem}", (NormBackwardParams, PipeRows, PipeWork), (*types, *shape.defines, *added))
    groups = shape.blocks(work.tiles, limits.sms) * shape.groups  # none without rows
    partials = torch.empty(len(vectors), groups, hidden, dtype=torch.float32, device=x.device)
    dx = rows_of(given, "dx", x.shape, placed[1].offset)
    weight = vector_of(call.weight, hidden, "weight")
    params = NormBackwardParams(placed, dx, work, weight, partials.data_ptr(), call.eps)
    gradients = KernelCall.of(source, shape, params, work.tiles, row_breaks(cut, limits))
    parts = -(-hidden // COLUMNS)
    out = [vector_of(each, hidden, "the gradient of a vector") for each in vectors]
    summing = SumPartialsParams(partials.data_ptr(), (*out, 0)[:2], groups, hidden, parts, len(vectors))
    summed = KernelSource("rows/sum_partials", (SumPartialsParams,), types[2:])
    shared_bytes = SUM_THREADS // 32 * COLUMNS * 4
    sums = KernelCall(summed, SUM_THREADS, shared_bytes, summing, parts * len(vectors), early=bool(rows))
    return BackwardCalls(gradients, sums, partials, limits.sms, shape.groups)
