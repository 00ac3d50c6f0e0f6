"""Dispatch and combine between CPU ranks: the arithmetic that is the same however rows are carried."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.carrier import Carrier, Visit
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.placing import Arrived, Placement
from raymoe.exchange.refusal import Refusal, judge_statuses, status_of
from raymoe.exchange.sending import Sending
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.summing import RowSums
from raymoe.job.errors import DataRefused
from raymoe.memory.world import World


@dataclass(frozen=True)
class _WayHome:
    """How rows go home: where they stand, and how they came."""

    placement: Placement
    visit: Visit

    @property
    def refusal(self) -> Refusal:
        return self.visit.sending.refusal or self.placement.refusal


class OnCpu:
    """A backend for CPU ranks; a carrier of its own."""

    capturable = False
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, carrier: Carrier) -> None:
        self._rank, self._size, self._spec = world.rank, world.size, spec
        self._carrier = carrier
        self._known: DataRefused | None = None
        self._dispatches = 0

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        n = len(tokens.x) if tokens.num_tokens is None else int(tokens.num_tokens.item())
        ids, weights = tokens.ids.numpy()[:n], tokens.weights.numpy()[:n]
        sending = Sending.of(ids, weights, self._size, self._spec.experts)
        arrived = self._carrier.dispatch(tokens.x, sending)
        local, capacity = self._spec.local_experts(self._size), self._spec.rows(self._size)
        placement = Placement.of(arrived, local, self._spec.alignment, capacity)
        self._dispatches += 1
        home = _WayHome(placement, Visit(sending, arrived.counts, arrived.where, self._dispatches))
        self._know(home.refusal)
        x, index = (arrived.table, self._index(arrived, placement)) if out is None else (out, None)
        if out is not None and len(placement.index):
            rows = out[: len(placement.index)]
            torch.index_select(arrived.table, 0, torch.from_numpy(placement.index), out=rows)
        return Dispatched(
            x=x,
            weights=torch.from_numpy(placement.weights),
            expert_offsets=torch.from_numpy(placement.offsets.astype(np.int32)),
            expert_counts=torch.from_numpy(placement.counts.astype(np.int32)),
            index=index,
            tokens=len(tokens.x),
            _home=home,
            _owner=self,
        )

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, _WayHome)
        bags = home.placement.going_home(weighted)
        came = self._carrier.combine(rows, bags, home.visit, status_of(home.refusal, home.visit.number, weighted))
        if (refused := judge_statuses(came.statuses, self._spec)) is not None:
            self._known = None
            out.fill_(torch.nan)
            raise refused
        sums = RowSums(came.table, home.visit.sending.coming_home(came.where, got.tokens), out.dtype)
        sums.write(0, got.tokens, out)

    def check(self) -> None:
        """The data of the last dispatch, if this rank itself refuses it: combine tells what the others refuse."""
        if self._known is not None:
            known, self._known = self._known, None
            raise known

    def close(self, together: bool) -> None:
        self._carrier.close(together)

    def _know(self, refusal: Refusal) -> None:
        self._known = None
        if refusal:
            self._known = DataRefused(refusal.sentence(self._rank, self._spec, self._size))

    def _index(self, arrived: Arrived, placement: Placement) -> torch.Tensor:
        index = torch.full((self._spec.rows(self._size),), arrived.zero_row, device="cpu")
        index[: len(placement.index)] = torch.from_numpy(placement.index)
        return index
