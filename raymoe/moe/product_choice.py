"""Choose the kernel of a product by the rows that an expert is expected to have."""

from __future__ import annotations

from math import inf

from raymoe.moe.product_fp8 import FEW as FP8_FEW
from raymoe.moe.product_fp8 import MANY as FP8_MANY
from raymoe.moe.product_fp8 import SOME as FP8_SOME
from raymoe.moe.product_fp8 import ScaledTiles
from raymoe.moe.products import FEW, MANY, SOME, TileClass

CHOICES: tuple[tuple[float, TileClass | None], ...] = ((16.0, None), (72.0, FEW), (144.0, SOME), (inf, MANY))
"""Rows of an expert, on average, up to which each is the fastest. None is few_rows.cu (docs/evidence/experiments/
few_rows.md), which has SwiGLU alone; the others are classes of product.cu."""


FP8_CHOICES: tuple[tuple[float, ScaledTiles], ...] = ((24.0, FP8_FEW), (48.0, FP8_SOME), (inf, FP8_MANY))
"""The same for product_fp8.cu, by the sizes of tiles alone: no run has measured them yet."""


def choose_fp8(expected_rows: float) -> ScaledTiles:
    """Return the class of tiles of product_fp8.cu.

    >>> choose_fp8(8.0) is FP8_FEW, choose_fp8(inf) is FP8_MANY
    (True, True)
    """
    return next(tiles for most, tiles in FP8_CHOICES if expected_rows <= most)


def choose(expected_rows: float, few_rows: bool) -> TileClass | None:
    """Return the class of tiles of product.cu; None: few_rows.cu, if that has this product (`few_rows`).

    >>> choose(8.0, few_rows=True) is None, choose(8.0, few_rows=False) is FEW, choose(inf, few_rows=True) is MANY
    (True, True, True)
    """
    return next(tiles for most, tiles in CHOICES if expected_rows <= most and (few_rows or tiles is not None))
