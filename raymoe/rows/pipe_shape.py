"""Choose the shape of a block of kernels/include/raymoe/rows/pipe.cuh: groups, warps, stages, and rows of a tile.

Read `row_shape` first: rows that one group holds in registers, for normalisations. `piece_shape` is for kernels that
work on each element alone, so a row can be cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raymoe.errors import ConfigError

Loading = Literal["PIPED", "IN_TURN", "PLAIN", "ROW"]
"""How tiles come: by the pipeline, by the baseline that waits for each input in turn, or by ordinary loads; ROW is the
last one with a block for each row."""

MOST_HIDDEN = 32768
FEW_ROWS = 512
"""Up to so many rows, kernels load them without a pipeline: each SM gets too few to fill one. RMSNorm of 256 rows took
3.8 us without and 4.4 with it (7168 bfloat16, H200, 2026-11-23)."""
FEW_ROWS_OF_AN_SM = 4
"""The same for each SM, where a caller limits their number."""
PIPED_ROWS = 1024
"""Up to so many rows, norms of one input use the pipeline on the whole GPU. More rows go without: the hardware gives
blocks of one row to SMs as they become free, while blocks of a pipeline have fixed rows, and all wait for the slowest
SM. LayerNorm of 1024 rows took 11.8 us with a pipeline and 12.1 without; RMSNorm of 2048 rows 19.1 and 17.3 (H200,
2026-11-24)."""
ROW_THREAD_BYTES, ROW_RESIDENT, UNEVEN_RESIDENT = 64, 896, 768
"""Of a row of each input, in each thread of such a block, and the threads that an SM holds at least: four blocks of
seven warps for 7168 bfloat16. With fewer, too few loads are under way; with more, a thread has too few registers.
RMSNorm of 4096 rows took 33.1 us with four blocks, 47.4 with six (same machine). Where a row does not fill the block,
a thread needs more registers."""
WHOLE_GPU = 132
"""SMs of an H100 and of an H200."""
ALONE_ROWS = WHOLE_GPU
"""Up to so many rows, as many as SMs, blocks of one row share no SM. A thread may then have more registers,
and a bias is loaded with the row. LayerNorm of 128 rows took 3.56 us, and 3.70 with the bias loaded after the sum (7168
bfloat16, H200, 2026-11-24)."""
BALANCED_TURNS = 16
"""From so many turns of a block on, blocks with fixed rows are as few as need no more turns. 4096 rows take 32 turns of
132 blocks, and of 128."""
SHARED_BYTES = 220 << 10
"""Shared memory that a block may use: what a block of Hopper has, 227 KiB, less a reserve."""
TILE_BYTES = 8 << 10
"""Bytes of a tile, all inputs together, that several short rows are put together for."""
CONSUMER_WARPS = 11
"""Warps of a block that compute. With the producer each quarter of an SM has three, and a thread 168 registers; with
one warp more it would have 128."""
WIDE_WARPS = 15
"""The same where a thread then needs at most LIGHT registers, or for rows of more than WIDE elements, of which 11 warps
would hold too much a thread. RMSNorm to 8-bit floats of 16384 rows took 91.3 us with three groups of five warps, and
114 with two groups (7168 bfloat16, H200, 2026-11-23)."""
LIGHT = 72
LONG_ROW = 4096
"""Elements of a row from which on a gradient's block is one group."""
MANY_GRADIENT_ROWS = 8192
"""From so many rows on, with two inputs and one gradient of a vector, four warps are faster than eight: RMSNorm
backward of 16384 rows took 173.7 and 181.8 us (same machine). So they are for few rows: of 128 rows 7.2 and 8.6 us."""
GRADIENT_ROW_BYTES = 16 << 10
"""Of a row of one input. Gradients of no more rows than SMs go without stages up to so many bytes: the block's threads
hold the row (RowAgain of gradients.cuh). RMSNorm backward of 128 rows took 7.6 us without and 8.6 with stages (7168
bfloat16, H200, 2026-11-24)."""
GRADIENT_REGISTERS = 160
"""Of a thread of such a group, for all that it holds."""
WIDE = 22528
PLAIN_WARPS = 16
LEAST_ROW_WARPS = 2
"""Of a block of one row."""
DEEPEST = 3
"""Stages of a group, unless a caller asks for more. With six the same RMSNorm took 5 % longer: more rows under way at
once spread over more pages of memory."""
QUANTISED_STAGES = 2
"""The same for 8-bit results: RMSNorm of 4096 rows took 26.4 us with two stages, 27.8 with three (same machine)."""
FEW_SMS = 64
"""Up to so many SMs, a group has one stage more. RMSNorm of 4096 rows took 47.1 us on 48 SMs with four stages for each
group, 51.7 with three; on 96 SMs 45.5 and 44.6 (7168 bfloat16, H100, 2026-11-25)."""
LEAST_STORED = 3
"""Stages of a group at least, where results leave from them, else two: one is loaded, one computed on, one stored.
x + residual and its norm took 91.4 us on 48 SMs with two groups of three stages, 113 with three of two. RMSNorm took
80.9 us with one group of four stages, 95.3 with two of two (same day)."""
DYNAMIC_TURNS = 2
"""Blocks take tiles from a counter if each has at least so many for each of its stages. Of fewer, the blocks that begin
first would take too many at once: RMSNorm of 1024 rows took 15.9 us with a counter and 14.8 without (same day)."""
STAGE_WORDS_BYTES = 24
"""Of a stage: two barriers, and the number of its tile."""
SUM_BYTES = 16
"""Of a warp, for the sums of a group; there are two places for it."""


