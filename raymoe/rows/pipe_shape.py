"""Choose the shape of a block of kernels/include/raymoe/rows/pipe.cuh: groups, warps, stages, and rows of a tile.

Read `row_shape` first: it is for norms, where one group holds a row in registers. `piece_shape` is for kernels that
work on each element alone, so a row can be cut into pieces.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from raymoe.errors import ConfigError

Loading = Literal["PIPED", "IN_TURN", "PLAIN", "ROW"]
"""How tiles are loaded: PIPED by the pipeline, IN_TURN by the baseline that waits for one input after the other, PLAIN
by ordinary loads, ROW by ordinary loads in a block for each row."""


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
    """Without stages: whether loads have the hint that their lines of the L2 cache are not read again soon."""
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
        """The bytes of stages, of two barriers and a number for each stage, and of the sums of all groups."""
        tiles = self.stages * self.stage_bytes if self.staged else 0
        return tiles + self.stages * STAGE_WORDS_BYTES + self.groups * 2 * self.warps * SUM_BYTES

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
        """The number of blocks that share `tiles` tiles on `sms` SMs; 0 without tiles."""
        return blocks_of(-(-tiles // self.at_once), sms * self.blocks_of_sm, balanced=self.balanced)


def blocks_of(parts: int, most: int, *, balanced: bool) -> int:
    """The number of blocks for `parts` parts; `most` 0: as many as there are parts.

    >>> blocks_of(4096, 132, balanced=True), blocks_of(4096, 132, balanced=False), blocks_of(200, 132, balanced=True)
    (128, 132, 132)
    """
    if not most or parts <= most:
        return parts
    turns = -(-parts // most)
    return -(-parts // turns) if balanced and turns >= BALANCED_TURNS else most


@dataclass(frozen=True)
class Limits:
    """The settings of a launch that a caller gives; None: chosen here. `stages` are those of a block.

    `batch_invariant`, for norms: the block does not depend on the number of rows, so it sums each row in one order.
    """

    sms: int | None = None
    stages: int | None = None
    loading: Loading | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("sms", "stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it is at least 1")

    @property
    def key(self) -> tuple[int | None, int | None, Loading | None, bool]:
        """The same values as a tuple, whose hash costs less."""
        return self.sms, self.stages, self.loading, self.batch_invariant


NO_LIMITS = Limits()


@functools.lru_cache(maxsize=256)
def limits_of(sms: int | None, batch_invariant: bool = False) -> Limits:
    """The limits of a call that may take `sms` SMs; None: all."""
    return Limits(sms, batch_invariant=batch_invariant)


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
    """Whether a count on the device gives the number of rows."""
    biased: bool = False
    """Whether a vector is added to each row."""
    summed: bool = False
    """Whether an elementwise kernel also sums pieces of rows: warps that share a piece then need a barrier."""

    @property
    def row_bytes(self) -> int:
        return self.hidden // 8 * self.eight_bytes

    @property
    def budget(self) -> int:
        """Registers of a thread for all that it holds."""
        return GRADIENT_BUDGET if self.gradients else REGISTERS


# Limits. docs/evidence/experiments/block_limits.md has their measurements.

MOST_HIDDEN = 32768
WHOLE_GPU = 132  # the SMs of an H100 and of an H200
SHARED_BYTES = 220 << 10  # the stages of a block; a block of Hopper has 227 KiB
TILE_BYTES = 8 << 10  # the size up to which several short rows make one tile, all inputs together

# The way of loading, by the number of rows.
FEW_ROWS = 512  # up to here there is no pipeline, because an SM gets too few rows to fill one
FEW_ROWS_OF_AN_SM = 4  # the same for each SM, where a caller limits their number
PIPED_ROWS = 1024  # up to here norms of one input use the pipeline on the whole GPU
MANY_GRADIENT_ROWS = 8192  # from here on gradients with two inputs take four warps
MOST_ROWS = 1 << 31  # a batch-invariant norm takes the block of so many rows
DYNAMIC_TURNS = 2  # blocks take tiles from a counter if each gets this many for each of its stages
BALANCED_TURNS = 16  # from here on a grid with fixed rows is as small as its turns allow

# Warps of a block with stages that compute, and registers of their threads. The producer warp is not counted.
CONSUMER_WARPS = 11  # they leave a thread 168 registers
WIDE_WARPS = 15  # the same if a thread then needs at most LIGHT registers, or rows have more than WIDE elements
LIGHT = 72
WIDE = 22528
REGISTERS = 72  # the parts of rows and vectors that a thread holds while it works on a row
GRADIENT_BUDGET = 96  # the same for gradients
GRADIENT_REGISTERS = 160  # everything that a thread holds where a gradient's block is one group
LONG_ROW = 4096  # the elements of a row from which on a gradient's block is one group

# Stages of a group.
DEEPEST = 3  # the most, unless a caller asks for more
QUANTISED_STAGES = 2  # the same for 8-bit results
FEW_SMS = 64  # up to here a group has one stage more
LEAST_STORED = 3  # the least where results leave from stages: one is loaded, one computed on, one stored
STAGE_WORDS_BYTES = 24  # the two barriers of a stage, and the number of its tile
SUM_BYTES = 16  # a warp's share of the sums of a group, which have two places

# A block for each row.
ROW_THREAD_BYTES = 64  # the part of a row of each input that a thread takes
ROW_RESIDENT = 896  # the threads that an SM holds at least: four blocks of seven warps
UNEVEN_RESIDENT = 768  # the same where a row does not fill the block, so a thread needs more registers
ALONE_ROWS = WHOLE_GPU  # up to here blocks share no SM, so a thread may have more registers
GRADIENT_ROW_BYTES = 16 << 10  # the row of an input that the threads of a gradient's block can hold
PLAIN_WARPS, LEAST_ROW_WARPS = 16, 2

# A piece of a row, in eight-element units, and the blocks that take pieces.
PIECE = 256  # a warp with stages takes eight units in each thread
PLAIN_PIECE = 64  # a warp without stages takes two, whose loads overlap
SCALED_EIGHTS = 16  # the units that share a scale as 8-bit floats; a piece holds whole blocks of them
BLOCK_WARPS = 4  # where a block takes a piece, one unit in each thread
BLOCK_RESIDENT = 1536  # the threads of such blocks that an SM holds at least,
BLOCK_REGISTERS = 16  # if a thread needs no more registers for inputs and results
PIECE_RESIDENT = 768  # the same for all other blocks of pieces
PLAIN_PIECE_WARPS, QUANTISED_PIECE_WARPS = 2, 1
COUNTED_WARPS = 24  # the warps of all blocks of an SM where a count on the device gives the number of rows


# Rows that one group holds in registers.


def row_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for rows that a group of warps holds in registers.

    >>> def shape(rows: int, limits: Limits) -> str:
    ...     block = row_shape(RowWork(rows, hidden=7168, eight_bytes=16, registers=8), limits)
    ...     return f"{block.loading} {block.groups} x {block.warps}, {block.stages} stages, {block.blocks_of_sm} blocks"
    >>> [shape(rows, Limits()) for rows in (128, 1024, 16384)]
    ['ROW 1 x 7, 1 stages, 0 blocks', 'PIPED 3 x 5, 9 stages, 1 blocks', 'ROW 1 x 7, 1 stages, 0 blocks']
    >>> [shape(4096, limits) for limits in (Limits(sms=48), Limits(stages=1))]
    ['PIPED 3 x 5, 12 stages, 1 blocks', 'PIPED 1 x 15, 1 stages, 1 blocks']
    >>> row_shape(RowWork(100000, 64, 16, 1, 8), Limits(48)).tile_rows  # 8 KiB of rows in each tile
    64
    >>> row_shape(RowWork(4096, 32768, 64, 1, 20), Limits(48)).loading  # no two rows of 128 KiB fit into an SM
    'PLAIN'
    >>> {shape(rows, Limits(batch_invariant=True)) for rows in (1, 128, 1024, 16384)}
    {'ROW 1 x 7, 1 stages, 0 blocks'}
    """
    if limits.batch_invariant:
        work = replace(work, rows=MOST_ROWS)
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

    Gradients with three inputs take twice the warps, 14 for 7168 bfloat16.

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


