"""The kernel of kernels/combine.cu: what it takes, and how a launch of it is laid out on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated

from raymoe.device.dispatch import ROW_TYPES, STAMP_BYTES, THREADS, WARPS, Halves, pace_ns, stamps
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
    progress: U64
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
    slot_tokens: U32
    tokens: U32
    topk: U32
    row_bytes: U32
    slot_bytes: U32
    weighted: U32
    op: U32
    parts: U32
    reducers: U32
    reducer_lanes: U32
    chunk: U32
    summers: U32
    pace_ns: U32
    pieces: U32


def combine_source(dtype: str, stamped: bool = False, traces: bool = False) -> KernelSource:
    """The kernel for rows of this dtype: three that each hold the registers of one type, not one with those of all."""
    structs = (CombineParams, RefusalRecord, Peers, *STRUCTS)
    return KernelSource("combine", structs, (("ROW_TYPE", ROW_TYPES[dtype]), *stamps(stamped), *traced(traces)))


@dataclass(frozen=True)
class CombineGrid:
    """Which blocks do what, one to a multiprocessor."""

    reducers: int
    summers: int
    reducer_lanes: int
    chunk: int
    pieces: int
    pace_ns: int
    shared_bytes: int

    @property
    def lanes(self) -> int:
        return self.reducers * self.reducer_lanes

    def shape(self, parts: int) -> Shape:
        """The launch that does these parts."""
        blocks = (self.reducers if parts & REDUCE else 0) + (self.summers if parts & SUM else 0)
        return Shape(blocks, THREADS, self.shared_bytes if parts & REDUCE else 0)


def grid_of(row_bytes: int, tokens: int, sms: int, shared_bytes: int) -> CombineGrid:
    """A grid of at most `sms` blocks for rows like these, on multiprocessors with so much shared memory a block.

    >>> grid_of(14336, 4096, 132, 232448)
    CombineGrid(reducers=66, summers=66, reducer_lanes=8, chunk=1, pieces=2, pace_ns=10369, shared_bytes=114944)
    >>> grid_of(14336, 16, 132, 232448).pieces, grid_of(16, 16, 132, 232448).pieces
    (7, 1)
    """
    if sms < 2:
        raise ConfigError(f"sms is {sms}; a combine needs at least 2, one that reduces and one that sums")
    reducers = max(1, min(REDUCERS, sms // 2))
    summers = max(1, min(SUMMERS, sms - reducers))
    vectors = row_bytes // 16
    # Enough pieces for all warps of few tokens, and none so small that a warp's loads do not fill it.
    wanted = max(PIECES, -(-summers * WARPS // tokens))
    pieces = max(1, min(wanted, vectors // VECTORS_A_STEP, MOST_PIECES))
    piece_bytes = -(-vectors // pieces) * 16
    stage_bytes = piece_bytes + STAMP_BYTES  # with or without stamps
    lanes = min(REDUCER_LANES, shared_bytes // (2 * stage_bytes))
    if lanes < 1:
        raise ConfigError(
            f"a row of {row_bytes} bytes; {shared_bytes} bytes of shared memory hold no two of its pieces"
        )
    pace = pace_ns(piece_bytes, reducers * lanes, tokens)
    return CombineGrid(reducers, summers, lanes, CHUNK, pieces, pace, lanes * 2 * stage_bytes)


REDUCERS, SUMMERS, REDUCER_LANES, CHUNK, PIECES = 66, 66, WARPS, 1, 2
MOST_PIECES = 32
VECTORS_A_STEP = 128
"""What the threads of a warp load at a time of one row: 4 vectors each."""
