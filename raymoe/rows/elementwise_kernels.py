"""SwiGLU, its gradient and expressions by kernels: memory for the results, the tensors of each kernel, and its launch.

These kernels work on each element alone, so a row can be cut into pieces. `swiglu` and the other functions have the
arguments of the operators of their names, but `Limits` in the place of `sms`. As in `norm_kernels.py`, a class has the
tensors of each kernel: `launch` enqueues it on the current stream, `kernel_call` checks the tensors and computes the
kernel, its shape and its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import torch
from torch import Tensor

import raymoe.rows.row_launch as row_launch
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.expression import MOST_INPUTS, parse
from raymoe.rows.operators import code
from raymoe.rows.pipe_shape import NO_LIMITS, Limits, RowWork, piece_breaks, piece_shape
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
    row_type,
    rows_in,
    rows_of,
    scales_of,
    takes_hidden,
    vector_of,
    work_of,
)
from raymoe.rows.row_launch import KernelCall, device_of
from raymoe.rows.row_results import new_halved, new_like, new_quantised

# SwiGLU.


def swiglu(gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    y = new_halved(gate_up)
    Swiglu(as_rows(gate_up), y, _as_offsets(offsets)).launch(limits)
    return y


def swiglu_fp8(gate_up: Tensor, offsets: Tensor | None, column: bool, limits: Limits) -> tuple[Tensor, Tensor]:
    *leading, width = gate_up.shape
    values, scales = new_quantised(torch.Size([*leading, width // 2]), gate_up.device, column)
    Swiglu(as_rows(gate_up), values, _as_offsets(offsets), flat(scales)).launch(limits)
    return values, scales


def weighted_swiglu(gate_up: Tensor, weights: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    y = new_halved(gate_up)
    Swiglu(as_rows(gate_up), y, _as_offsets(offsets), weights=weights.contiguous()).launch(limits)
    return y


def swiglu_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    d_gate_up = new_like(gate_up)
    SwigluBackward(as_rows(dy), as_rows(gate_up), d_gate_up, _as_offsets(offsets)).launch(limits)
    return d_gate_up


def weighted_swiglu_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, offsets: Tensor | None, limits: Limits
) -> tuple[Tensor, Tensor]:
    d_gate_up, rows, offsets = new_like(gate_up), as_rows(gate_up), _as_offsets(offsets)
    sums = new_piece_sums(rows, offsets, limits)
    SwigluBackward(as_rows(dy), rows, d_gate_up, offsets, weights.contiguous(), sums).launch(limits)
    d_weights = sums.view(-1) if len(sums) == 1 else sums.sum(dim=0)
    return d_gate_up, d_weights.view(weights.shape)


def _as_offsets(offsets: Tensor | None) -> Tensor | None:
    return offsets if offsets is None or offsets.dtype is torch.int32 else offsets.to(torch.int32)


@dataclass(frozen=True)
class SwigluParams(Params):
    """The parameters of kernels/rows/swiglu.cu."""

    inputs: Annotated[tuple[PipeRows, ...], PipeRows.array(2)]
    out: PipeRows
    fp8: PipeFp8
    work: PipeWork
    end: Address
    weights: Address


@dataclass(slots=True)
class Swiglu:
    """out = silu(gate) * up of gate_up [..., 2F], gate first. `scales` as in `RmsNorm` of norm_kernels.py.

    With `offsets`, int32 on the device, rows from the last offset on are neither read nor written. With `weights`,
    float32 for each row, each row is multiplied by its weight; 8-bit results have none.
    """

    gate_up: Tensor
    out: Tensor
    offsets: Tensor | None = None
    scales: Tensor | None = None
    weights: Tensor | None = None

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch the kernel on the current stream."""
        gate_up, out, offsets, scales, weights = self.gate_up, self.out, self.offsets, self.scales, self.weights
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
        if prepared is not None:
            prepared.of_rows(rows, values)
            return
        names = (*(SWIGLU if scales is None else SWIGLU_FP8), *_names_of(end=offsets, weights=weights))
        device.launch_first(key, rows, values, self.kernel_call(limits), limits, names)

    def kernel_call(self, limits: Limits) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""
        gate, up = _halves(as_matrix(self.gate_up))
        result, quantised = as_matrix(self.out), self.scales is not None
        one_dtype([gate] if quantised else [gate, result])
        row_work = work_on([gate, up], quantised=quantised, counted=self.offsets is not None)
        shape = piece_shape(row_work, limits)
        placed = in_stage([gate, up], shape)
        out, fp8 = PipeRows(), PipeFp8()
        if self.scales is not None:
            if self.weights is not None:
                raise ConfigError("swiglu of weighted rows as 8-bit floats; leave out the weights or the scales")
            fp8 = fp8_of(result, self.scales, gate.shape)
        else:
            out = rows_of(result, "out", gate.shape, placed[0].offset)
        work = work_of(shape, *gate.shape)
        weights = _numbers(self.weights, len(gate), "weights")
        params = SwigluParams(placed, out, fp8, work, _end_of(self.offsets), weights)
        switches = (*((("FP8", "1"),) if quantised else ()), *_weighted(self.weights))
        defines = (("ROW_TYPE", row_type(gate)), *shape.defines, *switches)
        source = KernelSource("rows/swiglu", (SwigluParams, *STRUCTS), defines)
        return KernelCall.of(source, shape, params, work.tiles, piece_breaks(row_work, limits))


