"""Launch the norms of rows on one GPU. pipe_backward.py has their gradients, pipe_pieces.py SwiGLU and expressions.

kernels/include/raymoe/rows/pipe.cuh has the pipeline of all these kernels.

Each kernel has a dataclass with its tensors. `rms_norm_call(call, limits)` checks them and computes source, shape and
parameters. `rms_norm(call)` launches on the current stream. It does all that only for the first call with tensors of a
kind; others set addresses and the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import F32, U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.launch import KernelCall, PreparedRows, device_of
from raymoe.rows.pipe_shape import NO_LIMITS, Limits, RowWork, row_breaks, row_shape
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
    registers_of,
    row_type,
    rows_in,
    rows_of,
    scales_of,
    vector_of,
    work_of,
)

if TYPE_CHECKING:
    import torch

TwoRows = Annotated[tuple[PipeRows, ...], PipeRows.array(2)]


@dataclass(frozen=True)
class NormParams(Params):
    """The parameters of kernels/rows/rms_norm.cu and layer_norm.cu. Twin of the struct in rows/norm.cuh."""

    weight: Address
    bias: Address
    eps: F32
    unused: U32
    inputs: TwoRows
    outputs: TwoRows
    work: PipeWork
    fp8: PipeFp8


# The calls. Tensors are [..., H] and contiguous, or [T, H] with the elements of a row adjacent and rows any multiple of
# 16 bytes apart. The dataclasses are not frozen: that would cost an eager call 1 us.


@dataclass(slots=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight; with a residual, x + residual takes the place of x and is stored too.

    With `scales`, `out` is float8_e4m3fn and `scales[row, block]` is float32 with any strides, so it may lie by rows or
    by columns.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    eps: float = 1e-6
    scales: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None


@dataclass(slots=True)
class LayerNorm:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias. `scales` as in `RmsNorm`; `bias` None: no bias."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    eps: float = 1e-5
    scales: torch.Tensor | None = None


def rms_norm(call: RmsNorm, limits: Limits = NO_LIMITS) -> None:
    """Launch kernels/rows/rms_norm.cu on the current stream."""
    rows: tuple[torch.Tensor, ...] = (call.x, call.out)
    if call.residual is not None and call.residual_out is not None:
        rows = (call.x, call.out, call.residual, call.residual_out)
    elif call.residual is not call.residual_out:
        raise _half_of_residual()
    _launch(rms_norm_call, call, limits, rows, (call.weight,))


def layer_norm(call: LayerNorm, limits: Limits = NO_LIMITS) -> None:
    """Launch kernels/rows/layer_norm.cu on the current stream."""
    vectors = (call.weight,) if call.bias is None else (call.weight, call.bias)
    _launch(layer_norm_call, call, limits, (call.x, call.out), vectors)


def _launch(
    make: Callable[[Any, Limits], KernelCall],
    call: RmsNorm | LayerNorm,
    limits: Limits,
    rows: tuple[torch.Tensor, ...],
    vectors: tuple[torch.Tensor, ...],
) -> None:
    x, scales = call.x, call.scales
    count, hidden = rows_in(x), x.shape[-1]
    kind: list[Any] = [make, limits.key, call.eps, hidden]
    values = addresses_of(vectors, rows, kind)
    if scales is not None and values is not None:
        values += scales_of(scales, kind)
    device, key = device_of(x.get_device()), tuple(kind)
    prepared = None if values is None else device.find(key, count)
    if prepared is None or values is None:
        made = make(call, limits)
        if values is None or not made.tiles:  # a row of 8-bit floats needs less alignment
            device.run(made, limits.sms)
            return
        names = (*VECTORS[: len(vectors)], *(ROWS if scales is None else FP8_ROWS)[: len(rows)])
        prepared = PreparedRows(device, made, limits.sms, names if scales is None else (*names, *SCALES))
        device.keep(key, count, made.breaks, prepared)
    prepared.of_rows(count, values)


VECTORS = ("weight", "bias")
ROWS = ("inputs[0].at", "outputs[0].at", "inputs[1].at", "outputs[1].at")
FP8_ROWS = ("inputs[0].at", "fp8.values", "inputs[1].at", "outputs[1].at")
"""The parameters that each call sets."""


def rms_norm_call(call: RmsNorm, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `rms_norm`."""
    if (call.residual is None) != (call.residual_out is None):
        raise _half_of_residual()
    added = [] if call.residual is None or call.residual_out is None else [call.residual, call.residual_out]
    inputs, outputs = [call.x, *added[:1]], [call.out, *added[1:]]
    norm = _Norm("rms_norm", inputs, outputs, call.weight, None, call.scales, call.eps)
    return norm.call(limits, _switches(ADD=bool(added)))


def _half_of_residual() -> ConfigError:
    return ConfigError("rms_norm with a residual needs both the residual and a tensor for x + residual")


def layer_norm_call(call: LayerNorm, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `layer_norm`."""
    return _Norm("layer_norm", [call.x], [call.out], call.weight, call.bias, call.scales, call.eps).call(limits, ())


def _switches(**switches: bool) -> tuple[tuple[str, str], ...]:
    return tuple((name, "1") for name, on in switches.items() if on)


@dataclass(frozen=True)
class _Norm:
    """The shared part of the norms."""

    stem: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    eps: float

    def call(self, limits: Limits, defines: tuple[tuple[str, str], ...]) -> KernelCall:
        inputs, given = [*map(as_matrix, self.inputs)], [*map(as_matrix, self.outputs)]
        x, vectors = inputs[0], [each for each in (self.weight, self.bias) if each is not None]
        rows, hidden, quantised = *x.shape, self.scales is not None
        one_dtype(vectors)
        one_dtype([*inputs, *given[quantised:]])
        registers = registers_of(x) + sum(map(registers_of, vectors))
        eight_bytes = len(inputs) * 8 * x.element_size()
        work = RowWork(rows, check_hidden(hidden), eight_bytes, len(inputs), registers, quantised=quantised)
        work = replace(work, biased=self.bias is not None)
        shape = row_shape(work, limits)
        placed = in_stage(inputs, shape)
        outputs = [
            PipeRows() if quantised and i == 0 else rows_of(out, "an output", x.shape, at.offset)
            for i, (out, at) in enumerate(zip(given, placed, strict=True))
        ]
        fp8 = PipeFp8() if self.scales is None else fp8_of(given[0], self.scales, x.shape)
        tiles = work_of(shape, rows, hidden)
        addresses = [vector_of(each, hidden, "a weight or bias") for each in vectors]
        params = NormParams(addresses[0], sum(addresses[1:]), self.eps, 0, placed, tuple(outputs), tiles, fp8)
        types = (("HIDDEN", str(hidden)), ("ROW_TYPE", row_type(x)), ("WEIGHT_TYPE", row_type(self.weight)))
        switches = (
            *defines,
            *((("FP8", "1"),) if quantised else ()),
            *((("BIAS", "1"),) if self.bias is not None else ()),
        )
        source = KernelSource(f"rows/{self.stem}", (NormParams, *STRUCTS), (*types, *shape.defines, *switches))
        return KernelCall.of(source, shape, params, tiles.tiles, row_breaks(work, limits))
