"""How many bytes a step has to move between ranks, whatever backend moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.inputs import Draw


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
    """The traffic of an exchange: combine sends rows the other way, `both` is one after the other."""

    dispatch: Traffic
    combine: Traffic
    both: Traffic

    @property
    def by_op(self) -> dict[str, Traffic]:
        """By what result lines call the operations."""
        return {"dispatch": self.dispatch, "combine": self.combine, "exchange": self.both}

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[float]],
        row_bytes: int,
        home_bytes: int | None = None,
        home_rows: Sequence[Sequence[float]] | None = None,
    ) -> Traffics:
        """`rows[s][d]` rows go from rank s to rank d; what a rank sends to itself crosses nothing.

        A row has `row_bytes`, scales included, and `home_bytes` on its way back; the same unless said. As many rows
        come back as went, unless `home_rows[s][d]` says how many rank d sends home to rank s.

        >>> Traffics.of([[5, 3], [1, 5]], row_bytes=10).both
        Traffic(total=80, busiest=40)
        >>> Traffics.of([[5, 3], [1, 5]], row_bytes=5, home_bytes=10)
        Traffics(dispatch=Traffic(total=20, busiest=15), combine=Traffic(total=40, busiest=30), \
both=Traffic(total=60, busiest=35))
        >>> Traffics.of([[9, 9], [9, 9]], row_bytes=10, home_rows=[[5, 3], [1, 5]]).both
        Traffic(total=220, busiest=120)
        """
        there = _through_ports(rows, row_bytes)
        back = _through_ports(home_rows or rows, row_bytes if home_bytes is None else home_bytes)
        # A port sends with dispatch what it receives with combine.
        both = [(out + home_out, into + home_in) for (out, into), (home_in, home_out) in zip(there, back, strict=True)]
        return cls(*(Traffic(sum(out for out, _ in ports), max(map(max, ports))) for ports in (there, back, both)))


def _through_ports(rows: Sequence[Sequence[float]], row_bytes: int) -> list[tuple[float, float]]:
    """Of each rank, the bytes that it sends and those that are sent to it.

    >>> _through_ports([[5, 3], [1, 5]], row_bytes=10)
    [(30, 10), (10, 30)]
    """
    ranks = range(len(rows))
    return [
        (
            sum(rows[rank][peer] for peer in ranks if peer != rank) * row_bytes,
            sum(rows[peer][rank] for peer in ranks if peer != rank) * row_bytes,
        )
        for rank in ranks
    ]


def traffic_of(world: World, draws: Sequence[Draw], spec: ExchangeSpec) -> Traffics:
    """The traffic of an average step, of which these are this rank's."""
    counts = [rows_for(draw.ids, world.size, spec.experts) for draw in draws]
    mean = [sum(to_peer) / len(counts) for to_peer in zip(*counts, strict=True)]
    tokens = sum(len(draw.ids) for draw in draws) / len(draws)
    told: list[tuple[list[float], float]] = world.swap((mean, tokens), "traffic")  # type: ignore[assignment]
    needed = [to_peer for to_peer, _ in told]
    sent = [[tokens] * world.size for _, tokens in told] if spec.by_copy_engine else needed
    return Traffics.of(sent, spec.wire_row_bytes, spec.home_row_bytes, needed)
