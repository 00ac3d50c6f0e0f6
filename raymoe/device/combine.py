"""The kernel of kernels/combine.cu: what it takes, and how a launch of it is laid out on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated

from raymoe.device.dispatch import ROW_TYPES, STAMP_BYTES, THREADS, WARPS, Halves, stamps
from raymoe.device.jit import KernelSource
from raymoe.device.launch import Shape
from raymoe.device.params import U32, U64, Address, Params
from raymoe.device.peer import MAX_RANKS, Peers
from raymoe.device.sync import STRUCTS, Watch
from raymoe.device.trace import traced
from raymoe.job.errors import ConfigError

REDUCE, SUM = 1, 2
ALL_PARTS = REDUCE | SUM


@dataclass(frozen=True)
class RefusalRecord(Params):
    """Twin of the struct in kernels/include/raymoe/combine.cuh."""

    epoch: U64
    unused: U64
    refusals: Annotated[tuple[int, ...], ctypes.c_uint64 * (2 * MAX_RANKS)]


@dataclass(frozen=True)
class CombineParams(Params):
    """Twin of the struct in kernels/include/raymoe/combine.cuh, where the fields are described."""

    peers: Peers
    watch: Watch
    rows: Halves
    statuses: Halves
    arrivals: U64
    done: U64
    heads: U64
    few_rows: Halves
    few_statuses: Halves
    expert_rows: Address
    home: Address
    masks: Address
    got: Address
    y: Address
    trace: Address
    operation: Address
    record: Address
    taken: Address
    arrival_stride: U32
    few_lines: U32
    slot_tokens: U32
    tokens: U32
    topk: U32
    row_bytes: U32
    wire_row_bytes: U32
    slot_bytes: U32
    weighted: U32
    op: U32
    parts: U32
    reducers: U32
    reducer_lanes: U32
    together: U32
    summers: U32
    pieces: U32


def combine_source(dtype: str, stamped: bool = False, traces: bool = False, wire: str | None = None) -> KernelSource:
    """The kernel for rows of this dtype, whose sums cross as `wire`: many that each hold the registers of what they
    need, not one with those of all."""
    structs = (CombineParams, RefusalRecord, Peers, *STRUCTS)
    types = [("ROW_TYPE", ROW_TYPES[dtype])] + ([("WIRE_TYPE", ROW_TYPES[wire])] if wire not in (None, dtype) else [])
    return KernelSource("combine", structs, (*types, *stamps(stamped), *traced(traces)))


@dataclass(frozen=True)
class CombineGrid:
    """Which blocks do what, one to a multiprocessor."""

    reducers: int
    summers: int
    reducer_lanes: int
    pieces: int
    together: int
    shared_bytes: int

    def shape(self, parts: int) -> Shape:
        """The launch that does these parts."""
        blocks = (self.reducers if parts & REDUCE else 0) + (self.summers if parts & SUM else 0)
        return Shape(blocks, THREADS, self.shared_bytes if parts & REDUCE else 0)


def grid_of(row_bytes: int, tokens: int, sms: int, shared_bytes: int, blocks_a_sm: int = 1) -> CombineGrid:
    """A grid of at most `blocks_a_sm` blocks on each of `sms` multiprocessors with so much shared memory a block.

    >>> grid_of(14336, 4096, 132, 231424, 2)
    CombineGrid(reducers=132, summers=110, reducer_lanes=8, pieces=4, together=2, shared_bytes=66048)
    >>> grid_of(14336, 16, 132, 231424).pieces, grid_of(16, 16, 132, 231424).pieces
    (7, 1)
    """
    blocks, room = sms * blocks_a_sm, shared_bytes // blocks_a_sm - RESERVED_SHARED * (blocks_a_sm - 1)
    if blocks < 2:
        raise ConfigError(f"sms is {sms}; a combine needs at least 2, one that reduces and one that sums")
    reducers = max(1, min(REDUCERS, blocks // 2))
    summers = max(1, min(SUMMERS, blocks - reducers))
    vectors = row_bytes // 16
    # Enough pieces for all warps of few tokens, and none so small that a warp's loads do not fill it.
    wanted = max(PIECES, -(-2 * summers * WARPS // tokens))
    pieces = max(1, min(wanted, vectors // VECTORS_A_STEP, MOST_PIECES))
    lane_bytes = STEPS_UNDER_WAY * (VECTORS_A_STEP * 16 + STAMP_BYTES)  # with or without stamps, whatever they cross as
    lanes = min(REDUCER_LANES, room // lane_bytes)
    return CombineGrid(reducers, summers, lanes, pieces, TOGETHER, lanes * lane_bytes)


def most_pieces(tokens: int) -> int:
    """Of so many rows: each has a word at the ranks that they come from, and the words are there before any grid is.

    >>> most_pieces(4096), most_pieces(1)
    (22240, 32)
    """
    return min(tokens * MOST_PIECES, tokens * (PIECES + 1) + 2 * SUMMERS * WARPS)


REDUCERS, SUMMERS, REDUCER_LANES, PIECES, TOGETHER = 132, 110, WARPS, 4, 2
"""4096 tokens of 7168 bfloat16 took 486 us with these, 491 in 2 pieces with a fence for each, 570 by 66 reducers and 66
summers, 510 in whole rows; reducing and pushing alone takes 470 (4x H200, 2026-11-21)."""

RESERVED_SHARED = 512
MOST_PIECES = 32
VECTORS_A_STEP, STEPS_UNDER_WAY = 128, 4
"""What the threads of a warp load at a time of one row, 4 vectors each; and how many such steps are under way."""
