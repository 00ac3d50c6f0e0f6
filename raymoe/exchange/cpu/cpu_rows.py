"""The plan of rows for CPU ranks: the rows that a source sends, their places at a receiver, and sums of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal

# Small arrays of the plan. They are NumPy's, because at these sizes its calls cost least.

Array: TypeAlias = npt.NDArray[Any]


def starts_of(counts: Array) -> Array:
    """Return the starts of runs that lie one after the other, and the end of the last.

    >>> starts_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def places_in_runs(counts: Array, starts: Array) -> Array:
    """Return the places of all elements of runs, where run i has `counts[i]` elements and begins at `starts[i]`.

    >>> places_in_runs(np.array([2, 1]), np.array([0, 16])).tolist()
    [0, 1, 16]
    """
    shift = starts[: len(counts)] - starts_of(counts)[:-1]
    places: Array = np.arange(int(counts.sum())) + np.repeat(shift, counts)
    return places


@dataclass
class Bags:
    """Sums of rows of a table: bag i adds the rows `index[starts[i]:starts[i + 1]]`, in that order."""

    index: Array
    starts: Array
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def spread(self, where: Array, total: int) -> Bags:
        """Put these bags at `where` (ascending) among `total` bags; the others are empty.

        >>> Bags(np.array([5, 6, 7]), np.array([0, 1, 3])).spread(np.array([1, 3]), total=4).starts.tolist()
        [0, 0, 1, 1, 3]
        """
        sizes = np.zeros(total, np.int64)
        sizes[where] = np.diff(self.starts)
        return Bags(self.index, starts_of(sizes), self.weights)

    def take(self, order: Array) -> Bags:
        """Put bag `order[i]` at i.

        >>> bags = Bags(np.array([5, 6, 7]), np.array([0, 1, 3])).take(np.array([1, 0]))
        >>> bags.index.tolist(), bags.starts.tolist()
        ([6, 7, 5], [0, 2, 3])
        """
        sizes = np.diff(self.starts)[order]
        entries = places_in_runs(sizes, self.starts[:-1][order])
        weights = None if self.weights is None else self.weights.take(entries)
        return Bags(self.index.take(entries), starts_of(sizes), weights)


# The source's side of a dispatch.


