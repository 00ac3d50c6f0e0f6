"""Lay out a launch of kernels/peer/dispatch.cu on a GPU: which blocks send, which place, and with how many warps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from raymoe.cuda.launch import Shape
from raymoe.cuda.structs import MAX_RANKS
from raymoe.errors import ConfigError
from raymoe.exchange.peer.dispatch import MOST_COUNTING_BLOCKS, PLACE, ROUTE, SEND, THREADS, WARPS

PLAN_BYTES, QUEUE, SEND_QUEUE_BYTES = 32768, 16, 256
"""Bytes of shared memory, and rows in a ring: the same values as in placing.cuh and sending.cuh."""


@dataclass(frozen=True)
class DispatchGrid:
    """The kinds of blocks, one block an SM, and how each divides its shared memory."""

    senders: int
    placement_blocks: int
    counting_blocks: int
    sender_warps: int
    sender_stages: int
    placement_warps: int
    placement_stages: int
    together: int
    shared_bytes: int
    mixed: int = 0
    """Warps of each block that send, where every block also places; 0: a block sends or places."""

    def shape(self, parts: int) -> Shape:
        """Return the shape of a launch that does these parts."""
        if self.mixed:
            return Shape(self.placement_blocks, THREADS + 32 * self.mixed, self.shared_bytes)
        others = self.placement_blocks if parts & PLACE else self.counting_blocks if parts & ROUTE else 0
        return Shape((self.senders if parts & SEND else 0) + others, THREADS, self.shared_bytes)


@dataclass(frozen=True)
class Rows:
    """The properties of a spec that decide the grid."""

    slot_bytes: int
    row_bytes: int
    tokens: int
    topk: int
    experts: int
    ranks: int
    placed: bool
    """Whether rows are copied to their places; with layout rank they are not."""
    fp8: bool = False
    dequantised: bool = False


def ring_memory(stages: int, stage_bytes: int) -> int:
    """Return the bytes of shared memory of a warp's ring; the same sum as in dispatch.cuh."""
    return _whole_lines(stages * (stage_bytes + 8))


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def warps_of(available: int, row_bytes: int, warps: int, stages: int, extra: int = 0) -> tuple[int, int]:
    """Return how many warps, and stages of each, fit into shared memory. Each warp needs `extra` bytes too.

    All `warps` if each gets `stages` or more. Otherwise fewer warps, so that each gets at least two stages.

    >>> warps_of(200_000, 14336, warps=4, stages=3), warps_of(200_000, 65536, warps=4, stages=3)
    ((4, 3), (1, 3))
    >>> warps_of(200_000, 256, warps=4, stages=3)  # small rows: more of them in flight
    (4, 16)
    """
    for least in (stages, 2, 1):
        for count in range(warps, 0, -1):
            fit = QUEUE
            while fit and (ring_memory(fit, row_bytes) + extra) * count > available:
                fit -= 1
            if fit >= least:
                return count, fit
    raise ConfigError(f"a row has {row_bytes} bytes; {available} bytes of shared memory cannot hold it")


def quantising_warps(available: int, row_bytes: int, slot_bytes: int, most: int) -> tuple[int, int]:
    """Return the number of warps that quantise, at most `most`, and of stages for rows that leave.

    There are two stages for each warp if they fit, and never fewer than warps.

    >>> quantising_warps(232_448, 14336, 7424, most=4), quantising_warps(232_448, 65536, 16896, most=4)
    ((4, 8), (2, 5))
    """
    for each in (2, 1):
        for warps in range(most, 0, -1):
            for stages in range(2 * most, each * warps - 1, -1):
                if quantising_bytes(warps, stages, row_bytes, slot_bytes) <= available:
                    return warps, stages
    raise ConfigError(f"a row has {row_bytes} bytes; {available} bytes of shared memory are too few to quantise it")


