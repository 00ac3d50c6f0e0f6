"""Launch the kernels that work on each element alone: swiglu.cu, swiglu_backward.cu and pointwise.cu.

As in `raymoe.device.pipe`, `swiglu(call)` launches on the current stream, and `swiglu_call(call, limits)` only computes
the kernel, its shape and its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from raymoe.device.jit import KernelSource
from raymoe.device.params import Address, Params
from raymoe.device.pipe_launch import KernelCall, launch
from raymoe.device.pipe_shape import Limits, PipeShape, RowWork, piece_shape
from raymoe.device.pipe_tensors import (
    STRUCTS,
    PipeFp8,
    PipeRows,
    PipeWork,
    check_hidden,
    fp8_of,
    in_stage,
    one_dtype,
    row_type,
    rows_of,
    vector_of,
    work_of,
)
from raymoe.errors import ConfigError

if TYPE_CHECKING:
    import torch

MOST_INPUTS = 9
"""Of an expression: as many as kernels/pointwise.cu takes."""


@dataclass(frozen=True)
class SwigluParams(Params):
    inputs: Annotated[tuple[PipeRows, ...], PipeRows.array(2)]
    out: PipeRows
    fp8: PipeFp8
    work: PipeWork
    end: Address
    weights: Address


@dataclass(frozen=True)
class SwigluBackwardParams(Params):
    inputs: Annotated[tuple[PipeRows, ...], PipeRows.array(3)]
    outputs: Annotated[tuple[PipeRows, ...], PipeRows.array(2)]
    work: PipeWork
    end: Address
    weights: Address
    piece_sums: Address


@dataclass(frozen=True)
class PointwiseParams(Params):
    streams: Annotated[tuple[PipeRows, ...], PipeRows.array(MOST_INPUTS)]
    vectors: Annotated[tuple[PipeRows, ...], PipeRows.array(MOST_INPUTS)]
    out: PipeRows
    work: PipeWork


@dataclass(frozen=True)
class Swiglu:
    """out = silu(gate) * up of gate_up [T, 2F], gate first. `scales` as in `RmsNorm`.

    With `offsets`, int32 on the device, rows from the last offset on are neither read nor written. With `weights`,
    float32[T], each row is multiplied by its weight; 8-bit results have none.
    """

    gate_up: torch.Tensor
    out: torch.Tensor
    offsets: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class SwigluBackward:
    """The gradient of gate_up from dy [T, F].

    With `weights`, the sum of `piece_sums` over its first dimension is their gradient; `new_piece_sums` allocates them.
    """

    dy: torch.Tensor
    gate_up: torch.Tensor
    d_gate_up: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    piece_sums: torch.Tensor | None = None


@dataclass(frozen=True)
class Pointwise:
    """An expression in C++ of float variables v0, v1, ..., one for each input, from a parser that checked it.

    An input is as large as `out` [T, H], or a row vector [H], or a column vector [T, 1]. All have one dtype.
    """

    code: str
    inputs: Sequence[torch.Tensor]
    out: torch.Tensor


def swiglu(call: Swiglu, limits: Limits | None = None) -> None:
    """Launch kernels/swiglu.cu on the current stream."""
    limits = limits or Limits()
    launch(swiglu_call(call, limits), limits.sms, call.gate_up.device)


def swiglu_backward(call: SwigluBackward, limits: Limits | None = None) -> None:
    """Launch kernels/swiglu_backward.cu on the current stream."""
    limits = limits or Limits()
    launch(swiglu_backward_call(call, limits), limits.sms, call.dy.device)


def pointwise(call: Pointwise, limits: Limits | None = None) -> None:
    """Launch kernels/pointwise.cu on the current stream. A new expression or mix of inputs is compiled first."""
    limits = limits or Limits()
    launch(pointwise_call(call, limits), limits.sms, call.out.device)


def swiglu_call(call: Swiglu, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `swiglu`."""
    gate, up = _halves(call.gate_up)
    quantised = call.scales is not None
    one_dtype([gate] if quantised else [gate, call.out])
    shape = _shape([gate, up], limits, quantised=quantised, counted=call.offsets is not None)
    placed = in_stage([gate, up], shape)
    out, fp8 = PipeRows(), PipeFp8()
    if call.scales is not None:
        if call.weights is not None:
            raise ConfigError("swiglu of weighted rows as 8-bit floats; leave out the weights or the scales")
        fp8 = fp8_of(call.out, call.scales, gate.shape)
    else:
        out = rows_of(call.out, "out", gate.shape, placed[0].offset)
    work = work_of(shape, *gate.shape)
    params = SwigluParams(placed, out, fp8, work, _end(call.offsets), _numbers(call.weights, gate.shape[:1], "weights"))
    defines = (("ROW_TYPE", row_type(gate)), *shape.defines, *((("FP8", "1"),) if quantised else ()))
    defines += _weighted(call.weights)
    return KernelCall.of(KernelSource("swiglu", (SwigluParams, *STRUCTS), defines), shape, params, work.tiles)


