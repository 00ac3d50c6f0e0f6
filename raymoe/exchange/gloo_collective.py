"""Dispatch and combine over Gloo all-to-alls, as a careful user of torch.distributed would write them.

A dispatch is two collectives. The first has a fixed size, so no counts need to go ahead of it: the number of rows to
each rank and their metadata, T*K ids and weights at most. While it is under way the rows are packed. The second
carries the rows, with the counts of the first. A combine is one: the counts are known, and a row ahead of each block
holds the refusal of the rank that sent it.
"""

from __future__ import annotations

import numpy as np
import torch

from raymoe.exchange.arrays import Array, Bags, places_in_runs, starts_of
from raymoe.exchange.carrier import Home, Visit
from raymoe.exchange.gloo import Gloo
from raymoe.exchange.order import Order
from raymoe.exchange.placing import Arrived
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.sending import Sending
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.summing import RowSums
from raymoe.memory.world import World


class GlooCollective:
    """Rows that arrive lie one behind the other, source after source."""

    def __init__(self, world: World, spec: ExchangeSpec) -> None:
        self._gloo = Gloo(world)
        self._order = world.shared(Order)
        self._number = self._order.register()
        self._tokens, self._topk, self._hidden = spec.tokens, spec.topk, spec.hidden
        most = world.size * spec.tokens
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._zero_row = most
        self._table = torch.zeros(most + 1, spec.hidden, dtype=dtype)
        self._packed = torch.empty(most, spec.hidden, dtype=dtype)
        self._home: torch.dtype = getattr(torch, spec.combine_wire)
        self._leaving = torch.empty(most + world.size, spec.home_width, dtype=self._home)
        self._returned = torch.empty_like(self._leaving)
        # For each rank: the number of rows, T*K ids, T*K weights (their bits).
        self._told = torch.zeros(world.size, 1 + 2 * spec.tokens * spec.topk, dtype=torch.int32)
        self._heard = torch.zeros_like(self._told)

    def dispatch(self, x: torch.Tensor, sending: Sending) -> Arrived:
        self._order.enter("dispatch", self._number)
        giving = sending.counts.tolist()
        self._tell(sending, giving)
        self._order.agree()
        wait = self._gloo.all_to_all("dispatch", self._heard, self._told)
        packed = self._packed[: len(sending.tokens)]
        torch.index_select(x, 0, torch.from_numpy(sending.tokens), out=packed)
        wait()
        counts: Array = self._heard[:, 0].numpy().astype(np.int64)
        taking = counts.tolist()
        n = sum(taking)
        wait = self._gloo.all_to_all("dispatch", self._table[:n], packed, taking, giving)
        ids, weights = self._metadata(taking)
        wait()
        return Arrived(self._table, np.arange(n), ids, weights, counts, self._zero_row)

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, refusal: Refusal) -> Home:
        # Which dispatch it is of: another one's rows have other numbers, which Gloo would not survive.
        self._order.enter("combine", self._number, 2 * visit.number + (bags.weights is not None))
        giving, taking = (visit.counts + 1).tolist(), (visit.sending.counts + 1).tolist()
        leaving = self._leaving[: sum(giving)]
        words = torch.frombuffer(bytearray(refusal.pack()), dtype=torch.uint8)
        sums, begin = RowSums(rows, bags, self._home), 0
        for block in torch.split(leaving, giving):
            block.view(torch.uint8)[0, : Refusal.NBYTES] = words
            end = begin + len(block) - 1
            sums.write(begin, end, block[1:, : self._hidden])
            begin = end
        returned = self._returned[: sum(taking)]
        self._order.agree()
        self._gloo.all_to_all("combine", returned, leaving, taking, giving)()
        refusals = [
            Refusal.unpack(block.view(torch.uint8)[0, : Refusal.NBYTES].numpy().tobytes())
            for block in torch.split(returned, taking)
        ]
        where = places_in_runs(visit.sending.counts, starts_of(visit.sending.counts + 1)[:-1] + 1)
        return Home(returned[:, : self._hidden], where, refusals)

    def close(self, together: bool) -> None:
        self._gloo.close(together)

    def _tell(self, sending: Sending, giving: list[int]) -> None:
        told, most = self._told.numpy(), self._tokens * self._topk
        told[:, 0] = giving
        ids, weights = sending.ids.ravel(), sending.weights.ravel().view(np.int32)
        begin = 0
        for rank, rows in enumerate(giving):
            end = begin + rows * self._topk
            told[rank, 1 : 1 + end - begin] = ids[begin:end]
            told[rank, 1 + most : 1 + most + end - begin] = weights[begin:end]
            begin = end

    def _metadata(self, taking: list[int]) -> tuple[Array, Array]:
        heard, most = self._heard.numpy(), self._tokens * self._topk
        ids = [heard[source, 1 : 1 + rows * self._topk] for source, rows in enumerate(taking)]
        weights = [heard[source, 1 + most : 1 + most + rows * self._topk] for source, rows in enumerate(taking)]
        flat = np.concatenate(weights).view(np.float32)
        return np.concatenate(ids).reshape(-1, self._topk), flat.reshape(-1, self._topk)