@dataclass
class SendPlan:
    """The rows that a source sends: one for each (token, destination rank), however many of its experts are named.

    Rows are in the order (destination, token). `ids` are local to the destination; -1 means an expert elsewhere.

    >>> ids = np.array([[0, 3], [2, 3], [-1, -1]])  # three tokens, experts 0 and 1 on rank 0, 2 and 3 on rank 1
    >>> plan = SendPlan.of(ids, np.ones((3, 2), np.float32), ranks=2, experts=4)
    >>> plan.ranks.tolist(), plan.tokens.tolist(), plan.counts.tolist()
    ([0, 1, 1], [0, 0, 1], [1, 2])
    >>> plan.ids.tolist()
    [[0, -1], [-1, 1], [0, 1]]
    >>> SendPlan.of(ids + 1, np.ones((3, 2), np.float32), ranks=2, experts=4).refusal
    Refusal(cause=<Cause.ID: 1>, other=0, number=4)
    """

    topk_idx: Array  # [T', K] as the caller gave them; empty if they are refused
    topk_weights: Array
    ranks: Array  # [P] the destination of each row
    tokens: Array  # [P] the token of each row
    counts: Array  # [R] rows for each destination
    ids: Array  # [P, K]
    weights: Array  # [P, K]
    refusal: Refusal = NO_REFUSAL

    @classmethod
    def of(cls, ids: Array, weights: Array, ranks: int, experts: int) -> SendPlan:
        refusal = _out_of_range(ids, experts)
        if refusal:  # a refused step sends nothing
            ids, weights = ids[:0], weights[:0]
        n, local = len(ids), experts // ranks
        ids = ids.astype(np.int32, copy=False)
        # An id of -1 ("no expert") gives rank -1, which marks the last row; that row is cut off.
        marks = np.zeros((ranks + 1) * n, np.bool_)
        marks[(ids // local) * n + np.arange(n)[:, None]] = True
        marks = marks[: ranks * n]
        counts = marks.reshape(ranks, n).sum(axis=1)
        rank = np.repeat(np.arange(ranks), counts)
        token = np.flatnonzero(marks) - rank * n
        # `take` is several times faster than indexing with an array.
        here = ids.take(token, axis=0) - (rank * local).astype(np.int32)[:, None]
        here = np.where(here.view(np.uint32) < local, here, -1)  # as unsigned, a negative id is large
        return cls(ids, weights, rank, token, counts, here, weights.take(token, axis=0), refusal)

    def sums_to_add(self, where: Array, tokens: int) -> Bags:
        """Make a bag for each of `tokens` tokens: its returned rows, in rank order. Row i is at `where[i]`."""
        order = np.argsort(self.tokens, kind="stable")  # rows are in rank order already
        counts = np.bincount(self.tokens, minlength=tokens)
        return Bags(where.take(order), starts_of(counts))


def _out_of_range(ids: Array, experts: int) -> Refusal:
    if ids.size == 0 or (ids.min() >= -1 and ids.max() < experts):
        return NO_REFUSAL
    token, k = np.argwhere((ids < -1) | (ids >= experts))[0].tolist()
    return Refusal(Cause.ID, token, int(ids[token, k]))


# The receiver's side of a dispatch.


@dataclass
class ArrivedRows:
    """The rows that a carrier received, in the order (source, token), and their metadata."""

    table: torch.Tensor
    where: Array  # [N] the row of `table` that holds each
    ids: Array  # [N, K] local experts; -1 means an expert elsewhere
    weights: Array  # [N, K]
    counts: Array  # [R] how many of the N rows each source sent
    zero_row: int  # a row of `table` that holds zeros
    refusal: Refusal = NO_REFUSAL
    inside: RoutesInside | None = None
    """Only between domains: the routes of the rows inside this domain."""


# The state that a dispatch saves for its combine, which sends sums back where the rows came from.


@dataclass
class SavedRoutes:
    """Where the rows of a dispatch went and where rows came from, at one rank."""

    plan: SendPlan
    counts: Array  # [R] rows that arrived from each source
    where: Array  # [N] the row of the carrier's table that holds each
    number: int
    """The number of the dispatch in its exchange, the same on all ranks."""
    inside: RoutesInside | None = None
    """Only between domains: the routes of the rows inside this domain."""
    digest: int = 0
    """That of the placement of experts in slots; 0: there are no slots."""


@dataclass(frozen=True)
class RoutesInside:
    """The routes inside a domain, of a dispatch between domains."""

    routes: SavedRoutes
    places: Array
    """The place in the contract's order of each row that arrived inside."""


@dataclass
class Placement:
    """The expert-major order of rows: inside an expert (source, token, k), each expert at a multiple of `alignment`.

    >>> ids = np.array([[1, 0], [-1, 1]])  # two rows arrived; the first is for both experts
    >>> weights = np.array([[0.25, 0.75], [0.0, 1.0]], np.float32)
    >>> arrived = ArrivedRows(torch.zeros(3, 8), np.array([0, 1]), ids, weights, np.array([2]), zero_row=2)
    >>> placed = Placement.of(arrived, experts=2, alignment=4, capacity=16)
    >>> placed.counts.tolist(), placed.offsets.tolist()
    ([1, 2], [0, 4, 8])
    >>> placed.index.tolist()  # the table's row of each place; gaps have the row of zeros
    [0, 2, 2, 2, 0, 1, 2, 2]
    """

    counts: Array  # [L]
    offsets: Array  # [L + 1]
    index: Array  # [offsets[L]]
    weights: Array  # [capacity]
    _place: Array  # the place of each (row, local expert) pair, in the order (source, token, k)
    _pair: Array  # which of the N * K entries of the rows that arrived each pair is
    _pairs: Array  # [N] the number of pairs of each row
    refusal: Refusal = NO_REFUSAL

    @classmethod
    def of(cls, arrived: ArrivedRows, experts: int, alignment: int, capacity: int) -> Placement:
        flat = arrived.ids.ravel()
        pair = np.flatnonzero(flat >= 0)
        expert = flat.take(pair)
        counts = np.bincount(expert, minlength=experts)
        refusal = arrived.refusal
        if not refusal and len(counts) > experts:
            refusal = Refusal(Cause.EXPERT, *_first_unknown_expert(arrived, experts))
        offsets = starts_of(-(-counts // alignment) * alignment)
        if not refusal and offsets[-1] > capacity:
            refusal = Refusal(Cause.CAPACITY, 0, int(offsets[-1]))
        if refusal:
            return cls._empty(experts, capacity, len(arrived.where), refusal)
        # NumPy sorts 16-bit keys by radix, several times faster than wider ones.
        by_expert = np.argsort(expert.astype(np.int16) if experts < 2**15 else expert, kind="stable")
        place_sorted = places_in_runs(counts, offsets)
        pair_sorted = pair.take(by_expert)
        K = arrived.ids.shape[1]
        index = np.full(int(offsets[-1]), arrived.zero_row)
        index[place_sorted] = arrived.where.take(pair_sorted // K)
        weights = np.zeros(capacity, np.float32)
        weights[place_sorted] = arrived.weights.ravel().take(pair_sorted)
        place = np.empty_like(place_sorted)
        place[by_expert] = place_sorted
        pairs = np.bincount(pair // K, minlength=len(arrived.where))
        return cls(counts, offsets, index, weights, place, pair, pairs)

    @classmethod
    def _empty(cls, experts: int, capacity: int, rows: int, refusal: Refusal) -> Placement:
        """Place nothing, because the step is refused. Each row that arrived is returned as zeros."""
        none = np.zeros(0, np.int64)
        weights = np.zeros(capacity, np.float32)
        return cls(
            np.zeros(experts, np.int64),
            np.zeros(experts + 1, np.int64),
            none,
            weights,
            none,
            none,
            np.zeros(rows, np.int64),
            refusal,
        )

    @classmethod
    def restored(cls, counts: Array, offsets: Array, entries: Array, weights: Array, refusal: Refusal) -> Placement:
        """Make the placement of a dispatch again, without the order of its rows, from what `entries` gave.

        >>> entries = np.array([[4, 0], [-1, 5]])  # the example above
        >>> weights = np.array([0.75, 0, 0, 0, 0.25, 1, 0, 0], np.float32)
        >>> again = Placement.restored(np.array([1, 2]), np.array([0, 4, 8]), entries, weights, NO_REFUSAL)
        >>> again.sums_to_send(True).index.tolist(), again.sums_to_send(True).starts.tolist()
        ([4, 0, 5], [0, 2, 3])
        """
        pair = np.flatnonzero(entries >= 0)
        pairs, none = (entries >= 0).sum(axis=1), np.zeros(0, np.int64)
        return cls(counts, offsets, none, weights, entries.ravel().take(pair), pair, pairs, refusal)

    def entries(self, topk: int) -> Array:
        """Return the place of each entry (row that arrived, k); -1 where the expert is elsewhere."""
        entries = np.full(len(self._pairs) * topk, -1)
        entries[self._pair] = self._place
        return entries.reshape(-1, topk)

    def sums_to_send(self, weighted: bool) -> Bags:
        """Make a bag for each row that arrived: its expert-major rows, in the order of k."""
        return Bags(self._place, starts_of(self._pairs), self.weights.take(self._place) if weighted else None)


def _first_unknown_expert(arrived: ArrivedRows, experts: int) -> tuple[int, int]:
    """Return the source of the first local id that is too large, and the id."""
    row, k = np.argwhere(arrived.ids >= experts)[0].tolist()
    return int(np.searchsorted(starts_of(arrived.counts), row, side="right")) - 1, int(arrived.ids[row, k])


# Sums of rows in float32, in a fixed order, rounded once.
#
# Only `torch.embedding_bag` gathers and sums rows without writing the gathered rows to memory. For bfloat16 rows it
# sums in float32.
#
# - Its weights must have the rows' dtype. A float32 weight is exactly the sum of three bfloat16 numbers (3 x 8 bits of
#   mantissa). So a bfloat16 row is added three times, once by each part of its weight; the second and third time it is
#   in the cache.
# - A part of 0 times an infinite row is NaN. So a sum that comes out NaN is computed again by whole weights.
# - Its results have the rows' dtype, and it is slow for float16. So float16 rows, and bfloat16 rows whose sums are
#   wanted in another dtype, are converted to float32 first. Sums are rounded once, when they are copied out.

_PIECE_BYTES = 1 << 20  # sums of one call: few enough to be in the cache when they are copied out

_INFINITY, _MINUS_INFINITY = 0x7F80, 0xFF80  # bits as bfloat16; the bits of NaN are larger


class RowSums:
    """Sums of a table's rows: one for each bag, weighted where the bags have weights, rounded once to `dtype`.

    >>> table = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 8).contiguous()
    >>> bags = Bags(np.array([2, 0, 1]), np.array([0, 2, 2, 3]), np.array([0.5, 1.0, 0.25], np.float32))
    >>> out = torch.empty(3, 8)
    >>> RowSums(table, bags, out.dtype).write(0, 3, out)
    >>> out[:, 0].tolist()  # the second bag is empty
    [3.0, 0.0, 0.5]
    """

    def __init__(self, table: torch.Tensor, bags: Bags, dtype: torch.dtype) -> None:
        index, self._starts = bags.index, bags.starts
        self._split_bags: Bags | None = None
        weights = None if bags.weights is None else torch.from_numpy(bags.weights)
        direct = table.dtype == torch.float32 or (table.dtype == dtype == torch.bfloat16)
        self._through_float32 = not direct
        if table.dtype == torch.bfloat16 and direct and bags.weights is not None:
            weights, self._split_bags = _bfloat16_parts(bags.weights), bags
            index, self._starts = np.repeat(index, 3), self._starts * 3
        self._table, self._index, self._weights = table, torch.from_numpy(index), weights
        self._piece = max(1, _PIECE_BYTES // (table.shape[1] * table.element_size()))

    def write(self, begin: int, end: int, out: torch.Tensor) -> None:
        """Write the sums of bags `begin` to `end - 1` into the rows of `out`, which has the constructor's `dtype`."""
        for first in range(begin, end, self._piece):
            last = min(first + self._piece, end)
            out[first - begin : last - begin].copy_(self._sums(first, last))

    def _sums(self, begin: int, end: int) -> torch.Tensor:
        first, last = int(self._starts[begin]), int(self._starts[end])
        if first == last:
            return self._table.new_zeros(())
        table, index = self._table, self._index[first:last]
        if self._through_float32:
            table, index = table.index_select(0, index).float(), torch.arange(last - first, device="cpu")
        starts = torch.from_numpy(self._starts[begin : end + 1] - first)
        weights = None if self._weights is None else self._weights[first:last]
        sums = torch.embedding_bag(table, index, starts, False, 0, False, weights, True)[0]
        if self._split_bags is None or not _any_nan(sums):
            return sums
        return torch.where(sums.isnan(), self._sums_by_whole_weights(self._split_bags, begin, end), sums)

    def _sums_by_whole_weights(self, bags: Bags, begin: int, end: int) -> torch.Tensor:
        """Return these sums in float32, where each row is added once by its whole weight."""
        assert bags.weights is not None
        first, last = int(bags.starts[begin]), int(bags.starts[end])
        rows = self._table.index_select(0, torch.from_numpy(bags.index[first:last])).float()
        weights, starts = torch.from_numpy(bags.weights[first:last]), torch.from_numpy(bags.starts[begin:end] - first)
        return torch.embedding_bag(rows, torch.arange(last - first, device="cpu"), starts, False, 0, False, weights)[0]


def _any_nan(sums: torch.Tensor) -> bool:
    """Whether any of these bfloat16 numbers is NaN, of either sign. Takes 21 us a MiB; `isnan` takes 670.

    >>> [_any_nan(torch.tensor([1.0, value], dtype=torch.bfloat16)) for value in (torch.inf, -torch.inf, torch.nan)]
    [False, False, True]
    """
    bits = sums.view(torch.int16).numpy()
    return bool(bits.max() > _INFINITY or bits.view(np.uint16).max() > _MINUS_INFINITY)


def _bfloat16_parts(weights: Array) -> torch.Tensor:
    """Split each float32 number into three bfloat16 numbers, whose sum it is exactly.

    >>> parts = _bfloat16_parts(np.array([1 / 3], np.float32)).double()
    >>> parts.tolist(), float(parts.sum()) == float(np.float32(1 / 3))
    ([0.33203125, 0.0012969970703125, 5.0961971282958984e-06], True)
    """
    parts = np.empty((len(weights), 3), np.uint16)
    rest = weights
    with np.errstate(invalid="ignore"):  # the rest of an infinite weight is NaN
        for part in range(3):
            bits = rest.view(np.uint32)
            # A bfloat16 is the upper half of a float32: 8 bits of mantissa of the rest.
            parts[:, part] = bits >> 16
            rest = rest - (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return torch.from_numpy(parts.reshape(-1)).view(torch.bfloat16)
