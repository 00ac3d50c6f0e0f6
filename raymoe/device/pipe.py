"""Launch the norms of rows on one GPU. pipe_backward.py has their gradients, pipe_pieces.py SwiGLU and expressions.

kernels/include/raymoe/pipe/pipe.cuh has the pipeline of all these kernels.

Each kernel has a dataclass with its tensors. `rms_norm(call)` checks them and launches on the current stream.
`rms_norm_call(call, limits)` only computes source, shape and parameters, so a test can run them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from raymoe.device.jit import KernelSource
from raymoe.device.params import F32, U32, Address, Params
from raymoe.device.pipe_launch import KernelCall, launch
from raymoe.device.pipe_shape import Limits, RowWork, row_shape
from raymoe.device.pipe_tensors import (
    STRUCTS,
    PipeFp8,
    PipeRows,
    PipeWork,
    check_hidden,
    fp8_of,
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

TwoRows = Annotated[tuple[PipeRows, ...], PipeRows.array(2)]


@dataclass(frozen=True)
class NormParams(Params):
    """The parameters of kernels/rms_norm.cu and layer_norm.cu. Twin of the struct in pipe/norm.cuh."""

    weight: Address
    bias: Address
    eps: F32
    unused: U32
    inputs: TwoRows
    outputs: TwoRows
    work: PipeWork
    fp8: PipeFp8


# The calls. All tensors are of two dimensions, rows x hidden, with elements of a row one behind the other. The rows of
# a tensor may be any multiple of 16 bytes apart.


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class LayerNorm:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias. `scales` as in `RmsNorm`; `bias` None: no bias."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    eps: float = 1e-5
    scales: torch.Tensor | None = None


def rms_norm(call: RmsNorm, limits: Limits | None = None) -> None:
    """Launch kernels/rms_norm.cu on the current stream."""
    limits = limits or Limits()
    launch(rms_norm_call(call, limits), limits.sms, call.x.device)


def layer_norm(call: LayerNorm, limits: Limits | None = None) -> None:
    """Launch kernels/layer_norm.cu on the current stream."""
    limits = limits or Limits()
    launch(layer_norm_call(call, limits), limits.sms, call.x.device)


def rms_norm_call(call: RmsNorm, limits: Limits) -> KernelCall:
    """The kernel, shape and parameters of `rms_norm`."""
    if (call.residual is None) != (call.residual_out is None):
        raise ConfigError("rms_norm with a residual needs both the residual and a tensor for x + residual")
    added = [] if call.residual is None or call.residual_out is None else [call.residual, call.residual_out]
    inputs, outputs = [call.x, *added[:1]], [call.out, *added[1:]]
    norm = _Norm("rms_norm", inputs, outputs, call.weight, None, call.scales, call.eps)
    return norm.call(limits, _switches(ADD=bool(added)))


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
        x, vectors = self.inputs[0], [each for each in (self.weight, self.bias) if each is not None]
        rows, hidden, quantised = *x.shape, self.scales is not None
        one_dtype(vectors)
        one_dtype([*self.inputs, *self.outputs[quantised:]])
        registers = registers_of(x) + sum(map(registers_of, vectors))
        eight_bytes = len(self.inputs) * 8 * x.element_size()
        work = RowWork(rows, check_hidden(hidden), eight_bytes, len(self.inputs), registers, quantised=quantised)
        work = replace(work, biased=self.bias is not None)
        shape = row_shape(work, limits)
        placed = in_stage(self.inputs, shape)
        outputs = [
            PipeRows() if quantised and i == 0 else rows_of(out, "an output", x.shape, at.offset)
            for i, (out, at) in enumerate(zip(self.outputs, placed, strict=True))
        ]
        fp8 = PipeFp8() if self.scales is None else fp8_of(self.outputs[0], self.scales, x.shape)
        tiles = work_of(shape, rows, hidden)
        addresses = [vector_of(each, hidden, "a weight or bias") for each in vectors]
        params = NormParams(addresses[0], sum(addresses[1:]), self.eps, 0, placed, tuple(outputs), tiles, fp8)
        types = (("HIDDEN", str(hidden)), ("ROW_TYPE", row_type(x)), ("WEIGHT_TYPE", row_type(self.weight)))
        switches = (
            *defines,
            *((("FP8", "1"),) if quantised else ()),
            *((("BIAS", "1"),) if self.bias is not None else ()),
        )
        source = KernelSource(self.stem, (NormParams, *STRUCTS), (*types, *shape.defines, *switches))
        return KernelCall.of(source, shape, params, tiles.tiles)
