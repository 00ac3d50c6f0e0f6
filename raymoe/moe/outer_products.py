"""Gradients of the experts' weights by kernels/moe/outer_product.cu: each expert's rows, transposed, times others.

The kernel clips loads at an expert's count, so gaps may hold anything. docs/products.md has more.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import U32, Address, Params
from raymoe.cuda.tensor_map import EncodedMap, TensorMap
from raymoe.errors import ConfigError
from raymoe.moe.products import ELEMENTS
from raymoe.rows.pipe_tensors import ALIGNMENT

THREADS = 384
TILE_OUTPUTS, TILE_COLUMNS, STAGE_ROWS, STAGES = 128, 256, 64, 4
PIECE = 64
"""Elements of a row in a box."""
CLIPPED = 1 << 30
"""Twin of the constant in kernels/include/raymoe/moe/product/outer.cuh."""
MOST_SIZE = 0x7FFF0000
"""A size of a tensor map that no coordinate reaches."""
STEP = 8
"""Outputs and columns are multiples of it."""
SHARED_BYTES = STAGES * (STAGE_ROWS * (TILE_OUTPUTS + TILE_COLUMNS) * 2 + 16) + 2 * (16 + 16)
"""The stages, their barriers, and two records of tiles with theirs."""


@dataclass(frozen=True)
class OuterParams(Params):
    """The parameters of kernels/moe/outer_product.cu."""

    dy: EncodedMap
    x: EncodedMap
    expert_offsets: Address
    expert_counts: Address
    d_weight: Address
    taken: Address
    experts: U32
    outputs: U32
    columns: U32
    unused: Annotated[tuple[int, ...], ctypes.c_uint32 * 5] = (0,) * 5


@dataclass(slots=True)
class OuterProduct:
    """d_weight[L, N, K] from dy[C, N] and x[C, K], of bfloat16 or float16. Offsets are int32[L + 1], counts int32[L].

    If d_weight is float32, the sums are added to it.
    """

    dy: torch.Tensor
    x: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    d_weight: torch.Tensor

    @property
    def adds(self) -> bool:
        return self.d_weight.dtype is torch.float32

    @property
    def tiles(self) -> int:
        """The number of tiles.

        >>> dy, x, places = torch.empty(9, 136), torch.empty(9, 512), torch.empty(4)
        >>> OuterProduct(dy, x, places, places, torch.empty(3, 136, 512)).tiles
        12
        """
        experts, outputs, columns = self.d_weight.shape
        return experts * -(-outputs // TILE_OUTPUTS) * -(-columns // TILE_COLUMNS)

    def source(self) -> KernelSource:
        """Return the build for this product."""
        switches = {"ADDS_RESULTS": self.adds, "HALF_FLOATS": self.x.dtype is torch.float16}
        defines = tuple((name, "1") for name, wanted in switches.items() if wanted)
        return KernelSource("moe/outer_product", (OuterParams, EncodedMap), defines)

    def maps(self) -> tuple[TensorMap, TensorMap]:
        """Return the maps of dy and x."""
        return clipped_map(self.dy), clipped_map(self.x)

    def check(self) -> None:
        """Refuse what the kernel cannot compute."""
        _, outputs, columns = self.d_weight.shape
        if not fits(outputs, columns):
            raise ConfigError(f"{outputs} outputs of {columns} columns; the outer product takes multiples of {STEP}")
        if len(self.x) >= CLIPPED:
            raise ConfigError(f"{len(self.x)} rows; the outer product takes fewer than {CLIPPED}")
        for name in ("dy", "x", "d_weight"):
            if getattr(self, name).data_ptr() % ALIGNMENT:
                raise ConfigError(
                    f"outer product: {name} does not begin at a multiple of {ALIGNMENT} bytes: call .clone()"
                )

    def params(self, encoded: tuple[EncodedMap, EncodedMap], taken: int) -> OuterParams:
        """Return the parameters; `taken` is the address of the counter of tiles."""
        experts, outputs, columns = self.d_weight.shape
        return OuterParams(
            *encoded,
            expert_offsets=self.offsets.data_ptr(),
            expert_counts=self.counts.data_ptr(),
            d_weight=self.d_weight.data_ptr(),
            taken=taken,
            experts=experts,
            outputs=outputs,
            columns=columns,
        )


def clipped_map(rows: torch.Tensor) -> TensorMap:
    """Return a map of rows[C, K] by which loads end at any row. The header of the kernel explains its dimensions."""
    columns = rows.shape[1]
    row_bytes = columns * rows.element_size()
    sizes, strides = (columns, CLIPPED, MOST_SIZE, MOST_SIZE), (row_bytes, row_bytes, (1 << 34) - row_bytes)
    return TensorMap(rows.data_ptr(), sizes, strides, (PIECE, STAGE_ROWS, 1, 1), ELEMENTS[rows.dtype])


def fits(outputs: int, columns: int) -> bool:
    """Whether the kernel computes as many outputs of as many columns.

    >>> fits(8, 16), fits(12, 64)
    (True, False)
    """
    return outputs % STEP == 0 and columns % STEP == 0 and min(outputs, columns) > 0