SWIGLU = ("inputs[0].at", "inputs[1].at", "out.at")
SWIGLU_FP8 = ("inputs[0].at", "inputs[1].at", "fp8.values", *SCALES)
SWIGLU_BACKWARD = ("inputs[0].at", "outputs[0].at", "inputs[2].at", "inputs[1].at", "outputs[1].at")
"""The parameters that each launch sets, beside those of offsets and weights."""


@dataclass(frozen=True)
class SwigluBackwardParams(Params):
    """The parameters of kernels/rows/swiglu_backward.cu."""

    inputs: Annotated[tuple[PipeRows, ...], PipeRows.array(3)]
    outputs: Annotated[tuple[PipeRows, ...], PipeRows.array(2)]
    work: PipeWork
    end: Address
    weights: Address
    piece_sums: Address


@dataclass(slots=True)
class SwigluBackward:
    """The gradient of gate_up from dy [..., F].

    With `weights`, the sum of `piece_sums` over its first dimension is their gradient; `new_piece_sums` allocates them.
    """

    dy: Tensor
    gate_up: Tensor
    d_gate_up: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    piece_sums: Tensor | None = None

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch the kernel on the current stream."""
        dy, gate_up, d_gate_up, offsets = self.dy, self.gate_up, self.d_gate_up, self.offsets
        weights, sums = self.weights, self.piece_sums
        rows, width = rows_in(dy), gate_up.shape[-1]
        kind: list[Any] = ["swiglu_backward", limits.key, width]
        values = _addresses(kind, (gate_up, d_gate_up), (dy,))
        if values is not None:
            half = width // 2 * gate_up.element_size()
            values += (values[0] + half, values[1] + half)
            _add_numbers(kind, values, offsets, weights)
            if sums is not None:
                kind.append((sums.dtype, sums.shape[0]))
                values.append(sums.data_ptr())
        device, key = device_of(dy.get_device()), tuple(kind)
        prepared = None if values is None else device.find(key, rows)
        if prepared is not None:
            prepared.of_rows(rows, values)
            return
        names = (*SWIGLU_BACKWARD, *_names_of(end=offsets, weights=weights, piece_sums=sums))
        device.launch_first(key, rows, values, self.kernel_call(limits), limits, names)

    def kernel_call(self, limits: Limits) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""
        dy = as_matrix(self.dy)
        inputs, results = [*_halves(as_matrix(self.gate_up)), dy], _halves(as_matrix(self.d_gate_up))
        one_dtype([*inputs, *results])
        row_work = work_on(inputs, others=2, counted=self.offsets is not None, summed=self.weights is not None)
        shape = piece_shape(row_work, limits)
        placed = in_stage(inputs, shape)
        work = work_of(shape, *dy.shape)
        outputs = tuple(
            rows_of(result, "d_gate_up", dy.shape, at.offset) for result, at in zip(results, placed, strict=False)
        )
        if (self.weights is None) != (self.piece_sums is None):
            raise ConfigError("the gradient of weighted rows needs both the weights and memory for their gradients")
        weights = _numbers(self.weights, work.rows, "weights")
        sums = _numbers(self.piece_sums, work.pieces * work.rows, "piece_sums")
        params = SwigluBackwardParams(placed, outputs, work, _end_of(self.offsets), weights, sums)
        defines = (("ROW_TYPE", row_type(dy)), *shape.defines, *_weighted(self.weights))
        source = KernelSource("rows/swiglu_backward", (SwigluBackwardParams, PipeRows, PipeWork), defines)
        return KernelCall.of(source, shape, params, work.tiles, piece_breaks(row_work, limits))


def new_piece_sums(gate_up: Tensor, offsets: Tensor | None, limits: Limits) -> Tensor:
    """Allocate `piece_sums` of `SwigluBackward`: float32 for each piece of each row, as these limits cut rows.

    >>> new_piece_sums(torch.empty(5, 2 * 1200), None, Limits()).shape  # pieces of 512 elements
    torch.Size([3, 5])
    """
    rows, half = rows_in(gate_up), gate_up.shape[-1] // 2
    pieces = _pieces(rows, half, gate_up.element_size(), offsets is not None, limits.key)
    return torch.empty((pieces, rows), dtype=torch.float32, device=gate_up.device)


@functools.lru_cache(maxsize=1024)
def _pieces(rows: int, half: int, item: int, counted: bool, limits: Any) -> int:
    work = RowWork(rows, check_hidden(half), 24 * item, 3, 10 * item, counted=counted, summed=True)
    return work_of(piece_shape(work, Limits(*limits)), rows, half).pieces


def _addresses(kind: list[Any], *groups: tuple[Tensor, ...]) -> list[int] | None:
    """`addresses_of` for several groups of rows; the rows of a group have one shape."""
    addresses: list[int] = []
    for group in groups:
        of_group = addresses_of((), group, kind)
        if of_group is None:
            return None
        addresses += of_group
    return addresses


def _add_numbers(kind: list[Any], values: list[int], offsets: Tensor | None, weights: Tensor | None) -> None:
    if offsets is not None:
        kind.append(("offsets", offsets.dtype))
        values.append(offsets.data_ptr() + (offsets.shape[0] - 1) * offsets.stride(0) * 4)
    if weights is not None:
        kind.append(("weights", weights.dtype, weights.is_contiguous()))
        values.append(weights.data_ptr())


def _names_of(**tensors: Tensor | None) -> list[str]:
    """The names of the parameters whose tensors are given."""
    return [name for name, tensor in tensors.items() if tensor is not None]


def _halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up."""
    if whole.shape[1] % 2:
        raise ConfigError(f"gate_up has rows of {whole.shape[1]} elements; they are a gate and an up of equal size")
    half = whole.shape[1] // 2
    return whole[:, :half], whole[:, half:]


