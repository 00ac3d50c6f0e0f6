"""Parameters and sources of dispatch.cu, alltoallv.cu, announce.cu and pack.cu. Grids are in dispatch_grid.py."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Annotated

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import ROW_TYPES, U32, U64, Address, Params
from raymoe.cuda.structs import MAX_RANKS, STRUCTS, Peers, Watch
from raymoe.exchange.packed_refusal import PackedRefusal
from raymoe.exchange.peer.trace import traced

THREADS = 256
WARPS = THREADS // 32
WIDE = 2 * WARPS
"""Warps of a block that fills an SM: alltoallv, pack and, where there are registers for it, combine. A combine of 4096
tokens of 7168 bfloat16 took 219 us with one such block on each SM, and 241 with two blocks of half their warps. On 64
SMs it took 292 us, and 464 with one of the smaller blocks on each (2x H200, cold L2 cache, 2026-11-22)."""
MAX_DONE = 272
"""Words of one rank at a peer, one for each block that sends: more than a GPU has SMs."""

MOST_COUNTING_BLOCKS = 64
RANK_BITS = 21
"""Bits of a routing entry for its number among its source's entries for an expert."""
STAMP_BYTES = 16
ROUTE, SEND, PLACE = 1, 2, 4
ALL_PARTS = ROUTE | SEND | PLACE

BufferOffsets = Annotated[tuple[int, ...], ctypes.c_uint64 * 2]


@dataclass(frozen=True)
class DispatchSummary(Params):
    """Values of a dispatch for its combine, besides `entry_places` and `masks`. The numbers of tokens come first."""

    tokens: Annotated[tuple[int, ...], ctypes.c_uint32 * MAX_RANKS]
    refusal: PackedRefusal
    number: U64


@dataclass(frozen=True)
class RefusalRecord(Params):
    """Twin of the struct in kernels/include/raymoe/peer/dispatch/dispatch.cuh."""

    epoch: U64
    unused: U64
    refusals: Annotated[tuple[int, ...], ctypes.c_uint64 * (2 * MAX_RANKS)]


@dataclass(frozen=True)
class Scratch(Params):
    """Words of this rank alone, which stay from run to run, with their first values."""

    bad_entry: U64 = 2**64 - 1
    needed: U64 = 0
    bad_count: U64 = 2**64 - 1
    routed: U32 = 0
    unused: U32 = 0


