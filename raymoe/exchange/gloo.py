"""Backends `allgather` and `collective` between CPU ranks: carriers over Gloo."""

from __future__ import annotations

import numpy as np
import torch

from raymoe.exchange.cpu import OperationOrder, Returned, Visit
from raymoe.exchange.cpu_rows import Array, Arrived, Bags, RowSums, Sending
from raymoe.exchange.refusal import Refusal, judge_statuses
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.net.gloo import Gloo

# Everything to everyone, over Gloo: the yardstick of a small world.
#
# A dispatch gathers all tokens, ids and weights of all ranks on every rank, which picks its own: one collective for the
# rows, started first, one for what is told about them. A combine hands every rank a block of T rows, zeros for the
# tokens that have no expert here. That is a reduce-scatter whose sum the source takes itself, because Gloo's own sums
# in the order of a ring and rounds at every hop.


class GlooAllgather:
    """Row t of source s arrives as row s*T + t."""

    def __init__(self, world: World, spec: ExchangeSpec) -> None:
        self._gloo = Gloo(world)
        self._order = world.shared(OperationOrder)
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

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, status: Refusal) -> Returned:
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
        return Returned(returned[:, : self._hidden], where, statuses)

    def close(self, together: bool) -> None:
        self._gloo.close(together)


# Dispatch and combine over Gloo all-to-alls, as a careful user of torch.distributed would write them.
#
# A dispatch is two collectives. The first has a fixed size, so no counts need to go ahead of it: the number of rows to
# each rank and their metadata, T*K ids and weights at most. While it is under way the rows are packed. The second
# carries the rows, with the counts of the first. A combine is one, with the same counts. Ranks that combine different
# dispatches have different ones, which Gloo would not survive, so the statuses go ahead of it, where all ranks agree on
# the operation (`OperationOrder`), and of a step that is refused no row leaves.


class GlooCollective:
    """Rows that arrive lie one behind the other, source after source."""

    def __init__(self, world: World, spec: ExchangeSpec) -> None:
        self._gloo = Gloo(world)
        self._order = world.shared(OperationOrder)
        self._number = self._order.register()
        self._tokens, self._topk, self._hidden = spec.tokens, spec.topk, spec.hidden
        most = world.size * spec.tokens
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._zero_row = most
        self._table = torch.zeros(most + 1, spec.hidden, dtype=dtype, device="cpu")
        self._packed = torch.empty(most, spec.hidden, dtype=dtype, device="cpu")
        self._home: torch.dtype = getattr(torch, spec.combine_wire)
        self._spec = spec
        self._leaving = torch.empty(most, spec.home_width, dtype=self._home, device="cpu")
        self._returned = torch.empty_like(self._leaving)
        # For each rank: the number of rows, T*K ids, T*K weights (their bits).
        self._told = torch.zeros(world.size, 1 + 2 * spec.tokens * spec.topk, dtype=torch.int32, device="cpu")
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

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, status: Refusal) -> Returned:
        self._order.enter("combine", self._number, status)
        giving, taking = visit.counts.tolist(), visit.sending.counts.tolist()
        leaving, returned = self._leaving[: sum(giving)], self._returned[: sum(taking)]
        RowSums(rows, bags, self._home).write(0, len(leaving), leaving[:, : self._hidden])
        statuses = self._order.agree()
        if judge_statuses(statuses, self._spec) is None:
            self._gloo.all_to_all("combine", returned, leaving, taking, giving)()
        return Returned(returned[:, : self._hidden], np.arange(len(returned)), statuses)

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
