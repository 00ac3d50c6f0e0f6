"""The parameters of the kernels that backends `collective` and `allgather` run around NCCL's collectives.

The kernels are kernels/nccl/publish_routing.cu, count_entries.cu, number_entries.cu, spread_rows.cu, sum_entries.cu and
sum_ranks.cu, run in this order. None waits for another GPU, and all run from compute capability 8.0 on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import ROW_TYPES, U32, U64, Address, Params
from raymoe.exchange.packed_refusal import PackedRefusal

MOST_RANKS = 16
THREADS = 256
MOST_SHARED_BYTES = 48 << 10
"""The most shared memory of a block that counts: every GPU has it."""
MOST_EXPERTS = 3072
"""The most experts on a rank: the counters of one warp fit into MOST_SHARED_BYTES."""
VECTOR_BYTES = 16
SPREAD_VECTORS = 128
"""Vectors of a row that a warp moves at a time."""


@dataclass(frozen=True)
class DispatchMemory(Params):
    """Twin of the struct in kernels/include/raymoe/nccl/rounds.cuh: the layout of a dispatch's memory."""

    record: U64
    returned_rows: U64
    row_of: U64
    places: U64
    rank: U32
    ranks: U32
    tokens: U32
    topk: U32
    local: U32
    compact: U32

    @classmethod
    def of(cls, sizes: Sizes, rank: int) -> DispatchMemory:
        """Return the layout for an exchange of these sizes.

        >>> DispatchMemory.of(Sizes(ranks=2, tokens=3, topk=2, local=4, compact=True), rank=1).record
        128
        """
        offsets, end = [], 0
        for nbytes in sizes.regions():
            offsets.append(end)
            end += -(-nbytes // VECTOR_BYTES) * VECTOR_BYTES
        _, record, returned_rows, row_of, places = offsets  # the metadata of all ranks comes first
        numbers = rank, sizes.ranks, sizes.tokens, sizes.topk, sizes.local, int(sizes.compact)
        return cls(record, returned_rows, row_of, places, *numbers)


@dataclass(frozen=True)
class Sizes:
    """R ranks, at most T tokens a rank, K ids a token, L experts a rank; `compact`: rows lie one after the other."""

    ranks: int
    tokens: int
    topk: int
    local: int
    compact: bool

    @property
    def metadata_bytes(self) -> int:
        """The metadata of one rank: its ids, its weights, then the status of a backward pass."""
        return -(-self.tokens * self.topk * 8 // VECTOR_BYTES) * VECTOR_BYTES + PackedRefusal.nbytes()

    def regions(self) -> tuple[int, ...]:
        """Bytes of each part of a dispatch's memory: metadata of all ranks, record, returned_rows, row_of, places."""
        all_tokens = self.ranks * self.tokens
        return (
            self.ranks * self.metadata_bytes,
            DispatchRecord.nbytes(),
            self.tokens * self.ranks * 4,
            all_tokens * 4,
            all_tokens * self.topk * 4,
        )

    @property
    def memory_bytes(self) -> int:
        return sum(-(-nbytes // VECTOR_BYTES) * VECTOR_BYTES for nbytes in self.regions())

    @property
    def stats_words(self) -> int:
        """Words that a block of count_entries writes."""
        return self.local + self.ranks + 1

    def numbering_bytes(self, warps: int) -> int:
        """Shared memory of a block of number_entries; kernels/include/raymoe/nccl/numbering.cuh lays it out."""
        return 4 * ((warps + 2) * self.local + (warps + 1) * (self.ranks + 1) + warps)

    def numbering_warps(self, most: int = THREADS // 32) -> int:
        """Return the warps of a block of number_entries: each has a counter for each expert in shared memory.

        >>> Sizes(4, 4096, 8, 64, False).numbering_warps(), Sizes(1, 64, 8, MOST_EXPERTS, False).numbering_warps()
        (8, 1)
        """
        fitting = (warps for warps in range(most, 0, -1) if self.numbering_bytes(warps) <= MOST_SHARED_BYTES)
        return next(fitting, 1)


@dataclass(frozen=True)
class DispatchRecord(Params):
    """Twin of the struct in kernels/include/raymoe/nccl/rounds.cuh: the totals of a dispatch."""

    refusal: PackedRefusal
    number: U64
    unused: U64
    rows_from: Annotated[tuple[int, ...], ctypes.c_uint32 * MOST_RANKS]
    rows_to: Annotated[tuple[int, ...], ctypes.c_uint32 * MOST_RANKS]


@dataclass(frozen=True)
class PublishScratch(Params):
    """Words of this rank alone; the defaults are their first values."""

    bad_entry: U64 = 2**64 - 1
    number: U64 = 0
    ticket: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class PublishRoutingParams(Params):
    memory: DispatchMemory
    saved: Address = 0
    topk_idx: Address = 0
    topk_weights: Address = 0
    num_tokens: Address = 0
    forward: Address = 0
    mark: Address = 0
    scratch: Address = 0
    wide_topk_idx: U32 = 0
    x_rows: U32 = 0
    experts: U32 = 0
    site: U32 = 0


@dataclass(frozen=True)
class CountParams(Params):
    memory: DispatchMemory
    saved: Address = 0
    stats: Address = 0
    runs: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class NumberParams(Params):
    memory: DispatchMemory
    saved: Address = 0
    stats: Address = 0
    out_weights: Address = 0
    expert_offsets: Address = 0
    expert_counts: Address = 0
    index: Address = 0
    host_counts: Address = 0
    runs: U32 = 0
    x_rows: U32 = 0
    capacity: U32 = 0
    alignment: U32 = 0
    zero_row: U32 = 0
    group: U32 = 1


@dataclass(frozen=True)
class SpreadParams(Params):
    rows: Address = 0
    own: Address = 0
    out: Address = 0
    saved: Address = 0
    source: U64 = 2**64 - 1
    to: U64 = 0
    expert_offsets: Address = 0
    expert_counts: Address = 0
    count: U32 = 0
    stride: U32 = 0
    width: U32 = 0
    skip: U32 = 2**32 - 1
    own_first: U32 = 0
    own_count: U32 = 0
    row_bytes: U32 = 0
    pieces: U32 = 0
    experts: U32 = 0
    first_row: U32 = 0


@dataclass(frozen=True)
class SumEntriesParams(Params):
    memory: DispatchMemory
    saved: Address = 0
    rows: Address = 0
    outgoing: Address = 0
    numbers: Address = 0
    outgoing_numbers: Address = 0
    row_bytes: U32 = 0
    wire_row_bytes: U32 = 0
    pieces: U32 = 0
    weighted: U32 = 0
    site: U32 = 0
    skew: U32 = 0
    number_stride: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class SumRanksParams(Params):
    memory: DispatchMemory
    saved: Address = 0
    outgoing: Address = 0
    returned: Address = 0
    y: Address = 0
    refused: Address = 0
    outgoing_numbers: Address = 0
    returned_numbers: Address = 0
    out_numbers: Address = 0
    row_bytes: U32 = 0
    wire_row_bytes: U32 = 0
    pieces: U32 = 0
    y_rows: U32 = 0
    skew: U32 = 0
    number_stride: U32 = 0


@dataclass(frozen=True)
class PublishPassParams(Params):
    """Twin of the struct in kernels/nccl/publish_pass.cu, which describes the fields."""

    number: Address = 0
    into: Address = 0
    mark: Address = 0
    dispatches: Address = 0
    site: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class ComparePassesParams(Params):
    """Twin of the struct in kernels/nccl/compare_passes.cu, which describes the fields."""

    passes: Address = 0
    rows: Address = 0
    refused: Address = 0
    stride: U64 = 0
    bytes: U64 = 0
    ranks: U32 = 0
    unused: U32 = 0


REFUSED_BYTES = 16 + MOST_RANKS * PackedRefusal.nbytes()
"""The statuses of the first refused combine, after two words. The first word is 1 where there are statuses."""

_STRUCTS = (DispatchMemory, DispatchRecord)
PUBLISH_ROUTING = KernelSource("nccl/publish_routing", (PublishRoutingParams, PublishScratch, *_STRUCTS))
COUNT = KernelSource("nccl/count_entries", (CountParams, *_STRUCTS))
NUMBER = KernelSource("nccl/number_entries", (NumberParams, *_STRUCTS))
SPREAD = KernelSource("nccl/spread_rows", (SpreadParams,))
PUBLISH_PASS = KernelSource("nccl/publish_pass", (PublishPassParams,))
COMPARE_PASSES = KernelSource("nccl/compare_passes", (ComparePassesParams,))


def sum_sources(dtype: str, wire: str) -> tuple[KernelSource, KernelSource]:
    """Return the kernel that sums a rank's rows of a token, and the kernel that adds the ranks' sums."""
    types = (("ROW_TYPE", ROW_TYPES[dtype]), ("WIRE_TYPE", ROW_TYPES[wire]))
    return (
        KernelSource("nccl/sum_entries", (SumEntriesParams, *_STRUCTS), types),
        KernelSource("nccl/sum_ranks", (SumRanksParams, *_STRUCTS), types),
    )


def sum_pieces(row_bytes: int, item_bytes: int, wire_item_bytes: int) -> int:
    """Return the number of pieces of a row, which a warp sums one at a time.

    A thread takes two vectors of a piece where sums cross in a wider dtype, else four.

    >>> sum_pieces(14336, 2, 2), sum_pieces(14336, 2, 4)
    (7, 14)
    """
    unroll = 2 if wire_item_bytes > item_bytes else 4
    return -(-row_bytes // (VECTOR_BYTES * 32 * unroll))
