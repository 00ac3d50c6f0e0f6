"""How many bytes a step has to move between ranks, whatever backend moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def rows_for(ids: torch.Tensor, ranks: int, experts: int) -> list[int]:
    """How many of these tokens each rank needs: a token counts once for a rank, however many experts it has there.

    >>> rows_for(torch.tensor([[0, 1], [1, 2], [-1, 3]]), ranks=2, experts=4)
    [2, 2]
    """
    owner = torch.where(ids < 0, -1, ids // (experts // ranks))
    return [int((owner == rank).any(dim=-1).sum()) for rank in range(ranks)]


@dataclass(frozen=True)
class Traffic:
    """Bytes between ranks: `total` of the gang, and `busiest`, the most that pass one rank's port in one direction."""

    total: float
    busiest: float


@dataclass(frozen=True)
class Traffics:
    """The traffic of one direction (combine is the rows of dispatch the other way), and of both in turn."""

    one_way: Traffic
    both: Traffic

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], row_bytes: int) -> Traffics:
        """`rows[s][d]` rows go from rank s to rank d; what a rank sends to itself crosses nothing.

        >>> Traffics.of([[5, 3], [1, 5]], row_bytes=10)
        Traffics(one_way=Traffic(total=40, busiest=30), both=Traffic(total=80, busiest=40))
        """
        ranks = range(len(rows))
        out = [row_bytes * sum(rows[rank][peer] for peer in ranks if peer != rank) for rank in ranks]
        into = [row_bytes * sum(rows[peer][rank] for peer in ranks if peer != rank) for rank in ranks]
        both = [sent + received for sent, received in zip(out, into, strict=True)]
        return cls(Traffic(sum(out), max(*out, *into)), Traffic(sum(both), max(both)))
