"""Launch the kernels that work on each element alone: swiglu.cu, swiglu_backward.cu and pointwise.cu.

As in `raymoe.rows.pipe`, `swiglu(call)` launches on the current stream, and `swiglu_call(call, limits)` computes the
kernel, its shape and its parameters anew.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.launch import KernelCall, PreparedRows, device_of
from raymoe.rows.pipe_shape import NO_LIMITS, Limits, RowWork, piece_breaks, piece_shape
from raymoe.rows.pipe_tensors import (
    SCALES,
    STRUCTS,
    PipeFp8,
    PipeRows,
    PipeWork,
    addresses_of,
    as_matrix,
    check_hidden,
    fp8_of,
    in_stage,
    one_dtype,
    row_type,
    rows_in,
    rows_of,
    scales_of,
    vector_of,
    work_of,
)

if TYPE_CHECKING:
    import torch

MOST_INPUTS = 9
"""Of an expression: as many as kernels/rows/pointwise.cu takes."""


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


# The calls; raymoe/rows/pipe.py says what tensors they take.


@dataclass(slots=True)
class Swiglu:
    """out = silu(gate) * up of gate_up [..., 2F], gate first. `scales` as in `RmsNorm`.

    With `offsets`, int32 on the device, rows from the last offset on are neither read nor written. With `weights`,
    float32 for each row, each row is multiplied by its weight; 8-bit results have none.
    """

    gate_up: torch.Tensor
    out: torch.Tensor
    offsets: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    weights: torch.Tensor | None = None


@dataclass(slots=True)
class SwigluBackward:
    """The gradient of gate_up from dy [..., F].

    With `weights`, the sum of `piece_sums` over its first dimension is their gradient; `new_piece_sums` allocates them.
    """

    dy: torch.Tensor
    gate_up: torch.Tensor
    d_gate_up: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    piece_sums: torch.Tensor | None = None


@dataclass(slots=True)
class Pointwise:
    """An expression in C++ of float variables v0, v1, ..., one for each input, from a parser that checked it.

    An input is as large as `out` [..., H], or a row vector [H], or a column vector [..., 1]. All have one dtype.
    """

    code: str
    inputs: Sequence[torch.Tensor]
    out: torch.Tensor


def swiglu(call: Swiglu, limits: Limits = NO_LIMITS) -> None:
    """Launch kernels/rows/swiglu.cu on the current stream."""
    gate_up, out, offsets, scales, weights = call.gate_up, call.out, call.offsets, call.scales, call.weights
    rows, width = rows_in(gate_up), gate_up.shape[-1]
    kind: list[Any] = ["swiglu", limits.key, width]
    values = _addresses(kind, (gate_up,), (out,))
    if values is not None:
        values.insert(1, values[0] + width // 2 * gate_up.element_size())
        if scales is not None:
            values += scales_of(scales, kind)
        _add_numbers(kind, values, offsets, weights)
    device, key = device_of(gate_up.get_device()), tuple(kind)
    prepared = None if values is None else device.find(key, rows)
    if prepared is None or values is None:
        made = swiglu_call(call, limits)
        if values is None or not made.tiles:
            device.run(made, limits.sms)
            return
        names = (*(SWIGLU if scales is None else SWIGLU_FP8), *_given(end=offsets, weights=weights))
        prepared = PreparedRows(device, made, limits.sms, names)
        device.keep(key, rows, made.breaks, prepared)
    prepared.of_rows(rows, values)


def swiglu_backward(call: SwigluBackward, limits: Limits = NO_LIMITS) -> None:
    """Launch kernels/rows/swiglu_backward.cu on the current stream."""
    dy, gate_up, into, offsets = call.dy, call.gate_up, call.d_gate_up, call.offsets
    weights, sums = call.weights, call.piece_sums
    rows, width = rows_in(dy), gate_up.shape[-1]
    kind: list[Any] = ["swiglu_backward", limits.key, width]
    values = _addresses(kind, (gate_up, into), (dy,))
    if values is not None:
        half = width // 2 * gate_up.element_size()
        values += (values[0] + half, values[1] + half)
        _add_numbers(kind, values, offsets, weights)
        if sums is not None:
            kind.append((sums.dtype, sums.shape[0]))
            values.append(sums.data_ptr())
    device, key = device_of(dy.get_device()), tuple(kind)
    prepared = None if values is None else device.find(key, rows)
    if prepared is None or values is None:
        made = swiglu_backward_call(call, limits)
        if values is None or not made.tiles:
            device.run(made, limits.sms)
            return
        names = (*SWIGLU_BACKWARD, *_given(end=offsets, weights=weights, piece_sums=sums))
        prepared = PreparedRows(device, made, limits.sms, names)
        device.keep(key, rows, made.breaks, prepared)
    prepared.of_rows(rows, values)


def _addresses(kind: list[Any], *groups: tuple[torch.Tensor, ...]) -> list[int] | None:
    """`addresses_of` of several groups of rows, each of one shape."""
    found: list[int] = []
    for group in groups:
        addresses = addresses_of((), group, kind)
        if addresses is None:
            return None
        found += addresses
    return found


def _add_numbers(
    kind: list[Any], values: list[int], offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> None:
    if offsets is not None:
        kind.append(("offsets", offsets.dtype))
        values.append(offsets.data_ptr() + (offsets.shape[0] - 1) * offsets.stride(0) * 4)
    if weights is not None:
        kind.append(("weights", weights.dtype, weights.is_contiguous()))
        values.append(weights.data_ptr())


def pointwise(call: Pointwise, limits: Limits = NO_LIMITS) -> None:
    """Launch kernels/rows/pointwise.cu on the current stream. A new expression or mix of inputs is compiled first."""
    out, inputs = call.out, call.inputs
    rows, shape = rows_in(out), out.shape
    kind: list[Any] = ["pointwise", limits.key, call.code, shape[-1]]
    values: list[int] | None
    for each in inputs:
        if each.shape != shape:
            values, spread = _spread_addresses(kind, out, inputs)
            break
    else:
        values, spread = addresses_of((), (out, *inputs), kind), ["FULL"] * len(inputs)
    device, key = device_of(out.get_device()), tuple(kind)
    prepared = None if values is None else device.find(key, rows)
    if prepared is None or values is None:
        made = pointwise_call(call, limits)
        if values is None or not made.tiles:
            device.run(made, limits.sms)
            return
        prepared = PreparedRows(device, made, limits.sms, ("out.at", *_inputs(spread)))
        device.keep(key, rows, made.breaks, prepared)
    prepared.of_rows(rows, values)


def _spread_addresses(
    kind: list[Any], out: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> tuple[list[int] | None, list[str]]:
    """The addresses of the result and of the inputs, and how each input is spread over the result."""
    spread = [_kind(each, out) for each in inputs]
    whole = [each for each, how in zip(inputs, spread, strict=True) if how == "FULL"]
    vectors = [each for each, how in zip(inputs, spread, strict=True) if how == "ROW"]
    columns = [(each.dtype, each.is_contiguous() or each.stride()) for each in inputs if each.dim() > 1]
    kind += (*spread, *columns)
    aligned = addresses_of(vectors, (out, *whole), kind) is not None
    return [each.data_ptr() for each in (out, *inputs)] if aligned else None, spread


SWIGLU = ("inputs[0].at", "inputs[1].at", "out.at")
SWIGLU_FP8 = ("inputs[0].at", "inputs[1].at", "fp8.values", *SCALES)
SWIGLU_BACKWARD = ("inputs[0].at", "outputs[0].at", "inputs[2].at", "inputs[1].at", "outputs[1].at")
"""The parameters that each call sets, beside those of offsets and weights."""


def _inputs(kinds: Sequence[str]) -> list[str]:
    """The parameters that hold the addresses of an expression's inputs.

    >>> _inputs(["FULL", "ROW", "FULL"])
    ['streams[0].at', 'vectors[1].at', 'streams[1].at']
    """
    streams = count()
    return [
        f"streams[{next(streams)}].at" if kind == "FULL" else f"vectors[{index}].at" for index, kind in enumerate(kinds)
    ]


def _given(**tensors: torch.Tensor | None) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None]


def swiglu_call(call: Swiglu, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `swiglu`."""
    gate, up = _halves(as_matrix(call.gate_up))
    given, quantised = as_matrix(call.out), call.scales is not None
    one_dtype([gate] if quantised else [gate, given])
    cut = _cut([gate, up], quantised=quantised, counted=call.offsets is not None)
    shape = piece_shape(cut, limits)
    placed = in_stage([gate, up], shape)
    out, fp8 = PipeRows(), PipeFp8()
    if call.scales is not None:
        if call.weights is not None:
            raise ConfigError("swiglu of weighted rows as 8-bit floats; leave out the weights or the scales")
        fp8 = fp8_of(given, call.scales, gate.shape)
    else:
        out = rows_of(given, "out", gate.shape, placed[0].offset)
    work = work_of(shape, *gate.shape)
    params = SwigluParams(placed, out, fp8, work, _end(call.offsets), _numbers(call.weights, len(gate), "weights"))
    defines = (("ROW_TYPE", row_type(gate)), *shape.defines, *((("FP8", "1"),) if quantised else ()))
    defines += _weighted(call.weights)
    source = KernelSource("rows/swiglu", (SwigluParams, *STRUCTS), defines)
    return KernelCall.of(source, shape, params, work.tiles, piece_breaks(cut, limits))


