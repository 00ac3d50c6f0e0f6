"""The emulator finds each bug that is injected into the pipeline of kernels/include/raymoe/rows/.

Every fence, barrier and wait of pipe.cuh is left out once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymoe.rows.pipe_shape import Limits
from tests.emulator.build import Change
from tests.emulator.machine import EmulatorError
from tests.gpu.sanitized_ranks import EACH_THREAD_ARRIVES
from tests.unit.rows.test_pipe_emulated import NormCase, run_rms_norm, small_blocks

__all__ = ["small_blocks"]

SEEDS = range(6)
TWO_STAGES = NormCase(15, 264, add=True, limits=Limits(stages=2))
WIDE = NormCase(15, 520, add=True, registers=8)
QUANTISED = replace(WIDE, add=False, fp8="row", limits=Limits(stages=2))
DYNAMIC = NormCase(23, 520, fp8="row", registers=8, dynamic=True)
GROUPS_OF_ONE = replace(DYNAMIC, hidden=264, registers=72)
IN_TURN = NormCase(15, 520, limits=Limits(loading="IN_TURN"), add=True, registers=8)
FENCE = "ptx::fence_proxy_async_shared();  // orders this thread's reads"


def injected(old: str, new: str = "", file: str = "pipe.cuh", which: int | None = None) -> Change:
    return Change(file, old, new or ("//" if "//" in old else ""), which)


INJECTED_BUGS = {
    "no wait for an empty stage": (TWO_STAGES, injected("await(empty(turn % STAGES), (turn / STAGES - 1) & 1);")),
    "a wait for the turn before the last": (TWO_STAGES, injected("(turn / STAGES - 1) & 1", "turn / STAGES & 1")),
    "no wait for a full stage": (TWO_STAGES, injected("await(full(turn % STAGES), turn / STAGES & 1);")),
    "bytes of one input": (TWO_STAGES, injected("bytes += bytes_of", "bytes = bytes_of")),
    "bytes of one row more": (TWO_STAGES, injected("u32 bytes = 0;", "u32 bytes = inputs_[0].eight_bytes;")),
    "no proxy fence before a stage is stored": (TWO_STAGES, injected(f"{FENCE} and writes", "//")),
    "no barrier before a stage is stored": (
        WIDE,
        injected("group_barrier();\n        if (!leads()) {", "if (!leads()) {"),
    ),
    "a stage is refilled while a store reads it": (
        TWO_STAGES,
        injected("ptx::bulk_wait_read<1>();", "ptx::bulk_wait_read<2>();"),
    ),
    "no wait for the store before": (TWO_STAGES, injected("ptx::bulk_wait_read<1>();")),
    "a group with one stage does not wait for its store": (
        replace(TWO_STAGES, limits=Limits(stages=1)),
        injected("ptx::bulk_wait_read<0>();\n            arrive_empty", "arrive_empty"),
    ),
    "the stage of this turn is given back": (
        TWO_STAGES,
        injected("arrive_empty(tile.turn - GROUPS);", "arrive_empty(tile.turn);"),
    ),
    "a block ends while its stages are read": (
        TWO_STAGES,
        injected("ptx::bulk_wait_read<0>();  // the stages must last"),
    ),
    "no proxy fence before a stage is given back": (QUANTISED, injected(f"{FENCE} of the stage before", "//")),
    "a stage is empty when one warp has read it": (
        QUANTISED,
        injected("ptx::barrier_init(empty(stage), GROUP_WARPS);", "ptx::barrier_init(empty(stage), 1);"),
    ),
    "a warp gives a stage back that its threads read": (
        QUANTISED,
        injected("__syncwarp();  // all threads of the warp"),
    ),
    "the other warps do not give their stage back": (
        WIDE,
        injected("arrive_as_warp(tile.turn);\n        }\n        group", "}\n        group"),
    ),
    "barriers are not handed to all threads": (WIDE, injected("__syncthreads();  // hands the initialised")),
    "barriers are not fenced": (WIDE, injected("ptx::fence_barrier_init();  // orders the inits")),
    "stages of two groups": (
        NormCase(15, 264, add=True, limits=Limits(stages=4)),
        injected("turn % STAGES * work_.stage_bytes", "turn / 2 % STAGES * work_.stage_bytes"),
    ),
    "one place for the sums": (
        NormCase(15, 264, registers=8),
        injected("parity_ ^= 1;", file="sums.cuh"),
    ),
    "no barrier before the sums are read": (
        WIDE,
        injected("            group_barrier();", file="sums.cuh"),
    ),
    "dynamic: a number before its stage is empty": (
        DYNAMIC,
        injected(
            "await_empty(turn);\n                publish_number(turn, number);\n                load",
            "publish_number(turn, number);\n                await_empty(turn);\n                load",
        ),
    ),
    "dynamic: a number after the bytes are announced": (
        DYNAMIC,
        injected(
            "publish_number(turn, number);\n                load(turn, placed(turn, number));",
            "load(turn, placed(turn, number));\n                publish_number(turn, number);",
        ),
    ),
    "dynamic: no number": (DYNAMIC, injected("ptx::shared_store_4(number_at(turn % STAGES), number);")),
    "dynamic: one number for all stages": (DYNAMIC, injected("(2 * STAGES + stage) * 8", "2 * STAGES * 8")),
    "dynamic: one group alone ends": (GROUPS_OF_ONE, injected("group < GROUPS; ++group", "group < 1; ++group")),
    "dynamic: an end before its stage is empty": (
        GROUPS_OF_ONE,
        injected(
            "await_empty(turn);\n                publish_number(turn, number);\n                ptx",
            "publish_number(turn, number);\n                ptx",
        ),
    ),
    "dynamic: the counter does not wrap": (DYNAMIC, injected("increments - 1);", "increments);")),
    "dynamic: increments before the first tile are not counted": (
        DYNAMIC,
        injected("AHEAD * gridDim.x", "0 * gridDim.x"),
    ),
    "dynamic: a tile is left out": (DYNAMIC, injected("return gridDim.x + ptx", "return gridDim.x + 1 + ptx")),
    "in turn: a barrier is invalidated while threads wait": (
        IN_TURN,
        injected("group_barrier();  // no thread of the group still waits"),
    ),
    "in turn: a barrier that is not initialised for all": (
        IN_TURN,
        injected("group_barrier();  // hands the initialised barrier"),
    ),
    "in turn: no wait for the store": (
        IN_TURN,
        injected("ptx::bulk_wait_read<0>();\n            arrive_empty", "arrive_empty"),
    ),
}


@pytest.mark.parametrize(("case", "change"), INJECTED_BUGS.values(), ids=INJECTED_BUGS)
def test_an_injected_bug_is_found(case: NormCase, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        try:
            run_rms_norm(case, monkeypatch, seed, (change,))
        except (EmulatorError, AssertionError) as found:
            print(f"seed {seed}: {found}"[:300])
            return
    pytest.fail(f"{len(SEEDS)} interleavings are all right with it")


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [(), EACH_THREAD_ARRIVES], ids=["as they are", "each thread arrives"])
@pytest.mark.parametrize("case", list(dict.fromkeys(case for case, _ in INJECTED_BUGS.values())), ids=str)
def test_the_same_cases_are_right_without_the_mistakes(
    case: NormCase, changes: tuple[Change, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in SEEDS:
        run_rms_norm(case, monkeypatch, seed, changes)


def test_gaps_of_a_row_are_judged() -> None:
    """The judge of these tests must see a byte that was written between two rows."""
    from tests.unit.rows.emulated_pipe import Strided

    rows = Strided.empty(3, 64, torch.bfloat16, gap=8)
    rows.whole[1, 130] = 0
    with pytest.raises(AssertionError, match="between two rows"):
        rows.check_gaps()
