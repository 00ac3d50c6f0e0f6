"""Parameters, sources and grids of kernels/peer/dispatch_ll.cu and combine_ll.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Shape
from raymoe.cuda.params import ROW_TYPES, U32
from raymoe.cuda.structs import MAX_RANKS, STRUCTS, Peers
from raymoe.exchange.peer.combine import CombineCall
from raymoe.exchange.peer.dealing import Dealing
from raymoe.exchange.peer.dispatch import (
    WARPS,
    WIDE,
    BufferOffsets,
    DispatchCall,
    DispatchSummary,
    RefusalRecord,
    Scratch,
)
from raymoe.exchange.peer.trace import traced

LINE_BYTES, LINE_WORDS, GROUP = 128, 15, 4
"""kernels/include/raymoe/peer/ll/lines.cuh has the same values."""

BLOCK, BLOCK_WORDS, UNIT_BLOCKS, STAGE_BYTES = 128, 17, 15, 2048
"""kernels/include/raymoe/peer/ll/quantised_rows_ll.cuh has the same values."""


@dataclass(frozen=True)
class DispatchLlParams(DispatchCall):
    """Twin of the struct in kernels/include/raymoe/peer/ll/words_ll.cuh, which describes the fields."""

    rows: BufferOffsets
    routing_entries: BufferOffsets
    counts: BufferOffsets
    lines: U32
    entries: U32
    sent: Dealing
    placed: Dealing
    counting_blocks: U32
    counting_runs: U32
    leaving_sms: U32
    arriving_sms: U32


@dataclass(frozen=True)
class CombineLlParams(CombineCall):
    """Twin of the struct in kernels/include/raymoe/peer/ll/sums_ll.cuh, which describes the fields."""

    rows: BufferOffsets
    statuses: BufferOffsets
    lines: U32
    reduced: Dealing
    summed: Dealing
    leaving_sms: U32
    arriving_sms: U32


def dispatch_ll_source(dtype: str = "bfloat16", fp8: bool = False, traces: bool = False) -> KernelSource:
    """Return the kernel for rows that cross as they are, or for rows of this dtype that cross as 8-bit floats."""
    structs = (DispatchLlParams, DispatchSummary, RefusalRecord, Scratch, Peers, *STRUCTS)
    defines = (("WIRE_FP8", "1"), ("ROW_TYPE", ROW_TYPES[dtype])) if fp8 else ()
    return KernelSource("peer/dispatch_ll", structs, (*defines, *traced(traces)))


def combine_ll_source(dtype: str, traces: bool = False) -> KernelSource:
    """Return the kernel for rows of this dtype."""
    structs = (CombineLlParams, RefusalRecord, Peers, *STRUCTS)
    return KernelSource("peer/combine_ll", structs, (("ROW_TYPE", ROW_TYPES[dtype]), *traced(traces)))


def row_lines(row_bytes: int) -> int:
    """Return the lines of 128 bytes that a row takes, 120 bytes of the row in each.

    >>> row_lines(16), row_lines(120), row_lines(14336)
    (1, 1, 120)
    """
    return -(-(row_bytes // 8) // LINE_WORDS)


def quantised_lines(hidden: int) -> int:
    """Return the lines of a row that crosses as 8-bit floats: 17 words for each 128 elements.

    >>> quantised_lines(128), quantised_lines(15 * 128), quantised_lines(7168)
    (2, 17, 64)
    """
    return row_lines(-(-hidden // BLOCK) * BLOCK_WORDS * 8)


@dataclass(frozen=True)
class LlGrid:
    """The SMs that work on what leaves this rank, those that work on what arrives, and the blocks of each SM.

    kernels/include/raymoe/peer/ll/roles_ll.cuh assigns blocks accordingly.
    """

    leaving: int
    arriving: int
    rounds: int
    mixed: bool = False
    """Whether every block does both kinds of work. Then `leaving` and `arriving` are the same SMs."""

    @property
    def warps(self) -> int:
        """Return the warps of a block."""
        return WIDE if self.mixed else WARPS

    @property
    def sms(self) -> int:
        return self.arriving if self.mixed else self.leaving + self.arriving

    def shape(self, shared_bytes: int = 0) -> Shape:
        return Shape(self.rounds * self.sms, 32 * self.warps, shared_bytes)

    def build_of(self, source: KernelSource) -> KernelSource:
        """Return the build of a kernel for blocks of this kind."""
        mixed = (("BLOCK_WARPS", str(WIDE)), ("MIXED_ROLES", "1")) if self.mixed else ()
        return replace(source, defines=(*source.defines, *mixed))

    def leave(self, groups: int, most: int, tokens: int, peers: int = 1) -> Dealing:
        """Deal rows of so many groups out to the warps that work on what leaves."""
        return Dealing.of(groups, most, tokens, peers, self.rounds * self.leaving * self.warps)

    def arrive(self, groups: int, most: int, tokens: int, peers: int = 1) -> Dealing:
        """Deal rows of so many groups out to the warps that work on what arrives."""
        return Dealing.of(groups, most, tokens, peers, self.rounds * self.arriving * self.warps)

    @classmethod
    def of(cls, leaving: int, arriving: int, most_leaving: int, sms: int, whole: bool, mixes: bool = True) -> LlGrid:
        """Lay out so many warps of work in each direction on at most `sms` SMs; `whole`: these are the whole GPU.

        If they do not fit, all SMs work. Where it `mixes`, blocks on a part of the GPU have twice the warps and do both
        kinds of work, if a warp has more than FEW_ROUNDS units of it. Else at most `most_leaving` SMs work on what
        leaves. Each SM of the whole GPU has two blocks.

        >>> LlGrid.of(leaving=30, arriving=120, most_leaving=44, sms=132, whole=True)
        LlGrid(leaving=4, arriving=15, rounds=1, mixed=False)
        >>> LlGrid.of(leaving=3840, arriving=15360, most_leaving=44, sms=132, whole=True)
        LlGrid(leaving=44, arriving=88, rounds=2, mixed=False)
        >>> LlGrid.of(leaving=3840, arriving=15360, most_leaving=8, sms=24, whole=False)
        LlGrid(leaving=24, arriving=24, rounds=1, mixed=True)
        """
        first, second = max(1, -(-leaving // WARPS)), max(1, -(-arriving // WARPS))
        if first + second <= sms:
            return cls(first, second, 1)
        if mixes and not whole and leaving + arriving > FEW_ROUNDS * sms * WIDE:
            return cls(sms, sms, 1, mixed=True)
        first = max(1, min(first, most_leaving, sms - 1))
        return cls(first, sms - first, ROUNDS if whole else 1)


def is_mixed_ll(sms: int, fp8: bool = False) -> bool:
    """Return whether blocks on so many SMs, which are not the whole GPU, do both kinds of work.

    Blocks that quantise do not yet: no GPU has timed them.

    >>> is_mixed_ll(24), is_mixed_ll(64), is_mixed_ll(24, fp8=True)
    (True, False, False)
    """
    return sms <= MOST_MIXED_SMS_LL and not fp8


def dispatch_ll_grid(units: int, tokens: int, ranks: int, sms: int, whole: bool, fp8: bool = False) -> LlGrid:
    """Lay out a dispatch of rows of so many units; a unit is one warp's work.

    >>> dispatch_ll_grid(30, tokens=1, ranks=4, sms=132, whole=True)
    LlGrid(leaving=4, arriving=16, rounds=1, mixed=False)
    >>> dispatch_ll_grid(30, tokens=128, ranks=4, sms=132, whole=True)
    LlGrid(leaving=24, arriving=108, rounds=2, mixed=False)
    >>> dispatch_ll_grid(30, tokens=1024, ranks=4, sms=132, whole=True)
    LlGrid(leaving=34, arriving=98, rounds=2, mixed=False)
    """
    arriving = max(tokens * ranks * units, WARPS * min(LEAST_PLACEMENT_BLOCKS, sms - 1))
    senders = SENDERS_OF_MORE if tokens > SENDERS_TOKENS else QUANTISERS if fp8 else SENDERS
    return LlGrid.of(tokens * units, arriving, sms * senders // SMS, sms, whole, is_mixed_ll(sms, fp8))


def combine_ll_grid(units: int, tokens: int, ranks: int, sms: int, whole: bool) -> LlGrid:
    """Lay out a combine likewise. The work on what arrives is one row of y for each token, for all ranks together.

    >>> combine_ll_grid(30, tokens=1, ranks=4, sms=132, whole=True)
    LlGrid(leaving=12, arriving=4, rounds=1, mixed=False)
    >>> combine_ll_grid(30, tokens=128, ranks=4, sms=132, whole=True)
    LlGrid(leaving=55, arriving=77, rounds=2, mixed=False)
    """
    mixes = is_mixed_ll(sms)
    return LlGrid.of(tokens * (ranks - 1) * units, tokens * units, sms * LOCAL_SMS // SMS, sms, whole, mixes)


def ll_counting_blocks(entries: int, arriving: int) -> tuple[int, int]:
    """Return the number of counting blocks, and the runs of 32 entries of each.

    Each counting block counts the entries before its runs itself.

    >>> ll_counting_blocks(8, arriving=15), ll_counting_blocks(1024, arriving=88), ll_counting_blocks(8192, arriving=98)
    ((1, 1), (32, 1), (86, 3))
    """
    runs = max(1, -(-entries // 32))
    runs_of_block = -(-runs // arriving)
    return -(-runs // runs_of_block), runs_of_block


SENDERS, QUANTISERS, LOCAL_SMS, SMS, ROUNDS = 24, 20, 55, 132, 2
"""The most SMs of SMS that work on what leaves, and the blocks of each SM. A dispatch of 128 tokens of 7168 bfloat16
took 23.1 us with 16 senders, 22.6 with 20, 22.4 with 24, 22.7 with 28, 22.4 with 33, 24.0 with 48. A combine took 23.8
with 44 SMs for the local reduction, 23.4 with 55, 60 and 66. As 8-bit floats a dispatch took 17.2 with 16 senders, 16.6
with 20, 16.8 with 24, 16.5 with 28, 16.7 with 32 (4x H200, cold L2 cache, 2026-11-22)."""

MOST_MIXED_SMS_LL = 48
"""On up to so many SMs blocks do both kinds of work. Dispatch + combine of 256 tokens of 7168 bfloat16 took 49 + 61 us
instead of 59 + 92 on 24, 34 + 39 instead of 37 + 56 on 48; a dispatch of 16 tokens on 132 8.8 instead of 8.1 (2x H200,
cold L2 cache, 2026-11-26)."""

FEW_ROUNDS = 2
"""With up to so many units of work for a warp, blocks of one kind are faster on few SMs too. Dispatch + combine of 16
tokens took 7.9 + 9.7 us instead of 9.5 + 12.7 on 48 SMs, where a warp has 1.9 and 1.3 units; on 24, with 3.8 and 2.5,
9.8 + 13.3 instead of 10.2 + 12.8 (2x H100, cold L2 cache, 2026-11-27)."""

SENT, PLACED, REDUCED, SUMMED = 6, 5, 4, 2
"""Groups of lines that a warp has in flight: as in kernels/include/raymoe/peer/ll/rows_ll.cuh and sums_ll.cuh."""

SENDERS_TOKENS, SENDERS_OF_MORE = 128, 34
"""1024 tokens of 7168 bfloat16 took 75 us with 24 senders, 73 with 28, 71 with 32, 69 with 36, 75 with 44 (2x H200,
cold L2 cache, 2026-11-22)."""

LEAST_PLACEMENT_BLOCKS = 16
"""Placement blocks also fill the gaps of experts, a warp each. One token took 7.3 us with 16, 7.3 with 64, 7.5 with
100; as 8-bit floats 8.3, 8.5 and 8.5 (4x H200, cold L2 cache, 2026-11-22). With 4 it took 10.9 us instead of 10.3 (2x
H200, the day before)."""


def row_units(row_bytes: int, hidden: int, fp8: bool) -> int:
    """Return the most units of a row, each the least that a warp moves.

    >>> row_units(14336, 7168, fp8=False), row_units(14336, 7168, fp8=True)
    (30, 4)
    """
    return -(-hidden // (UNIT_BLOCKS * BLOCK)) if fp8 else -(-row_lines(row_bytes) // GROUP)


def ll_shared_bytes(experts: int, grid: LlGrid, fp8: bool = False) -> int:
    """Return the shared memory of a placing block; if rows cross as 8-bit floats, each warp has a stage in it too.

    >>> few, mixed = LlGrid(1, 1, 1), LlGrid(8, 8, 1, mixed=True)
    >>> ll_shared_bytes(256, few), ll_shared_bytes(256, few, fp8=True), ll_shared_bytes(256, mixed, fp8=True)
    (2112, 18496, 34880)
    """
    return -(-(2 * experts + MAX_RANKS) * 4 // 16) * 16 + fp8 * grid.warps * STAGE_BYTES
