"""Parameters, source and grid of kernels/peer/combine.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Shape
from raymoe.cuda.params import ROW_TYPES, U32, U64, Address, Params
from raymoe.cuda.structs import STRUCTS, Peers, Watch
from raymoe.errors import ConfigError
from raymoe.exchange.peer.column_pieces import MOST_PIECES as MOST_COLUMN_PIECES
from raymoe.exchange.peer.dispatch import STAMP_BYTES, WARPS, WIDE, BufferOffsets, RefusalRecord, stamps
from raymoe.exchange.peer.dispatch_grid import crossing
from raymoe.exchange.peer.trace import traced

REDUCE, SUM = 1, 2
ALL_PARTS = REDUCE | SUM


@dataclass(frozen=True)
class CombineCall(Params):
    """The parameters that the kernels of many tokens and of few tokens have in common.

    Twin of the struct in kernels/include/raymoe/peer/combine/combine.cuh, which describes the fields.
    """

    peers: Peers
    watch: Watch
    expert_rows: Address
    entry_places: Address
    masks: Address
    summary: Address
    y: Address
    trace: Address
    operation: Address
    record: Address
    slot_tokens: U32
    tokens: U32
    topk: U32
    row_bytes: U32
    weighted: U32
    op: U32
    site: U32
    unused: U32


@dataclass(frozen=True)
class CombineParams(CombineCall):
    """Twin of the struct in kernels/include/raymoe/peer/combine/combine.cuh, which describes the fields."""

    rows: BufferOffsets
    statuses: BufferOffsets
    arrivals: U64
    done: U64
    heads: U64
    taken: Address
    stored: Address
    numbers: Address
    returned_numbers: Address
    wire_row_bytes: U32
    slot_bytes: U32
    parts: U32
    local_blocks: U32
    local_warps: U32
    together: U32
    final_blocks: U32
    pieces: U32
    arrival_stride: U32
    first_token: U32
    most_tokens: U32
    number_bytes: U32
    stored_vectors: U32
    unused_too: U32 = 0


def number_bytes(topk: int) -> int:
    """Return the bytes of the float32 numbers that may return with a token, one of each entry, in a slot.

    >>> number_bytes(8), number_bytes(1)
    (32, 16)
    """
    return -(-4 * topk // 16) * 16


def combine_source(
    dtype: str,
    stamped: bool = False,
    traces: bool = False,
    wire: str | None = None,
    warps: int = WARPS,
    carries: bool = False,
) -> KernelSource:
    """Return the kernel for rows of this dtype whose sums cross as `wire`, with blocks of so many warps.

    With `carries` a number of each entry is returned beside the sums. Each combination is a build of its own, because
    one build for all would hold the registers of all.
    """
    structs = (CombineParams, RefusalRecord, Peers, *STRUCTS)
    types = [("ROW_TYPE", ROW_TYPES[dtype])] + ([("WIRE_TYPE", ROW_TYPES[wire])] if wire not in (None, dtype) else [])
    wide = [("BLOCK_WARPS", str(warps))] if warps != WARPS else []
    carrying = [("CARRIES", "1")] if carries else []
    return KernelSource("peer/combine", structs, (*types, *wide, *carrying, *stamps(stamped), *traced(traces)))


def with_ll_statuses(source: KernelSource) -> KernelSource:
    """Return the build whose statuses are the words of kernels/peer/combine_ll.cu: for backward passes of few tokens.

    >>> with_ll_statuses(combine_source("float16", carries=True)).defines
    (('ROW_TYPE', 'F16'), ('CARRIES', '1'), ('LL_STATUSES', '1'))
    """
    return replace(source, defines=(*source.defines, ("LL_STATUSES", "1")))


def beside_product(source: KernelSource) -> KernelSource:
    """Return the build that begins with the pieces of columns that a product beside it has stored.

    >>> beside_product(combine_source("bfloat16")).defines
    (('ROW_TYPE', 'Bf16'), ('BESIDE_PRODUCT', '1'))
    """
    return replace(source, defines=(*source.defines, ("BESIDE_PRODUCT", "1")))


def block_warps(capability: tuple[int, int], stamped: bool, retypes: bool) -> int:
    """Return the warps of a block, one block to an SM: as many as there are registers for.

    On Blackwell, with stamps, or if sums cross as another dtype than rows have, 16 would spill (NVRTC 13.0).

    >>> block_warps((9, 0), stamped=False, retypes=False), block_warps((10, 0), stamped=False, retypes=False)
    (16, 8)
    """
    return WARPS if stamped or retypes or capability >= (10, 0) else WIDE


@dataclass(frozen=True)
class CombineGrid:
    """The roles of a launch's blocks, one block to an SM."""

    local_blocks: int
    final_blocks: int
    warps: int
    """Warps of a block."""
    local_warps: int
    pieces: int
    together: int
    shared_bytes: int
    piece_tiles: int = 0
    """Beside a product, the tiles side by side in one of its pieces; else 0."""

    def shape(self, parts: int) -> Shape:
        """Return the launch shape for these parts."""
        blocks = (self.local_blocks if parts & REDUCE else 0) + (self.final_blocks if parts & SUM else 0)
        return Shape(blocks, self.warps * 32, self.shared_bytes if parts & REDUCE else 0)

    def beside_product(self, pieces: int, piece_tiles: int) -> CombineGrid:
        """Return the same blocks for a combine beside a product that stores so many pieces of so many tiles.

        Few of them have SMs before the product ends.
        """
        return replace(self, pieces=pieces, together=FEW_TOGETHER, piece_tiles=piece_tiles)


