"""The emulator finds each bug that is injected into kernels/moe/product_fp8.cu, in what product.cu does not have."""

from __future__ import annotations

import pytest

from raymoe.moe.product_fp8 import TILES
from raymoe.moe.products import Gate
from tests.emulator.build import KERNELS, Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.moe.emulated_product_fp8 import ScaledCase, judge, run_scaled

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")

SEEDS = range(4)
PLAIN = ScaledCase((17, 0, 40, 1), columns=400, outputs=272)
ROWS = ScaledCase((200, 70), columns=400, outputs=272, tiles=TILES)
"""Tokens are rows of wgmma."""
QUANTISED_ROWS = ScaledCase((70,), columns=144, outputs=256, gate=Gate(), quantised=True, tiles=TILES)
INTERLEAVED_ROWS = ScaledCase((70,), columns=144, outputs=192, gate=Gate(interleaved=True), tiles=TILES)
BIASED_ROWS = ScaledCase((70,), columns=64, outputs=144, bias=True, weighted=True, tiles=TILES)
QUANTISED = ScaledCase((17, 5), columns=144, outputs=256, gate=Gate(), quantised=True)
INTERLEAVED = ScaledCase((17, 5), columns=144, outputs=192, gate=Gate(interleaved=True))
BIASED = ScaledCase((9,), columns=64, outputs=192, gate=Gate(True, 1.702, 7.0, 1.0), quantised=True, bias=True)
BY_ROW = ScaledCase((17, 3), columns=400, outputs=48, by_row=True)
_FOLDER = KERNELS / "include/raymoe/moe/product"
_FILES = [KERNELS / "moe/product_fp8.cu", *(_FOLDER / name for name in ("scaled.cuh", "quantised_results.cuh"))]
_FILES += [_FOLDER / "multiplying.cuh", _FOLDER / "loading.cuh"]


def injected(old: str, new: str = "", which: int | None = None, case: ScaledCase = PLAIN) -> tuple[ScaledCase, Change]:
    """Change the one file of the kernel that has the text."""
    (file,) = (path.name for path in _FILES if old in path.read_text())
    return case, Change(file, old, new, which)


def in_rows(old: str, new: str = "", which: int | None = None, case: ScaledCase = ROWS) -> tuple[ScaledCase, Change]:
    """Change the file of tokens as rows."""
    return case, Change("scaled_rows.cuh", old, new, which)


def quantised(old: str, new: str = "", which: int | None = None) -> tuple[ScaledCase, Change]:
    return injected(old, new, which, QUANTISED)


STRIPS_READ = "__syncwarp();  // all threads of the warp have read the strips\n"
FACTORS_WRITTEN = "__syncwarp();  // all threads of the warp have written their factors"
GIVEN_BACK = "give_back(memory, turn);"
OUTER_BARRIER = "ptx::barrier_of_warps(QUANTISING_BARRIER, MULTIPLYING_WARPS * 32);  // hands over the "
ORDER = {
    "the first half is promoted before it has come": injected("ptx::wgmma_wait<1>();"),
    "the second half is promoted before it has come": injected("ptx::wgmma_wait<0>();"),
    "a half is promoted before it has come": in_rows("ptx::wgmma_wait<0>();"),
    "a stage is given back while threads of the warp read factors": in_rows(
        "__syncwarp();  // all threads of the warp have read their factors\n", "\n"
    ),
    "a stage is given back while threads of the warp read its strips": injected(STRIPS_READ, "\n"),
    "a stage is given back before it is promoted": injected(f"{STRIPS_READ}        {GIVEN_BACK}", ""),
    "factors are written before the stage is empty": injected(
        "await(memory.empty(stage), (turn / STAGES + 1) & 1);\n#pragma", "#pragma"
    ),
    "a stage is full before all threads have written factors": injected(FACTORS_WRITTEN, "//"),
    "a stage is full without factors": injected("1 + Others::ARRIVALS", "1"),
    "factors do not arrive": injected("ptx::barrier_arrive(memory.full(stage));"),
    "the turns of stages are not counted": injected("stage_turn += blocks;"),
    "scaling warps do not say that they have read a record": injected(
        "MULTIPLYING_WARPS + Others::WARPS", "MULTIPLYING_WARPS"
    ),
    "factors of results before all maxima": quantised(f"{OUTER_BARRIER}maxima", "//"),
    "results before their factors": quantised(f"{OUTER_BARRIER}factors", "//"),
}
"""One for each fence, wait and count."""

