"""The norms and their gradients by kernels: memory for the results, the tensors of each kernel, and its launch.

`rms_norm` and the other functions have the arguments of the operators of their names, but `Limits` in the place of
`sms`. Each kernel has a class with its tensors: `launch` enqueues it on the current stream, `kernel_call` checks the
tensors and computes the kernel, its shape and its parameters. `launch` calls that only for the first tensors of a kind.
Later launches set addresses and the number of rows.

kernels/include/raymoe/rows/pipe.cuh has the pipeline of all these kernels. `elementwise_kernels.py` has the kernels of
SwiGLU and expressions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.pipe_shape import NO_LIMITS, Limits, RowWork, row_breaks, row_shape
from raymoe.rows.pipe_tensors import (
    SCALES,
    STRUCTS,
    PipeFp8,
    PipeRows,
    PipeWork,
    addresses_of,
    as_dense,
    as_matrix,
    as_rows,
    check_hidden,
    flat,
    fp8_of,
    in_stage,
    one_dtype,
    registers_of,
    row_type,
    rows_in,
    rows_of,
    scales_of,
    vector_of,
    work_of,
)
from raymoe.rows.row_launch import KernelCall, Prepared, PreparedRows, RowsDevice, device_of
from raymoe.rows.row_results import new_like, new_quantised, new_total


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, limits: Limits) -> tuple[Tensor, Tensor]:
    if residual is None:
        return plain_rms_norm(x, weight, eps, limits), new_total(x, None)
    y, total = new_like(x), new_like(x)
    RmsNorm(as_rows(x), as_dense(weight), y, eps, None, as_rows(residual), total).launch(limits)
    return y, total


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, limits: Limits) -> Tensor:
    y = new_like(x)
    RmsNorm(as_rows(x), as_dense(weight), y, eps).launch(limits)
    return y


def rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, column: bool, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = new_quantised(x.shape, x.device, column)
    total = new_total(x, residual)
    added = (None, None) if residual is None else (as_rows(residual), total)
    RmsNorm(as_rows(x), as_dense(weight), values, eps, flat(scales), *added).launch(limits)
    return values, scales, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, limits: Limits) -> Tensor:
    y = new_like(x)
    LayerNorm(as_rows(x), as_dense(weight), as_dense(bias), y, eps).launch(limits)
    return y


def layer_norm_fp8(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, column: bool, limits: Limits
) -> tuple[Tensor, Tensor]:
    values, scales = new_quantised(x.shape, x.device, column)
    LayerNorm(as_rows(x), as_dense(weight), as_dense(bias), values, eps, flat(scales)).launch(limits)
    return values, scales


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, rows: Tensor, weight: Tensor, eps: float, limits: Limits
) -> tuple[Tensor, Tensor]:
    drows, dweight = new_like(rows), new_like(weight)
    added = None if dtotal is None else as_rows(dtotal)
    RmsNormBackward(as_rows(dy), as_rows(rows), as_dense(weight), drows, dweight, eps, added).launch(limits)
    return drows, dweight


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = new_like(x), new_like(weight), new_like(weight)
    LayerNormBackward(as_rows(dy), as_rows(x), as_dense(weight), dx, dweight, dbias, eps).launch(limits)
    return dx, dweight, dbias


# The kernels rms_norm.cu and layer_norm.cu. Tensors are [..., H] and contiguous, or [T, H] with the elements of a row
# adjacent and rows any multiple of 16 bytes apart. The classes are not frozen: that would cost an eager call 1 us.

TwoRows = Annotated[tuple[PipeRows, ...], PipeRows.array(2)]


@dataclass(frozen=True)
class NormParams(Params):
    """The parameters of both kernels. Twin of the struct in kernels/include/raymoe/rows/norm.cuh."""

    weight: Address
    bias: Address
    eps: F32
    unused: U32
    inputs: TwoRows
    outputs: TwoRows
    work: PipeWork
    fp8: PipeFp8


@dataclass(slots=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight; with a residual, x + residual takes the place of x and is stored too.

    With `scales`, `out` is float8_e4m3fn and `scales[row, block]` is float32 with any strides, so it may lie by rows or
    by columns.
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    eps: float = 1e-6
    scales: Tensor | None = None
    residual: Tensor | None = None
    residual_out: Tensor | None = None

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch kernels/rows/rms_norm.cu on the current stream."""
        rows: tuple[Tensor, ...] = (self.x, self.out)
        if self.residual is not None and self.residual_out is not None:
            rows = (self.x, self.out, self.residual, self.residual_out)
        elif self.residual is not self.residual_out:
            raise _half_of_residual()
        _launch_norm(self, limits, rows, (self.weight,))

    def kernel_call(self, limits: Limits) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""
        if self.residual is None and self.residual_out is None:
            return _norm_call(self, [self.x], [self.out], limits)
        if self.residual is None or self.residual_out is None:
            raise _half_of_residual()
        return _norm_call(self, [self.x, self.residual], [self.out, self.residual_out], limits)


