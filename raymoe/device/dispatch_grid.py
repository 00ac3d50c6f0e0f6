"""How a launch of kernels/dispatch.cu is laid out on a GPU: which blocks send, which place, and by how many lanes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from raymoe.device.dispatch import MOST_ROUTERS, PLACE, ROUTE, SEND, THREADS, WARPS
from raymoe.device.kernels import Shape
from raymoe.device.structs import MAX_RANKS
from raymoe.errors import ConfigError

PLAN_BYTES, QUEUE, SEND_QUEUE_BYTES = 32768, 16, 256
"""Of shared memory, and rows in a ring: as in placing.cuh and sending.cuh."""


@dataclass(frozen=True)
class DispatchGrid:
    """Which blocks do what, one to a multiprocessor, and how each divides its shared memory."""

    senders: int
    placers: int
    routers: int
    sender_lanes: int
    sender_stages: int
    placer_lanes: int
    placer_stages: int
    together: int
    shared_bytes: int

    def shape(self, parts: int) -> Shape:
        """The launch that does these parts."""
        others = self.placers if parts & PLACE else self.routers if parts & ROUTE else 0
        return Shape((self.senders if parts & SEND else 0) + others, THREADS, self.shared_bytes)


@dataclass(frozen=True)
class Rows:
    """What of a spec decides the grid."""

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


def lane_memory(stages: int, stage_bytes: int) -> int:
    """Shared memory of a lane's ring; the same sum as in dispatch.cuh."""
    return _in_lines(stages * (stage_bytes + 8))


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def lanes_of(room: int, row_bytes: int, lanes: int, stages: int, beside: int = 0) -> tuple[int, int]:
    """How many lanes of how many stages fit, with `beside` bytes for each lane besides its ring: as many lanes as asked
    where each has `stages`, else fewer, so that each has two at least.

    >>> lanes_of(200_000, 14336, lanes=4, stages=3), lanes_of(200_000, 65536, lanes=4, stages=3)
    ((4, 3), (1, 3))
    >>> lanes_of(200_000, 256, lanes=4, stages=3)  # small rows: more of them under way
    (4, 16)
    """
    for least in (stages, 2, 1):
        for count in range(lanes, 0, -1):
            fit = QUEUE
            while fit and (lane_memory(fit, row_bytes) + beside) * count > room:
                fit -= 1
            if fit >= least:
                return count, fit
    raise ConfigError(f"a row of {row_bytes} bytes; {room} bytes of shared memory hold none")


def quantising_lanes(room: int, row_bytes: int, slot_bytes: int, most: int) -> tuple[int, int]:
    """How many lanes of at most so many quantise rows, and how many stages those have that leave: two for each lane if
    they fit, and no fewer than lanes.

    >>> quantising_lanes(232_448, 14336, 7424, most=4), quantising_lanes(232_448, 65536, 16896, most=4)
    ((4, 8), (2, 5))
    """
    for each in (2, 1):
        for lanes in range(most, 0, -1):
            for stages in range(2 * most, each * lanes - 1, -1):
                if quantising_bytes(lanes, stages, row_bytes, slot_bytes) <= room:
                    return lanes, stages
    raise ConfigError(f"a row of {row_bytes} bytes; {room} bytes of shared memory cannot quantise it")


def lanes_wanted(rows: Rows, senders: int, placers: int) -> int:
    """Lanes of a sender that quantise: as many as keep up with the links, or with the placers where those are slower.

    >>> from dataclasses import replace
    >>> rows = Rows(7424, 14336, tokens=4096, topk=8, experts=256, ranks=4, placed=True, fp8=True)
    >>> lanes_wanted(rows, 28, 104), lanes_wanted(replace(rows, ranks=2), 32, 100)
    (4, 4)
    >>> lanes_wanted(replace(rows, slot_bytes=6400, row_bytes=12288, topk=2, experts=8), 32, 100)
    6
    """
    sent = max(crossing(rows.ranks, rows.topk), 1) * rows.slot_bytes / LINK_BYTES_A_US
    placed_bytes = rows.placed * rows.topk * (rows.row_bytes if rows.dequantised else rows.slot_bytes)
    us_a_row = senders * max(sent, placed_bytes / (placers * PLACED_BYTES_A_US))
    return max(FP8_SENDER_LANES, min(MOST_FP8_SENDER_LANES, ceil(LANE_US / us_a_row)))