# Pieces of rows, for kernels that work on each element alone.


def piece_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for elementwise kernels. With few stages, groups of more warps share a piece.

    >>> def shape(limits: Limits, hidden: int = 2048) -> str:
    ...     block = piece_shape(RowWork(4096, hidden, eight_bytes=32), limits)
    ...     tile = f"{block.tile_rows} rows x {block.piece}"
    ...     return f"{block.loading} {block.groups} x {block.warps}, {block.stages} stages, {tile}"
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
    """Whether at least three of four threads get a unit, if a block takes a piece of a row."""
    threads = 32 * BLOCK_WARPS
    return 4 * eights >= 3 * threads * -(-eights // threads)


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
    """Choose the way of loading.

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
    """One group, because every group has a row of sums for each vector.

    >>> shape = _gradient_shape(RowWork(4096, 7168, 32, 2, 20, gradients=1), 28672, 7)
    >>> shape.warps, shape.stages
    (8, 4)
    """
    eights, warps, stages = work.hidden // 8, 8, 4
    if work.gradients > 1:
        warps, stages = -(-eights // 128), 5  # a thread then holds four vectors of a row, and loads none of them twice
    elif work.rows <= FEW_ROWS or (work.inputs == 2 and work.rows >= MANY_GRADIENT_ROWS):
        warps, stages = 4, 5
    needed = -(-eights // (32 * max(1, GRADIENT_REGISTERS // work.registers)))
    return PipeShape("PIPED", 1, min(WIDE_WARPS, max(warps, needed)), min(stages, fitting), stage_bytes)


def _consumers(work: RowWork, eights: int, budget: int) -> int:
    """Warps of a block that compute on rows."""
    groups = _groups(eights, max(1, budget // work.registers), WIDE_WARPS)
    needed = -(-eights // (32 * (WIDE_WARPS // groups))) * work.registers
    return WIDE_WARPS if work.hidden > WIDE or (budget == REGISTERS and needed <= LIGHT) else CONSUMER_WARPS


def _tile(work: RowWork, eights: int) -> tuple[int, int]:
    """The rows of a tile of about `eights` eights, and the eights of a piece of a row."""
    width = work.hidden // 8
    if width > eights:
        return 1, eights
    return max(1, min(eights // width, work.rows)), width


def _groups(eights: int, vectors: int, block: int) -> int:
    """The most groups of a block of `block` warps whose threads hold a row with at most `vectors` eights in each.

    >>> _groups(896, 9, 11), _groups(896, 4, 11), _groups(8, 9, 11), _groups(4096, 9, 11)
    (2, 1, 11, 1)
    """
    return max(1, block // -(-eights // (32 * vectors)))


def _divided(most_groups: int, fitting: int, wanted: int | None, deepest: int, least: int = 2) -> tuple[int, int]:
    """Groups and stages of a block. A group has `least` stages if enough of them fit; `fitting` bounds `wanted`.

    >>> _divided(3, 15, None, 3), _divided(3, 7, None, 3), _divided(3, 7, None, 3, least=3)
    ((3, 9), (3, 6), (2, 6))
    >>> [_divided(3, 15, wanted, 3, least=3) for wanted in (1, 2, 4, 8, 9)]
    [(1, 1), (1, 2), (1, 4), (2, 8), (3, 9)]
    """
    if wanted is None:
        groups = max(1, min(most_groups, fitting // least))
        return groups, groups * min(deepest, fitting // groups)
    stages = min(wanted, fitting)
    divisors = [groups for groups in range(1, most_groups + 1) if stages % groups == 0]
    return max(groups for groups in divisors if groups == 1 or stages >= least * groups), stages


# Numbers of rows with one shape: a launch is prepared once for all numbers between two breaks.


def row_breaks(work: RowWork, limits: Limits) -> tuple[int, ...]:
    """The numbers of rows from which on `row_shape` may choose another shape; between two it chooses the same one.

    >>> breaks = row_breaks(RowWork(4096, hidden=7168, eight_bytes=16, registers=8), Limits())
    >>> {ALONE_ROWS + 1, FEW_ROWS + 1, PIPED_ROWS + 1} <= set(breaks)
    True
    >>> row_breaks(RowWork(4096, hidden=7168, eight_bytes=16, registers=8), Limits(batch_invariant=True))
    (2,)
    """
    if limits.batch_invariant:
        return (2,)  # one row has no stride
    most = TILE_BYTES // work.row_bytes
    tile_rows = max(1, most)
    fitting = (SHARED_BYTES - 2048) // (tile_rows * work.row_bytes + STAGE_WORDS_BYTES)
    turns = [DYNAMIC_TURNS * stages * tile_rows * _sms(limits) for stages in range(1, fitting + 1)]
    return _breaks(most, limits, (PIPED_ROWS + 1, ALONE_ROWS + 1, MANY_GRADIENT_ROWS, *turns))


def piece_breaks(work: RowWork, limits: Limits) -> tuple[int, ...]:
    """The numbers of rows from which on `piece_shape` may choose another shape.

    >>> piece_breaks(RowWork(4096, 2048, eight_bytes=32), Limits()), piece_breaks(RowWork(9, 512, 32), Limits())[:3]
    ((2, 513), (2, 3, 4))
    """
    eights = PIECE * (CONSUMER_WARPS if limits.stages else 1)
    return _breaks(eights // (work.hidden // 8), limits, ())


def _breaks(most_tile_rows: int, limits: Limits, more: tuple[int, ...]) -> tuple[int, ...]:
    """All breaks in order. Fewer rows than a tile can hold make a tile of their own size, and one row has no stride."""
    few = [FEW_ROWS + 1]
    if limits.sms is not None:
        few += [limits.sms + 1, FEW_ROWS_OF_AN_SM * limits.sms + 1]
    return tuple(sorted({2, *range(2, most_tile_rows + 1), *few, *more}))
