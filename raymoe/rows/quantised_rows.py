"""Quantise rows to 8-bit floats with a scale for each 128 elements, by one kernel on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

import raymoe.rows.row_launch as row_launch
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import Params
from raymoe.rows.direct import directly
from raymoe.rows.elementwise_kernels import work_on
from raymoe.rows.operator_definitions import operator
from raymoe.rows.pipe_shape import NO_LIMITS, Limits, piece_breaks, piece_shape
from raymoe.rows.pipe_tensors import (
    SCALES,
    STRUCTS,
    PipeFp8,
    PipeRows,
    PipeWork,
    addresses_of,
    as_matrix,
    as_rows,
    flat,
    fp8_of,
    in_stage,
    row_type,
    rows_in,
    scales_of,
    work_of,
)
from raymoe.rows.row_launch import KernelCall, device_of
from raymoe.rows.row_results import new_quantised, quantised


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Map x[T, H] to values float8_e4m3fn[T, H] and scales float32[T, ceil(H / 128)], by the formula of `raymoe.fp8`.

    Scales are one column after the other. On GPUs H is a multiple of 8. There is no gradient.

    >>> import torch
    >>> values, scales = quantise_rows(torch.tensor([[3.0, -896.0]]))
    >>> values.tolist(), scales.tolist()
    ([[1.5, -448.0]], [[2.0]])
    """
    pair: tuple[Tensor, Tensor] = (_quantise_rows if directly(x) else _quantise_rows_operator)(x)
    return pair


def _quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if not row_launch.takes(x):
        return quantised(x, column=True)
    values, scales = new_quantised(x.shape, x.device, column=True)
    Quantise(as_rows(x), values, flat(scales)).launch()
    return values, scales


_quantise_rows_operator = operator("quantise_rows", _quantise_rows)


@_quantise_rows_operator.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return new_quantised(x.shape, x.device, column=True)


@dataclass(frozen=True)
class QuantiseParams(Params):
    """The parameters of kernels/rows/quantise.cu."""

    inputs: Annotated[tuple[PipeRows, ...], PipeRows.array(1)]
    fp8: PipeFp8
    work: PipeWork


@dataclass(slots=True)
class Quantise:
    """The values and scales of x [..., H]. `scales` as in `RmsNorm` of norm_kernels.py."""

    x: Tensor
    values: Tensor
    scales: Tensor

    def launch(self, limits: Limits = NO_LIMITS) -> None:
        """Launch the kernel on the current stream."""
        x, rows = self.x, rows_in(self.x)
        kind: list[Any] = ["quantise", limits.key, x.shape[-1]]
        addresses = addresses_of((), (x, self.values), kind)
        if addresses is not None:
            addresses += scales_of(self.scales, kind)
        device, key = device_of(x.get_device()), tuple(kind)
        prepared = None if addresses is None else device.find(key, rows)
        if prepared is not None:
            prepared.of_rows(rows, addresses)
            return
        names = ("inputs[0].at", "fp8.values", *SCALES)
        device.launch_first(key, rows, addresses, self.kernel_call(limits), limits, names)

    def kernel_call(self, limits: Limits = NO_LIMITS) -> KernelCall:
        """Check the tensors; return the kernel, its shape and its parameters."""
        x, values = as_matrix(self.x), as_matrix(self.values)
        row_work = work_on([x], quantised=True)
        shape = piece_shape(row_work, limits)
        work = work_of(shape, *x.shape)
        params = QuantiseParams(in_stage([x], shape), fp8_of(values, self.scales, x.shape), work)
        source = KernelSource("rows/quantise", (QuantiseParams, *STRUCTS), (("ROW_TYPE", row_type(x)), *shape.defines))
        return KernelCall.of(source, shape, params, work.tiles, piece_breaks(row_work, limits))
