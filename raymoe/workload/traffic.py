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
    """The traffic of an exchange: combine sends the rows of dispatch the other way, `both` is one after the other."""

    dispatch: Traffic
    combine: Traffic
    both: Traffic

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], row_bytes: int, home_bytes: int | None = None) -> Traffics:
        """`rows[s][d]` rows go from rank s to rank d; what a rank sends to itself crosses nothing.

        A row has `row_bytes`, scales included, and `home_bytes` on its way back; the same unless said.

        >>> Traffics.of([[5, 3], [1, 5]], row_bytes=10).both
        Traffic(total=80, busiest=40)
        >>> Traffics.of([[5, 3], [1, 5]], row_bytes=5, home_bytes=10)
        Traffics(dispatch=Traffic(total=20, busiest=15), combine=Traffic(total=40, busiest=30), \
both=Traffic(total=60, busiest=35))
        """
        ranks = range(len(rows))
        home_bytes = row_bytes if home_bytes is None else home_bytes
        out = [sum(rows[rank][peer] for peer in ranks if peer != rank) for rank in ranks]
        into = [sum(rows[peer][rank] for peer in ranks if peer != rank) for rank in ranks]
        one_way, most = sum(out), max(*out, *into)
        # A port sends with dispatch what it receives with combine.
        both = [
            max(there * row_bytes + back * home_bytes, back * row_bytes + there * home_bytes)
            for there, back in zip(out, into, strict=True)
        ]
        return cls(
            Traffic(one_way * row_bytes, most * row_bytes),
            Traffic(one_way * home_bytes, most * home_bytes),
            Traffic(one_way * (row_bytes + home_bytes), max(both)),
        )
