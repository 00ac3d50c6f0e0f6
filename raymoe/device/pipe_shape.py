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
FEW_ROWS = 1024
"""Up to so many rows, kernels load them without a pipeline. Each SM gets too few to fill one. Not measured yet."""
FEW_ROWS_OF_AN_SM = 8
"""The same for each SM, where a caller limits their number."""
SHARED_BYTES = 220 << 10
"""Shared memory that a block may use: what a block of Hopper has, 227 KiB, less a reserve."""
TILE_BYTES = 8 << 10
"""Bytes of a tile, all inputs together, that several short rows are put together for."""
CONSUMER_WARPS = 11
"""Warps of a block that compute. With the producer each quarter of an SM has three, and a thread 168 registers; with
one warp more it would have 128."""
WIDE_WARPS = 15
"""The same for rows of more than WIDE elements, of which 11 warps would hold too much a thread."""
WIDE = 22528
PLAIN_WARPS = 16
DEEPEST = 6
"""Stages of a group, unless a caller asks for more."""
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

    @property
    def row_bytes(self) -> int:
        return self.hidden // 8 * self.eight_bytes


REGISTERS = 72
"""Of a thread, for the parts of rows and vectors that it holds while it works on a row."""


def row_shape(work: RowWork, limits: Limits) -> PipeShape:
    """The shape for rows that a group of warps holds in registers.

    >>> row_shape(RowWork(rows=4096, hidden=7168, eight_bytes=16, registers=8), Limits())
    PipeShape(loading='PIPED', groups=2, warps=5, stages=12, stage_bytes=14336, tile_rows=1, piece=0)
    >>> row_shape(RowWork(4096, 7168, 16, 8), Limits(stages=1))
    PipeShape(loading='PIPED', groups=1, warps=11, stages=1, stage_bytes=14336, tile_rows=1, piece=0)
    >>> row_shape(RowWork(128, 7168, 16, 8), Limits())
    PipeShape(loading='PLAIN', groups=1, warps=8, stages=1, stage_bytes=0, tile_rows=1, piece=0)
    >>> row_shape(RowWork(100000, 64, 16, 8), Limits()).tile_rows  # 8 KiB of rows in each tile
    64
    >>> row_shape(RowWork(4096, 32768, 64, 20), Limits()).loading  # two float32 inputs: no two rows fit into an SM
    'PLAIN'
    """
    eights, budget = work.hidden // 8, work.budget or REGISTERS
    tile_rows = max(1, min(TILE_BYTES // work.row_bytes, work.rows))
    stage_bytes = tile_rows * work.row_bytes
    fitting = (SHARED_BYTES - 1024) // stage_bytes
    loading = limits.loading or _loading(work.rows, limits)
    if loading == "PLAIN" or fitting < (1 if limits.stages or limits.loading else 2):
        groups = _groups(eights, max(1, budget // 2 // work.registers), PLAIN_WARPS)
        warps = PLAIN_WARPS // groups
        if limits.sms is None:  # many small blocks on each SM
            groups = max(1, 4 // warps)
        return PipeShape("PLAIN", groups, warps, groups, 0)
    consumers = WIDE_WARPS if work.hidden > WIDE else CONSUMER_WARPS
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
    PipeShape(loading='PIPED', groups=11, warps=1, stages=44, stage_bytes=4096, tile_rows=32, piece=8)
    """
    loading = limits.loading or _loading(work.rows, limits)
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


def _loading(rows: int, limits: Limits) -> Loading:
    """Whether to use the pipeline. This is the one place that decides it.

    >>> _loading(1000, Limits()), _loading(1000, Limits(sms=48)), _loading(1000, Limits(stages=1))
    ('PLAIN', 'PIPED', 'PIPED')
    """
    few = FEW_ROWS if limits.sms is None else min(FEW_ROWS, FEW_ROWS_OF_AN_SM * limits.sms)
    return "PLAIN" if rows <= few and limits.stages is None else "PIPED"


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
    ((3, 15), (3, 6), (2, 8), (1, 3), (1, 2))
    """
    if asked is None:
        groups = max(1, min(most_groups, fitting // 2))
        return groups, groups * min(DEEPEST, fitting // groups)
    stages = min(asked, fitting)
    groups = max(each for each in range(1, most_groups + 1) if stages % each == 0 and (each == 1 or stages >= 2 * each))
    return groups, stages
