"""Choose the kernel of a product by the rows that an expert is expected to have."""

from __future__ import annotations

from math import inf

from raymoe.moe.products import FEW, MANY, SOME, TileClass

CHOICES: tuple[tuple[float, TileClass | None], ...] = ((16.0, None), (72.0, FEW), (144.0, SOME), (inf, MANY))
"""Rows of an expert, on average, up to which each is the fastest. None is few_rows.cu (docs/evidence/experiments/
few_rows.md), which has SwiGLU alone; the others are classes of product.cu."""


def choose(expected_rows: float, few_rows: bool) -> TileClass | None:
    """Return the class of tiles of product.cu; None: few_rows.cu, if that has this product (`few_rows`).

    >>> choose(8.0, few_rows=True) is None, choose(8.0, few_rows=False) is FEW, choose(inf, few_rows=True) is MANY
    (True, True, True)
    """
    return next(tiles for most, tiles in CHOICES if expected_rows <= most and (few_rows or tiles is not None))
