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

STAGES = 4
"""Rows are pushed best by every multiprocessor, few of them in flight on each. 4096 tokens between four ranks by 132
blocks x 4 stages, 66 x 4 and 32 x 8: rows of 14,336 B 462, 467, 477 us; of 7,424 B 246, 251, 255; of 5,760 B 194, 198,
203; of 2,944 B 108, 113, 130; of 1,024 B 48, 52, 74; with 8 stages on 132 blocks the same (4x H200, cold L2 cache,
2026-11-22). Of 7,392 B, which do not begin with lines of 128 B, 266, 272 and 256."""


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
    >>> shape_of(1, 65536, sms=132)
    (1, Ring(stages=3, stage_bytes=65536))
    """
    stages = min(STAGES, SHARED_BYTES // (row_bytes + 8))
    return min(tokens, sms), Ring(max(1, stages), row_bytes)


def row_push_launch(kernels: Kernels, params: RowPushParams, blocks: int, ring: Ring) -> Launch:
    """A launch of the kernel on `blocks` blocks; `params` without stages, which are the ring's."""
    whole = replace(params, stages=ring.stages, row_bytes=ring.stage_bytes)
    return Launch(kernels.function(ROW_PUSH), Shape(blocks, THREADS, ring.shared_bytes), whole)
