"""The emulator finds each bug that is injected into kernels/moe/outer_product.cu."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulator.build import KERNELS, Change, compiler
from tests.emulator.machine import EmulatorError
from tests.unit.moe.emulated_outer import OuterCase, expected, judge, run_outer

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")

SEEDS = range(4)
PLAIN = OuterCase((17, 0, 70, 1), outputs=136, columns=72)
LONG = OuterCase((400,), outputs=16, columns=16)
"""More stages than there is memory for."""
SEVERAL = OuterCase((300, 200, 400, 130), outputs=16, columns=16)
"""Several tiles of many stages."""
SHORT = OuterCase((17, 0, 40, 1), outputs=264, columns=8)
"""One stage a tile, so that a block may be two tiles ahead."""
WIDE = OuterCase((20,), outputs=72, columns=136)
ONE_TILE = OuterCase((5,), outputs=16, columns=8)
ADDS = replace(PLAIN, adds=True)
TWO_TILES = OuterCase((20, 3), outputs=136, columns=264)
_FOLDER = KERNELS / "include/raymoe/moe/product"
_FILES = [
    KERNELS / "moe/outer_product.cu",
    *(_FOLDER / f"{name}.cuh" for name in ("operands", "outer", "outer_results")),
]


def injected(old: str, new: str = "", which: int | None = None, case: OuterCase = PLAIN) -> tuple[OuterCase, Change]:
    """Change the one file of the kernel that has the text."""
    (file,) = (path.name for path in _FILES if old in path.read_text())
    return case, Change(file, old, new, which)


GIVEN_BACK = "give_back(memory, turn - 1);"
ORDER = {
    "no wait for an empty stage": injected("await(memory.empty(stage), (turn / STAGES + 1) & 1);", case=LONG),
    "a wait for the stage of the turn before": injected(
        "await(memory.empty(stage), (turn / STAGES + 1) & 1)", "await(memory.empty(stage), turn / STAGES & 1)"
    ),
    "a stage is given back without a wait": injected("ptx::wgmma_wait<younger>();", case=LONG),
    "the stage of this turn is given back": injected(GIVEN_BACK, "give_back(memory, turn);", which=0, case=LONG),
    "the stage before the last is not given back": injected(GIVEN_BACK, which=1, case=SEVERAL),
    "the last stage is not given back": injected("give_back(memory, turn++);", "++turn;", case=SEVERAL),
    "a stage that is not there is given back": injected("if (tile.rows > ROWS)", "if (true)", case=SHORT),
    "a stage before the first is given back": injected("if (!first)", "if (true)", case=SEVERAL),
    "a stage is empty when one warpgroup has read it": injected(
        "ptx::barrier_init(memory.empty(stage), MULTIPLYING_WARPS);",
        "ptx::barrier_init(memory.empty(stage), 4);",
        case=LONG,
    ),
    "bytes that do not come": injected("bytes = DY_BYTES + boxes", "bytes = DY_BYTES + 128 + boxes"),
    "barriers are not fenced": injected("ptx::fence_barrier_init();"),
    "results before the last product": injected("multiply_rows<N, 2, 0>", "multiply_rows<N, 2, 1>"),
    "products are not committed": injected("ptx::wgmma_commit();"),
    "more registers than there are": injected("MULTIPLYING_REGISTERS = 232", "MULTIPLYING_REGISTERS = 240"),
    "a record is read before it is written": injected("await(memory.told(record), turn / 2 & 1);"),
    "a record is written while it is read": injected("await(memory.read(record), (turn / 2 + 1) & 1);", case=SHORT),
    "a record is given back while threads of the warp read it": injected(
        "__syncwarp();  // all threads of the warp", "//", case=SHORT
    ),
    "the counter does not wrap": injected("tiles + blocks - 1;", "tiles + blocks;"),
    "a tile is taken twice": injected("next = blocks + ptx", "next = blocks - 1 + ptx", which=0),
}
"""One for each fence, wait and count."""

VALUES = {
    # The rows.
    "rows are not clipped": injected("clipped = CLIPPED - tile.rows + row", "clipped = row"),
    "rows are clipped one later": injected("CLIPPED - tile.rows + row", "CLIPPED - tile.rows - 1 + row"),
    "the same rows in each stage": injected("CLIPPED - tile.rows + row", "CLIPPED - tile.rows", case=LONG),
    "rows from the start of an expert": injected("expert * 4ull) + tile.rows;", "expert * 4ull);"),
    "columns of dy of the first piece": injected("tile.output + box * PIECE", "tile.output", case=WIDE),
    "columns of x of the first piece": injected("tile.column + box * PIECE", "tile.column", case=WIDE),
    "a box of x is left out": injected("box < boxes", "box + 1 < boxes", case=WIDE),
    # wgmma.
    "the sums are not zero at first": injected("sums[i] = 0.0f;", "sums[i] = 1.0f;"),
    "16 rows too few": injected("multiply_rows<N, 2, 0>", "multiply_rows<N, 1, 0>"),
    "parts of another number of rows": injected("(tile.rows + 15) / 16 % 4", "tile.rows / 16 % 4"),
    "another stride between groups of 8 rows": injected(
        "static_cast<u64>(1024 / 16) << 32", "static_cast<u64>(512 / 16) << 32"
    ),
    "no swizzle": injected("SWIZZLE_128 | GROUP_STRIDE", "GROUP_STRIDE"),
    "no stride between 64 columns": injected("memory.x(stage), BOX_BYTES", "memory.x(stage)", case=WIDE),
    "another stride between 64 columns": injected("memory.x(stage), BOX_BYTES", "memory.x(stage), 1024", case=WIDE),
    "other rows of dy": injected("outputs + part * NEXT", "outputs + (part ^ 1) * NEXT"),
    "other rows of x": injected("columns + part * NEXT", "columns + (part ^ 1) * NEXT"),
    "dy is not transposed": injected("wgmma<N, 1, 1>", "wgmma<N, 0, 1>"),
    "x is not transposed": injected("wgmma<N, 1, 1>", "wgmma<N, 1, 0>"),
    "the other warpgroup's outputs": injected("threadIdx.x / 128 * BOX_BYTES", "(1 - threadIdx.x / 128) * BOX_BYTES"),
    # The tiles.
    "tiles of the first outputs alone": injected("within % output_tiles * TILE_OUTPUTS", "0"),
    "tiles of the first columns alone": injected("within / output_tiles * TILE_COLUMNS", "0", case=TWO_TILES),
    "tiles of columns as of outputs": injected("within / output_tiles", "within % output_tiles", case=TWO_TILES),
    "columns of a whole tile are multiplied": injected(
        "min(TILE_COLUMNS, rounded_up(p.columns - tile.column, PIECE))", "rounded_up(p.columns, PIECE)", case=TWO_TILES
    ),
    # The results.
    "no zeros for experts without rows": injected("store_results<TILE_COLUMNS>(p, tile, zeros);"),
    "outputs after the last are stored": injected("output + half * 8 < p.outputs", "true"),
    "columns after the last are stored": injected("wanted && column < columns", "wanted"),
    "threads keep their words": injected("exchange_in_fours(pairs);"),
    "pairs do not swap": injected("odd ? words[i] : words[i + 1], 1", "odd ? words[i + 1] : words[i], 1"),
    "fours do not swap": injected("upper ? words[i] : words[i + 2], 2", "upper ? words[i + 2] : words[i], 2"),
    "the rows of the other eight": injected(
        "(quarter * 4 + i) * 4 + half * 2", "(quarter * 4 + i) * 4 + (1 - half) * 2"
    ),
    "outputs after the last are added": injected("output + (odd ? 8 : 0) < p.outputs", "true", case=ADDS),
    "columns after the last are added": injected("if (wanted && column < p.columns) {", "if (wanted) {", case=ADDS),
    "neighbours do not swap": injected("odd ? four[0] : four[2], 1", "odd ? four[2] : four[0], 1", case=ADDS),
    "neighbours swap other columns": injected("odd ? four[1] : four[3], 1", "odd ? four[3] : four[1], 1", case=ADDS),
    "results are added twice": injected("row += odd ? 8 * row_bytes : 0;", "", case=ADDS),
}
INJECTED_BUGS = ORDER | VALUES


BY_ERROR = {
    "multiplies 16 bytes of shared memory at .*, which a bulk load fills, and thread .* has not found": injected(
        "await(memory.full(stage), turn / STAGES & 1);"
    ),
    "bulk loads into 8192 bytes of shared memory at .*, which a wgmma of warp .* reads": injected(
        "multiply_rows<N, 4, 1>", "multiply_rows<N, 4, 2>", case=LONG
    ),
    "multiplies 16 bytes of shared memory at .*, which nothing has written": injected(
        "tile, columns_of(p, tile), stage_turn", "tile, TILE_COLUMNS, stage_turn"
    ),
    "no wgmma_fence stands between": injected("ptx::wgmma_fence();"),
    "its block ends with a wgmma that no wait covers": injected("ptx::wgmma_wait<younger>();", case=ONE_TILE),
    "it has written sums while wgmma adds to them": injected(
        "ptx::wgmma_commit();", "ptx::wgmma_commit(); sums[1] += 1.0f;"
    ),
    "begins at .* of shared memory, no multiple of 1024": injected(
        "return dy(stage) + DY_BYTES;", "return dy(stage) + DY_BYTES + 128;"
    ),
    "the warps of its warpgroup take different steps": injected(
        "ptx::wgmma_commit();", "if (threadIdx.x >= 32) ptx::wgmma_commit();"
    ),
    "waits for registers that others give away": injected("ptx::give_registers_away<OTHER_REGISTERS>();"),
    "stores 16 bytes of shared memory at .*; there are": injected("return read(2) + record", "return read(3) + record"),
    "uses the barrier at .*, which thread 0 has initialised, and nothing orders the two": injected(
        "__syncthreads();  // hands", "//"
    ),
}
"""Bugs by the error that the machine must report."""


def check(case: OuterCase, seed: int, *changes: Change) -> None:
    product = case.product()
    wanted = expected(product)
    run_outer(product, blocks=2, seed=seed, changes=changes)
    judge(product, wanted)


def find(case: OuterCase, change: Change) -> None:
    for seed in SEEDS:
        try:
            check(case, seed, change)
        except (EmulatorError, AssertionError) as error:
            print(f"seed {seed}: {error}"[:300])
            return
    pytest.fail(f"{len(SEEDS)} interleavings are all right with it")


@pytest.mark.parametrize(("case", "change"), ORDER.values(), ids=ORDER)
def test_an_injected_bug_is_found(case: OuterCase, change: Change) -> None:
    find(case, change)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "change"), VALUES.values(), ids=VALUES)
def test_a_bug_injected_into_values_is_found(case: OuterCase, change: Change) -> None:
    find(case, change)


@pytest.mark.parametrize("error", BY_ERROR)
def test_the_machine_names_the_error(error: str) -> None:
    case, change = BY_ERROR[error]
    with pytest.raises(EmulatorError, match=f"(?s){error}"):
        check(case, 0, change)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case", dict.fromkeys(case for case, _ in (*INJECTED_BUGS.values(), *BY_ERROR.values())), ids=str
)
def test_the_same_cases_are_right_without_the_bugs(case: OuterCase, seed: int) -> None:
    check(case, seed)
