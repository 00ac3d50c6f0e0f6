"""The builds of kernels/moe/product.cu and outer_product.cu."""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.moe.products import TILES, Gate
from tests.unit.moe.emulated_outer import OuterCase
from tests.unit.moe.emulated_product import SMALL, ProductCase, in_pieces

PLAIN = ProductCase((1,), columns=8, outputs=16, tiles=TILES)
GATED = replace(PLAIN, gate=Gate())
ALL_SWITCHES = replace(PLAIN, gate=Gate(True, 1.702, 7.0, 1.0), gate_up=True, bias=True, weighted=True, zero_gaps=True)
GPT_OSS = Gate(True, 1.702, 7.0, 1.0)
TRAINED = replace(GATED, gate_up=True, zero_gaps=True)
OF_LAYERS = (
    *(TRAINED, replace(TRAINED, weighted=True), replace(PLAIN, zero_gaps=True)),
    *(replace(PLAIN, gate=GPT_OSS, bias=True), replace(PLAIN, bias=True)),
)
"""The builds of layers that the switches do not show: the forward pass of training, and gpt-oss."""
GRADIENT = replace(PLAIN, transposed=True, zero_gaps=True)
HALF = replace(ALL_SWITCHES, gate=Gate(), dtype=torch.float16)


def product_sources() -> tuple[KernelSource, ...]:
    """Return the builds: first those that show each switch, all but one with small tiles, which compile in seconds."""
    quick = (PLAIN, *(replace(case, tiles=SMALL) for case in (GATED, ALL_SWITCHES, HALF)))
    whole = (PLAIN, GATED, ALL_SWITCHES, HALF, replace(PLAIN, bias=True, weighted=True, zero_gaps=True), *OF_LAYERS)
    gradients = GRADIENT, replace(GRADIENT, dtype=torch.float16), replace(GRADIENT, zero_gaps=False)
    told = [in_pieces(replace(PLAIN, bias=bias).product()) for bias in (False, True)]
    products = [*(case.product() for case in (*quick, *whole, *gradients)), *told]
    return tuple(dict.fromkeys(product.source() for product in products))


def outer_sources() -> tuple[KernelSource, ...]:
    """Return all builds of outer_product.cu."""
    cases = (OuterCase((1,), 16, 8, dtype, adds) for dtype in (torch.bfloat16, torch.float16) for adds in (False, True))
    return tuple(case.product().source() for case in cases)