def warps_wanted(rows: Rows, senders: int, placement_blocks: int) -> int:
    """Return the warps of a sender that quantise: enough to keep up with the links, or with slower placement blocks.

    >>> from dataclasses import replace
    >>> rows = Rows(7424, 14336, tokens=4096, topk=8, experts=256, ranks=4, placed=True, fp8=True)
    >>> warps_wanted(rows, 28, 104), warps_wanted(replace(rows, ranks=2), 32, 100)
    (4, 4)
    >>> warps_wanted(replace(rows, slot_bytes=6400, row_bytes=12288, topk=2, experts=8), 32, 100)
    6
    """
    sent = max(crossing(rows.ranks, rows.topk), 1) * rows.slot_bytes / LINK_BYTES_A_US
    placed_bytes = rows.placed * rows.topk * (rows.row_bytes if rows.dequantised else rows.slot_bytes)
    us_a_row = senders * max(sent, placed_bytes / (placement_blocks * PLACED_BYTES_A_US))
    return max(FP8_SENDER_WARPS, min(MOST_FP8_SENDER_WARPS, ceil(WARP_US / us_a_row)))


def quantising_bytes(warps: int, stages: int, row_bytes: int, slot_bytes: int) -> int:
    """Return the bytes of shared memory of a block that quantises; the same sum as in quantised_sending.cuh."""
    shared = (2 * MOST_LEAVING + 3 * LEAVING_QUEUE) * 8 + 16  # barriers, the queue itself, turns
    return warps * ring_memory(1, row_bytes) + stages * _whole_lines(slot_bytes) + shared


def crossing(ranks: int, topk: int) -> float:
    """Return the average number of other ranks that a token goes to, with uniform routing.

    >>> round(crossing(ranks=4, topk=8), 2), round(crossing(ranks=2, topk=8), 2), crossing(1, 8)
    (2.7, 1.0, 0.0)
    """
    return (ranks - 1) * (1 - (1 - 1 / ranks) ** topk)