def local_share(ranks: int, topk: int) -> float:
    """Return the local reduction's share of the loads and stores of a combine with uniform routing.

    The local reduction loads the rows of peers' tokens and stores one row for each. The final reduction loads the rows
    of this rank's tokens and the rows that come, and stores y.

    >>> round(local_share(ranks=2, topk=8), 2), round(local_share(ranks=4, topk=8), 2), local_share(1, 8)
    (0.45, 0.6, 0.0)
    """
    cross = crossing(ranks, topk)
    reducing, summing = topk * (ranks - 1) / ranks + cross, topk / ranks + cross + 1
    return reducing / (reducing + summing)


def grid_of(
    row_bytes: int, tokens: int, sms: int, shared_bytes: int, share: float = 0.5, warps: int = WARPS
) -> CombineGrid:
    """Lay out one block of so many warps on each of `sms` SMs; `share` of the blocks reduce.

    >>> grid = grid_of(14336, 4096, 132, 231424, local_share(ranks=4, topk=8), WIDE)
    >>> grid.local_blocks, grid.final_blocks, grid.local_warps, grid.pieces, grid.together
    (60, 72, 16, 4, 2)
    >>> grid_of(14336, 16, 132, 231424).pieces, grid_of(16, 16, 132, 231424).pieces
    (7, 1)
    >>> grid_of(14336, 4096, 48, 231424).together, grid_of(14336, 4096, 24, 231424).pieces
    (3, 1)
    """
    if sms < 2:
        raise ConfigError(f"sms is {sms}; a combine needs at least 2, one that reduces and one that sums")
    local_blocks = max(1, min(round(sms * share), MOST_LOCAL_BLOCKS, sms - 1))
    final_blocks = sms - local_blocks
    vectors = row_bytes // 16
    # Enough pieces for all warps if tokens are few; no piece so small that a warp's loads do not fill it.
    whole = min(PIECES if sms > MOST_WHOLE_SMS else 1, -(-vectors // (STEPS_A_PIECE * VECTORS_A_STEP)))
    wanted = max(whole, -(-2 * min(final_blocks * warps, FINAL_WARPS) // tokens))
    pieces = max(1, min(wanted, vectors // VECTORS_A_STEP, MOST_PIECES))
    warp_bytes = STEPS_UNDER_WAY * (VECTORS_A_STEP * 16 + STAMP_BYTES)  # enough for every wire type, with stamps too
    local_warps = min(warps, shared_bytes // warp_bytes)
    together = FEW_TOGETHER if local_blocks <= FEW_LOCAL_BLOCKS else TOGETHER
    return CombineGrid(local_blocks, final_blocks, warps, local_warps, pieces, together, local_warps * warp_bytes)


def most_pieces(tokens: int) -> int:
    """Return the most pieces of so many rows. Each has a word at its token's rank, allocated before any grid is known.

    >>> most_pieces(4096), most_pieces(1)
    (32768, 32)
    """
    return min(tokens * MOST_PIECES, max(tokens * (PIECES + 1) + 2 * FINAL_WARPS, tokens * MOST_COLUMN_PIECES))


MOST_LOCAL_BLOCKS = 60
"""The local reduction's share of all SMs is more, but links take no more. 4096 tokens of 7168 bfloat16 took 482 us
with 59 blocks, 484 with 66, 495 with 79; on 64 SMs 553 with the share, 615 with 29 (4x H200, 2026-11-22)."""

PIECES, TOGETHER, FINAL_WARPS = 4, 2, 880
STEPS_A_PIECE = 2
"""Pieces of a row at most; words after one fence; warps that few rows are cut for; least steps of a piece. 4096 tokens
of 7168 took 482 us in 4 pieces, 597 in 3, 499 in 2. Tokens of 4096, which are 4 steps, took 327 us in 4 pieces, 353 in
3, 291 in 2, 312 in 1 (4x H200, 2026-11-22)."""

FEW_LOCAL_BLOCKS, FEW_TOGETHER = 30, 3
"""With few warps, more pieces share a fence: the warps wait for fences longer than readers wait for words. 4096 tokens
of 7168 took 288 us on 48 SMs with two pieces after a fence, 280 with three, 283 with four; on 64 SMs 239, 232 and 236;
on all 205, 216 and 228 (2x H200, 2026-11-22)."""

MOST_WHOLE_SMS = 24
"""On up to so many SMs rows are whole: a piece costs a warp places, a wait and a share of a fence, which few warps hide
less. 4096 tokens of 7168 took 619 us instead of 755 on 16 SMs, 471 instead of 497 on 24, but 314 instead of 282 on 48
(2x H200, 2026-11-26)."""

MOST_PIECES = 32
VECTORS_A_STEP, STEPS_UNDER_WAY = 128, 4
"""Vectors that a warp loads of one row at a time, 4 for each thread; and the steps in flight."""
