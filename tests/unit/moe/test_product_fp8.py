"""kernels/moe/product_fp8.cu on the emulator. Values are small integers and scales powers of two: sums are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.moe.product_fp8 import TILES, ScaledTiles
from raymoe.moe.products import Gate
from tests.emulator.build import compiler
from tests.unit.moe.emulated_product import in_pieces
from tests.unit.moe.emulated_product_fp8 import SMALL, ScaledCase, drawn_case, judge, run_scaled

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")

OTHER = ScaledTiles(24, 4)
SWIGLU, INTERLEAVED = Gate(), Gate(interleaved=True)
GPT_OSS = Gate(interleaved=True, alpha=1.702, limit=7.0, up_plus=1.0)


def check(case: ScaledCase, blocks: int = 2, seed: int = 0) -> None:
    scaled = case.product()
    run_scaled(scaled, blocks, seed)
    judge(scaled)


@pytest.mark.parametrize(
    "case",
    [
        ScaledCase(),
        ScaledCase(columns=400, outputs=272),
        ScaledCase(columns=16, outputs=16),
        ScaledCase(columns=128, outputs=256, gap=0),
        ScaledCase(tiles=OTHER, columns=272),
        ScaledCase((24, 25, 48, 8, 7), tiles=OTHER, columns=128, outputs=144),
        ScaledCase((1, 0, 0), columns=64),
        ScaledCase((0, 0, 0)),
        ScaledCase((1,) * 40, columns=16, outputs=16),
        ScaledCase((70,), columns=128, outputs=528),
    ],
    ids=str,
)
def test_each_expert_multiplies_its_own_rows(case: ScaledCase) -> None:
    """Rows of no expert and their scales are NaN, which must not spread, and are not written."""
    check(case)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("tiles", "counts"), [(ScaledTiles(32, 6), (32, 40, 5)), (TILES, (128, 193, 120, 65, 7))])
def test_the_classes_of_layers(tiles: ScaledTiles, counts: tuple[int, ...], quantised: bool) -> None:
    """Their tokens come by boxes of all four sizes, and are columns and rows of wgmma."""
    gate = SWIGLU if quantised else None
    check(ScaledCase(counts, columns=144, outputs=128, gate=gate, quantised=quantised, tiles=tiles))


@pytest.mark.parametrize("piece_tiles", [1, 2])
@pytest.mark.parametrize("tiles", [SMALL, TILES], ids=str)
def test_results_in_pieces_of_columns_have_the_same_bits(tiles: ScaledTiles, piece_tiles: int) -> None:
    case = ScaledCase((17, 0, 130, 1), columns=144, outputs=528, tiles=tiles)
    plain, told = case.product(), case.product()
    told.product = in_pieces(told.product, piece_tiles)
    run_scaled(plain)
    run_scaled(told, blocks=3, launches=2)
    assert torch.equal(plain.product.y, told.product.y)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_blocks_shares_the_tiles(seed: int) -> None:
    check(ScaledCase(columns=272, outputs=272), blocks=seed % 3 + 1, seed=seed)


@pytest.mark.parametrize(
    "case",
    [
        ScaledCase(gate=SWIGLU, outputs=128),
        ScaledCase(gate=SWIGLU, outputs=256, quantised=True),
        ScaledCase(gate=SWIGLU, outputs=128, quantised=True, tiles=OTHER, columns=272, weighted=True),
        ScaledCase(gate=INTERLEAVED, outputs=64, quantised=True),
        ScaledCase(gate=INTERLEAVED, outputs=192, bias=True),
        ScaledCase(gate=GPT_OSS, outputs=192, quantised=True, bias=True),
        ScaledCase(gate=replace(GPT_OSS, interleaved=False), outputs=128, quantised=True, bias=True, weighted=True),
        ScaledCase(bias=True, outputs=272, by_row=True, columns=400),
        ScaledCase(weighted=True, tiles=OTHER),
        ScaledCase((70, 3), gate=SWIGLU, outputs=128, quantised=True, weighted=True, tiles=TILES),
        ScaledCase((70, 3), gate=GPT_OSS, outputs=192, quantised=True, bias=True, tiles=TILES),
        ScaledCase((70, 3), gate=INTERLEAVED, outputs=64, bias=True, tiles=TILES),
        ScaledCase((3, 130), bias=True, outputs=272, by_row=True, columns=400, weighted=True, tiles=TILES),
    ],
    ids=str,
)
def test_every_switch(case: ScaledCase) -> None:
    check(case)


def test_a_second_launch_gives_the_same_bits() -> None:
    """The first one leaves the counter of tiles at zero."""
    case = ScaledCase(normal=True, gate=SWIGLU, outputs=128, quantised=True)
    once, twice = case.product(), case.product()
    run_scaled(once)
    run_scaled(twice, blocks=3, seed=1, launches=2)
    assert torch.equal(once.product.y.view(torch.uint8), twice.product.y.view(torch.uint8))
    assert once.y_scales is not None and twice.y_scales is not None
    assert torch.equal(once.y_scales, twice.y_scales)


@pytest.mark.parametrize("gate", [None, SWIGLU])
def test_the_bits_of_a_row_depend_on_its_own_values(gate: Gate | None) -> None:
    """They are the same in another class, as rows and as columns of wgmma, and where the expert has fewer rows."""
    case = ScaledCase((80, 0, 17, 1), columns=272, outputs=128, normal=True, gate=gate)
    whole, other, fewer = case.product(), replace(case, tiles=TILES).product(), case.product()
    fewer.product.counts[0], fewer.product.counts[2] = 9, 3
    for scaled in (whole, other, fewer):
        run_scaled(scaled)
    assert torch.equal(whole.product.y, other.product.y)
    for expert, count in enumerate(fewer.product.counts.tolist()):
        start = int(fewer.product.offsets[expert])
        assert torch.equal(whole.product.y[start:][:count], fewer.product.y[start:][:count])


def test_infinite_and_undefined_results_do_not_spoil_a_scale() -> None:
    case = ScaledCase((9,), columns=128, outputs=128, gate=SWIGLU, quantised=True)
    plain, scaled = case.product(), case.product()
    scaled.product.weight[0, 5, 0] = torch.nan  # gate of output 5
    for each in (plain, scaled):
        run_scaled(each)
    values, others = scaled.product.y[:9].float(), torch.arange(128) != 5
    assert bool(values[:, 5].isnan().all()) and bool(values[:, others].isfinite().all())
    want = plain.product.y[:9].float() * plain.y_scales[:9]
    reach = want.abs().argmax(dim=1)
    same = reach != 5
    assert same.sum() > 4
    assert torch.equal(values[same][:, others] * scaled.y_scales[:9][same], want[same][:, others])


def test_outputs_after_the_last_have_no_part_in_a_scale() -> None:
    """They have no bias, and no results other than zero."""
    scaled = ScaledCase((9,), columns=64, outputs=192, gate=INTERLEAVED, quantised=True, bias=True).product()
    x, weight, bias = scaled.product.x, scaled.product.weight, scaled.product.bias
    assert bias is not None and scaled.y_scales is not None
    x[:9], weight[:], bias[:] = x.new_zeros(()), weight.new_zeros(()), 0.0
    x[:9, 0], weight[0, -2, 0], bias[0, -2:] = 64.0, -64.0, 4.0  # gate of the last output is far below zero
    run_scaled(scaled)
    assert not scaled.product.y[:9].float().any() and bool((scaled.y_scales[:9] == 1).all())


def test_sizes_that_the_kernel_does_not_take_are_refused() -> None:
    for case in (ScaledCase(columns=24), ScaledCase(gate=SWIGLU, outputs=64), ScaledCase(gate=INTERLEAVED, outputs=48)):
        with pytest.raises(ConfigError, match="multiples of"):
            case.product().check()
    for tokens, stages in ((72, 3), (136, 3), (12, 3), (16, 2), (128, 2)):
        with pytest.raises(ConfigError, match=r"up to 64 tokens a tile.* or 128, and from 3 stages on"):
            ScaledTiles(tokens, stages)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_drawn_cases(seed: int) -> None:
    check(drawn_case(seed), blocks=seed % 4 + 1, seed=seed)
