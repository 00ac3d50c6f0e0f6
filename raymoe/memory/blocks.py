"""Free and taken pieces of a pool's segments: numbers only, no memory.

>>> blocks = Blocks()
>>> blocks.add(1024)
0
>>> first, second = blocks.take(100), blocks.take(300)
>>> first, second
(Block(segment=0, start=0, nbytes=256), Block(segment=0, start=256, nbytes=512))
>>> blocks.take(512) is None  # 256 bytes are left
True
>>> blocks.give(second)
>>> blocks.take(512).start, blocks.free_bytes
(256, 256)
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from raymoe.memory.layout import round_up

BLOCK_BYTES = 256
"""Blocks start at multiples of it, and their sizes are multiples of it: no two tensors share a cache line."""


@dataclass(frozen=True)
class Block:
    """A piece of a segment."""

    segment: int
    start: int
    nbytes: int


class Blocks:
    """Gives out pieces of segments and takes them back. Pieces side by side become one again."""

    def __init__(self) -> None:
        self._pieces: list[list[tuple[int, int]]] = []  # of each segment: start and bytes of what is free, in order
        self.segment_bytes: list[int] = []

    @property
    def total_bytes(self) -> int:
        return sum(self.segment_bytes)

    @property
    def free_bytes(self) -> int:
        return sum(nbytes for pieces in self._pieces for _, nbytes in pieces)

    def add(self, nbytes: int) -> int:
        """Add a free segment; return its number."""
        whole = nbytes // BLOCK_BYTES * BLOCK_BYTES
        self._pieces.append([(0, whole)])
        self.segment_bytes.append(whole)
        return len(self._pieces) - 1

    def take(self, nbytes: int) -> Block | None:
        """Take so many bytes, rounded up, from the smallest piece that has them. None where no piece has them."""
        size = round_up(max(nbytes, 1), BLOCK_BYTES)
        fitting = [
            (free, segment, index)
            for segment, pieces in enumerate(self._pieces)
            for index, (_, free) in enumerate(pieces)
            if free >= size
        ]
        if not fitting:
            return None
        free, segment, index = min(fitting)
        start, _ = self._pieces[segment][index]
        self._pieces[segment][index : index + 1] = [(start + size, free - size)] if free > size else []
        return Block(segment, start, size)

    def give(self, block: Block) -> None:
        """Give back a block that was taken."""
        pieces = self._pieces[block.segment]
        start, end = block.start, block.start + block.nbytes
        index = bisect_left(pieces, (start, 0))
        before = pieces[index - 1] if index else None
        after = pieces[index] if index < len(pieces) else None
        overlaps = (before is not None and sum(before) > start) or (after is not None and after[0] < end)
        if overlaps or end > self.segment_bytes[block.segment]:
            raise ValueError(f"{block} was given back and is free, or never was a block")
        first, last = index, index
        if before is not None and sum(before) == start:
            first, start = index - 1, before[0]
        if after is not None and after[0] == end:
            last, end = index + 1, sum(after)
        pieces[first:last] = [(start, end - start)]