def swiglu_backward_call(call: SwigluBackward, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `swiglu_backward`."""
    inputs, results = [*_halves(call.gate_up), call.dy], _halves(call.d_gate_up)
    one_dtype([*inputs, *results])
    shape = _shape(inputs, limits, others=2, counted=call.offsets is not None, summed=call.weights is not None)
    placed = in_stage(inputs, shape)
    outputs = tuple(
        rows_of(each, "d_gate_up", call.dy.shape, at.offset) for each, at in zip(results, placed, strict=False)
    )
    work = work_of(shape, *call.dy.shape)
    if (call.weights is None) != (call.piece_sums is None):
        raise ConfigError("the gradient of weighted rows needs both the weights and memory for their gradients")
    weights = _numbers(call.weights, call.dy.shape[:1], "weights")
    sums = _numbers(call.piece_sums, (work.pieces, work.rows), "piece_sums")
    params = SwigluBackwardParams(placed, outputs, work, _end(call.offsets), weights, sums)
    defines = (("ROW_TYPE", row_type(call.dy)), *shape.defines, *_weighted(call.weights))
    source = KernelSource("swiglu_backward", (SwigluBackwardParams, PipeRows, PipeWork), defines)
    return KernelCall.of(source, shape, params, work.tiles)


def new_piece_sums(gate_up: torch.Tensor, offsets: torch.Tensor | None, limits: Limits) -> torch.Tensor:
    """Allocate `piece_sums` of `SwigluBackward`: float32 for each piece of each row, as these limits cut rows.

    >>> import torch
    >>> new_piece_sums(torch.empty(5, 2 * 1200), None, Limits()).shape  # pieces of 512 elements
    torch.Size([3, 5])
    """
    import torch

    gate, up = _halves(gate_up)
    work = work_of(_shape([gate, up, gate], limits, others=2, counted=offsets is not None, summed=True), *gate.shape)
    return torch.empty(work.pieces, work.rows, dtype=torch.float32, device=gate_up.device)


def pointwise_call(call: Pointwise, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `pointwise`."""
    kinds = [_kind(each, call.out) for each in call.inputs]
    streams = [each for each, kind in zip(call.inputs, kinds, strict=True) if kind == "FULL"]
    if not streams or len(kinds) > MOST_INPUTS:
        raise ConfigError(
            f"an expression of {len(kinds)} inputs, {len(streams)} of them as large as the result; it takes 1 to "
            f"{MOST_INPUTS}, and at least one that is as large"
        )
    one_dtype([*call.inputs, call.out])
    shape = _shape(streams, limits, others=1 + len(kinds) - len(streams))
    placed = in_stage(streams, shape)
    vectors = tuple(_vector(each, kind, call.out) for each, kind in zip(call.inputs, kinds, strict=True))
    work = work_of(shape, *call.out.shape)
    params = PointwiseParams(placed, vectors, rows_of(call.out, "out", call.out.shape, placed[0].offset), work)
    types = (("ROW_TYPE", row_type(call.out)), ("KINDS", ",".join(kinds)), ("EXPRESSION", call.code))
    source = KernelSource("pointwise", (PointwiseParams, PipeRows, PipeWork), (*types, *shape.defines))
    return KernelCall.of(source, shape, params, work.tiles)


def _shape(
    streams: Sequence[torch.Tensor],
    limits: Limits,
    *,
    others: int = 1,
    quantised: bool = False,
    counted: bool = False,
    summed: bool = False,
) -> PipeShape:
    """The shape for inputs as large as the result; `others` counts results and vectors."""
    rows, hidden = streams[0].shape
    eight_bytes = sum(8 * each.element_size() for each in streams)
    registers = (len(streams) + others) * 2 * streams[0].element_size()
    work = RowWork(
        rows, check_hidden(hidden), eight_bytes, len(streams), registers, 0, quantised, counted, summed=summed
    )
    return piece_shape(work, limits)


def _halves(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if whole.shape[1] % 2:
        raise ConfigError(f"gate_up has rows of {whole.shape[1]} elements; they are a gate and an up of equal size")
    half = whole.shape[1] // 2
    return whole[:, :half], whole[:, half:]


def _numbers(tensor: torch.Tensor | None, shape: Sequence[int], name: str) -> int:
    """The address of float32 numbers of this shape; 0 without them."""
    if tensor is None:
        return 0
    if str(tensor.dtype) != "torch.float32" or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        raise ConfigError(
            f"{name} are {tensor.dtype} {tuple(tensor.shape)}; float32 {tuple(shape)} is needed, contiguous"
        )
    return tensor.data_ptr()


def _weighted(weights: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    return () if weights is None else (("WEIGHTED", "1"),)


def _end(offsets: torch.Tensor | None) -> int:
    """The address of the last offset."""
    if offsets is None:
        return 0
    if str(offsets.dtype) != "torch.int32" or offsets.dim() != 1 or not len(offsets):
        raise ConfigError(f"expert_offsets are {offsets.dtype} {tuple(offsets.shape)}; int32 [experts + 1] is needed")
    return offsets.data_ptr() + (len(offsets) - 1) * offsets.stride(0) * 4


def _kind(tensor: torch.Tensor, out: torch.Tensor) -> str:
    rows, hidden = out.shape
    kinds = {(rows, hidden): "FULL", (hidden,): "ROW", (rows, 1): "COLUMN"}
    kind = kinds.get(tuple(tensor.shape))
    if kind is None:
        raise ConfigError(
            f"an input has the shape {tuple(tensor.shape)}; with {rows} x {hidden} it is one of {list(kinds)}"
        )
    return kind


def _vector(tensor: torch.Tensor, kind: str, out: torch.Tensor) -> PipeRows:
    if kind == "FULL":
        return PipeRows()
    if kind == "ROW":
        return PipeRows(vector_of(tensor, out.shape[1], "a row vector"))
    return PipeRows(tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