def swiglu_backward_call(call: SwigluBackward, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `swiglu_backward`."""
    dy = as_matrix(call.dy)
    inputs, results = [*_halves(as_matrix(call.gate_up)), dy], _halves(as_matrix(call.d_gate_up))
    one_dtype([*inputs, *results])
    cut = _cut(inputs, others=2, counted=call.offsets is not None, summed=call.weights is not None)
    shape = piece_shape(cut, limits)
    placed = in_stage(inputs, shape)
    outputs = tuple(rows_of(each, "d_gate_up", dy.shape, at.offset) for each, at in zip(results, placed, strict=False))
    work = work_of(shape, *dy.shape)
    if (call.weights is None) != (call.piece_sums is None):
        raise ConfigError("the gradient of weighted rows needs both the weights and memory for their gradients")
    weights = _numbers(call.weights, work.rows, "weights")
    sums = _numbers(call.piece_sums, work.pieces * work.rows, "piece_sums")
    params = SwigluBackwardParams(placed, outputs, work, _end(call.offsets), weights, sums)
    defines = (("ROW_TYPE", row_type(dy)), *shape.defines, *_weighted(call.weights))
    source = KernelSource("rows/swiglu_backward", (SwigluBackwardParams, PipeRows, PipeWork), defines)
    return KernelCall.of(source, shape, params, work.tiles, piece_breaks(cut, limits))


def new_piece_sums(gate_up: torch.Tensor, offsets: torch.Tensor | None, limits: Limits) -> torch.Tensor:
    """Allocate `piece_sums` of `SwigluBackward`: float32 for each piece of each row, as these limits cut rows.

    >>> import torch
    >>> new_piece_sums(torch.empty(5, 2 * 1200), None, Limits()).shape  # pieces of 512 elements
    torch.Size([3, 5])
    """
    import torch

    rows, half = rows_in(gate_up), gate_up.shape[-1] // 2
    pieces = _pieces(rows, half, gate_up.element_size(), offsets is not None, limits.key)
    return torch.empty((pieces, rows), dtype=torch.float32, device=gate_up.device)


@functools.lru_cache(maxsize=1024)
def _pieces(rows: int, half: int, item: int, counted: bool, limits: Any) -> int:
    work = RowWork(rows, check_hidden(half), 24 * item, 3, 10 * item, counted=counted, summed=True)
    return work_of(piece_shape(work, Limits(*limits)), rows, half).pieces


def pointwise_call(call: Pointwise, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `pointwise`."""
    kinds = [_kind(each, call.out) for each in call.inputs]
    out = as_matrix(call.out)
    inputs = [each if kind == "ROW" else as_matrix(each) for each, kind in zip(call.inputs, kinds, strict=True)]
    streams = [each for each, kind in zip(inputs, kinds, strict=True) if kind == "FULL"]
    if not streams or len(kinds) > MOST_INPUTS:
        raise ConfigError(
            f"an expression of {len(kinds)} inputs, {len(streams)} of them as large as the result; it takes 1 to "
            f"{MOST_INPUTS}, and at least one that is as large"
        )
    one_dtype([*inputs, out])
    cut = _cut(streams, others=1 + len(kinds) - len(streams))
    shape = piece_shape(cut, limits)
    placed = in_stage(streams, shape)
    vectors = tuple(_vector(each, kind, out) for each, kind in zip(inputs, kinds, strict=True))
    work = work_of(shape, *out.shape)
    params = PointwiseParams(placed, vectors, rows_of(out, "out", out.shape, placed[0].offset), work)
    types = (("ROW_TYPE", row_type(out)), ("KINDS", ",".join(kinds)), ("EXPRESSION", call.code))
    source = KernelSource("rows/pointwise", (PointwiseParams, PipeRows, PipeWork), (*types, *shape.defines))
    return KernelCall.of(source, shape, params, work.tiles, piece_breaks(cut, limits))


def _cut(
    streams: Sequence[torch.Tensor],
    *,
    others: int = 1,
    quantised: bool = False,
    counted: bool = False,
    summed: bool = False,
) -> RowWork:
    """The work on inputs as large as the result; `others` counts results and vectors."""
    rows, hidden = streams[0].shape
    eight_bytes = sum(8 * each.element_size() for each in streams)
    registers = (len(streams) + others) * 2 * streams[0].element_size()
    return RowWork(
        rows, check_hidden(hidden), eight_bytes, len(streams), registers, 0, quantised, counted, summed=summed
    )


def _halves(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if whole.shape[1] % 2:
        raise ConfigError(f"gate_up has rows of {whole.shape[1]} elements; they are a gate and an up of equal size")
    half = whole.shape[1] // 2
    return whole[:, :half], whole[:, half:]


def _numbers(tensor: torch.Tensor | None, count: int, name: str) -> int:
    """The address of so many float32 numbers; 0 without them."""
    if tensor is None:
        return 0
    if str(tensor.dtype) != "torch.float32" or tensor.numel() != count or not tensor.is_contiguous():
        raise ConfigError(
            f"{name} are {tensor.dtype} {tuple(tensor.shape)}; {count} contiguous numbers of float32 are needed"
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
    """How an input is spread over the result. Rows and columns may be flattened where the result is not."""
    shape, full = tensor.shape, out.shape
    if shape == full:
        return "FULL"
    if shape == full[-1:]:
        return "ROW"
    if shape == (*full[:-1], 1):
        return "COLUMN"
    rows, hidden = rows_in(out), full[-1]
    kinds = {(rows, hidden): "FULL", (hidden,): "ROW", (rows, 1): "COLUMN"}
    kind = kinds.get(tuple(shape))
    if kind is None:
        raise ConfigError(f"an input has the shape {tuple(shape)}; with {rows} x {hidden} it is one of {list(kinds)}")
    return kind


def _vector(tensor: torch.Tensor, kind: str, out: torch.Tensor) -> PipeRows:
    if kind == "FULL":
        return PipeRows()
    if kind == "ROW":
        return PipeRows(vector_of(tensor, out.shape[1], "a row vector"))
    return PipeRows(tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