@dataclass(frozen=True)
class PipeShape:
    """A block: `groups` of `warps` warps, `stages` of `stage_bytes`, tiles of `tile_rows` rows or of `piece` eights.

    >>> PipeShape("PIPED", groups=3, warps=4, stages=12, stage_bytes=14336).shared_bytes
    172704
    """

    loading: Loading
    groups: int
    warps: int
    stages: int
    stage_bytes: int
    tile_rows: int = 1
    piece: int = 0
    """Eight-element units of a piece of a row; 0: whole rows."""
    blocks_of_sm: int = 1
    """Blocks for each SM of the launch; 0: as many as there are tiles. The hardware then gives blocks to SMs as they
    become free, so no SM waits for a slower one."""
    resident: int = 512
    """Without stages: threads that an SM holds at least, which bounds the registers of a thread."""
    once: bool = False
    """Without stages: whether loads tell the L2 cache that their lines are not read again soon."""
    dynamic: bool = False
    """Whether blocks take tiles from a counter, so that none waits for a slower SM. Gradients cannot: their sums have
    an order."""
    known: bool = True
    """Whether the number of tiles is known before the launch."""

    @property
    def threads(self) -> int:
        return 32 * (self.groups * self.warps + (self.loading == "PIPED"))

    @property
    def staged(self) -> bool:
        return self.loading in ("PIPED", "IN_TURN")

    @property
    def shared_bytes(self) -> int:
        """Stages, two barriers and a number for each, and the sums of all groups."""
        held = self.stages * self.stage_bytes if self.staged else 0
        return held + self.stages * STAGE_WORDS_BYTES + self.groups * 2 * self.warps * SUM_BYTES

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        return (
            ("PIPE_LOADING", self.loading),
            ("PIPE_GROUPS", str(self.groups)),
            ("PIPE_WARPS", str(self.warps)),
            ("PIPE_STAGES", str(self.stages)),
            *((("PIPE_VECTORS", str(-(-self.piece // (32 * self.warps)))),) if self.piece and not self.staged else ()),
            *((("PIPE_RESIDENT", str(self.resident)),) if not self.staged else ()),
            *((("PIPE_ONCE", "1"),) if self.once else ()),
            *((("PIPE_DYNAMIC", "1"),) if self.dynamic else ()),
        )

    @property
    def at_once(self) -> int:
        """Tiles that a block takes together."""
        return 1 if self.staged else self.groups

    @property
    def balanced(self) -> bool:
        return self.staged and self.known and not self.dynamic

    def blocks(self, tiles: int, sms: int) -> int:
        """The number of blocks that share so many tiles on so many SMs; 0 without tiles."""
        return blocks_of(-(-tiles // self.at_once), sms * self.blocks_of_sm, balanced=self.balanced)


def blocks_of(parts: int, most: int, *, balanced: bool) -> int:
    """The number of blocks for so many parts; `most` 0: as many as there are parts.

    >>> blocks_of(4096, 132, balanced=True), blocks_of(4096, 132, balanced=False), blocks_of(200, 132, balanced=True)
    (128, 132, 132)
    """
    if not most or parts <= most:
        return parts
    turns = -(-parts // most)
    return -(-parts // turns) if balanced and turns >= BALANCED_TURNS else most


@dataclass(frozen=True)
class Limits:
    """The settings of a launch that a caller gives; None: chosen here. `stages` are those of a block."""

    sms: int | None = None
    stages: int | None = None
    loading: Loading | None = None

    def __post_init__(self) -> None:
        for name in ("sms", "stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it is at least 1")

    @property
    def key(self) -> tuple[int | None, int | None, Loading | None]:
        """The same values as a tuple, whose hash costs less."""
        return self.sms, self.stages, self.loading


NO_LIMITS = Limits()


@dataclass(frozen=True)
class RowWork:
    """Rows of `hidden` elements. `eight_bytes` counts eight elements of all inputs together."""

    rows: int
    hidden: int
    eight_bytes: int
    inputs: int = 1
    registers: int = 0
    """32-bit registers that a thread needs for eight elements of a row, everything that it holds together."""
    gradients: int = 0
    """Vectors whose gradients groups sum over their rows."""
    quantised: bool = False
    counted: bool = False
    """Whether a count on the device tells the rows that are there."""
    biased: bool = False
    """Whether a vector is added to each row."""
    summed: bool = False
    """Whether a kernel of each element also sums pieces of rows: warps that share a piece then need a barrier."""

    @property
    def row_bytes(self) -> int:
        return self.hidden // 8 * self.eight_bytes

    @property
    def budget(self) -> int:
        """Registers of a thread for all that it holds."""
        return GRADIENT_BUDGET if self.gradients else REGISTERS


GRADIENT_BUDGET = 96
REGISTERS = 72
"""Of a thread, for the parts of rows and vectors that it holds while it works on a row."""


def row_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for rows that a group of warps holds in registers.

    >>> def shape(rows: int, limits: Limits) -> str:
    ...     made = row_shape(RowWork(rows, hidden=7168, eight_bytes=16, registers=8), limits)
    ...     return f"{made.loading} {made.groups} x {made.warps}, {made.stages} stages, {made.blocks_of_sm} blocks"
    >>> [shape(rows, Limits()) for rows in (128, 1024, 16384)]
    ['ROW 1 x 7, 1 stages, 0 blocks', 'PIPED 3 x 5, 9 stages, 1 blocks', 'ROW 1 x 7, 1 stages, 0 blocks']
    >>> [shape(4096, limits) for limits in (Limits(sms=48), Limits(stages=1))]
    ['PIPED 3 x 5, 12 stages, 1 blocks', 'PIPED 1 x 15, 1 stages, 1 blocks']
    >>> row_shape(RowWork(100000, 64, 16, 1, 8), Limits(48)).tile_rows  # 8 KiB of rows in each tile
    64
    >>> row_shape(RowWork(4096, 32768, 64, 1, 20), Limits(48)).loading  # no two rows of 128 KiB fit into an SM
    'PLAIN'
    """
    eights, budget = work.hidden // 8, work.budget
    tile_rows = max(1, min(TILE_BYTES // work.row_bytes, work.rows))
    stage_bytes = tile_rows * work.row_bytes
    fitting = (SHARED_BYTES - 2048) // (stage_bytes + STAGE_WORDS_BYTES)
    loading = limits.loading or _loading(work, limits)
    if loading in ("PLAIN", "ROW") or fitting < (1 if limits.stages or limits.loading else 2):
        alone = _alone_shape(work, eights, limits) if loading == "ROW" else None
        return alone or _plain_shape(work, eights, limits)
    if loading == "PIPED" and limits.stages is None and work.gradients and work.hidden >= LONG_ROW:
        return _gradient_shape(work, stage_bytes, fitting)
    consumers = _consumers(work, eights, budget)
    most = _groups(eights, max(1, budget // work.registers), consumers)
    if loading == "IN_TURN":
        groups = stages = min(most, fitting)
    else:
        deepest = (QUANTISED_STAGES if work.quantised else DEEPEST) + (_sms(limits) <= FEW_SMS and not work.gradients)
        least = 2 if work.quantised and work.inputs == 1 else LEAST_STORED
        groups, stages = _divided(most, fitting, limits.stages, max(deepest, least), least)
    turns = work.rows // (tile_rows * _sms(limits))
    dynamic = loading == "PIPED" and not work.gradients and turns >= DYNAMIC_TURNS * stages
    return PipeShape(loading, groups, consumers // groups, stages, stage_bytes, tile_rows, dynamic=dynamic)


def _sms(limits: Limits) -> int:
    return limits.sms or WHOLE_GPU


def _alone_shape(work: RowWork, eights: int, limits: Limits) -> PipeShape | None:
    """A block for each row, if the row is not too short and not too long for it. Gradients need an SM for each row.

    Gradients with three inputs take twice the warps, 14 for 7168 bfloat16: 128 rows took 8.2 us with 14 warps, 9.2 with
    seven. With two inputs, seven are faster: RMSNorm took 7.6 us, and 7.8 with 14; LayerNorm 10.4 and 11.6 (H200,
    2026-11-24).

    >>> add = RowWork(128, hidden=7168, eight_bytes=48, inputs=3, gradients=1)
    >>> _alone_shape(add, 896, Limits(132)).warps, _alone_shape(add, 896, Limits(127))
    (14, None)
    """
    if limits.sms is not None and not (work.gradients and work.rows <= limits.sms):
        return None
    thread_bytes = ROW_THREAD_BYTES // (2 if work.gradients and work.inputs > 2 else 1)
    vectors = max(1, thread_bytes * work.inputs // work.eight_bytes)
    warps = -(-eights // (32 * vectors))
    if not LEAST_ROW_WARPS <= warps <= PLAIN_WARPS:
        return None
    resident = UNEVEN_RESIDENT if eights % (32 * warps) else ROW_RESIDENT
    if work.gradients or (work.biased and work.rows <= ALONE_ROWS):
        resident = 32 * warps
    return PipeShape("ROW", 1, warps, 1, 0, blocks_of_sm=0, resident=resident)


def _plain_shape(work: RowWork, eights: int, limits: Limits) -> PipeShape:
    """Rows without stages: on the whole GPU small blocks, of which many fit on an SM."""
    vectors = max(1, work.budget // 2 // work.registers)
    if limits.sms is not None:
        groups = _groups(eights, vectors, PLAIN_WARPS)
        return PipeShape("PLAIN", groups, PLAIN_WARPS // groups, groups, 0)
    warps = min(PLAIN_WARPS, -(-eights // (32 * vectors)))
    groups = max(1, 4 // warps)
    return PipeShape("PLAIN", groups, warps, groups, 0, blocks_of_sm=0)


PIECE = 256
"""Eight-element units of a piece for each warp of its group: eight for each thread."""
BLOCK_WARPS, BLOCK_RESIDENT, BLOCK_REGISTERS = 4, 1536, 16
"""Without stages, on the whole GPU: the warps of a block that takes a piece of a row, one eight-element unit for each
thread, and the threads that an SM holds at least if a thread needs no more registers for inputs and results. So 4096
rows took 17.5 us for SwiGLU of 2 x 2048, 25.8 for its gradient and 32.4 for a copy of 7168; with warps that each
take a PLAIN_PIECE, 18.7, 27.0 and 34.3 (bfloat16, H200, 2026-11-24)."""
PLAIN_PIECE = 64
"""A warp's piece where rows are short, counted on the device, summed, or become 8-bit floats: two units for each
thread, whose loads overlap. SwiGLU of 16384 rows took 50.4 us with them, 52.6 with eight for each thread (2 x 2048
bfloat16, H200, 2026-11-23)."""
PIECE_RESIDENT = 768
"""Threads that an SM then holds at least, also of blocks whose threads need more than BLOCK_REGISTERS. SwiGLU to 8-bit
floats of 16384 rows took 49.0 us with 768 and with 1024, 53.3 with 512 (same machine)."""
PLAIN_PIECE_WARPS, QUANTISED_PIECE_WARPS, COUNTED_WARPS = 2, 1, 24
"""Warps of such a block, and of all blocks of an SM where a count on the device tells the rows: with a block for each
piece that could be there, most would have nothing to do. SwiGLU to 8-bit floats of 4096 rows of 16384 took 15.6 us with
24 warps, and 17.3 with 48 (same machine)."""


def piece_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for kernels that work on each element alone. With few stages, groups of more warps share a piece.

    >>> def shape(limits: Limits, hidden: int = 2048) -> str:
    ...     made = piece_shape(RowWork(4096, hidden, eight_bytes=32), limits)
    ...     tile = f"{made.tile_rows} rows x {made.piece}"
    ...     return f"{made.loading} {made.groups} x {made.warps}, {made.stages} stages, {tile}"
    >>> shape(Limits()), shape(Limits(sms=48))
    ('PLAIN 1 x 4, 1 stages, 1 rows x 128', 'PIPED 11 x 1, 22 stages, 1 rows x 256')
    >>> shape(Limits(stages=8)), shape(Limits(sms=48), hidden=64)
    ('PIPED 4 x 2, 8 stages, 2 rows x 256', 'PIPED 11 x 1, 22 stages, 32 rows x 8')
    >>> shape(Limits(), hidden=1032)  # a second block of a row would have one unit
    'PLAIN 2 x 1, 2 stages, 1 rows x 64'
    """
    loading = limits.loading or ("PLAIN" if limits.sms is None and limits.stages is None else _loading(work, limits))
    if loading in ("PLAIN", "ROW"):
        by_warps = work.quantised or work.counted or work.summed
        if limits.sms is None and not by_warps and _fills_blocks(work.hidden // 8):
            return _block_shape(work)
        tile_rows, piece = _tile(work, PLAIN_PIECE)
        warps = QUANTISED_PIECE_WARPS if work.quantised else PLAIN_PIECE_WARPS
        blocks = COUNTED_WARPS // warps if work.counted else 0
        if limits.sms is not None:
            warps, blocks = PLAIN_WARPS, 1
        return PipeShape("PLAIN", warps, 1, warps, 0, tile_rows, piece, blocks, PIECE_RESIDENT, once=work.quantised)
    room = (SHARED_BYTES - 1024) // work.eight_bytes  # eights of all stages together
    if loading == "IN_TURN":
        tile_rows, piece = _tile(work, PIECE)
        groups = stages = min(CONSUMER_WARPS, room // (tile_rows * piece))
    elif limits.stages is None:
        tile_rows, piece = _tile(work, PIECE)
        groups, stages = _divided(CONSUMER_WARPS, room // (tile_rows * piece), None, DEEPEST)
    else:
        groups, stages = _divided(CONSUMER_WARPS, room // SCALED_EIGHTS, limits.stages, DEEPEST)
        most = room // stages // SCALED_EIGHTS * SCALED_EIGHTS
        tile_rows, piece = _tile(work, min(PIECE * (CONSUMER_WARPS // groups), most))
    warps = CONSUMER_WARPS // groups if limits.stages else 1
    stage_bytes = tile_rows * piece * work.eight_bytes
    return PipeShape(loading, groups, warps, stages, stage_bytes, tile_rows, piece, known=not work.counted)


def _fills_blocks(eights: int) -> bool:
    """Whether at least three of four threads have an eight, with blocks that take a piece of a row."""
    each = 32 * BLOCK_WARPS
    return 4 * eights >= 3 * each * -(-eights // each)


def _block_shape(work: RowWork) -> PipeShape:
    """A block for each piece of a row.

    >>> def resident(inputs: int) -> int:
    ...     return _block_shape(RowWork(4096, 2048, 16 * inputs, inputs, registers=4 * (inputs + 1))).resident
    >>> resident(3), resident(4)
    (1536, 768)
    """
    resident = BLOCK_RESIDENT if work.registers <= BLOCK_REGISTERS else PIECE_RESIDENT
    return PipeShape("PLAIN", 1, BLOCK_WARPS, 1, 0, 1, min(32 * BLOCK_WARPS, work.hidden // 8), 0, resident)


def _loading(work: RowWork, limits: Limits) -> Loading:
    """Whether to use the pipeline.

    >>> few, many = RowWork(500, 7168, 16), RowWork(9000, 7168, 16)
    >>> _loading(few, Limits()), _loading(few, Limits(sms=48)), _loading(few, Limits(stages=1))
    ('ROW', 'PIPED', 'PIPED')
    >>> _loading(many, Limits()), _loading(many, Limits(sms=48))
    ('ROW', 'PIPED')
    >>> gradient = RowWork(100, 7168, 32, 2, gradients=1)
    >>> _loading(gradient, Limits(sms=132)), _loading(gradient, Limits(sms=48))
    ('ROW', 'PIPED')
    """
    if limits.stages is not None:
        return "PIPED"
    if work.gradients and work.hidden >= LONG_ROW:
        alone = work.rows <= (limits.sms or 0) and work.row_bytes <= GRADIENT_ROW_BYTES * work.inputs
        return "ROW" if alone else "PIPED"
    few = FEW_ROWS if limits.sms is None else min(FEW_ROWS, FEW_ROWS_OF_AN_SM * limits.sms)
    never = limits.sms is not None or work.gradients or work.quantised
    many = not never and (work.inputs > 1 or work.rows > PIPED_ROWS)
    if work.rows > few and not many:
        return "PIPED"
    return "PLAIN" if never else "ROW"


def _gradient_shape(work: RowWork, stage_bytes: int, fitting: int) -> PipeShape:
    """One group, because each has a row of sums for each vector.

    >>> shape = _gradient_shape(RowWork(4096, 7168, 32, 2, 20, gradients=1), 28672, 7)
    >>> shape.warps, shape.stages
    (8, 4)
    """
    eights, warps, stages = work.hidden // 8, 8, 4
    if work.gradients > 1:
        warps, stages = -(-eights // 128), 5  # a thread then holds four vectors of a row, and never takes them again
    elif work.rows <= FEW_ROWS or (work.inputs == 2 and work.rows >= MANY_GRADIENT_ROWS):
        warps, stages = 4, 5
    needed = -(-eights // (32 * max(1, GRADIENT_REGISTERS // work.registers)))
    return PipeShape("PIPED", 1, min(WIDE_WARPS, max(warps, needed)), min(stages, fitting), stage_bytes)


def _consumers(work: RowWork, eights: int, budget: int) -> int:
    """Warps of a block that compute on rows."""
    groups = _groups(eights, max(1, budget // work.registers), WIDE_WARPS)
    held = -(-eights // (32 * (WIDE_WARPS // groups))) * work.registers
    return WIDE_WARPS if work.hidden > WIDE or (budget == REGISTERS and held <= LIGHT) else CONSUMER_WARPS


SCALED_EIGHTS = 16
"""Eight-element units with one scale as 8-bit floats. A piece holds whole blocks of them."""


def _tile(work: RowWork, eights: int) -> tuple[int, int]:
    """Rows of a tile of about so many eights, and the eights of a piece of a row."""
    width = work.hidden // 8
    if width > eights:
        return 1, eights
    return max(1, min(eights // width, work.rows)), width


def _groups(eights: int, vectors: int, block: int) -> int:
    """The most groups of a block of so many warps whose threads hold a row with at most `vectors` eights each.

    >>> _groups(896, 9, 11), _groups(896, 4, 11), _groups(8, 9, 11), _groups(4096, 9, 11)
    (2, 1, 11, 1)
    """
    return max(1, block // -(-eights // (32 * vectors)))


def _divided(most_groups: int, fitting: int, asked: int | None, deepest: int, least: int = 2) -> tuple[int, int]:
    """Groups and stages of a block. A group has `least` stages if there are so many; `asked` is bounded by `fitting`.

    >>> _divided(3, 15, None, 3), _divided(3, 7, None, 3), _divided(3, 7, None, 3, least=3)
    ((3, 9), (3, 6), (2, 6))
    >>> [_divided(3, 15, asked, 3, least=3) for asked in (1, 2, 4, 8, 9)]
    [(1, 1), (1, 2), (1, 4), (2, 8), (3, 9)]
    """
    if asked is None:
        groups = max(1, min(most_groups, fitting // least))
        return groups, groups * min(deepest, fitting // groups)
    stages = min(asked, fitting)
    shares = [each for each in range(1, most_groups + 1) if stages % each == 0]
    return max(each for each in shares if each == 1 or stages >= least * each), stages


# Numbers of rows with one shape.


def row_breaks(work: RowWork, limits: Limits) -> tuple[int, ...]:
    """The numbers of rows from which on `row_shape` may choose another shape; between two it chooses the same one.

    >>> breaks = row_breaks(RowWork(4096, hidden=7168, eight_bytes=16, registers=8), Limits())
    >>> {ALONE_ROWS + 1, FEW_ROWS + 1, PIPED_ROWS + 1} <= set(breaks)
    True
    """
    most = TILE_BYTES // work.row_bytes
    tile_rows = max(1, most)
    fitting = (SHARED_BYTES - 2048) // (tile_rows * work.row_bytes + STAGE_WORDS_BYTES)
    turns = [DYNAMIC_TURNS * stages * tile_rows * _sms(limits) for stages in range(1, fitting + 1)]
    return _breaks(most, limits, (PIPED_ROWS + 1, ALONE_ROWS + 1, MANY_GRADIENT_ROWS, *turns))


def piece_breaks(work: RowWork, limits: Limits) -> tuple[int, ...]:
    """The same of `piece_shape`.

    >>> piece_breaks(RowWork(4096, 2048, eight_bytes=32), Limits()), piece_breaks(RowWork(9, 512, 32), Limits())[:3]
    ((2, 513), (2, 3, 4))
    """
    eights = PIECE * (CONSUMER_WARPS if limits.stages else 1)
    return _breaks(eights // (work.hidden // 8), limits, ())


def _breaks(most_tile_rows: int, limits: Limits, more: tuple[int, ...]) -> tuple[int, ...]:
    """All breaks. Fewer rows than a tile could hold make a tile of their own size, and one row has no stride."""
    few = [FEW_ROWS + 1]
    if limits.sms is not None:
        few += [limits.sms + 1, FEW_ROWS_OF_AN_SM * limits.sms + 1]
    return tuple(sorted({2, *range(2, most_tile_rows + 1), *few, *more}))
