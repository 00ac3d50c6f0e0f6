"""The products of experts with few rows by few_rows.cu, which reads each weight once.

`multiply_few_rows` is one product. Its kernel multiplies the rows of an expert while the weights come from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import raymoe.rows.row_launch as row_launch
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.rows.pipe_tensors import ALIGNMENT
from raymoe.rows.row_launch import KernelCall, device_of

WARPS, BLOCKS_OF_SM = 8, 2
STEP = 32
"""Columns are a multiple of it."""


@dataclass(frozen=True)
class FewRowsParams(Params):
    """The parameters of kernels/moe/few_rows.cu."""

    x: Address
    weight: Address
    expert_offsets: Address
    expert_counts: Address
    y: Address
    experts: U32
    outputs: U32
    columns: U32
    unused: U32 = 0


@dataclass(slots=True)
class FewRows:
    """x[C, K], weight[L, N, K] and y[C, N] of bfloat16, contiguous; the offsets are int32[L + 1], the counts int32[L].

    `gated`: weight[L, 2N, K] is gate and up, and y is SwiGLU of the two products.
    """

    x: torch.Tensor
    weight: torch.Tensor
    expert_offsets: torch.Tensor
    expert_counts: torch.Tensor
    y: torch.Tensor
    gated: bool = False

    def launch(self) -> None:
        """Launch the kernel on the current stream."""
        x, weight = self.x, self.weight
        kind = "few_rows", self.gated, weight.shape
        device = device_of(x.get_device())
        prepared = device.find(kind, 0)
        addresses = [x.data_ptr(), weight.data_ptr()]
        if prepared is None or any(address % ALIGNMENT for address in addresses):
            call = self.kernel_call()
            if not call.tiles:
                return
            prepared = device.prepare(kind, 0, call, FEW_ROWS)
        addresses += (self.expert_offsets.data_ptr(), self.expert_counts.data_ptr(), self.y.data_ptr())
        prepared(prepared.call.tiles if len(x) else 0, addresses)

    def kernel_call(self) -> KernelCall:
        """Check the sizes; return the kernel, its shape and its parameters."""
        experts, rows, columns = self.weight.shape
        outputs = rows // 2 if self.gated else rows
        tile = outputs_of_tile(self.gated)
        if columns % STEP or outputs % tile:
            raise ConfigError(
                f"{outputs} outputs of {columns} columns for few rows; the kernel takes multiples of {tile} outputs "
                f"and {STEP} columns"
            )
        for name, tensor in (("x", self.x), ("weight", self.weight)):
            if tensor.data_ptr() % ALIGNMENT:
                raise ConfigError(f"few rows: {name} does not begin at a multiple of {ALIGNMENT} bytes: call .clone()")
        params = FewRowsParams(
            x=self.x.data_ptr(),
            weight=self.weight.data_ptr(),
            expert_offsets=self.expert_offsets.data_ptr(),
            expert_counts=self.expert_counts.data_ptr(),
            y=self.y.data_ptr(),
            experts=experts,
            outputs=outputs,
            columns=columns,
        )
        tiles = 0 if len(self.x) == 0 else experts * outputs // tile
        return KernelCall(source_of(self.gated), 32 * WARPS, 4 * (experts + 1), params, tiles, WARPS, BLOCKS_OF_SM)


FEW_ROWS = ("x", "weight", "expert_offsets", "expert_counts", "y")
"""The parameters that each launch sets."""


def outputs_of_tile(gated: bool) -> int:
    """The outputs of a warp's tile, which divide N."""
    return 8 if gated else 16


def source_of(gated: bool) -> KernelSource:
    return KernelSource("moe/few_rows", (FewRowsParams,), (("GATED_ROWS", "1"),) if gated else ())


def takes(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> bool:
    """Whether the kernel computes the product of such rows by weight[L, N, K]; `gated`: SwiGLU of its halves."""
    _, rows, columns = weight.shape
    sizes = columns % STEP == 0 and (rows // 2 if gated else rows) % outputs_of_tile(gated) == 0
    fit = all(
        tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
        for tensor in (x, weight)
    )
    return sizes and fit and row_launch.takes(x)


def multiply_few_rows(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, *, gated: bool
) -> torch.Tensor:
    """Multiply each expert's rows by its weight; `gated`: SwiGLU of the products by gate and up."""
    y = x.new_empty(len(x), weight.shape[1] // (2 if gated else 1))
    FewRows(x, weight, offsets, counts, y, gated).launch()
    return y
