"""The builds of kernels/moe/product_fp8.cu."""

from __future__ import annotations

from dataclasses import replace

from raymoe.cuda.jit import KernelSource
from raymoe.moe.product_fp8 import TILES, ScaledTiles
from raymoe.moe.products import Gate
from tests.unit.moe.emulated_product import in_pieces
from tests.unit.moe.emulated_product_fp8 import SMALL, ScaledCase

PLAIN = ScaledCase((1,), columns=16, outputs=16, tiles=ScaledTiles(32, 6))
GATED = replace(PLAIN, gate=Gate(), outputs=128)
QUANTISED = replace(GATED, quantised=True)
ALL_SWITCHES = replace(QUANTISED, gate=Gate(True, 1.702, 7.0, 1.0), bias=True, weighted=True)


def product_fp8_sources() -> tuple[KernelSource, ...]:
    """Return the builds: first those that show each switch, in classes that compile in a few seconds."""
    quick = (PLAIN, QUANTISED, replace(ALL_SWITCHES, tiles=SMALL))
    whole = (PLAIN, QUANTISED, GATED, ALL_SWITCHES, replace(PLAIN, bias=True, weighted=True))
    cases = (*quick, *(replace(case, tiles=tiles) for tiles in (ScaledTiles(64, 5), TILES) for case in whole))
    products = [case.product() for case in cases]
    told = replace(PLAIN, tiles=TILES).product()
    told.product = in_pieces(told.product)
    return tuple(dict.fromkeys(product.source() for product in (*products, told)))
