"""Everything to everyone, over Gloo: the yardstick of a small world.

A dispatch gathers all tokens, ids and weights of all ranks on every rank, which picks its own: one collective for the
rows, started first, one for what is told about them. A combine hands every rank a block of T rows, zeros for the tokens
that have no expert here. That is a reduce-scatter whose sum the source takes itself, because Gloo's own sums in the
order of a ring and rounds at every hop.
"""

from __future__ import annotations

import numpy as np
import torch

from raymoe.exchange.arrays import Array, Bags
from raymoe.exchange.carrier import Home, Visit
from raymoe.exchange.gloo import Gloo
from raymoe.exchange.order import Order
from raymoe.exchange.placing import Arrived
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.sending import Sending
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.summing import RowSums
from raymoe.memory.world import World


class GlooAllgather:
    """Row t of source s arrives as row s*T + t."""

    def __init__(self, world: World, spec: ExchangeSpec) -> None:
        self._gloo = Gloo(world)
        self._order = world.shared(Order)
        self._number = self._order.register()
        self._rank, self._size, self._tokens, self._topk = world.rank, world.size, spec.tokens, spec.topk
        self._local, self._hidden = spec.local_experts(world.size), spec.hidden
        dtype: torch.dtype = getattr(torch, spec.dtype)
        T, H = spec.tokens, spec.hidden
        self._table = torch.zeros(world.size * T + 1, H, dtype=dtype, device="cpu")
        self._mine = torch.zeros(T, H, dtype=dtype, device="cpu")
        # T*K global ids, -1 where a token has none or is not there, and T*K weights (their bits).
        self._told = torch.empty(2, T, spec.topk, dtype=torch.int32, device="cpu")
        self._heard = torch.empty(world.size, 2, T, spec.topk, dtype=torch.int32, device="cpu")
        # One row more in each block: it holds the status.
        home: torch.dtype = getattr(torch, spec.combine_wire)
        self._leaving = torch.empty(world.size, T + 1, spec.home_width, dtype=home, device="cpu")
        self._returned = torch.empty_like(self._leaving)

    def dispatch(self, x: torch.Tensor, sending: Sending) -> Arrived:
        self._order.enter("dispatch", self._number)
        mine = x
        if len(x) < self._tokens:
            self._mine[: len(x)].copy_(x)
            mine = self._mine
        self._order.agree()
        wait_rows = self._gloo.all_gather("dispatch", self._table[:-1], mine)
        ids, weights = self._told.numpy()
        ids.fill(-1)
        ids[: len(sending.given_ids)] = sending.given_ids
        weights[: len(sending.given_ids)] = sending.given_weights.view(np.int32)
        self._gloo.all_gather("dispatch", self._heard.flatten(0, 1), self._told)()
        arrived = self._pick()
        wait_rows()
        return arrived

    def _pick(self) -> Arrived:
        """The tokens of all ranks that have an expert here, in the order (source, token)."""
        heard: Array = self._heard.numpy()
        ids = heard[:, 0].reshape(-1, self._topk) - self._rank * self._local
        elsewhere = (ids < 0) | (ids >= self._local)
        where = np.flatnonzero(~elsewhere.all(axis=1))
        ids[elsewhere] = -1
        weights = heard[:, 1].reshape(-1, self._topk)[where].view(np.float32)
        counts = np.bincount(where // self._tokens, minlength=self._size)
        return Arrived(self._table, where, ids[where], weights, counts, len(self._table) - 1)

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, status: Refusal) -> Home:
        self._order.enter("combine", self._number)
        words = torch.frombuffer(bytearray(status.pack()), dtype=torch.uint8)
        stride = self._tokens + 1
        leaving, returned = self._leaving.flatten(0, 1), self._returned.flatten(0, 1)
        where = visit.where // self._tokens * stride + visit.where % self._tokens
        sums = RowSums(rows, bags.spread(where, len(leaving)), leaving.dtype)
        sums.write(0, len(leaving), leaving[:, : self._hidden])
        self._leaving.view(torch.uint8)[:, self._tokens, : Refusal.NBYTES] = words
        self._order.agree()
        self._gloo.all_to_all("combine", returned, leaving)()
        packed = self._returned.view(torch.uint8)[:, self._tokens, : Refusal.NBYTES].numpy()
        statuses = [Refusal.unpack(block.tobytes()) for block in packed]
        where = visit.sending.ranks * stride + visit.sending.tokens
        return Home(returned[:, : self._hidden], where, statuses)

    def close(self, together: bool) -> None:
        self._gloo.close(together)