VALUES = {
    # Products of 128 columns.
    "products are added to those before": injected("wgmma_e4m3<N, false>", "wgmma_e4m3<N, true>"),
    "products replace those of 32 columns before": injected("wgmma_e4m3<N, true>", "wgmma_e4m3<N, false>"),
    "the last 32 columns are left out": injected("part < COLUMNS / 32;", "part < COLUMNS / 32 - 1;"),
    "the second half has the first one's rows": injected("rows + HALF_BYTES / 16, tokens", "rows, tokens"),
    "the other warpgroup's rows": injected("warpgroup * (HALF_BYTES / 2)", "(1 - warpgroup) * (HALF_BYTES / 2)"),
    # Promotion.
    "the second half has the factors of the first": injected("products[1], strips[1]", "products[1], strips[0]"),
    "factors of other tokens": injected("strip + threadIdx.x % 4 * 8;", "strip + threadIdx.x / 4 % 4 * 8;"),
    "one factor for two tokens": injected("products[i + 3], factors.second", "products[i + 3], factors.first"),
    "warpgroups have the scales of the other one": injected(
        "TURNS ? warpgroup : 0", "TURNS ? 1 - warpgroup : 0", case=INTERLEAVED
    ),
    # Tokens as rows.
    "the second half has the weights of the first": in_rows("weights + half * (HALF_BYTES / 16)", "weights"),
    "both warpgroups have the same tokens": in_rows("warpgroup * (64 * ROW_BYTES)", "0 * warpgroup"),
    "both tokens have one factor": in_rows("at + 8 * 4", "at"),
    "halves of tokens as rows have the factors of the first": in_rows("half == 0 ? of_first : of_second", "of_first"),
    "outputs in turn have the factors of the first": in_rows(
        "products, of_second", "products, of_first", case=INTERLEAVED_ROWS
    ),
    "half of the outputs are not promoted": in_rows(
        "HALF_ROWS / 2, HALF_ROWS>", "HALF_ROWS, HALF_ROWS>", 0, INTERLEAVED_ROWS
    ),
    "tokens of the next tile are stored": in_rows("token + i * 8 < tile.rows", "token + i * 8 < TOKENS"),
    "rows after the last output are stored": in_rows("+ eight * 8 < p.outputs", "< p.outputs"),
    "the second half goes to the first one's outputs": in_rows(
        "tile.output + (GATED ? 0 : half * HALF_ROWS) + eight * 8 + four_outputs()",
        "tile.output + eight * 8 + four_outputs()",
    ),
    "one token has the weight of the other": in_rows("weights[i / 2]", "weights[0]", 0, BIASED_ROWS),
    "biases of the first of two outputs": in_rows("threadIdx.x % 4 * 2 + i", "threadIdx.x % 4 * 2", case=BIASED_ROWS),
    "maxima of two threads of four": in_rows(
        "reach[i] = fmaxf(reach[i], __shfl_xor_sync(0xFFFFFFFF, reach[i], 2));", case=QUANTISED_ROWS
    ),
    "a maximum of both tokens": in_rows(
        "reach[i / 2] = fmaxf(reach[i / 2], size)", "reach[0] = fmaxf(reach[0], size)", case=QUANTISED_ROWS
    ),
    "scales of the other token": in_rows(
        "p.y_scale_stride + results.row(i)", "p.y_scale_stride + results.row(0)", case=QUANTISED_ROWS
    ),
    "bytes of the other eight": in_rows("(eight + j / 2) * 4", "(eight + 1 - j / 2) * 4", case=QUANTISED_ROWS),
    "full tiles leave tokens out": injected("full ? begin + TOKENS :", "full ? begin + TOKENS - 8 :", case=ROWS),
    "a tile loads its own tokens only": (
        ROWS,
        Change("product.cuh", "tile.stored > COLUMN_TOKENS ? TOKENS :", "", None),
    ),
    "two warps write the same factors": injected("next = own;", "next = own / 2;"),
    # Scales.
    "scales of other rows": injected("(tile.row + token) * p.row_stride", "(tile.row + token / 2) * p.row_stride"),
    "strides exchanged": injected("p.row_stride + block * p.block_stride", "p.block_stride + block * p.row_stride"),
    "strides of scales by column": injected("* p.row_stride + block", "* 1 + block", case=BY_ROW),
    "rows of no expert have scales": injected(
        "token < tile.rows, p.row_scales + at * 4", "true, p.row_scales + at * 4"
    ),
    "the first block's scale of weights": injected("(weights[0] + block) * 4", "weights[0] * 4"),
    "the second half has the first one's scale of weights": injected(
        "weight_scales(tile, 1)}", "weight_scales(tile, 0)}"
    ),
    "another expert's scales": injected("static_cast<u64>(tile.expert) * row_blocks +", "static_cast<u64>(0) +"),
    "a block of rows after the last": injected("min(row / SCALED_ELEMENTS, row_blocks - 1)", "row / SCALED_ELEMENTS"),
    "up has the scales of gate": quantised("tile.output + strip * p.product.outputs", "tile.output"),
    "gate and up in turn have the scales of one": injected(
        "2 * (tile.output + strip * 64)", "tile.output", case=INTERLEAVED
    ),
    # Results as 8-bit floats.
    "maxima of a quarter of the outputs": quantised("u32 step = 4; step < 32", "u32 step = 4; step < 16"),
    "maxima of eight outputs": quantised("finite_magnitude(low[i + 2])", "finite_magnitude(low[i])"),
    "maxima of one warpgroup": quantised(
        "i < MULTIPLYING_WARPS; ++i) {\n            reach", "i < 4; ++i) {\n            reach"
    ),
    "scales of rows of no expert are stored": quantised("        if (token < tile.rows) {", "        if (true) {"),
    "scales of the other block": quantised("tile.output / SCALED_ELEMENTS * p.y_scale_stride", "p.y_scale_stride"),
    "factors are stored as scales": quantised("__float_as_uint(scaling.scale)", "__float_as_uint(scaling.factor)"),
    "factors of other tokens' results": quantised("(i % 2 == 0 ? factors.first : factors.second)", "factors.first"),
    "bytes of other outputs": quantised("0x3120", "0x3210"),
    "neighbours keep their halves": quantised("odd ? own & 0xFFFF : own >> 16, 1", "odd ? own >> 16 : own & 0xFFFF, 1"),
    "rows of no expert are stored": quantised("token < tile.rows && results.there[0]", "results.there[0]"),
    "outputs after the last are stored": injected(
        "token < tile.rows && results.there[0]", "token < tile.rows", case=BIASED
    ),
}
INJECTED_BUGS = ORDER | VALUES