def _numbers(tensor: Tensor | None, count: int, name: str) -> int:
    """Check `count` float32 numbers, and return their address; 0 without them."""
    if tensor is None:
        return 0
    if str(tensor.dtype) != "torch.float32" or tensor.numel() != count or not tensor.is_contiguous():
        raise ConfigError(
            f"{name} are {tensor.dtype} {tuple(tensor.shape)}; {count} contiguous numbers of float32 are needed"
        )
    return tensor.data_ptr()


def _weighted(weights: Tensor | None) -> tuple[tuple[str, str], ...]:
    return () if weights is None else (("WEIGHTED", "1"),)


def _end_of(offsets: Tensor | None) -> int:
    """Check the offsets, and return the address of the last one; 0 without them."""
    if offsets is None:
        return 0
    if str(offsets.dtype) != "torch.int32" or offsets.dim() != 1 or not len(offsets):
        raise ConfigError(f"expert_offsets are {offsets.dtype} {tuple(offsets.shape)}; int32 [experts + 1] is needed")
    return offsets.data_ptr() + (len(offsets) - 1) * offsets.stride(0) * 4


# Expressions.


def adds(terms: Sequence[Tensor]) -> bool:
    """Whether the kernel adds these terms of one shape and dtype."""
    return len(terms) <= MOST_INPUTS and takes_hidden(terms[0].shape[-1]) and row_launch.takes(terms[0])


