"""The layout of a heap: named regions at the same offsets on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from raymoe.errors import ConfigError

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "uint8": 1}

ALIGNMENT = 128
"""Of every region, in bytes. Two regions share no cache line, nor the pair of lines that a core fetches together."""

WORD_STRIDE = ALIGNMENT // 8
"""Distance between words of different writers, in 64-bit words."""

GRANULE = 4096
"""The size of a heap is a multiple of this many bytes."""


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`.

    >>> [round_up(value, 16) for value in (0, 1, 16, 17)]
    [0, 16, 16, 32]
    """
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Region:
    """A named piece of a heap. A region of words (flags) has shape (writers, WORD_STRIDE) and dtype int64."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"region {self.name} asks for dtype {self.dtype}; a heap holds {', '.join(ITEM_BYTES)}")
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"region {self.name} has shape {self.shape}; every dimension must be at least 1")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @classmethod
    def words(cls, name: str, writers: int) -> Region:
        """Lay out one 64-bit word per writer, 128 bytes apart."""
        return cls(name, (writers, WORD_STRIDE), "int64")


@dataclass(frozen=True)
class PlacedRegion:
    """A region and its offset in the heap, in bytes."""

    region: Region
    offset: int


@dataclass(frozen=True)
class Layout:
    """All regions of a heap, in order. Two ranks can be peers only if the hashes of their layouts are equal."""

    placed: tuple[PlacedRegion, ...]
    nbytes: int

    @classmethod
    def of(cls, regions: Iterable[Region]) -> Layout:
        placed: list[PlacedRegion] = []
        end = 0
        for region in regions:
            if any(other.region.name == region.name for other in placed):
                raise ConfigError(f"a layout names region {region.name} twice; names must differ")
            placed.append(PlacedRegion(region, end))
            end = round_up(end + region.nbytes, ALIGNMENT)
        if not placed:
            raise ConfigError("a layout with no regions was asked for; it needs at least one")
        return cls(tuple(placed), round_up(end, GRANULE))

    def find(self, name: str) -> PlacedRegion:
        for placed in self.placed:
            if placed.region.name == name:
                return placed
        known = ", ".join(placed.region.name for placed in self.placed)
        raise ConfigError(f"no region {name} in this layout; it has {known}")

    def region(self, name: str) -> Region:
        return self.find(name).region

    def table(self) -> list[dict[str, object]]:
        """Return the regions as plain values, one dict for each."""
        return [
            {
                "region": placed.region.name,
                "offset": placed.offset,
                "shape": list(placed.region.shape),
                "dtype": placed.region.dtype,
                "bytes": placed.region.nbytes,
            }
            for placed in self.placed
        ]

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr((self.placed, self.nbytes)).encode()).hexdigest()
