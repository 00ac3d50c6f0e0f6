"""Pieces of columns in which a product stores rows while the combine beside it sends the pieces that are there.

The product and the combine follow one another on one stream. The combine is launched early: it begins when all blocks
of the product have begun, on SMs that the product leaves. kernels/peer/combine.cu has the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_PIECES = 8
WORDS = MOST_PIECES + MOST_PIECES // 2
"""64-bit words of the struct in kernels/include/raymoe/base/column_pieces.cuh."""

TILE_OUTPUTS, TILE_VECTORS = 256, 32
"""Columns of results in a tile of the product, and their 16-byte vectors."""
LEAST_TILES = 8
"""Tiles side by side in a piece; the last piece has those that are left. The rows of an expert are read once for each
piece, and the last piece is combined after the product. So pieces are few and the last one is small."""
SMS_OF_TWO, MOST_SMS, SMS_PART = 8, 16, 8
"""The SMs that a product leaves to the combine: a part of all, no more than pays, on two ranks fewer. The product and
its combine took 1762 us with 8 SMs and 1816 with 16, after each other 1753, on two H200. On four they took 1844 us with
8 SMs, 1763 with 16 and 1807 with 24, after each other 1910 (2026-11-27)."""


@dataclass(slots=True)
class ColumnPieces:
    """By this a product tells the combine of a dispatch which pieces of the rows are there."""

    words: torch.Tensor
    """int64[WORDS] of the exchange, on its GPU."""
    dispatch: int
    """The address of the dispatch's number."""
    columns: int
    """Of a row."""
    piece_tiles: int
    """Tiles side by side in a piece."""
    sms: int
    """The SMs that the product leaves to the combine."""
    rows: torch.Tensor | None = None
    """The rows that a product stores in pieces, once it is enqueued."""
    reads: tuple[torch.Tensor | None, ...] = ()
    """The tensors that this product reads. The combine writes its results meanwhile, so they must not get this
    memory."""

    def are_of(self, rows: torch.Tensor) -> bool:
        """Whether a product stores these rows in pieces."""
        return self.rows is not None and self.rows.data_ptr() == rows.data_ptr()


def tiles_of_piece(columns: int) -> int:
    """Return the tiles side by side in a piece of rows of so many columns.

    >>> tiles_of_piece(7168), tiles_of_piece(512), tiles_of_piece(32768)
    (8, 8, 16)
    """
    return max(LEAST_TILES, -(-tiles_of(columns) // MOST_PIECES))


def pieces_of(columns: int) -> int:
    """Return the number of pieces of rows of so many columns.

    >>> pieces_of(7168), pieces_of(2880), pieces_of(512), pieces_of(16384)
    (4, 2, 1, 8)
    """
    return -(-tiles_of(columns) // tiles_of_piece(columns))


def tiles_of(columns: int) -> int:
    """Return the tiles side by side of rows of so many columns."""
    return -(-columns // TILE_OUTPUTS)


def sms_beside(sms: int, ranks: int) -> int:
    """Return the SMs that a product leaves to a combine of so many.

    >>> sms_beside(132, ranks=4), sms_beside(132, ranks=2), sms_beside(6, ranks=2)
    (16, 8, 2)
    """
    return max(2, min(SMS_OF_TWO if ranks <= 2 else MOST_SMS, sms // SMS_PART))


_TELLING: ContextVar[ColumnPieces | None] = ContextVar("pieces of columns that a product tells", default=None)


@contextmanager
def telling(pieces: ColumnPieces | None) -> Iterator[None]:
    """Let the last product that this thread enqueues inside store its rows in pieces; None: as ever."""
    before = _TELLING.set(pieces)
    try:
        yield
    finally:
        _TELLING.reset(before)


def pieces_to_tell(y: torch.Tensor, reads: tuple[torch.Tensor | None, ...]) -> ColumnPieces | None:
    """Return the pieces in which a product without a gate stores y; None: it stores y as ever.

    `reads` is all that the product reads.
    A combine reads rows of 16-bit elements in the dispatch's places, so others are not told.
    """
    pieces = _TELLING.get()
    if pieces is None or pieces.rows is not None or y.shape[1] != pieces.columns or y.element_size() != 2:
        return None
    pieces.rows, pieces.reads = y, reads
    return pieces
