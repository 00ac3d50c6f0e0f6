"""The kernel of kernels/dispatch.cu: what it takes, and how it is built. dispatch_grid.py lays a launch out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated

from raymoe.device.dealing import Dealing
from raymoe.device.jit import KernelSource
from raymoe.device.params import U32, U64, Address, Params
from raymoe.device.structs import MAX_RANKS, STRUCTS, Peers, Watch
from raymoe.device.trace import traced

THREADS = 256
WARPS = THREADS // 32
WIDE = 2 * WARPS
"""Warps of a block that fills a multiprocessor: alltoallv, pack and, where there are registers for it, combine. 4096
tokens of 7168 bfloat16 took a combine 219 us by such blocks, 241 by two of half their warps on each multiprocessor; by
64 multiprocessors 292, and 464 by one of those on each (2x H200, cold L2 cache, 2026-11-22)."""
MAX_DONE = 272
"""Words of one rank at a peer, one for each block that sends: more than a GPU has multiprocessors."""

MOST_ROUTERS = 64
RANK_BITS = 21
"""Of what is told of an entry, for its number among its source's entries for an expert."""
STAMP_BYTES = 16
ROUTE, SEND, PLACE = 1, 2, 4
ALL_PARTS = ROUTE | SEND | PLACE

Halves = Annotated[tuple[int, ...], ctypes.c_uint64 * 2]


@dataclass(frozen=True)
class Refused(Params):
    """Twin of the struct `Refusal`; raymoe/exchange/refusal.py packs the same 16 bytes. With no cause, `number` is the
    epoch of the dispatch."""

    cause: U32 = 0
    other: U32 = 0
    number: U64 = 0


@dataclass(frozen=True)
class Got(Params):
    """What a dispatch leaves for its combine, besides `home` and `masks`."""

    tokens: Annotated[tuple[int, ...], ctypes.c_uint32 * MAX_RANKS]
    refusal: Refused


@dataclass(frozen=True)
class Scratch(Params):
    """Words of this rank alone, kept from run to run; they begin like this."""

    bad_entry: U64 = 2**64 - 1
    needed: U64 = 0
    liar: U64 = 2**64 - 1
    routed: U32 = 0
    unused: U32 = 0


def local_inverse(local: int) -> int:
    """What an expert's number is multiplied by, for its rank to be the product's bits from 20 on: it is exact for the
    1024 experts that the kernels take.

    >>> import numpy
    >>> numbers = numpy.arange(1024)
    >>> all((numbers * local_inverse(local) >> 20 == numbers // local).all() for local in range(1, 1025))
    True
    """
    return -(-(2**20) // local)


@dataclass(frozen=True)
class DispatchParams(Params):
    """Twin of the struct in kernels/include/raymoe/dispatch/dispatch.cuh, where the fields are described."""

    peers: Peers
    watch: Watch
    rows: Halves
    told: Halves
    counts: Halves
    arrivals: U64
    done: U64
    heads: U64
    ll_rows: Halves
    ll_told: Halves
    ll_counts: Halves
    x: Address
    x_scales: Address
    ids: Address
    weights: Address
    num_tokens: Address
    out: Address
    scales: Address
    out_weights: Address
    expert_offsets: Address
    expert_counts: Address
    index: Address
    home: Address
    masks: Address
    got: Address
    trace: Address
    operation: Address
    scratch: Address
    taken: Address
    router_words: Address
    router_counts: Address
    half_slots: U64
    zero_slot: U64
    wide_ids: U32
    tokens: U32
    slot_tokens: U32
    topk: U32
    experts: U32
    local: U32
    local_inverse: U32
    row_bytes: U32
    out_row_bytes: U32
    slot_bytes: U32
    hidden: U32
    scale_stride: U32
    alignment: U32
    capacity: U32
    zero_padding: U32
    rank_layout: U32
    op: U32
    parts: U32
    senders: U32
    sender_lanes: U32
    sender_stages: U32
    together: U32
    at_once: U32
    arrival_stride: U32
    ll_lines: U32
    ll_entries: U32
    ll_sent: Dealing
    ll_placed: Dealing
    routers: U32
    router_runs: U32
    placers: U32
    placer_lanes: U32
    placer_stages: U32


ROW_TYPES = {"bfloat16": "Bf16", "float16": "F16", "float32": "F32"}


def dispatch_source(
    dtype: str = "bfloat16", fp8: bool = False, stamped: bool = False, traces: bool = False
) -> KernelSource:
    """The kernel for rows that cross as they are, or for rows of this dtype that cross as 8-bit floats."""
    structs = (DispatchParams, Got, Scratch, Peers, *STRUCTS)
    defines = (("WIRE_FP8", "1"), ("ROW_TYPE", ROW_TYPES[dtype])) if fp8 else ()
    return KernelSource("dispatch", structs, (*defines, *stamps(stamped), *traced(traces)))


def stamps(stamped: bool) -> tuple[tuple[str, str], ...]:
    """What a build is defined with that stamps every slot with its epoch and checks it on reading."""
    return (("STAMPED", "1"),) if stamped else ()


# The kernel of kernels/alltoallv.cu, which takes the parameters of a dispatch.


def alltoallv_source(stamped: bool = False) -> KernelSource:
    """The kernel for rows that cross as they are."""
    return KernelSource("alltoallv", (DispatchParams, Peers, *STRUCTS), stamps(stamped))


# The kernels around the copies of a dispatch by the copy engine, which take the parameters of a dispatch.

ANNOUNCE = KernelSource("announce", (DispatchParams, Peers, *STRUCTS))
ANNOUNCE_THREADS = 32
"""As BLOCK_WARPS in kernels/announce.cu says."""


def pack_source(stamped: bool = False) -> KernelSource:
    """The kernel that puts rows where the copy engine takes them from."""
    return KernelSource("pack", (DispatchParams, Peers, *STRUCTS), stamps(stamped))
