"""Products of experts whose rows and weights are 8-bit floats, by kernels/moe/product_fp8.cu.

The kernel is product.cu for other operands: tiles, counts and tensor maps are those of `Product`. Scales are beside it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import U64, Address, Params
from raymoe.cuda.tensor_map import EncodedMap
from raymoe.errors import ConfigError
from raymoe.fp8 import FP8_BLOCK
from raymoe.moe.products import Product, ProductParams, TileClass

MULTIPLYING_WARPS = 8
COLUMN_STEP = 16
"""Columns are a multiple of it: rows begin at multiples of 16 bytes."""
LEAST_STAGES = 3
"""Three warps take stages in turn."""
MOST_TOKENS = 128
"""Tokens of a tile: two warpgroups have 64 each, as rows of wgmma."""
MOST_COLUMN_TOKENS = 64
"""Up to so many are columns of wgmma."""


@dataclass(frozen=True)
class ScaledTiles(TileClass):
    """A build of product_fp8.cu. Its shared memory begins with scales."""

    def __post_init__(self) -> None:
        columns = 0 < self.tokens <= MOST_COLUMN_TOKENS and self.tokens % 8 == 0
        if not (columns or self.tokens == MOST_TOKENS) or self.stages < LEAST_STAGES:
            raise ConfigError(
                f"{self}: product_fp8.cu has up to {MOST_COLUMN_TOKENS} tokens a tile, in steps of 8, or "
                f"{MOST_TOKENS}, and from {LEAST_STAGES} stages on"
            )

    def shared_bytes(self, experts: int) -> int:
        """Strips with a float for each token: factors, maxima, factors of results. Then as in product.cu.

        >>> TILES.shared_bytes(256), ScaledTiles(32, 6).shared_bytes(256)
        (207012, 225476)
        """
        strips = 2 * self.stages + MULTIPLYING_WARPS + 1
        return -(-strips * 4 * self.tokens // 1024) * 1024 + super().shared_bytes(experts)


TILES = ScaledTiles(128, 4)
"""The class that is the fastest for any number of rows, and with all switches spills no registers."""


@dataclass(frozen=True)
class ScaledProductParams(Params):
    """The parameters of kernels/moe/product_fp8.cu."""

    product: ProductParams
    row_scales: Address
    row_stride: U64
    block_stride: U64
    weight_scales: Address
    y_scales: Address
    y_scale_stride: U64
    unused: Annotated[tuple[int, ...], ctypes.c_uint64 * 2] = (0,) * 2


SCALES = ("row_scales", "row_stride", "block_stride", "weight_scales", "y_scales", "y_scale_stride")


@dataclass(slots=True)
class ScaledProduct:
    """A product of float8_e4m3fn operands, x[C, K] and weight[L, N, K].

    Scales are float32: [C, ceil(K / 128)] of any strides, and [L, ceil(N / 128), ceil(K / 128)]. y is bfloat16. With
    `y_scales`, one column of scales after the other, a gated product gives float8_e4m3fn and scales.
    """

    product: Product
    row_scales: torch.Tensor
    weight_scales: torch.Tensor
    y_scales: torch.Tensor | None = None

    def source(self) -> KernelSource:
        """Return the build for this product."""
        defines = self.product.source().defines
        if self.y_scales is not None:
            defines += (("QUANTISED_RESULTS", "1"),)
        return KernelSource("moe/product_fp8", (ScaledProductParams, ProductParams, EncodedMap), defines)

    def check(self) -> None:
        """Refuse what the kernel cannot compute."""
        self.product.check()
        weight = self.product.weight
        if not fits(weight.shape[1], weight.shape[2], self.product.gate is not None, self._interleaved):
            raise ConfigError(
                f"fp8 product of {weight.shape[1]} rows of {weight.shape[2]} columns; the kernel takes columns in "
                f"multiples of {COLUMN_STEP}, and gate and up in multiples of {FP8_BLOCK} rows"
            )

    @property
    def _interleaved(self) -> bool:
        return self.product.gate is not None and self.product.gate.interleaved

    def params(self, encoded: tuple[EncodedMap, EncodedMap, tuple[EncodedMap, ...]], taken: int) -> ScaledProductParams:
        """Return the parameters; `taken` is the address of the counter of tiles."""
        return ScaledProductParams(self.product.params(encoded, taken), *self.scales())

    def scales(self) -> tuple[int, int, int, int, int, int]:
        """Return the parameters SCALES: addresses of scales, and strides in floats."""
        of_rows, of_weight, of_y = self.row_scales, self.weight_scales, self.y_scales
        row, block = of_rows.stride()
        y, y_stride = (0, 0) if of_y is None else (of_y.data_ptr(), of_y.stride(1))
        return of_rows.data_ptr(), row, block, of_weight.data_ptr(), y, y_stride


def fits(rows: int, columns: int, gated: bool, interleaved: bool) -> bool:
    """Whether the kernel multiplies by weights of so many rows and columns.

    Gate and up must not share a block of scales. Where they take turns, 64 of each are a block.

    >>> fits(256, 48, True, False), fits(128, 48, True, False), fits(128, 48, True, True), fits(48, 40, False, False)
    (True, False, True, False)
    """
    step = 1 if not gated else FP8_BLOCK if interleaved else 2 * FP8_BLOCK
    return columns % COLUMN_STEP == 0 and rows % step == 0
