"""kernels/moe/product.cu on the emulator, against exact results: operands are small integers."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch

from raymoe.exchange.peer.trace import NAMES, TRACE_POINTS
from raymoe.moe.products import TILES, Gate, TileClass
from tests.emulator.build import compiler
from tests.unit.moe.emulated_product import SMALL, ProductCase, drawn_case, in_pieces, judge, run_product

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")

OTHER = TileClass(24, 3)
SWIGLU, INTERLEAVED = Gate(), Gate(interleaved=True)
GPT_OSS = Gate(interleaved=True, alpha=1.702, limit=7.0, up_plus=1.0)
F16 = torch.float16


def check(case: ProductCase, blocks: int = 2, seed: int = 0) -> None:
    product = case.product()
    run_product(product, blocks, seed)
    judge(product, case.untouched)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        ProductCase(),
        ProductCase(columns=192, outputs=272),
        ProductCase(columns=8, outputs=16),
        ProductCase(columns=64, outputs=256, gap=0),
        ProductCase(tiles=OTHER, columns=136),
        ProductCase((24, 25, 48, 8, 7), tiles=OTHER, columns=64, outputs=144),
        ProductCase((1, 0, 0), columns=64),
        ProductCase((0, 0, 0)),
        ProductCase((1,) * 40, columns=16, outputs=16),
        ProductCase((70,), columns=64, outputs=528),
    ],
    ids=str,
)
def test_each_expert_multiplies_its_own_rows(case: ProductCase) -> None:
    """Rows of no expert are NaN in x, which must not spread, and are not written."""
    check(case)


@pytest.mark.parametrize("case", [ProductCase(), ProductCase(gate=SWIGLU), ProductCase(transposed=True)], ids=str)
@pytest.mark.parametrize(("tiles", "counts"), [(TileClass(96, 5), (64, 100, 56, 8)), (TILES, (176, 200, 120, 72, 40))])
def test_the_classes_of_layers(tiles: TileClass, counts: tuple[int, ...], case: ProductCase) -> None:
    """Their tokens come by boxes of all four sizes."""
    check(replace(case, counts=counts, columns=136, tiles=tiles))


def test_transposed_weights_give_the_same_bits() -> None:
    case = ProductCase(normal=True, columns=136, outputs=144)
    one, other = case.product(), replace(case, transposed=True).product()
    run_product(one)
    run_product(other)
    assert torch.equal(one.y, other.y)


@pytest.mark.parametrize("piece_tiles", [1, 2, 4])
@pytest.mark.parametrize("counts", [(17, 0, 40, 1), (0, 0), (8,)])
def test_results_in_pieces_of_columns_have_the_same_bits(counts: tuple[int, ...], piece_tiles: int) -> None:
    """Every piece is told once, also by blocks that have no tile of it; without rows none is."""
    case = ProductCase(counts, columns=64, outputs=784, bias=True)
    plain, told = case.product(), in_pieces(case.product(), piece_tiles)
    run_product(plain)
    for seed, blocks in enumerate((1, 3)):
        run_product(told, blocks, seed, launches=2)
        assert torch.equal(plain.y, told.y)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tiles", [SMALL, pytest.param(OTHER, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_blocks_shares_the_tiles(tiles: TileClass, seed: int) -> None:
    check(ProductCase(columns=136, outputs=272, tiles=tiles), blocks=seed % 3 + 1, seed=seed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        ProductCase(gate=SWIGLU),
        ProductCase(gate=SWIGLU, gate_up=True, columns=136, outputs=144, tiles=OTHER),
        ProductCase(gate=INTERLEAVED, gate_up=True, outputs=144),
        ProductCase(gate=GPT_OSS, gate_up=True, bias=True),
        ProductCase(gate=replace(GPT_OSS, interleaved=False), gate_up=True, bias=True, weighted=True, outputs=144),
        ProductCase(bias=True, outputs=272),
        ProductCase(weighted=True, tiles=OTHER),
        ProductCase(zero_gaps=True, gap=None, untouched=nan, gate=SWIGLU, gate_up=True),
        ProductCase((3, 17, 0, 5), zero_gaps=True, untouched=nan, bias=True, weighted=True),
        ProductCase(dtype=F16, outputs=272),
        ProductCase(transposed=True),
        ProductCase(transposed=True, columns=192, outputs=272, zero_gaps=True, gap=None, untouched=nan),
        ProductCase(transposed=True, columns=8, outputs=16, tiles=OTHER),
        ProductCase(transposed=True, dtype=F16, outputs=144, bias=True, weighted=True),
        ProductCase(dtype=F16, gate=INTERLEAVED, gate_up=True, bias=True, weighted=True, zero_gaps=True, gap=None),
    ],
    ids=str,
)
def test_every_switch(case: ProductCase) -> None:
    check(case)


def test_a_second_launch_gives_the_same_bits() -> None:
    """The first one leaves the counter of tiles at zero."""
    case = ProductCase(normal=True, gate=SWIGLU, gate_up=True)
    once, twice = case.product(), case.product()
    run_product(once)
    run_product(twice, blocks=3, seed=1, launches=2)
    assert torch.equal(once.y, twice.y)


def test_a_traced_build_stores_when_blocks_begin_and_end() -> None:
    product = ProductCase().product()
    product.trace = torch.zeros(4, TRACE_POINTS, dtype=torch.int64)
    run_product(product, blocks=3)
    begins, ends = (product.trace[:, NAMES.index(point)] for point in ("start", "end"))
    assert (begins[:3] > 0).all() and (begins[:3] <= ends[:3]).all()
    assert not product.trace[3].any() and product.trace.count_nonzero() == 6
    judge(product)


@pytest.mark.parametrize("gate", [None, SWIGLU])
def test_the_bits_of_a_row_depend_on_its_own_values(gate: Gate | None) -> None:
    """They are the same in another class, beside other rows, and where the expert has fewer rows."""
    case = ProductCase((40, 0, 17, 1), columns=136, normal=True, gate=gate)
    whole, other, fewer = case.product(), replace(case, tiles=OTHER).product(), case.product()
    fewer.counts[0], fewer.counts[2] = 9, 3
    fewer.x[int(fewer.offsets[0]) + 9 :][:31] = 5.0
    for product in (whole, other, fewer):
        run_product(product)
    assert torch.equal(whole.y, other.y)
    for expert, count in enumerate(fewer.counts.tolist()):
        start = int(fewer.offsets[expert])
        assert torch.equal(whole.y[start:][:count], fewer.y[start:][:count])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_drawn_cases(seed: int) -> None:
    check(drawn_case(seed), blocks=seed % 4 + 1, seed=seed)