def grid_of(rows: Rows, sms: int, shared_bytes: int) -> DispatchGrid:
    """Return the grid for these rows: at most `sms` blocks, each with at most `shared_bytes` of shared memory.

    >>> def warps(ranks: int, hidden: int, topk: int, sms: int = 132) -> tuple[int, int, int]:
    ...     rows = Rows(2 * hidden, 2 * hidden, tokens=4096, topk=topk, experts=256, ranks=ranks, placed=True)
    ...     grid = grid_of(rows, sms, 231_424)
    ...     return grid.senders, grid.sender_warps, grid.together
    >>> warps(4, 7168, 8), warps(4, 4096, 8), warps(4, 2880, 4), warps(2, 7168, 8), warps(4, 7168, 8, sms=48)
    ((54, 1, 2), (54, 2, 2), (54, 3, 2), (24, 4, 2), (14, 3, 4))
    >>> stay = grid_of(Rows(14336, 14336, tokens=4096, topk=8, experts=256, ranks=2, placed=False), 132, 231_424)
    >>> stay.senders, stay.sender_warps  # with layout rank
    (54, 3)
    >>> quantised = [Rows(7424, 14336, 4096, 8, 256, ranks, placed=True, fp8=True) for ranks in (2, 4, 8)]
    >>> [(grid.senders, grid.placement_blocks) for grid in (grid_of(rows, 132, 231_424) for rows in quantised)]
    [(32, 100), (28, 104), (24, 108)]
    """
    if sms < 2:
        raise ConfigError(f"sms is {sms}; a dispatch needs at least 2, one that sends and one that places")
    destinations = max(crossing(rows.ranks, rows.topk), 1)
    placement_is_short = rows.placed and rows.topk >= MANY_PLACES * destinations
    if rows.fp8:
        most_senders = max(FEWEST_FP8_SENDERS, min(FP8_SENDERS, round(FP8_SENDERS_OF_ONE_WAY / destinations)))
        most_placement_blocks = FP8_BLOCKS - most_senders
    elif placement_is_short:
        most_senders, most_placement_blocks = FEWER_SENDERS, MORE_PLACEMENT_BLOCKS
    else:
        most_senders, most_placement_blocks = SENDERS, PLACEMENT_BLOCKS
    sending = max(1, min(most_senders, max(sms * 3 // 10, sms - most_placement_blocks) if rows.placed else sms // 2))
    placement_blocks = max(1, min(most_placement_blocks if rows.placed else PLACEMENT_BLOCKS_OF_OWN, sms - sending))
    counting_blocks = max(1, min(placement_blocks, MOST_COUNTING_BLOCKS, -(-rows.tokens // TOKENS_A_COUNTING_BLOCK)))
    available = shared_bytes
    if rows.fp8:
        most_warps_wanted = warps_wanted(rows, sending, placement_blocks)
        sender_warps, sender_stages = quantising_warps(available, rows.row_bytes, rows.slot_bytes, most_warps_wanted)
        sending_bytes = quantising_bytes(sender_warps, sender_stages, rows.row_bytes, rows.slot_bytes)
    else:
        most_warps, in_flight = SENDER_WARPS, BYTES_IN_FLIGHT
        if placement_is_short:
            most_warps, in_flight = MOST_SENDER_WARPS, FEWER_IN_FLIGHT
        warps = max(1, min(most_warps, round(in_flight / (sending * destinations * rows.slot_bytes))))
        sender_warps, sender_stages = warps_of(available, rows.slot_bytes, warps, 3, extra=SEND_QUEUE_BYTES)
        sender_stages = min(sender_stages, SENDER_STAGES)
        sending_bytes = sender_warps * (ring_memory(sender_stages, rows.slot_bytes) + SEND_QUEUE_BYTES)
    before = _before_rings(rows)
    whole = _whole_lines(rows.row_bytes) if rows.dequantised else 0
    room = shared_bytes - before
    placement_warps, placement_stages = warps_of(room, rows.slot_bytes, PLACEMENT_WARPS, 3, extra=whole)
    together = TOGETHER if sending * sender_warps >= FEW_WARPS else FEW_TOGETHER
    used = max(
        sending_bytes,
        before + placement_warps * (ring_memory(placement_stages, rows.slot_bytes) + whole),
        (WARPS + 1) * rows.experts * 4,
    )
    return DispatchGrid(
        senders=sending,
        placement_blocks=placement_blocks,
        counting_blocks=counting_blocks,
        sender_warps=sender_warps,
        sender_stages=sender_stages,
        placement_warps=placement_warps,
        placement_stages=placement_stages,
        together=together,
        shared_bytes=used,
    )


def is_mixed(sms: int, rows: Rows) -> bool:
    """Return whether every block of a dispatch by `fused` sends and places on so many SMs.

    >>> rows = Rows(14336, 14336, tokens=4096, topk=8, experts=256, ranks=2, placed=True)
    >>> [is_mixed(sms, rows) for sms in (8, 32, 48)], is_mixed(48, replace(rows, placed=False))
    ([True, True, False], True)
    >>> [is_mixed(sms, replace(rows, fp8=True)) for sms in (64, 80)]
    [True, False]
    """
    if not rows.placed:
        return sms <= MOST_MIXED_SMS_BY_RANK
    return sms <= (MOST_MIXED_SMS_FP8 if rows.fp8 else MOST_MIXED_SMS)


@dataclass(frozen=True)
class Division:
    """The warps of a mixed block, for rows of 14336 bytes."""

    senders: int
    sender_stages: int
    sending: float
    """The senders' share of the memory for rows, at most."""
    placement_warps: int
    placement_stages: int


def mixed(rows: Rows, grid: DispatchGrid, sms: int, shared_bytes: int) -> DispatchGrid:
    """Return the grid in which every block sends and places, or `grid` where that cannot be.

    Of long rows too few fit on an SM, and of rows that are dequantised, which need a whole row more for each warp.

    >>> def warps(ranks: int, hidden: int, placed: bool = True) -> tuple[int, ...]:
    ...     rows = Rows(2 * hidden, 2 * hidden, tokens=4096, topk=8, experts=256, ranks=ranks, placed=placed)
    ...     grid = mixed(rows, grid_of(rows, 24, 231_424), 24, 231_424)
    ...     return grid.senders, grid.mixed, grid.sender_stages, grid.placement_warps, grid.placement_stages
    >>> warps(2, 7168), warps(2, 2880), warps(2, 7168, placed=False)
    ((24, 1, 4, 3, 3), (24, 2, 4, 8, 3), (24, 3, 3, 2, 2))
    >>> warps(2, 32768)  # not mixed
    (7, 0, 3, 1, 2)
    """
    before = _before_rings(rows)
    room = shared_bytes - before
    if rows.dequantised or ring_memory(FEWEST_MIXED_ROWS, rows.slot_bytes) > room:
        return grid
    if rows.fp8:
        return _mixed_fp8(rows, grid, sms, shared_bytes)
    division = PLACING if rows.placed else STAYING
    wanted = max(1, min(MOST_MIXED_SENDERS, round(division.senders * ROW_OF_A_SENDER / rows.slot_bytes)))
    share = int(room * division.sending)
    senders, stages = warps_of(share, rows.slot_bytes, wanted, division.sender_stages, extra=SEND_QUEUE_BYTES)
    stages = min(stages, division.sender_stages)
    sending = senders * (ring_memory(stages, rows.slot_bytes) + SEND_QUEUE_BYTES)
    placement_warps, placement_stages = warps_of(
        room - sending, rows.slot_bytes, division.placement_warps, division.placement_stages
    )
    placing = before + placement_warps * ring_memory(placement_stages, rows.slot_bytes)
    return replace(
        grid,
        senders=sms,
        placement_blocks=sms,
        counting_blocks=min(sms, grid.counting_blocks),
        sender_warps=senders,
        sender_stages=stages,
        placement_warps=placement_warps,
        placement_stages=placement_stages,
        together=TOGETHER if sms * senders >= FEW_WARPS else FEW_TOGETHER,
        shared_bytes=_whole_lines(max(placing, (WARPS + 1) * rows.experts * 4)) + sending,
        mixed=senders,
    )


def _mixed_fp8(rows: Rows, grid: DispatchGrid, sms: int, shared_bytes: int) -> DispatchGrid:
    """Return the grid in which every block sends and places rows that cross as fp8.

    Besides the warps that quantise, a block has one that pushes and one that announces.

    >>> def warps(hidden: int, placed: bool) -> tuple[int, ...]:
    ...     rows = Rows(hidden * 33 // 32, 2 * hidden, 4096, 8, 256, 2, placed, fp8=True)
    ...     grid = mixed(rows, grid_of(rows, 24, 231_424), 24, 231_424)
    ...     return grid.mixed, grid.sender_warps, grid.sender_stages, grid.placement_warps, grid.placement_stages
    >>> warps(7168, placed=True), warps(7168, placed=False)
    ((5, 3, 6, 8, 1), (7, 5, 12, 1, 4))
    """
    division = PLACING_FP8 if rows.placed else STAYING_FP8
    before = _before_rings(rows)
    room = shared_bytes - before
    quantising, stages = quantising_warps(
        int(room * division.sending), rows.row_bytes, rows.slot_bytes, division.senders
    )
    sending = quantising_bytes(quantising, stages, rows.row_bytes, rows.slot_bytes)
    placement_warps, placement_stages = warps_of(
        room - sending, rows.slot_bytes, division.placement_warps, division.placement_stages
    )
    placing = before + placement_warps * ring_memory(placement_stages, rows.slot_bytes)
    return replace(
        grid,
        senders=sms,
        placement_blocks=sms,
        counting_blocks=min(sms, grid.counting_blocks),
        sender_warps=quantising,
        sender_stages=stages,
        placement_warps=placement_warps,
        placement_stages=placement_stages,
        shared_bytes=_whole_lines(max(placing, (WARPS + 1) * rows.experts * 4)) + sending,
        mixed=quantising + 2,
    )


def _before_rings(rows: Rows) -> int:
    """Return the bytes of a placement block before its rings; the same sum as in placement_blocks.cuh."""
    return _whole_lines((2 * rows.experts + MAX_RANKS) * 4 + WARPS * QUEUE * 4 + PLAN_BYTES)


MOST_MIXED_SMS, MOST_MIXED_SMS_BY_RANK, MOST_MIXED_SMS_FP8 = 32, 48, 64
"""On up to so many SMs all blocks send and place, by the layout. 4096 tokens of 7168 took 478 us instead of 526 on 24
SMs, 383 instead of 399 on 32, but 327 instead of 286 on 48. With layout rank 501 instead of 611 on 8, 209 instead of
215 on 48, 200 instead of 196 on 64 (2x H100, 2026-11-26). Rows that cross as fp8 took 382 us instead of 503 on 24 SMs,
202 instead of 226 on 64; dequantised, 657 instead of 554 on 24 (2x H200, 2026-11-27)."""

PLACING, STAYING = Division(1, 4, 1 / 2, 8, 3), Division(3, 3, 3 / 4, 2, 2)
"""With layout rank the placement warps copy this rank's own rows into their slots only."""

PLACING_FP8, STAYING_FP8 = Division(3, 2, 1 / 2, 8, 1), Division(6, 2, 7 / 8, 1, 2)
"""With rows that cross as fp8; `senders` quantise, and stages for rows that leave follow from memory. A warp that
places a row of fp8 needs longer than its copies take, so many warps have one stage each: 4096 tokens of 7168 took 382
us on 24 SMs, by four warps of three stages 407 (2x H200, 2026-11-27)."""

MOST_MIXED_SENDERS, ROW_OF_A_SENDER, FEWEST_MIXED_ROWS = 4, 14336, 6
"""A warp that sends needs as long for a short row as for one of ROW_OF_A_SENDER bytes, so there are more where rows are
short."""

SENDERS, PLACEMENT_BLOCKS, PLACEMENT_BLOCKS_OF_OWN = 54, 78, 16
SENDER_WARPS, SENDER_STAGES, PLACEMENT_WARPS, TOGETHER, TOKENS_A_COUNTING_BLOCK = 3, 4, 8, 2, 128
FEW_WARPS, FEW_TOGETHER = 54, 4
BYTES_IN_FLIGHT = 2_200_000
"""Bytes in flight, with one row of each warp to each rank that a token goes to. Link throughput depends on the stores
in flight, so senders have more warps where rows are smaller or go to fewer ranks.

us for a dispatch of 4096 tokens, bfloat16 (4x H200, 2026-11-22). Hidden 7168, top-8: 54 senders of one warp 474, 66 of
two 487, of three 507; the kernel that only pushes rows 461. Hidden 2880, top-4: three warps 163, two 175. Hidden
4096, top-8: two 286, three 290.

With fewer warps than FEW_WARPS, each warp does more: it needs about 3 us for a row, and as much for a fence. So it
announces 4 rows with one fence. The 7168 case then takes 485 by 14 senders of 3 warps and 34 placement blocks, and 471
with layout rank by 10 senders of 3 warps."""

MANY_PLACES, FEWER_SENDERS, MORE_PLACEMENT_BLOCKS = 6, 24, 108
MOST_SENDER_WARPS, FEWER_IN_FLIGHT = 8, 1_500_000
"""Where a row has many places for each rank that it goes to, as on two ranks, placement blocks and memory are the
bottleneck. Then there are fewer senders, with more warps.

us for a dispatch of 4096 tokens, bfloat16 (2x H200, 2026-11-22). Hidden 7168, top-8: 54 senders of 3 warps 238, 32 of
4 223, 24 of 4 213, 24 of 3 237, 20 of 4 236. Hidden 4096, top-8: 54 of 3 144, 24 of 6 140, 24 of 8 135. Hidden 2880,
top-4, with at most four places for each rank: 54 of 3 95, 24 of 8 97."""

FEWEST_FP8_SENDERS, FP8_SENDERS, FP8_SENDERS_OF_ONE_WAY, FP8_BLOCKS = 24, 32, 76, 132
FP8_SENDER_WARPS, MOST_FP8_SENDER_WARPS, MOST_LEAVING, LEAVING_QUEUE = 4, 6, 12, 32
LINK_BYTES_A_US, PLACED_BYTES_A_US, WARP_US = 345_000, 13_900, 5.3
"""MOST_LEAVING and LEAVING_QUEUE are the same as in quantised_stages.cuh. A quantised row goes to every rank with an
expert of its token. So with more such ranks, fewer senders fill the links.

us for a dispatch of 4096 tokens of 7168 bfloat16, top-8: on four GPUs 263 by 20 to 36 senders; on two, where placement
blocks are the bottleneck, 197 by 24 senders, 175 by 32, 182 by 40.

A quantising warp needs 3.2 (hidden 2880) to 4.1 us (7168) for a row, its load included. There are always at least 4
warps, and about a third more than needed to keep up. us for 4 and 6 warps on two GPUs: 175 and 183 where rows have 8
places on two ranks, and placement blocks just keep up; hidden 4096 of 128 experts 123 and 105; hidden 2880, top-4, 103
and 83; hidden 6144, top-2, 129 and 102 (H200, cold L2 cache, 2026-11-22)."""
