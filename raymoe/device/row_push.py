"""The kernel of kernels/row_push.cu: what it takes, and a launch of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Kernels
from raymoe.device.launch import Launch, Shape
from raymoe.device.params import U32, U64, Address, Params
from raymoe.device.peer import Peers
from raymoe.device.ring import Ring
from raymoe.device.sync import STRUCTS, Watch

THREADS = 32

SHARED_BYTES = 200 << 10
"""Of a block's shared memory at most, for the ring."""

LARGE_ROW_BYTES = 8 << 10
LARGE_ROW_STAGES, SMALL_ROW_STAGES, SMALL_ROW_BLOCKS = 4, 8, 32
"""Large rows are pushed best by every SM, few of them in flight on each; small ones by fewer SMs. 4096 tokens between
four ranks, rows of 14,336 B: 132 blocks x 4 stages 463 us, 32 x 8 480, 16 x 8 485, 12 x 14 498; of 7,392 B: 32 x 8 256,
16 x 8 263, 132 x 8 266, 12 x 8 304 (4x H200, cold L2 cache, 2026-11-21)."""


@dataclass(frozen=True)
class RowPushParams(Params):
    """Twin of the struct in kernels/row_push.cu, where the words are described."""

    peers: Peers
    x: Address
    plan: Address
    count: Address
    slots: U64
    arrived: U64
    operation: Address
    watch: Watch = field(default_factory=Watch)
    op: U32 = 0
    tokens: U32 = 0
    row_bytes: U32 = 0
    stages: U32 = 0


ROW_PUSH = KernelSource("row_push", (RowPushParams, Peers, *STRUCTS))


def shape_of(tokens: int, row_bytes: int, sms: int) -> tuple[int, Ring]:
    """Blocks, each on an SM of its own, and the ring of each.

    >>> shape_of(4096, 14336, sms=132)
    (132, Ring(stages=4, stage_bytes=14336))
    >>> shape_of(4096, 7392, sms=132), shape_of(1, 65536, sms=132)
    ((32, Ring(stages=8, stage_bytes=7392)), (1, Ring(stages=3, stage_bytes=65536)))
    """
    large = row_bytes > LARGE_ROW_BYTES
    stages = min(LARGE_ROW_STAGES if large else SMALL_ROW_STAGES, SHARED_BYTES // (row_bytes + 8))
    return min(tokens, sms if large else min(sms, SMALL_ROW_BLOCKS)), Ring(max(1, stages), row_bytes)


def row_push_launch(kernels: Kernels, params: RowPushParams, blocks: int, ring: Ring) -> Launch:
    """A launch of the kernel on `blocks` blocks; `params` without stages, which are the ring's."""
    whole = replace(params, stages=ring.stages, row_bytes=ring.stage_bytes)
    return Launch(kernels.function(ROW_PUSH), Shape(blocks, THREADS, ring.shared_bytes), whole)