def pointwise(expression: str, names: str, inputs: Sequence[Tensor], limits: Limits) -> Tensor:
    by_name = dict(zip(names.split(","), inputs, strict=True))
    full = max(inputs, key=lambda tensor: (tensor.dim(), tensor.numel(), tensor.shape[-1]))
    parsed = parse(expression)
    return computed(code(parsed), [by_name[name] for name in parsed.names], full, limits)


def computed(expression: str, inputs: Sequence[Tensor], full: Tensor, limits: Limits) -> Tensor:
    """Compute an expression in C++ (`code` of `raymoe.rows.operators`). The result is as large as `full`."""
    out = new_like(full)
    shape = full.shape
    rows = [as_rows(tensor) if tensor.shape == shape else _as_spread(tensor, shape) for tensor in inputs]
    Pointwise(expression, rows, out).launch(limits)
    return out


def _as_spread(vector: Tensor, full: torch.Size) -> Tensor:
    """Return a row or column vector as the kernel takes it."""
    if vector.shape == full[-1:]:
        return as_dense(vector)
    return vector if vector.is_contiguous() else vector.reshape(-1, 1)


KERNEL_INPUTS = MOST_INPUTS + 1
"""The inputs that kernels/rows/pointwise.cu takes: those of an expression, and the gradient of its result."""


@dataclass(frozen=True)
class PointwiseParams(Params):
    """The parameters of kernels/rows/pointwise.cu."""

    streams: Annotated[tuple[PipeRows, ...], PipeRows.array(KERNEL_INPUTS)]
    vectors: Annotated[tuple[PipeRows, ...], PipeRows.array(KERNEL_INPUTS)]
    out: PipeRows
    work: PipeWork