def _half_of_residual() -> ConfigError:
    return ConfigError("rms_norm with a residual needs both the residual and a tensor for x + residual")


@dataclass(slots=True)
class LayerNorm:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias. `scales` as in `RmsNorm`; `bias` None: no bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    eps: float = 1e-5
    scales: Tensor | None = None

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch kernels/rows/layer_norm.cu on the current stream."""
        vectors = (self.weight,) if self.bias is None else (self.weight, self.bias)
        _launch_norm(self, limits, (self.x, self.out), vectors)

    def kernel_call(self, limits: Limits) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""
        return _norm_call(self, [self.x], [self.out], limits)


def _launch_norm(
    norm: RmsNorm | LayerNorm, limits: Limits, rows: tuple[Tensor, ...], vectors: tuple[Tensor, ...]
) -> None:
    x, scales = norm.x, norm.scales
    count, hidden = rows_in(x), x.shape[-1]
    kind: list[Any] = [type(norm), limits.key, norm.eps, hidden]
    values = addresses_of(vectors, rows, kind)
    if scales is not None and values is not None:
        values += scales_of(scales, kind)
    device, key = device_of(x.get_device()), tuple(kind)
    prepared = None if values is None else device.find(key, count)
    if prepared is not None:
        prepared.of_rows(count, values)
        return
    names = (*VECTORS[: len(vectors)], *(ROWS if scales is None else FP8_ROWS)[: len(rows)])
    if scales is not None:  # rows of 8-bit floats need less alignment, so there may be no values
        names = (*names, *SCALES)
    device.launch_first(key, count, values, norm.kernel_call(limits), limits, names)


VECTORS = ("weight", "bias")
ROWS = ("inputs[0].at", "outputs[0].at", "inputs[1].at", "outputs[1].at")
FP8_ROWS = ("inputs[0].at", "fp8.values", "inputs[1].at", "outputs[1].at")
"""The parameters that each launch sets."""


def _norm_call(norm: RmsNorm | LayerNorm, inputs: list[Tensor], outputs: list[Tensor], limits: Limits) -> KernelCall:
    """Compute the kernel, its shape and its parameters; a second input is added to the first."""
    inputs, outputs = [*map(as_matrix, inputs)], [*map(as_matrix, outputs)]
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    x, vectors = inputs[0], [norm.weight, *([] if bias is None else [bias])]
    rows, hidden, quantised = *x.shape, norm.scales is not None
    one_dtype(vectors)
    one_dtype([*inputs, *outputs[quantised:]])
    work = RowWork(
        rows,
        check_hidden(hidden),
        eight_bytes=len(inputs) * 8 * x.element_size(),
        inputs=len(inputs),
        registers=registers_of(x) + sum(map(registers_of, vectors)),
        quantised=quantised,
        biased=bias is not None,
    )
    shape = row_shape(work, limits)
    placed = in_stage(inputs, shape)
    results = [
        PipeRows() if quantised and i == 0 else rows_of(out, "an output", x.shape, at.offset)
        for i, (out, at) in enumerate(zip(outputs, placed, strict=True))
    ]
    fp8 = PipeFp8() if norm.scales is None else fp8_of(outputs[0], norm.scales, x.shape)
    tiles = work_of(shape, rows, hidden)
    addresses = [vector_of(vector, hidden, "a weight or bias") for vector in vectors]
    params = NormParams(addresses[0], sum(addresses[1:]), norm.eps, 0, placed, tuple(results), tiles, fp8)
    types = (("HIDDEN", str(hidden)), ("ROW_TYPE", row_type(x)), ("WEIGHT_TYPE", row_type(norm.weight)))
    switches = {"ADD": len(inputs) > 1, "FP8": quantised, "BIAS": bias is not None}
    defines = (*types, *shape.defines, *((name, "1") for name, on in switches.items() if on))
    stem = "layer_norm" if isinstance(norm, LayerNorm) else "rms_norm"
    source = KernelSource(f"rows/{stem}", (NormParams, *STRUCTS), defines)
    return KernelCall.of(source, shape, params, tiles.tiles, row_breaks(work, limits))


# The gradients: rms_norm_backward.cu or layer_norm_backward.cu, then sum_partials.cu. The first kernel writes dx, and
# for each group of warps its sums of the vectors' gradients. The second adds these in a fixed order. So gradients are
# the same in every run on a GPU, and change only with the number of SMs.

COLUMNS, SUM_THREADS = 128, 512
"""Columns that a block of sum_partials.cu adds at a time, and its threads. Its warps share the rows of sums."""


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
    """The parameters of kernels/rows/sum_partials.cu."""

    partials: Address
    out: Annotated[tuple[int, ...], ctypes.c_uint64 * 2]
    rows: U32
    hidden: U32
    parts: U32
    vectors: U32


@dataclass(slots=True)
class RmsNormBackward:
    """dx and d_weight [H] from dy and x [..., H]. `eps` is that of the forward call; nothing else of it is needed.

    After a forward call with a residual, `x` is x + residual, and `d_total` its own gradient, which is added to dx.
    Then dx is the gradient of both x and the residual.
    """

    dy: Tensor
    x: Tensor
    weight: Tensor
    dx: Tensor
    d_weight: Tensor
    eps: float = 1e-6
    d_total: Tensor | None = None

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch both kernels on the current stream."""
        rows = (self.dy, self.x, self.dx) if self.d_total is None else (self.dy, self.x, self.dx, self.d_total)
        _launch_backward(self, limits, rows, (self.weight, self.d_weight))

    def kernel_calls(self, limits: Limits) -> BackwardCalls:
        """Check the tensors; return both kernels for `limits.sms` SMs."""
        inputs = [self.dy, self.x, *([] if self.d_total is None else [self.d_total])]
        return _backward_calls(self, inputs, [self.d_weight], limits)


