"""The parameters of the kernels that write numbers of entries into rows of bytes, and read them from such rows.

They are kernels/spread_weights.cu and gather_weights.cu, which run before and behind the combine of these rows
(raymoe/exchange/weight_bytes.py). Neither waits for another GPU, and both run from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.device.dispatch import ROW_TYPES
from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Shape
from raymoe.device.params import U32, U64, Address, Params

NO_OFFSET = 2**64 - 1
THREADS = 256


@dataclass(frozen=True)
class SpreadWeightsParams(Params):
    """Twin of the struct in kernels/spread_weights.cu, which describes the fields."""

    kept: Address = 0
    weights: Address = 0
    rows: Address = 0
    places: U64 = 0
    tokens: U64 = NO_OFFSET
    place_stride: U32 = 4
    slot_tokens: U32 = 0
    topk: U32 = 0
    entries: U32 = 0
    capacity: U32 = 0
    row_bytes: U32 = 0
    row_threads: U32 = 1
    unused: U32 = 0

    def blocks(self, threads: int = THREADS) -> int:
        """The blocks of so many threads that take each entry at once."""
        return -(-self.entries * self.row_threads // threads)

    def shape(self) -> Shape:
        return Shape(self.blocks(), THREADS)


@dataclass(frozen=True)
class GatherWeightsParams(Params):
    """Twin of the struct in kernels/gather_weights.cu, which describes the fields."""

    rows: Address = 0
    weights: Address = 0
    tokens: U32 = 0
    topk: U32 = 0
    row_bytes: U32 = 0
    unused: U32 = 0

    def blocks(self, threads: int = THREADS) -> int:
        return -(-self.tokens * self.topk // threads)

    def shape(self) -> Shape:
        return Shape(self.blocks(), THREADS)


def spread_source(dtype: str) -> KernelSource:
    """Return the kernel that writes rows of this dtype."""
    return KernelSource("spread_weights", (SpreadWeightsParams,), (("ROW_TYPE", ROW_TYPES[dtype]),))


def gather_source(dtype: str) -> KernelSource:
    """Return the kernel that reads rows of this dtype."""
    return KernelSource("gather_weights", (GatherWeightsParams,), (("ROW_TYPE", ROW_TYPES[dtype]),))


def row_threads(row_bytes: int) -> int:
    """Return the threads that write a row: one for each 64 bytes, up to a warp.

    >>> row_threads(16), row_threads(64), row_threads(256), row_threads(14336)
    (1, 1, 4, 32)
    """
    parts = -(-row_bytes // 64)
    return min(32, 1 << (parts - 1).bit_length())