def local_inverse(local: int) -> int:
    """Return the factor with which `expert * factor >> 20` is the expert's rank.

    It is exact for the 1024 experts that the kernels take.

    >>> import numpy
    >>> numbers = numpy.arange(1024)
    >>> all((numbers * local_inverse(local) >> 20 == numbers // local).all() for local in range(1, 1025))
    True
    """
    return -(-(2**20) // local)


@dataclass(frozen=True)
class DispatchCall(Params):
    """The parameters that the kernels of many tokens and of few tokens have in common.

    Twin of the struct in kernels/include/raymoe/peer/dispatch/dispatch.cuh, which describes the fields.
    """

    peers: Peers
    watch: Watch
    x: Address
    x_scales: Address
    topk_idx: Address
    topk_weights: Address
    num_tokens: Address
    out: Address
    scales: Address
    out_weights: Address
    expert_offsets: Address
    expert_counts: Address
    index: Address
    entry_places: Address
    masks: Address
    summary: Address
    forward: Address
    mark: Address
    record: Address
    trace: Address
    operation: Address
    scratch: Address
    wide_topk_idx: U32
    tokens: U32
    slot_tokens: U32
    topk: U32
    experts: U32
    local: U32
    local_inverse: U32
    row_bytes: U32
    out_row_bytes: U32
    zero_padding: U32
    hidden: U32
    scale_stride: U32
    alignment: U32
    capacity: U32
    op: U32
    group: U32
    site: U32
    unused: U32


@dataclass(frozen=True)
class DispatchParams(DispatchCall):
    """Twin of the struct in kernels/include/raymoe/peer/dispatch/dispatch.cuh, which describes the fields."""

    rows: BufferOffsets
    routing_entries: BufferOffsets
    counts: BufferOffsets
    passes: BufferOffsets
    arrivals: U64
    done: U64
    heads: U64
    taken: Address
    counting_words: Address
    counting_sums: Address
    half_slots: U64
    zero_slot: U64
    slot_bytes: U32
    rank_layout: U32
    parts: U32
    senders: U32
    sender_warps: U32
    sender_stages: U32
    together: U32
    at_once: U32
    arrival_stride: U32
    counting_blocks: U32
    placement_blocks: U32
    placement_warps: U32
    placement_stages: U32


@dataclass(frozen=True)
class ChunkedDispatchParams(DispatchParams):
    """The parameters of a build whose rows of x come in chunks (kernels/include/raymoe/peer/dispatch/chunks.cuh)."""

    chunks: Address = 0
    chunk_tokens: U32 = 0
    rail_op: U32 = 0


def dispatch_source(
    dtype: str = "bfloat16",
    fp8: bool = False,
    stamped: bool = False,
    traces: bool = False,
    *,
    known: bool = False,
    chunked: bool = False,
) -> KernelSource:
    """Return the kernel for rows that cross as they are, or for rows of this dtype that cross as 8-bit floats.

    `known`: for rows that go to the places of an earlier dispatch. `chunked`: for rows of x that come in chunks while
    the kernel runs.
    """
    params = ChunkedDispatchParams if chunked else DispatchParams
    structs = (params, DispatchSummary, RefusalRecord, Scratch, Peers, *STRUCTS)
    defines: tuple[tuple[str, str], ...] = (("WIRE_FP8", "1"), ("ROW_TYPE", ROW_TYPES[dtype])) if fp8 else ()
    defines += (("KNOWN_ROUTING", "1"),) if known else ()
    defines += (("CHUNKED_ROWS", "1"),) if chunked else ()
    return KernelSource("peer/dispatch", structs, (*defines, *stamps(stamped), *traced(traces)))


def routed_again(source: KernelSource) -> KernelSource:
    """Return the build of a dispatch kernel, of many tokens or of few, for a backward pass that routes its rows again.

    >>> routed_again(dispatch_source(chunked=True)).defines
    (('CHUNKED_ROWS', '1'), ('AGAIN_ROUTED', '1'))
    """
    return replace(source, defines=(*source.defines, ("AGAIN_ROUTED", "1")))


def in_groups(source: KernelSource) -> KernelSource:
    """Return the build of a dispatch kernel, of many tokens or of few, in which experts share a gap.

    >>> in_groups(dispatch_source(chunked=True)).defines
    (('CHUNKED_ROWS', '1'), ('GROUPED_EXPERTS', '1'))
    """
    return replace(source, defines=(*source.defines, ("GROUPED_EXPERTS", "1")))


def in_mixed_blocks(source: KernelSource, senders: int) -> KernelSource:
    """Return the build of dispatch.cu whose blocks all place, and have so many more warps that send; 0: as it is.

    >>> in_mixed_blocks(dispatch_source(), 2).defines
    (('MIXED_SENDERS', '2'),)
    """
    return replace(source, defines=(*source.defines, ("MIXED_SENDERS", str(senders)))) if senders else source


def stamps(stamped: bool) -> tuple[tuple[str, str], ...]:
    """Return the defines of a build that stamps every slot with its epoch, and checks the stamp on reading."""
    return (("STAMPED", "1"),) if stamped else ()


# kernels/peer/alltoallv.cu takes the parameters of a dispatch.


def alltoallv_source(stamped: bool = False) -> KernelSource:
    """Return the kernel; it takes rows that cross as they are."""
    return KernelSource("peer/alltoallv", (DispatchParams, Peers, *STRUCTS), stamps(stamped))


# The kernels before and after the copies of the copy engine take the parameters of a dispatch.

ANNOUNCE = KernelSource("peer/announce", (DispatchParams, Peers, *STRUCTS))
ANNOUNCE_THREADS = 32
"""32 times BLOCK_WARPS of kernels/peer/announce.cu."""


def pack_source(stamped: bool = False) -> KernelSource:
    """Return the kernel that copies rows to the slots from which the copy engine copies."""
    return KernelSource("peer/pack", (DispatchParams, Peers, *STRUCTS), stamps(stamped))
