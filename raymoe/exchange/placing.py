"""The receiver's side of a dispatch: where the rows that arrived stand, expert by expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raymoe.exchange.arrays import Array, Bags, places_in_runs, starts_of
from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal


@dataclass
class Arrived:
    """What a backend brings: rows of `table`, in the order (source, token), and what was sent along with them."""

    table: torch.Tensor
    where: Array  # [N] the row of `table` in which each lies
    ids: Array  # [N, K] local experts, -1 for one that is elsewhere
    weights: Array  # [N, K]
    counts: Array  # [R] how many of the N came from each source
    zero_row: int  # a row of `table` that holds zeros
    refusal: Refusal = NO_REFUSAL


@dataclass
class Placement:
    """Rows expert by expert, inside an expert in the order (source, token, k), each expert at a multiple of
    `alignment`.

    >>> ids = np.array([[1, 0], [-1, 1]])  # two rows arrived; the first is for both experts
    >>> weights = np.array([[0.25, 0.75], [0.0, 1.0]], np.float32)
    >>> arrived = Arrived(torch.zeros(3, 8), np.array([0, 1]), ids, weights, np.array([2]), zero_row=2)
    >>> placed = Placement.of(arrived, experts=2, alignment=4, capacity=16)
    >>> placed.counts.tolist(), placed.offsets.tolist()
    ([1, 2], [0, 4, 8])
    >>> placed.index.tolist()  # for each place the row of the table, the row of zeros in the gaps
    [0, 2, 2, 2, 0, 1, 2, 2]
    """

    counts: Array  # [L]
    offsets: Array  # [L + 1]
    index: Array  # [offsets[L]]
    weights: Array  # [capacity]
    _place: Array  # place of each pair, pairs in the order (source, token, k)
    _pairs: Array  # [N] how many pairs each row has
    refusal: Refusal = NO_REFUSAL

    @classmethod
    def of(cls, arrived: Arrived, experts: int, alignment: int, capacity: int) -> Placement:
        flat = arrived.ids.ravel()
        pair = np.flatnonzero(flat >= 0)
        expert = flat.take(pair)
        counts = np.bincount(expert, minlength=experts)
        refusal = arrived.refusal
        if not refusal and len(counts) > experts:
            refusal = Refusal(Cause.EXPERT, *_culprit(arrived, experts))
        offsets = starts_of(-(-counts // alignment) * alignment)
        if not refusal and offsets[-1] > capacity:
            refusal = Refusal(Cause.CAPACITY, 0, int(offsets[-1]))
        if refusal:
            return cls._empty(experts, capacity, len(arrived.where), refusal)
        # 16-bit keys are sorted by radix, several times faster than wider ones.
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
        return cls(counts, offsets, index, weights, place, np.bincount(pair // K, minlength=len(arrived.where)))

    @classmethod
    def _empty(cls, experts: int, capacity: int, rows: int, refusal: Refusal) -> Placement:
        """Nothing is placed of a step that is refused; each row that arrived goes home as zeros."""
        none = np.zeros(0, np.int64)
        weights = np.zeros(capacity, np.float32)
        return cls(
            np.zeros(experts, np.int64),
            np.zeros(experts + 1, np.int64),
            none,
            weights,
            none,
            np.zeros(rows, np.int64),
            refusal,
        )

    def going_home(self, weighted: bool) -> Bags:
        """For each row that arrived, the expert-major rows that are summed for it, in the order of k."""
        return Bags(self._place, starts_of(self._pairs), self.weights.take(self._place) if weighted else None)


def _culprit(arrived: Arrived, experts: int) -> tuple[int, int]:
    """The source of the first id that no expert here has, and that id."""
    row, k = np.argwhere(arrived.ids >= experts)[0].tolist()
    return int(np.searchsorted(starts_of(arrived.counts), row, side="right")) - 1, int(arrived.ids[row, k])
