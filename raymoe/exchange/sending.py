"""The source's side of a dispatch: which of its tokens go to which rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raymoe.exchange.arrays import Array, Bags, starts_of
from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal


@dataclass
class Sending:
    """One row for each (token, destination rank), however many of that rank's experts the token names.

    Rows are in the order (destination, token). `ids` are local to the destination, -1 where an expert is elsewhere.

    >>> ids = np.array([[0, 3], [2, 3], [-1, -1]])  # three tokens, experts 0 and 1 on rank 0, 2 and 3 on rank 1
    >>> sending = Sending.of(ids, np.ones((3, 2), np.float32), ranks=2, experts=4)
    >>> sending.ranks.tolist(), sending.tokens.tolist(), sending.counts.tolist()
    ([0, 1, 1], [0, 0, 1], [1, 2])
    >>> sending.ids.tolist()
    [[0, -1], [-1, 1], [0, 1]]
    >>> Sending.of(ids + 1, np.ones((3, 2), np.float32), ranks=2, experts=4).refusal
    Refusal(cause=<Cause.ID: 1>, other=0, number=4)
    """

    given_ids: Array  # [T', K] as the caller gave them; none if they are refused
    given_weights: Array
    ranks: Array  # [P] the destination of each row
    tokens: Array  # [P] the token of each row
    counts: Array  # [R] rows for each destination
    ids: Array  # [P, K]
    weights: Array  # [P, K]
    refusal: Refusal = NO_REFUSAL

    @classmethod
    def of(cls, ids: Array, weights: Array, ranks: int, experts: int) -> Sending:
        refusal = _out_of_range(ids, experts)
        if refusal:  # nothing is sent of a step that is refused
            ids, weights = ids[:0], weights[:0]
        n, local = len(ids), experts // ranks
        ids = ids.astype(np.int32, copy=False)
        # Rank -1 of "no expert" marks the last row, which is cut off.
        marks = np.zeros((ranks + 1) * n, np.bool_)
        marks[(ids // local) * n + np.arange(n)[:, None]] = True
        marks = marks[: ranks * n]
        counts = marks.reshape(ranks, n).sum(axis=1)
        rank = np.repeat(np.arange(ranks), counts)
        token = np.flatnonzero(marks) - rank * n
        # `take` is several times faster than indexing with an array.
        here = ids.take(token, axis=0) - (rank * local).astype(np.int32)[:, None]
        here = np.where(here.view(np.uint32) < local, here, -1)  # a negative id is a large one without its sign
        return cls(ids, weights, rank, token, counts, here, weights.take(token, axis=0), refusal)

    def coming_home(self, home: Array, tokens: int) -> Bags:
        """For each of `tokens` tokens, the rows that come back for it, in rank order; `home[i]` is where row i lies."""
        order = np.argsort(self.tokens, kind="stable")  # rows are in rank order already
        counts = np.bincount(self.tokens, minlength=tokens)
        return Bags(home.take(order), starts_of(counts))


def _out_of_range(ids: Array, experts: int) -> Refusal:
    if ids.size == 0 or (ids.min() >= -1 and ids.max() < experts):
        return NO_REFUSAL
    token, k = np.argwhere((ids < -1) | (ids >= experts))[0].tolist()
    return Refusal(Cause.ID, token, int(ids[token, k]))
