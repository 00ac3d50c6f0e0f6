"""Sums of rows in float32, in a fixed order, rounded once.

`torch.embedding_bag` is the one operation that gathers rows and sums them without writing the gathered rows anywhere;
for bfloat16 rows it keeps its sums in float32. Its weights, though, must have the rows' dtype. A float32 weight is
exactly the sum of three bfloat16 numbers (3 x 8 bits of mantissa), so a bfloat16 row is added three times, each time
with a third of its weight: the row is in the cache the second and third time. Thirds of 0 make NaN of an infinite row,
so where a sum comes out NaN it is taken again by its whole weights. What embedding_bag gives, though, has the rows'
dtype: where sums of bfloat16 rows are wanted in another, and where embedding_bag is slow (float16), the rows go through
float32, and the sums are rounded when they are copied to where they go, once.
"""

from __future__ import annotations

import numpy as np
import torch

from raymoe.exchange.arrays import Array, Bags

_PIECE_BYTES = 1 << 20  # sums made by one call: they are still in the cache when they are copied to where they go

_INFINITY, _MINUS_INFINITY = 0x7F80, 0xFF80  # as bfloat16; NaN has more in the same bits


class RowSums:
    """The sums that bags say of the rows of a table, times their weights if they have some, rounded once, to `dtype`.

    >>> table = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 8).contiguous()
    >>> bags = Bags(np.array([2, 0, 1]), np.array([0, 2, 2, 3]), np.array([0.5, 1.0, 0.25], np.float32))
    >>> out = torch.empty(3, 8)
    >>> RowSums(table, bags, out.dtype).write(0, 3, out)
    >>> out[:, 0].tolist()  # the second bag is empty
    [3.0, 0.0, 0.5]
    """

    def __init__(self, table: torch.Tensor, bags: Bags, dtype: torch.dtype) -> None:
        index, self._starts = bags.index, bags.starts
        self._thirds_of: Bags | None = None
        weights = None if bags.weights is None else torch.from_numpy(bags.weights)
        as_it_is = table.dtype == torch.float32 or (table.dtype == dtype == torch.bfloat16)
        self._widened = not as_it_is
        if table.dtype == torch.bfloat16 and as_it_is and bags.weights is not None:
            weights, self._thirds_of = _thirds(bags.weights), bags
            index, self._starts = np.repeat(index, 3), self._starts * 3
        self._table, self._index, self._weights = table, torch.from_numpy(index), weights
        self._piece = max(1, _PIECE_BYTES // (table.shape[1] * table.element_size()))

    def write(self, begin: int, end: int, out: torch.Tensor) -> None:
        """Write the sums of bags `begin` to `end - 1` into the rows of `out`, which are of the `dtype` given before."""
        for first in range(begin, end, self._piece):
            last = min(first + self._piece, end)
            out[first - begin : last - begin].copy_(self._sums(first, last))

    def _sums(self, begin: int, end: int) -> torch.Tensor:
        first, last = int(self._starts[begin]), int(self._starts[end])
        if first == last:
            return self._table.new_zeros(())
        table, index = self._table, self._index[first:last]
        if self._widened:
            table, index = table.index_select(0, index).float(), torch.arange(last - first, device="cpu")
        starts = torch.from_numpy(self._starts[begin : end + 1] - first)
        weights = None if self._weights is None else self._weights[first:last]
        sums = torch.embedding_bag(table, index, starts, False, 0, False, weights, True)[0]
        if self._thirds_of is None or not _any_nan(sums):
            return sums
        return torch.where(sums.isnan(), self._again(self._thirds_of, begin, end), sums)

    def _again(self, bags: Bags, begin: int, end: int) -> torch.Tensor:
        """The same sums in float32, each row once with its whole weight."""
        assert bags.weights is not None
        first, last = int(bags.starts[begin]), int(bags.starts[end])
        rows = self._table.index_select(0, torch.from_numpy(bags.index[first:last])).float()
        weights, starts = torch.from_numpy(bags.weights[first:last]), torch.from_numpy(bags.starts[begin:end] - first)
        return torch.embedding_bag(rows, torch.arange(last - first, device="cpu"), starts, False, 0, False, weights)[0]


def _any_nan(sums: torch.Tensor) -> bool:
    """Whether one of these bfloat16 numbers is NaN, of either sign. 21 us a MiB, of which `isnan` takes 670.

    >>> [_any_nan(torch.tensor([1.0, value], dtype=torch.bfloat16)) for value in (torch.inf, -torch.inf, torch.nan)]
    [False, False, True]
    """
    bits = sums.view(torch.int16).numpy()
    return bool(bits.max() > _INFINITY or bits.view(np.uint16).max() > _MINUS_INFINITY)


def _thirds(weights: Array) -> torch.Tensor:
    """Three bfloat16 numbers for each float32 one, which is exactly their sum.

    >>> thirds = _thirds(np.array([1 / 3], np.float32)).double()
    >>> thirds.tolist(), float(thirds.sum()) == float(np.float32(1 / 3))
    ([0.33203125, 0.0012969970703125, 5.0961971282958984e-06], True)
    """
    thirds = np.empty((len(weights), 3), np.uint16)
    rest = weights
    with np.errstate(invalid="ignore"):  # of an infinite weight the rest is NaN
        for part in range(3):
            bits = rest.view(np.uint32)
            thirds[:, part] = (
                bits >> 16
            )  # a bfloat16 is the upper half of a float32: 8 bits of mantissa of what is left
            rest = rest - (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return torch.from_numpy(thirds.reshape(-1)).view(torch.bfloat16)