BY_ERROR = {
    "no wgmma_fence stands between": in_rows(
        "ptx::wgmma_fence();  // orders the registers of the products before the wgmma that replace them"
    ),
    "one more arrival than the barrier at .* waits for in a phase": injected("1 + Others::ARRIVALS", "1"),
    "multiplies 16 bytes of shared memory at .*, which a bulk load fills": injected(
        "await(memory.full(stage), turn / STAGES & 1);"
    ),
}
"""Bugs by the error that the machine must report."""


def find(case: ScaledCase, change: Change) -> None:
    for seed in SEEDS:
        scaled = case.product()
        try:
            run_scaled(scaled, blocks=2, seed=seed, changes=[change])
            judge(scaled)
        except (EmulatorError, AssertionError) as found:
            print(f"seed {seed}: {found}"[:300])
            return
    pytest.fail(f"{len(SEEDS)} interleavings are all right with it")


@pytest.mark.parametrize(("case", "change"), ORDER.values(), ids=ORDER)
def test_an_injected_bug_is_found(case: ScaledCase, change: Change) -> None:
    find(case, change)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "change"), VALUES.values(), ids=VALUES)
def test_a_bug_injected_into_values_is_found(case: ScaledCase, change: Change) -> None:
    find(case, change)


@pytest.mark.parametrize("error", BY_ERROR)
def test_the_machine_names_the_error(error: str) -> None:
    case, change = BY_ERROR[error]
    with pytest.raises(EmulatorError, match=f"(?s){error}"):
        run_scaled(case.product(), changes=[change])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case", dict.fromkeys(case for case, _ in (*INJECTED_BUGS.values(), *BY_ERROR.values())), ids=str
)
def test_the_same_cases_are_right_without_the_bugs(case: ScaledCase, seed: int) -> None:
    scaled = case.product()
    run_scaled(scaled, blocks=2, seed=seed)
    judge(scaled)