@dataclass(slots=True)
class LayerNormBackward:
    """dx, d_weight [H] and d_bias [H] from dy and x [..., H]."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    dx: Tensor
    d_weight: Tensor
    d_bias: Tensor
    eps: float = 1e-5

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch both kernels on the current stream."""
        _launch_backward(self, limits, (self.dy, self.x, self.dx), (self.weight, self.d_weight, self.d_bias))

    def kernel_calls(self, limits: Limits) -> BackwardCalls:
        """Check the tensors; return both kernels for `limits.sms` SMs."""
        return _backward_calls(self, [self.dy, self.x], [self.d_weight, self.d_bias], limits)


@dataclass(frozen=True)
class BackwardCalls:
    """The two kernels, and the memory between them. Without rows only the second one is launched.

    `groups` are the groups of a block of the first kernel.
    """

    gradients: KernelCall
    sums: KernelCall
    partials: Tensor
    sms: int
    groups: int


BACKWARD_ROWS = ("inputs[0].at", "inputs[1].at", "dx.at", "inputs[2].at")
OUT = ("out[0]", "out[1]")
"""The parameters that each launch sets, beside the address of the weight and that of the memory between the kernels."""


@dataclass(frozen=True)
class _PreparedBackward:
    """The two kernels; `groups` are those of a block of the first, `tiles` those of the second."""

    gradients: PreparedRows
    sums: Prepared
    groups: int
    tiles: int

    @classmethod
    def of(cls, device: RowsDevice, calls: BackwardCalls, rows: int) -> _PreparedBackward:
        gradients = PreparedRows(device, calls.gradients, calls.sms, ("weight", "partials", *BACKWARD_ROWS[:rows]))
        sums = Prepared(device, calls.sums, calls.sms, ("partials", "rows", *OUT[: len(calls.partials)]))
        return cls(gradients, sums, calls.groups, calls.sums.tiles)


