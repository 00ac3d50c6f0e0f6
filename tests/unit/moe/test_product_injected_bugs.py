"""The emulator finds each bug that is injected into kernels/moe/product.cu."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymoe.moe.products import TILES, Gate
from tests.emulator.build import KERNELS, Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.moe.emulated_product import ProductCase, judge, run_product

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")

SEEDS = range(4)
PLAIN = ProductCase((17, 0, 40, 1), columns=200, outputs=144)
GATED = ProductCase((17, 5), gate=Gate(), gate_up=True, zero_gaps=True)
SHORT = ProductCase((17, 0, 40, 1), columns=64, outputs=272)
"""One step a tile, so that a block may be two tiles ahead."""
BIASED = ProductCase((1, 1), columns=64, outputs=272, bias=True, weighted=True)
BOXES = ProductCase((120, 40), columns=64, outputs=16, tiles=TILES)
LONG_ROWS = ProductCase((17, 0, 40, 1), columns=520, outputs=144)
ONE_TILE = ProductCase((5,), columns=64, outputs=16)
_FOLDER = KERNELS / "include/raymoe/moe/product"
_FILES = [
    KERNELS / "moe/product.cu",
    *(_FOLDER / f"{name}.cuh" for name in ("loading", "multiplying", "operands", "product", "results")),
]
TRANSPOSED = replace(PLAIN, transposed=True)


def injected(
    old: str, new: str = "", which: int | None = None, case: ProductCase = PLAIN
) -> tuple[ProductCase, Change]:
    """Change the one file of the kernel that has the text."""
    (file,) = (path.name for path in _FILES if old in path.read_text())
    return case, Change(file, old, new, which)


def gated(old: str, new: str = "", which: int | None = None) -> tuple[ProductCase, Change]:
    return injected(old, new, which, GATED)


INJECTED_BUGS = {
    # The stages.
    "no wait for an empty stage": injected("await(memory.empty(stage), (turn / STAGES + 1) & 1);"),
    "a wait for the stage of the turn before": injected(
        "await(memory.empty(stage), (turn / STAGES + 1) & 1)", "await(memory.empty(stage), turn / STAGES & 1)"
    ),
    "a stage is given back without a wait": injected("ptx::wgmma_wait<0>();"),
    "a stage is not given back": injected("give_back(memory, turn);"),
    "a stage is empty when one warpgroup has read it": injected(
        "ptx::barrier_init(memory.empty(stage), MULTIPLYING_WARPS);", "ptx::barrier_init(memory.empty(stage), 4);"
    ),
    "bytes of rows that do not come": injected("bytes = WEIGHT_BYTES + rows", "bytes = WEIGHT_BYTES + (rows + 8)"),
    "rows are not rounded up": injected(
        "const u32 rows = loaded_tokens(tile), bytes", "const u32 rows = tile.stored, bytes"
    ),
    "boxes of 32 rows are left out": injected("u32 map = 1; map < 4", "u32 map = 2; map < 4", case=BOXES),
    "the second box of 64 rows is the first again": injected("row += 64, shared += 64", "shared += 64", case=BOXES),
    "barriers are not fenced": injected("ptx::fence_barrier_init();"),
    # wgmma.
    "the sums are not zero at first": injected("sums[0][i] = sums[1][i] = 0.0f;", "sums[0][i] = sums[1][i] = 1.0f;"),
    "results before the last product": injected("ptx::wgmma_wait<0>();", "ptx::wgmma_wait<1>();"),
    "products are not committed": injected("ptx::wgmma_commit();"),
    "another stride between groups of rows": injected(
        "static_cast<u64>(1024 / 16) << 32", "static_cast<u64>(512 / 16) << 32"
    ),
    "no swizzle": injected("SWIZZLE_128 | GROUP_STRIDE", "GROUP_STRIDE"),
    "another half of the weights": injected("half * (HALF_BYTES / 16)", "half * (HALF_BYTES / 32)"),
    "other columns of the weights": injected(
        "(HALF_BYTES / 16) + part * NEXT_WEIGHTS,", "(HALF_BYTES / 16) + part * 4 % 8,"
    ),
    "other columns of the tokens": injected("tokens + part * NEXT_COLUMNS", "tokens + (part ^ 1) * NEXT_COLUMNS"),
    "the other warpgroup's rows": injected("warpgroup * (HALF_BYTES / 2)", "(1 - warpgroup) * (HALF_BYTES / 2)"),
    # Transposed weights.
    "transposed weights are multiplied as they are": injected("wgmma<N, TRANSPOSED>", "wgmma<N>", case=TRANSPOSED),
    "the next columns of weights that are not transposed": injected(
        "TRANSPOSED ? NEXT_COLUMNS_TRANSPOSED : NEXT_COLUMNS", "NEXT_COLUMNS", case=TRANSPOSED
    ),
    "another stride between groups of columns": injected(
        "static_cast<u64>(1024 / 16) << 32", "static_cast<u64>(2048 / 16) << 32", case=TRANSPOSED
    ),
    "half of the next columns": injected("16 * PIECE_BYTES / 16", "8 * PIECE_BYTES / 16", case=TRANSPOSED),
    "a box of transposed weights is left out": injected(
        "box < WEIGHT_BYTES / BOX_BYTES", "box + 1 < WEIGHT_BYTES / BOX_BYTES", case=TRANSPOSED
    ),
    "boxes of the same outputs": injected("tile.output + box * PIECE", "tile.output", case=TRANSPOSED),
    "boxes of other columns": injected(
        "box * PIECE, column, tile.expert", "box * PIECE, 0, tile.expert", case=TRANSPOSED
    ),
    "boxes of another expert": injected("PIECE, column, tile.expert", "PIECE, column, 0", case=TRANSPOSED),
    "more registers than there are": injected("MULTIPLYING_REGISTERS = 232", "MULTIPLYING_REGISTERS = 240"),
    # The tiles.
    "a record is read before it is written": injected("await(memory.told(record), turn / 2 & 1);"),
    "a record is written while it is read": injected("await(memory.read(record), (turn / 2 + 1) & 1);", case=SHORT),
    "a record is given back while threads of the warp read it": injected(
        "__syncwarp();  // all threads of the warp", "//", case=SHORT
    ),
    "the counter does not wrap": injected("tiles() - 1)", "tiles())"),
    "a tile is left out": injected("next = ptx::blocks() + ptx", "next = ptx::blocks() + 1 + ptx"),
    "tiles of the first 32 experts are not counted": injected(
        "before + sum - own", "sum - own", case=ProductCase((1,) * 40, columns=16, outputs=16)
    ),
    "output tiles as without a gate": injected(
        "within / tiles) * OUTPUTS", "within / tiles) * 2 * HALF_ROWS", case=replace(GATED, outputs=144)
    ),
    # The results.
    "a bias after the last": injected("p.outputs - 1);", "p.outputs);", case=BIASED),
    "rows of no expert are stored": injected("token < tile.stored", "true"),
    "outputs after the last are stored": gated("there[0] = first < p.outputs;", "there[0] = true;"),
    "four outputs of the other eight": injected("threadIdx.x % 2 * 8 +", "threadIdx.x % 4 / 2 * 8 +"),
    "neighbours keep their halves": injected("odd ? low : high, 1", "odd ? high : low, 1"),
    "up rows of other outputs": gated("GATED ? tile.output : tile.output + HALF_ROWS", "tile.output + 8"),
    "gaps are not zero": gated("zero ? 0 : four.packed()", "four.packed()"),
    "gaps are written up to a multiple of 16 always": gated("min(end, room)", "end"),
    "gate and up exchanged": gated("gated(p, low[i], high[i])", "gated(p, high[i], low[i])"),
}


BY_ERROR = {
    "multiplies 16 bytes of shared memory at .*, which a bulk load fills, and thread .* has not found": injected(
        "await(memory.full(stage), turn / STAGES & 1);"
    ),
    "bulk loads into 16384 bytes of shared memory at .*, which a wgmma of warp .* reads": injected(
        "ptx::wgmma_wait<0>();", "ptx::wgmma_wait<1>();", case=LONG_ROWS
    ),
    "multiplies 16 bytes of shared memory at .*, which nothing has written": injected(
        "tile, rounded_up(tile.stored, STEP), stage_turn", "tile, TOKENS, stage_turn"
    ),
    "no wgmma_fence stands between": injected("ptx::wgmma_fence();"),
    "it has written sums while wgmma adds to them": injected(
        "ptx::wgmma_commit();", "ptx::wgmma_commit(); sums[1][0] += 1.0f;"
    ),
    "its block ends with a wgmma that no wait covers": injected("ptx::wgmma_wait<0>();", case=ONE_TILE),
    "begins at .* of shared memory, no multiple of 1024": injected(
        "return weights(stage) + WEIGHT_BYTES;", "return weights(stage) + WEIGHT_BYTES + 128;"
    ),
    "the warps of its warpgroup take different steps": injected(
        "ptx::wgmma_commit();", "if (threadIdx.x >= 32) ptx::wgmma_commit();"
    ),
    "the threads of its warp take different steps": injected(
        "TRANSPOSED>(sums[half], rows +", "TRANSPOSED>(sums[half], rows + threadIdx.x % 32 / 31 * 2 +"
    ),
    "waits until all four warps have issued its wgmma": injected(
        "ptx::wgmma_fence();",
        "if (threadIdx.x / 32 == 2) await(memory.full(stage), (turn / STAGES + 1) & 1); ptx::wgmma_fence();",
    ),
    "waits for registers that others give away": injected("ptx::give_registers_away<OTHER_REGISTERS>();"),
    "stores 4 bytes of shared memory at .*; there are": injected("return tile(2) + expert", "return tile(3) + expert"),
    "uses the barrier at .*, which thread 0 has initialised, and nothing orders the two": injected(
        "__syncthreads();  // hands", "//"
    ),
}
"""Bugs by the error that the machine must report."""


@pytest.mark.parametrize(("case", "change"), INJECTED_BUGS.values(), ids=INJECTED_BUGS)
def test_an_injected_bug_is_found(case: ProductCase, change: Change) -> None:
    for seed in SEEDS:
        product = case.product()
        try:
            run_product(product, blocks=2, seed=seed, changes=[change])
            judge(product)
        except (EmulatorError, AssertionError) as found:
            print(f"seed {seed}: {found}"[:300])
            return
    pytest.fail(f"{len(SEEDS)} interleavings are all right with it")


@pytest.mark.parametrize("error", BY_ERROR)
def test_the_machine_names_the_error(error: str) -> None:
    case, change = BY_ERROR[error]
    with pytest.raises(EmulatorError, match=f"(?s){error}"):
        run_product(case.product(), changes=[change])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case", dict.fromkeys(case for case, _ in (*INJECTED_BUGS.values(), *BY_ERROR.values())), ids=str
)
def test_the_same_cases_are_right_without_the_bugs(case: ProductCase, seed: int) -> None:
    product = case.product()
    run_product(product, blocks=2, seed=seed)
    judge(product)
