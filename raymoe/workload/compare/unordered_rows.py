"""Rows that other systems deliver in any order, compared with the tokens that were sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.inputs import Inputs
from raymoe.workload.oracle import AffineExperts

HASHED_ROWS = 4096
"""Rows whose hashes are computed at once: each takes 8 bytes for each of its columns."""


@dataclass(frozen=True)
class Part:
    """Rows that came for one expert, or in one run of tokens, and the tokens that should be there, in any order."""

    name: str
    places: torch.Tensor
    """int64[n]: the places of the rows that came."""
    ranks: torch.Tensor
    tokens: torch.Tensor
    """int64[m] each: source and token of the rows that should have come."""
    expert: int | None = None
    """The expert; None if a token comes once for all experts here."""


@dataclass(frozen=True)
class Came:
    """All that a dispatch has delivered: rows, ids that count the experts of this rank, else -1, and weights.

    Rows of an expert have one weight each; others come with the ids and weights of a token.
    """

    x: torch.Tensor
    ids: torch.Tensor | None
    weights: torch.Tensor | None


class SentRows:
    """The tokens that all ranks have sent to this one."""

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs) -> None:
        self._world, self._spec, self._inputs = world, spec, inputs
        self.experts = AffineExperts(spec.hidden, inputs.dtype, inputs.routing.seed)

    def ids_of(self, rank: int, index: int) -> torch.Tensor:
        """Return the ids that a rank has drawn for a step, -1 for experts of other ranks than this."""
        draws = self._inputs.draws
        ids = self._inputs.routing.draw(rank, index % len(draws)).ids.to(self._world.device).long()
        local = self._spec.local_experts(self._world.size)
        return torch.where(torch.div(ids, local, rounding_mode="floor") == self._world.rank, ids, -1)

    def wrong(self, index: int, parts: Iterator[Part], came: Came, rows: torch.Tensor, *, weigh: bool) -> str | None:
        """Return what is wrong with the rows of a step, or None; then the experts have computed `rows`.

        `weigh`: the weights are applied there, so that a combine only adds.
        """
        rows.fill_(torch.nan)
        for part in parts:
            if len(part.places) != len(part.tokens):
                return f"{len(part.places)} rows {part.name}, {len(part.tokens)} were sent"
            if len(part.tokens) and (wrong := self._wrong_part(index, part, came, rows, weigh)) is not None:
                return wrong
        return None

    def _wrong_part(self, index: int, part: Part, came: Came, rows: torch.Tensor, weigh: bool) -> str | None:
        """Compare rows with tokens whatever their order, and compute what this rank's combine sends for them."""
        wanted = torch.empty(len(part.tokens), self._spec.hidden, dtype=rows.dtype, device=rows.device)
        for rank in range(self._world.size):
            own = part.ranks == rank
            wanted[own] = self._inputs.fresh_of(rank, index)[part.tokens[own]]
        here = came.x.flatten(0, -2)[part.places]
        order, order_wanted = _hashes(here).argsort(), _hashes(wanted).argsort()
        if not torch.equal(here[order], wanted[order_wanted]):
            return f"rows {part.name} are not those that were sent"
        places = torch.empty_like(part.places)
        places[order_wanted] = part.places[order]  # the place of each wanted row
        ids, weights = self._routing_of(index, part)
        if (wrong := self._wrong_routing(part, places, came, ids, weights)) is not None:
            return wrong
        total = torch.zeros(len(wanted), self._spec.hidden, dtype=torch.float64, device=wanted.device)
        for expert in sorted(set(ids[ids >= 0].tolist())) if part.expert is None else [part.expert]:
            for k in range(self._spec.topk):
                own = ids[:, k] == expert
                scale = weights[own, k, None] if weigh else 1.0
                total[own] += self.experts(expert, wanted[own]) * scale
        rows.flatten(0, -2)[places] = total.to(rows.dtype)
        return None

    def _wrong_routing(
        self, part: Part, places: torch.Tensor, came: Came, ids: torch.Tensor, weights: torch.Tensor
    ) -> str | None:
        """Compare the ids and weights that came with the rows, whatever their order in a row."""
        if came.weights is None:
            return None
        came_weights = came.weights.flatten(0, -2)[places] if part.expert is None else came.weights[places]
        if part.expert is not None:
            same = torch.equal(came_weights, (weights * (ids == part.expert)).sum(dim=1))
            return None if same else f"weights {part.name} are not those that were sent"
        assert came.ids is not None
        local = self._spec.local_experts(self._world.size)
        own = torch.where(ids >= 0, ids - self._world.rank * local, -1)
        came_ids, order = came.ids.flatten(0, -2)[places].long().sort(dim=1)
        wanted, order_wanted = own.sort(dim=1)
        if not torch.equal(came_ids, wanted):
            return f"ids {part.name} are not those that were sent"
        differ = came_weights.gather(1, order) != weights.gather(1, order_wanted)
        return f"weights {part.name} are not those that were sent" if bool((differ & (wanted >= 0)).any()) else None

    def _routing_of(self, index: int, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids, -1 for experts of other ranks, and weights of the tokens that should have come."""
        K, device = self._spec.topk, self._world.device
        ids = torch.empty(len(part.tokens), K, dtype=torch.int64, device=device)
        weights = torch.empty(len(part.tokens), K, device=device)
        for rank in range(self._world.size):
            own = part.ranks == rank
            ids[own] = self.ids_of(rank, index)[part.tokens[own]]
            drawn = self._inputs.routing.draw(rank, index % len(self._inputs.draws)).weights.to(device)
            weights[own] = drawn[part.tokens[own]]
        return ids, weights


def sources_of(wanted: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source and token of each row, from a mask of each rank's tokens."""
    tokens = [mask.nonzero().flatten() for mask in wanted]
    ranks = [torch.full_like(of_rank, rank) for rank, of_rank in enumerate(tokens)]
    return torch.cat(ranks), torch.cat(tokens)


def _hashes(rows: torch.Tensor) -> torch.Tensor:
    """Return a number of each row, made of its bits: equal rows have equal numbers."""
    bits = rows.view(torch.int16) if rows.element_size() == 2 else rows.view(torch.int32)
    draw = torch.Generator().manual_seed(1)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=draw).to(rows.device)
    starts = range(0, len(bits), HASHED_ROWS)
    return torch.cat([(bits[start : start + HASHED_ROWS].long() * factors).sum(dim=1) for start in starts])