@dataclass(slots=True)
class Pointwise:
    """An expression in C++ of float variables v0, v1, ..., one for each input, from a parser that checked it.

    An input is as large as `out` [..., H], or a row vector [H], or a column vector [..., 1]. All have one dtype.
    """

    code: str
    inputs: Sequence[Tensor]
    out: Tensor

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch the kernel on the current stream. A new expression or mix of inputs is compiled first."""
        out, inputs = self.out, self.inputs
        rows, shape = rows_in(out), out.shape
        kind: list[Any] = ["pointwise", limits.key, self.code, shape[-1]]
        values: list[int] | None
        for tensor in inputs:
            if tensor.shape != shape:
                values, spread = _spread_addresses(kind, out, inputs)
                break
        else:
            values, spread = addresses_of((), (out, *inputs), kind), ["FULL"] * len(inputs)
        device, key = device_of(out.get_device()), tuple(kind)
        prepared = None if values is None else device.find(key, rows)
        if prepared is not None:
            prepared.of_rows(rows, values)
            return
        names = ("out.at", *_names_of_inputs(spread))
        device.launch_first(key, rows, values, self.kernel_call(limits), limits, names)

    def kernel_call(self, limits: Limits) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""
        kinds = [_kind(tensor, self.out) for tensor in self.inputs]
        out = as_matrix(self.out)
        inputs = [
            tensor if kind == "ROW" else as_matrix(tensor) for tensor, kind in zip(self.inputs, kinds, strict=True)
        ]
        streams = [tensor for tensor, kind in zip(inputs, kinds, strict=True) if kind == "FULL"]
        if not streams or len(kinds) > KERNEL_INPUTS:
            raise ConfigError(
                f"an expression of {len(kinds)} inputs, {len(streams)} of them as large as the result; it takes 1 to "
                f"{KERNEL_INPUTS}, and at least one that is as large"
            )
        one_dtype([*inputs, out])
        row_work = work_on(streams, others=1 + len(kinds) - len(streams))
        shape = piece_shape(row_work, limits)
        placed = in_stage(streams, shape)
        vectors = tuple(_vector(tensor, kind, out) for tensor, kind in zip(inputs, kinds, strict=True))
        work = work_of(shape, *out.shape)
        params = PointwiseParams(placed, vectors, rows_of(out, "out", out.shape, placed[0].offset), work)
        types = (("ROW_TYPE", row_type(out)), ("KINDS", ",".join(kinds)), ("EXPRESSION", self.code))
        source = KernelSource("rows/pointwise", (PointwiseParams, PipeRows, PipeWork), (*types, *shape.defines))
        return KernelCall.of(source, shape, params, work.tiles, piece_breaks(row_work, limits))


def _spread_addresses(kind: list[Any], out: Tensor, inputs: Sequence[Tensor]) -> tuple[list[int] | None, list[str]]:
    """The addresses of the result and of the inputs, and how each input is spread over the result."""
    spread = [_kind(tensor, out) for tensor in inputs]
    whole = [tensor for tensor, how in zip(inputs, spread, strict=True) if how == "FULL"]
    vectors = [tensor for tensor, how in zip(inputs, spread, strict=True) if how == "ROW"]
    columns = [(tensor.dtype, tensor.is_contiguous() or tensor.stride()) for tensor in inputs if tensor.dim() > 1]
    kind += (*spread, *columns)
    aligned = addresses_of(vectors, (out, *whole), kind) is not None
    return [tensor.data_ptr() for tensor in (out, *inputs)] if aligned else None, spread


def _names_of_inputs(kinds: Sequence[str]) -> list[str]:
    """The parameters that hold the addresses of an expression's inputs.

    >>> _names_of_inputs(["FULL", "ROW", "FULL"])
    ['streams[0].at', 'vectors[1].at', 'streams[1].at']
    """
    streams = count()
    return [
        f"streams[{next(streams)}].at" if kind == "FULL" else f"vectors[{index}].at" for index, kind in enumerate(kinds)
    ]


def _kind(tensor: Tensor, out: Tensor) -> str:
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


def _vector(tensor: Tensor, kind: str, out: Tensor) -> PipeRows:
    """The parameters of a row or column vector; zeros for an input as large as the result."""
    if kind == "FULL":
        return PipeRows()
    if kind == "ROW":
        return PipeRows(vector_of(tensor, out.shape[1], "a row vector"))
    return PipeRows(tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


def work_on(
    streams: Sequence[Tensor],
    *,
    others: int = 1,
    quantised: bool = False,
    counted: bool = False,
    summed: bool = False,
) -> RowWork:
    """The work on inputs as large as the result; `others` counts results and vectors."""
    rows, hidden = streams[0].shape
    return RowWork(
        rows,
        check_hidden(hidden),
        eight_bytes=sum(8 * tensor.element_size() for tensor in streams),
        inputs=len(streams),
        registers=(len(streams) + others) * 2 * streams[0].element_size(),
        quantised=quantised,
        counted=counted,
        summed=summed,
    )
