"""The kernels of kernels/dispatch_few.cu and combine_few.cu, which take the parameters of dispatch and combine."""

from __future__ import annotations

from raymoe.device.combine import CombineParams, RefusalRecord
from raymoe.device.dispatch import ROW_TYPES, WARPS, DispatchParams, Got, Scratch
from raymoe.device.jit import KernelSource
from raymoe.device.peer import MAX_RANKS, Peers
from raymoe.device.sync import STRUCTS
from raymoe.device.trace import traced

LINE_BYTES, LINE_WORDS, GROUP = 128, 15, 4
"""As in kernels/include/raymoe/lines.cuh."""

BLOCK, BLOCK_WORDS, STAGE_BYTES = 128, 17, 2048
"""As in kernels/include/raymoe/few_rows.cuh."""


def dispatch_few_source(dtype: str = "bfloat16", fp8: bool = False, traces: bool = False) -> KernelSource:
    """The kernel for rows that cross as they are, or for rows of this dtype that cross as 8-bit floats."""
    structs = (DispatchParams, Got, Scratch, Peers, *STRUCTS)
    defines = (("WIRE_FP8", "1"), ("ROW_TYPE", ROW_TYPES[dtype])) if fp8 else ()
    return KernelSource("dispatch_few", structs, (*defines, *traced(traces)))


def combine_few_source(dtype: str, traces: bool = False) -> KernelSource:
    """The kernel for rows of this dtype."""
    structs = (CombineParams, RefusalRecord, Peers, *STRUCTS)
    return KernelSource("combine_few", structs, (("ROW_TYPE", ROW_TYPES[dtype]), *traced(traces)))


def row_lines(row_bytes: int) -> int:
    """Lines of 128 bytes, 120 of them the row's, that a row takes.

    >>> row_lines(16), row_lines(120), row_lines(14336)
    (1, 1, 120)
    """
    return -(-(row_bytes // 8) // LINE_WORDS)


def quantised_lines(hidden: int) -> int:
    """Lines of a row that crosses as 8-bit floats: 17 words for each 128 elements.

    >>> quantised_lines(128), quantised_lines(15 * 128), quantised_lines(7168)
    (2, 17, 64)
    """
    return row_lines(-(-hidden // BLOCK) * BLOCK_WORDS * 8)


def few_blocks(row_bytes: int, rows: int, sms: int) -> int:
    """Blocks for so many rows: one warp for each group of lines and one block that routes, as far as there is room.

    >>> few_blocks(14336, 4, 132), few_blocks(14336, 512, 132), few_blocks(16, 1, 132)
    (16, 132, 2)
    """
    groups = -(-row_lines(row_bytes) // GROUP)
    return max(2, min(sms, 1 + -(-rows * groups // WARPS)))


def few_shared_bytes(experts: int, fp8: bool) -> int:
    """Of the block that routes, and of the placers after it, whose warps have a stage each where rows are quantised.

    >>> few_shared_bytes(256, fp8=False), few_shared_bytes(256, fp8=True)
    (9216, 18496)
    """
    placing = -(-(2 * experts + MAX_RANKS) * 4 // 16) * 16 + (WARPS * STAGE_BYTES if fp8 else 0)
    return max((WARPS + 1) * experts * 4, placing)