def quantising_bytes(lanes: int, stages: int, row_bytes: int, slot_bytes: int) -> int:
    """Shared memory of a block that does; the same sum as in quantised_sending.cuh."""
    shared = (2 * MOST_LEAVING + 3 * LEAVING_QUEUE) * 8 + 16  # barriers, the queue itself, turns
    return lanes * lane_memory(1, row_bytes) + stages * _in_lines(slot_bytes) + shared


def crossing(ranks: int, topk: int) -> float:
    """The other ranks that a token goes to, on average of uniform routing.

    >>> round(crossing(ranks=4, topk=8), 2), round(crossing(ranks=2, topk=8), 2), crossing(1, 8)
    (2.7, 1.0, 0.0)
    """
    return (ranks - 1) * (1 - (1 - 1 / ranks) ** topk)


def grid_of(rows: Rows, sms: int, shared_bytes: int) -> DispatchGrid:
    """A grid of at most `sms` blocks for rows like these, on multiprocessors with so much shared memory a block.

    >>> def lanes(ranks: int, hidden: int, topk: int, sms: int = 132) -> tuple[int, int, int]:
    ...     rows = Rows(2 * hidden, 2 * hidden, tokens=4096, topk=topk, experts=256, ranks=ranks, placed=True)
    ...     grid = grid_of(rows, sms, 231_424)
    ...     return grid.senders, grid.sender_lanes, grid.together
    >>> lanes(4, 7168, 8), lanes(4, 4096, 8), lanes(4, 2880, 4), lanes(2, 7168, 8), lanes(4, 7168, 8, sms=48)
    ((54, 1, 2), (54, 2, 2), (54, 3, 2), (24, 4, 2), (14, 3, 4))
    >>> stay = grid_of(Rows(14336, 14336, tokens=4096, topk=8, experts=256, ranks=2, placed=False), 132, 231_424)
    >>> stay.senders, stay.sender_lanes  # with layout rank
    (54, 3)
    >>> quantised = [Rows(7424, 14336, 4096, 8, 256, ranks, placed=True, fp8=True) for ranks in (2, 4, 8)]
    >>> [(grid.senders, grid.placers) for grid in (grid_of(rows, 132, 231_424) for rows in quantised)]
    [(32, 100), (28, 104), (24, 108)]
    """
    if sms < 2:
        raise ConfigError(f"sms is {sms}; a dispatch needs at least 2, one that sends and one that places")
    ways = max(crossing(rows.ranks, rows.topk), 1)
    many_places = rows.placed and rows.topk >= MANY_PLACES * ways
    if rows.fp8:
        most_senders = max(FEWEST_FP8_SENDERS, min(FP8_SENDERS, round(FP8_SENDERS_OF_ONE_WAY / ways)))
        most_placers = FP8_BLOCKS - most_senders
    elif many_places:
        most_senders, most_placers = FEWER_SENDERS, MORE_PLACERS
    else:
        most_senders, most_placers = SENDERS, PLACERS
    sending = max(1, min(most_senders, max(sms * 3 // 10, sms - most_placers) if rows.placed else sms // 2))
    placers = max(1, min(most_placers if rows.placed else PLACERS_OF_OWN, sms - sending))
    routers = max(1, min(placers, MOST_ROUTERS, -(-rows.tokens // TOKENS_A_ROUTER)))
    room = shared_bytes
    if rows.fp8:
        wanted = lanes_wanted(rows, sending, placers)
        sender_lanes, sender_stages = quantising_lanes(room, rows.row_bytes, rows.slot_bytes, wanted)
        sending_bytes = quantising_bytes(sender_lanes, sender_stages, rows.row_bytes, rows.slot_bytes)
    else:
        most_lanes, offered = (MOST_SENDER_LANES, FEWER_OFFER_BYTES) if many_places else (SENDER_LANES, OFFERED_BYTES)
        lanes = max(1, min(most_lanes, round(offered / (sending * ways * rows.slot_bytes))))
        sender_lanes, sender_stages = lanes_of(room, rows.slot_bytes, lanes, 3, beside=SEND_QUEUE_BYTES)
        sender_stages = min(sender_stages, SENDER_STAGES)
        sending_bytes = sender_lanes * (lane_memory(sender_stages, rows.slot_bytes) + SEND_QUEUE_BYTES)
    before = _in_lines((2 * rows.experts + MAX_RANKS) * 4 + WARPS * QUEUE * 4 + PLAN_BYTES)
    whole = _in_lines(rows.row_bytes) if rows.dequantised else 0
    placer_lanes, placer_stages = lanes_of(shared_bytes - before, rows.slot_bytes, PLACER_LANES, 3, beside=whole)
    together = TOGETHER if sending * sender_lanes >= FEW_LANES else FEW_TOGETHER
    used = max(
        sending_bytes,
        before + placer_lanes * (lane_memory(placer_stages, rows.slot_bytes) + whole),
        (WARPS + 1) * rows.experts * 4,
    )
    return DispatchGrid(
        sending, placers, routers, sender_lanes, sender_stages, placer_lanes, placer_stages, together, used
    )


SENDERS, PLACERS, PLACERS_OF_OWN = 54, 78, 16
SENDER_LANES, SENDER_STAGES, PLACER_LANES, TOGETHER, TOKENS_A_ROUTER = 3, 4, 8, 2, 128
FEW_LANES, FEW_TOGETHER = 54, 4
OFFERED_BYTES = 2_200_000
"""Of rows, one of each lane to each rank that a token goes to: what links are offered decides what they give. So
senders have more lanes where rows are smaller or go to fewer ranks. 4096 tokens of 7168 bfloat16, top-8, by 54 senders
of one lane take 474 us, by 66 of two 487, of three 507, and the kernel that pushes rows and does nothing else 461; of
hidden 2880, top-4, three lanes take 163, two 175; of 4096, top-8, two 286, three 290 (4x H200, 2026-11-22).

Where there are fewer lanes than FEW_LANES, each does more: a lane gets through a row in about 3 us and through a fence
in as much, so words go 4 by 4. By 14 senders of 3 lanes and 34 placers the 4096 tokens take 485, with layout rank by
10 senders of 3 lanes 471."""

MANY_PLACES, FEWER_SENDERS, MORE_PLACERS = 6, 24, 108
MOST_SENDER_LANES, FEWER_OFFER_BYTES = 8, 1_500_000
"""Where a row has many places for each rank that it goes to, which is so on two, it is placers that are short, and so
the memory: then there are fewer senders with more lanes. On two GPUs 4096 tokens of 7168 bfloat16, top-8, take 238 us
by 54 senders of 3 lanes, 223 by 32 of 4, 213 by 24 of 4, 237 by 24 of 3, 236 by 20 of 4; of hidden 4096, top-8, 144 by
54 of 3, 140 by 24 of 6, 135 by 24 of 8; of 2880, top-4, which has no more places than four for each, 95 by 54 of 3 and
97 by 24 of 8 (2x H200, 2026-11-22)."""

FEWEST_FP8_SENDERS, FP8_SENDERS, FP8_SENDERS_OF_ONE_WAY, FP8_BLOCKS = 24, 32, 76, 132
FP8_SENDER_LANES, MOST_FP8_SENDER_LANES, MOST_LEAVING, LEAVING_QUEUE = 4, 6, 12, 32
LINK_BYTES_A_US, PLACED_BYTES_A_US, LANE_US = 345_000, 13_900, 5.3
"""MOST_LEAVING and LEAVING_QUEUE as in quantised_stages.cuh. What a sender quantises goes to as many ranks as have an
expert of the token, so the more these are, the fewer senders fill the links: of 4096 tokens of 7168 bfloat16, top-8, on
four GPUs 20 to 36 senders take 263 us; on two, where placers are what is short, 24 take 197, 32 175, 40 182.

Where lanes are what is short, each gets through a row in 3.2 (hidden 2880) to 4.1 us (7168), its load included; there
should be a third more than keep up, and there always are 4. On two GPUs 4 and 6 lanes take 175 and 183 us where rows
have 8 places on two ranks, with which placers just keep up; hidden 4096 of 128 experts 123 and 105, hidden 2880, top-4,
103 and 83, hidden 6144, top-2, 129 and 102 (H200, cold L2 cache, 2026-11-22)."""
