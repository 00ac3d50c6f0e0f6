"""Tokens for a step, made outside the clock."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.moe.seeds import generator
from raymoe.workload.room import BATCHES, batches_of
from raymoe.workload.routing import Draw, Routing

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """What one rank brings to one step: `x`[T', H] with |x| <= 1, and where its tokens go."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Inputs:
    """One rank's batches. Timed steps take turns with a few that were made in advance; a verified step gets tokens that
    were never seen before, so that nothing left over from another step can be right.

    >>> routing = Routing("uniform", seed=0, ranks=2, tokens=4, experts=8, topk=2)
    >>> inputs = Inputs(routing, rank=1, hidden=8, dtype=torch.bfloat16)
    >>> inputs.at(3).x is inputs.at(10).x, bool((inputs.at(3, fresh=True).x == inputs.at(3).x).all())
    (True, False)
    """

    def __init__(
        self,
        routing: Routing,
        rank: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        """The batches are on `device`; `draws`, which the routing of a batch is taken from, are on the CPU."""
        self.routing, self.rank, self.hidden, self.dtype, self.device = routing, rank, hidden, dtype, device
        self.draws = draws_of(routing, rank)
        self._placed = [(draw.ids.to(device), draw.weights.to(device)) for draw in self.draws]
        batches = batches_of(routing.tokens * hidden * dtype.itemsize)
        self.rows = [self._draw("tokens", step) for step in range(batches)]

    def at(self, step: int, *, fresh: bool = False) -> Batch:
        """The batch of a step."""
        ids, weights = self._placed[step % len(self._placed)]
        x = self.fresh_of(self.rank, step) if fresh else self.rows[step % len(self.rows)]
        return Batch(x, ids, weights)

    def fresh_of(self, rank: int, step: int) -> torch.Tensor:
        """The fresh tokens that a rank, this or another, has at a step: the same where devices are of one kind."""
        return self._draw("fresh tokens", step, rank)

    def _draw(self, purpose: str, step: int, rank: int | None = None) -> torch.Tensor:
        rank = self.rank if rank is None else rank
        source = generator(purpose, self.routing.seed, rank, step, device=self.device)
        x = torch.empty(self.routing.tokens_of(rank), self.hidden, device=self.device)
        return x.uniform_(-1, 1, generator=source).to(self.dtype)


def draws_of(routing: Routing, rank: int) -> list[Draw]:
    """The draws that a rank's steps take turns with."""
    return [routing.draw(rank, step) for step in range(routing.recorded or BATCHES)]