def _launch_backward(
    norm: RmsNormBackward | LayerNormBackward, limits: Limits, rows: tuple[Tensor, ...], vectors: tuple[Tensor, ...]
) -> None:
    x = norm.x
    count, hidden = rows_in(x), x.shape[-1]
    kind: list[Any] = [type(norm), limits.key, norm.eps, hidden]
    addresses = addresses_of(vectors, rows, kind)
    device, key = device_of(x.get_device()), tuple(kind)
    prepared: _PreparedBackward | None = device.find(key, count) if count else None
    if prepared is None or addresses is None:
        calls = norm.kernel_calls(Limits(device.sms(limits.sms), limits.stages, limits.loading))
        assert addresses is not None, "tensors that are not aligned are refused"
        if not calls.gradients.tiles:
            device.run(calls.sums, calls.sms)  # zeros
            return
        prepared = _PreparedBackward.of(device, calls, len(rows))
        device.keep(key, count, calls.gradients.breaks, prepared)
    tiles = prepared.gradients.tiles(count)
    groups = prepared.gradients.blocks(tiles) * prepared.groups
    first_of_rows = len(vectors)
    partials = x.new_empty((first_of_rows - 1, groups, hidden), dtype=torch.float32)
    at = partials.data_ptr()
    prepared.gradients(tiles, [addresses[0], at, *addresses[first_of_rows:], count, tiles])
    prepared.sums(prepared.tiles, [at, groups, *addresses[1:first_of_rows]])


def _backward_calls(
    norm: RmsNormBackward | LayerNormBackward, inputs: list[Tensor], vectors: list[Tensor], limits: Limits
) -> BackwardCalls:
    if limits.sms is None:
        raise ConfigError("the number of SMs of a backward must be known, because its groups have memory each")
    inputs, dx = [*map(as_matrix, inputs)], as_matrix(norm.dx)
    x = inputs[1]
    rows, hidden = x.shape
    one_dtype([*inputs, dx])
    one_dtype([norm.weight, *vectors])
    work = RowWork(
        rows,
        check_hidden(hidden),
        eight_bytes=8 * len(inputs) * x.element_size(),
        inputs=len(inputs),
        # x, dy and a weight, and float32 sums of each vector's gradient
        registers=2 * registers_of(x) + registers_of(norm.weight) + 8 * len(vectors),
        gradients=len(vectors),
    )
    shape = row_shape(work, limits)
    placed = in_stage(inputs, shape)
    tiles = work_of(shape, rows, hidden)
    groups = shape.blocks(tiles.tiles, limits.sms) * shape.groups  # none without rows
    partials = torch.empty(len(vectors), groups, hidden, dtype=torch.float32, device=x.device)
    weight_type = ("WEIGHT_TYPE", row_type(norm.weight))
    defines = (("HIDDEN", str(hidden)), ("ROW_TYPE", row_type(x)), weight_type, *shape.defines)
    defines += (("ADD", "1"),) if len(inputs) > 2 else ()
    stem = "rms_norm_backward" if isinstance(norm, RmsNormBackward) else "layer_norm_backward"
    params = NormBackwardParams(
        inputs=placed,
        dx=rows_of(dx, "dx", x.shape, placed[1].offset),
        work=tiles,
        weight=vector_of(norm.weight, hidden, "weight"),
        partials=partials.data_ptr(),
        eps=norm.eps,
    )
    source = KernelSource(f"rows/{stem}", (NormBackwardParams, PipeRows, PipeWork), defines)
    gradients = KernelCall.of(source, shape, params, tiles.tiles, row_breaks(work, limits))
    parts = -(-hidden // COLUMNS)
    out = [vector_of(vector, hidden, "the gradient of a vector") for vector in vectors]
    sum_params = SumPartialsParams(partials.data_ptr(), (*out, 0)[:2], groups, hidden, parts, len(vectors))
    sum_source = KernelSource("rows/sum_partials", (SumPartialsParams,), (weight_type,))
    shared_bytes = SUM_THREADS // 32 * COLUMNS * 4
    sums = KernelCall(sum_source, SUM_THREADS, shared_bytes, sum_params, parts * len(vectors), early=bool(rows))
    return BackwardCalls(gradients, sums, partials, limits.sms, shape.groups)
