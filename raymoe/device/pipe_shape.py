"""Choose the shape of a block of kernels/include/raymoe/pipe/pipe.cuh: groups, warps, stages, and rows of a tile.

Read `row_shape` first: rows that one group holds in registers, for normalisations. `piece_shape` is for kernels that
work on each element alone, so a row can be cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raymoe.errors import ConfigError

Loading = Literal["PIPED", "IN_TURN", "PLAIN"]
"""How tiles come: by the pipeline, by the baseline that waits for each input in turn, or by ordinary loads."""

MOST_HIDDEN = 32768
FEW_ROWS = 512
"""Up to so many rows, kernels load them without a pipeline: each SM gets too few to fill one. RMSNorm of 256 rows took
3.8 us without and 4.4 with it, of 1024 rows 10.9 and 10.8 (7168 bfloat16, H200, 2026-11-23)."""
FEW_ROWS_OF_AN_SM = 4
"""The same for each SM, where a caller limits their number."""
MANY_ROWS = 8192
"""From so many rows on, norms of one input load without a pipeline too, if they may take the whole GPU: one block for
each row, which the hardware schedules. A pipeline's blocks have fixed rows, so all wait for the slowest SM: RMSNorm of
16384 rows took 116.8 us without, 122 with it, and the copy 113 (same machine)."""
MANY_ROWS_BYTES = 112
"""Of a row, in each thread of such a block: four warps for 7168 bfloat16. A weight is then loaded again for each row,
so threads need few registers and more blocks fit on an SM. With five warps LayerNorm of 16384 rows took 167 us, with
four 119 (same machine)."""
SOME_ROWS = 513
"""The same for kernels of several inputs and for those that work on each element alone: x + residual and its norm of
4096 rows took 59.8 us without and 63.2 with a pipeline, and the copy 58.6 (same machine)."""
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
LIGHT = 64
LONG_ROW = 4096
"""Elements of a row from which on a gradient's block is one group. Eight warps are faster up to MANY_ROWS, four from
there on: RMSNorm backward of 4096 rows 49.8 and 53.3 us, of 16384 rows 183.6 and 174.8 (same machine)."""
GRADIENT_REGISTERS = 160
"""Of a thread of such a group, for all that it holds."""
WIDE = 22528
PLAIN_WARPS = 16
DEEPEST = 3
"""Stages of a group, unless a caller asks for more. With six the same RMSNorm took 5 % longer: more rows under way at
once spread over more pages of memory."""
SUM_BYTES = 16
"""Of a warp, for the sums of a group; there are two places for it."""


@dataclass(frozen=True)
class PipeShape:
    """A block: `groups` of `warps` warps, `stages` of `stage_bytes`, tiles of `tile_rows` rows or of `piece` eights.

    >>> PipeShape("PIPED", groups=3, warps=4, stages=12, stage_bytes=14336).shared_bytes
    172608
    """

    loading: Loading
    groups: int
    warps: int
    stages: int
    stage_bytes: int
    tile_rows: int = 1
    piece: int = 0
    """Eight-element units of a piece of a row; 0: whole rows."""

    @property
    def threads(self) -> int:
        return 32 * (self.groups * self.warps + (self.loading == "PIPED"))

    @property
    def shared_bytes(self) -> int:
        """Stages, two barriers for each, and the sums of all groups."""
        held = 0 if self.loading == "PLAIN" else self.stages * self.stage_bytes
        return held + self.stages * 16 + self.groups * 2 * self.warps * SUM_BYTES

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        return (
            ("PIPE_LOADING", self.loading),
            ("PIPE_GROUPS", str(self.groups)),
            ("PIPE_WARPS", str(self.warps)),
            ("PIPE_STAGES", str(self.stages)),
        )


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


@dataclass(frozen=True)
class RowWork:
    """Rows of `hidden` elements. `eight_bytes` counts eight elements of all inputs together."""

    rows: int
    hidden: int
    eight_bytes: int
    registers: int = 0
    """32-bit registers that a thread needs for eight elements of a row, everything that it holds together."""
    budget: int | None = None
    """Registers of a thread for all that it holds; None: REGISTERS."""
    scheduled_from: int | None = None
    """From so many rows on, many blocks without a pipeline are faster on the whole GPU; None: never."""

    @property
    def gradients(self) -> bool:
        """Whether groups also sum the gradient of a vector over their rows."""
        return self.budget is not None

    @property
    def row_bytes(self) -> int:
        return self.hidden // 8 * self.eight_bytes


REGISTERS = 72
"""Of a thread, for the parts of rows and vectors that it holds while it works on a row."""


def row_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for rows that a group of warps holds in registers.

    >>> row_shape(RowWork(rows=4096, hidden=7168, eight_bytes=16, registers=8), Limits())
    PipeShape(loading='PIPED', groups=3, warps=5, stages=9, stage_bytes=14336, tile_rows=1, piece=0)
    >>> row_shape(RowWork(4096, 7168, 16, 8), Limits(stages=1))
    PipeShape(loading='PIPED', groups=1, warps=15, stages=1, stage_bytes=14336, tile_rows=1, piece=0)
    >>> row_shape(RowWork(128, 7168, 16, 8), Limits())
    PipeShape(loading='PLAIN', groups=1, warps=7, stages=1, stage_bytes=0, tile_rows=1, piece=0)
    >>> row_shape(RowWork(16384, 7168, 16, 8, scheduled_from=MANY_ROWS), Limits())
    PipeShape(loading='PLAIN', groups=1, warps=4, stages=1, stage_bytes=0, tile_rows=1, piece=0)
    >>> row_shape(RowWork(100000, 64, 16, 8), Limits()).tile_rows  # 8 KiB of rows in each tile
    64
    >>> row_shape(RowWork(4096, 32768, 64, 20), Limits()).loading  # two float32 inputs: no two rows fit into an SM
    'PLAIN'
    """
    eights, budget = work.hidden // 8, work.budget or REGISTERS
    tile_rows = max(1, min(TILE_BYTES // work.row_bytes, work.rows))
    stage_bytes = tile_rows * work.row_bytes
    fitting = (SHARED_BYTES - 2048) // stage_bytes
    loading = limits.loading or _loading(work, limits)
    if loading == "PLAIN" or fitting < (1 if limits.stages or limits.loading else 2):
        vectors = max(1, budget // 2 // work.registers)
        if limits.sms is not None:
            groups = _groups(eights, vectors, PLAIN_WARPS)
            return PipeShape("PLAIN", groups, PLAIN_WARPS // groups, groups, 0)
        if work.scheduled_from == MANY_ROWS and work.rows >= MANY_ROWS:
            vectors = MANY_ROWS_BYTES // work.eight_bytes
        warps = min(PLAIN_WARPS, -(-eights // (32 * vectors)))
        groups = max(1, 4 // warps)  # many small blocks on each SM
        return PipeShape("PLAIN", groups, warps, groups, 0)
    if loading == "PIPED" and limits.stages is None and work.gradients and work.hidden >= LONG_ROW:
        return _gradient_shape(work, stage_bytes, fitting)
    consumers = _consumers(work, eights, budget)
    most = _groups(eights, max(1, budget // work.registers), consumers)
    if loading == "IN_TURN":
        groups = stages = min(most, fitting)
    else:
        groups, stages = _divided(most, fitting, limits.stages)
    return PipeShape(loading, groups, consumers // groups, stages, stage_bytes, tile_rows)


PIECE = 256
"""Eight-element units of a piece for each warp of its group: eight for each thread."""


def piece_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for kernels that work on each element alone. With few stages, groups of more warps share a piece.

    >>> piece_shape(RowWork(rows=4096, hidden=2048, eight_bytes=32), Limits())
    PipeShape(loading='PIPED', groups=11, warps=1, stages=22, stage_bytes=8192, tile_rows=1, piece=256)
    >>> piece_shape(RowWork(4096, 2048, 32), Limits(stages=8))
    PipeShape(loading='PIPED', groups=4, warps=2, stages=8, stage_bytes=16384, tile_rows=2, piece=256)
    >>> piece_shape(RowWork(4096, 64, 16), Limits())
    PipeShape(loading='PIPED', groups=11, warps=1, stages=33, stage_bytes=4096, tile_rows=32, piece=8)
    """
    loading = limits.loading or _loading(work, limits)
    if loading == "PLAIN":
        groups = 4 if limits.sms is None else PLAIN_WARPS
        tile_rows, piece = _tile(work, PIECE)
        return PipeShape("PLAIN", groups, 1, groups, 0, tile_rows, piece)
    room = (SHARED_BYTES - 1024) // work.eight_bytes  # eights of all stages together
    if loading == "IN_TURN":
        tile_rows, piece = _tile(work, PIECE)
        groups = stages = min(CONSUMER_WARPS, room // (tile_rows * piece))
    elif limits.stages is None:
        tile_rows, piece = _tile(work, PIECE)
        groups, stages = _divided(CONSUMER_WARPS, room // (tile_rows * piece), None)
    else:
        groups, stages = _divided(CONSUMER_WARPS, room // SCALED_EIGHTS, limits.stages)
        most = room // stages // SCALED_EIGHTS * SCALED_EIGHTS
        tile_rows, piece = _tile(work, min(PIECE * (CONSUMER_WARPS // groups), most))
    warps = CONSUMER_WARPS // groups if limits.stages else 1
    return PipeShape(loading, groups, warps, stages, tile_rows * piece * work.eight_bytes, tile_rows, piece)


def _loading(work: RowWork, limits: Limits) -> Loading:
    """Whether to use the pipeline. This is the one place that decides it.

    >>> few, many = RowWork(500, 7168, 16), RowWork(9000, 7168, 16, scheduled_from=MANY_ROWS)
    >>> _loading(few, Limits()), _loading(few, Limits(sms=48)), _loading(few, Limits(stages=1))
    ('PLAIN', 'PIPED', 'PIPED')
    >>> _loading(many, Limits()), _loading(many, Limits(sms=48))
    ('PLAIN', 'PIPED')
    """
    if limits.stages is not None:
        return "PIPED"
    if work.gradients and work.hidden >= LONG_ROW:
        return "PIPED"
    few = FEW_ROWS if limits.sms is None else min(FEW_ROWS, FEW_ROWS_OF_AN_SM * limits.sms)
    scheduled = limits.sms is None and work.scheduled_from is not None and work.rows >= work.scheduled_from
    return "PLAIN" if work.rows <= few or scheduled else "PIPED"


def _gradient_shape(work: RowWork, stage_bytes: int, fitting: int) -> PipeShape:
    """One group, because each has a row of sums for each vector.

    >>> _gradient_shape(RowWork(4096, 7168, 32, 20, budget=96), 28672, 7)
    PipeShape(loading='PIPED', groups=1, warps=8, stages=4, stage_bytes=28672, tile_rows=1, piece=0)
    """
    warps, stages = (8, 4) if work.rows < MANY_ROWS else (4, 5)
    needed = -(-work.hidden // 8 // (32 * max(1, GRADIENT_REGISTERS // work.registers)))
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


def _divided(most_groups: int, fitting: int, asked: int | None) -> tuple[int, int]:
    """Groups and stages of a block. A group has at least two stages if there are two; `asked` is bounded by `fitting`.

    >>> _divided(3, 15, None), _divided(3, 7, None), _divided(3, 15, 8), _divided(3, 15, 3), _divided(12, 64, 2)
    ((3, 9), (3, 6), (2, 8), (1, 3), (1, 2))
    """
    if asked is None:
        groups = max(1, min(most_groups, fitting // 2))
        return groups, groups * min(DEEPEST, fitting // groups)
    stages = min(asked, fitting)
    groups = max(each for each in range(1, most_groups + 1) if stages % each == 0 and (each == 1 or stages >= 2 * each))
    return groups, stages
