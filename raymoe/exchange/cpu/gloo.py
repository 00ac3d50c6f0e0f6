"""The carriers over Gloo, for backends `allgather` and `collective` between CPU ranks."""

from __future__ import annotations

import numpy as np
import torch

from raymoe.exchange.cpu.cpu_backend import Call, Carried, KeepsNothing, Leaving, OperationOrder, Returned
from raymoe.exchange.cpu.cpu_rows import Array, Arrived, RowSums, Sending
from raymoe.exchange.refusal import Refusal, judge_statuses
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.net.gloo import Gloo

# Backend `allgather`: every rank receives all rows. It is the baseline of a small world.
#
# A dispatch gathers the tokens, ids and weights of all ranks on every rank, which picks its own. It is one collective
# for the rows, started first, and one for their metadata. A combine sends every rank a block of T rows, with zeros for
# the tokens that have no expert here. The source sums the blocks itself instead of using Gloo's reduce-scatter, which
# sums in the order of a ring and rounds at every hop.


class GlooAllgather(KeepsNothing):
    """Puts row t of source s into row s*T + t of its table."""

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
        # T*K global ids, -1 where a token is absent or has no expert, and the bits of T*K weights.
        self._metadata_out = torch.empty(2, T, spec.topk, dtype=torch.int32, device="cpu")
        self._metadata_in = torch.empty(world.size, 2, T, spec.topk, dtype=torch.int32, device="cpu")
        # The last row of each block holds the status.
        home: torch.dtype = getattr(torch, spec.combine_wire)
        self._leaving = torch.empty(world.size, T + 1, spec.combine_width, dtype=home, device="cpu")
        self._returned = torch.empty_like(self._leaving)

    def dispatch(self, x: torch.Tensor, sending: Sending, call: Call) -> Arrived:
        self._order.enter(call, self._number)
        mine = x
        if len(x) < self._tokens:
            self._mine[: len(x)].copy_(x)
            mine = self._mine
        self._order.agree()
        wait_rows = self._gloo.all_gather("dispatch", self._table[:-1], mine)
        ids, weights = self._metadata_out.numpy()
        ids.fill(-1)
        ids[: len(sending.given_ids)] = sending.given_ids
        weights[: len(sending.given_ids)] = sending.given_weights.view(np.int32)
        self._gloo.all_gather("dispatch", self._metadata_in.flatten(0, 1), self._metadata_out)()
        arrived = self._pick()
        wait_rows()
        return arrived

    def _pick(self) -> Arrived:
        """Pick the tokens of all ranks that have an expert here, in the order (source, token)."""
        metadata: Array = self._metadata_in.numpy()
        ids = metadata[:, 0].reshape(-1, self._topk) - self._rank * self._local
        elsewhere = (ids < 0) | (ids >= self._local)
        where = np.flatnonzero(~elsewhere.all(axis=1))
        ids[elsewhere] = -1
        weights = metadata[:, 1].reshape(-1, self._topk)[where].view(np.float32)
        counts = np.bincount(where // self._tokens, minlength=self._size)
        return Arrived(self._table, where, ids[where], weights, counts, len(self._table) - 1)

    def combine(self, given: Leaving, carried: Carried, status: Refusal) -> Returned:
        self._order.enter(given.call, self._number)
        words = torch.frombuffer(bytearray(status.pack()), dtype=torch.uint8)
        stride = self._tokens + 1
        leaving, returned = self._leaving.flatten(0, 1), self._returned.flatten(0, 1)
        where = carried.where // self._tokens * stride + carried.where % self._tokens
        sums = RowSums(given.rows, given.bags.spread(where, len(leaving)), leaving.dtype)
        sums.write(0, len(leaving), leaving[:, : self._hidden])
        self._leaving.view(torch.uint8)[:, self._tokens, : Refusal.NBYTES] = words
        self._order.agree()
        self._gloo.all_to_all("combine", returned, leaving)()
        packed = self._returned.view(torch.uint8)[:, self._tokens, : Refusal.NBYTES].numpy()
        statuses = [Refusal.unpack(block.tobytes()) for block in packed]
        where = carried.sending.ranks * stride + carried.sending.tokens
        entries = None if given.entries is None else self._return_entries(given.entries, carried)
        return Returned(returned[:, : self._hidden], where, statuses, entries)

    def _return_entries(self, entries: torch.Tensor, carried: Carried) -> torch.Tensor:
        leaving = torch.zeros(self._size * self._tokens, self._topk, device="cpu")
        leaving[torch.from_numpy(carried.where)] = entries
        returned = torch.empty_like(leaving)
        self._gloo.all_to_all("combine", returned, leaving)()
        sending = carried.sending
        return returned[torch.from_numpy(sending.ranks * self._tokens + sending.tokens)]

    def close(self, together: bool) -> None:
        self._gloo.close(together)


# Backend `collective`: all-to-alls, as a careful user of torch.distributed would write them.
#
# A dispatch is two collectives. The first carries the number of rows to each rank and their metadata, at most T*K ids
# and weights. Its size is fixed, so no counts go ahead of it. The rows are packed while it runs. The second carries
# the rows, with the counts of the first.
#
# A combine is one collective, with the same counts. Ranks that combine different dispatches have different counts, and
# Gloo would end the process. So all ranks exchange their statuses first, with the operation (`OperationOrder`). A
# refused step sends no row.


class GlooCollective(KeepsNothing):
    """Puts rows one after the other into its table, source after source."""

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
        self._leaving = torch.empty(most, spec.combine_width, dtype=self._home, device="cpu")
        self._returned = torch.empty_like(self._leaving)
        # For each rank: the number of rows, T*K ids, and the bits of T*K weights.
        self._metadata_out = torch.zeros(world.size, 1 + 2 * spec.tokens * spec.topk, dtype=torch.int32, device="cpu")
        self._metadata_in = torch.zeros_like(self._metadata_out)

    def dispatch(self, x: torch.Tensor, sending: Sending, call: Call) -> Arrived:
        self._order.enter(call, self._number)
        send_counts = sending.counts.tolist()
        self._fill_metadata(sending, send_counts)
        self._order.agree()
        wait = self._gloo.all_to_all("dispatch", self._metadata_in, self._metadata_out)
        packed = self._packed[: len(sending.tokens)]
        torch.index_select(x, 0, torch.from_numpy(sending.tokens), out=packed)
        wait()
        counts: Array = self._metadata_in[:, 0].numpy().astype(np.int64)
        receive_counts = counts.tolist()
        n = sum(receive_counts)
        wait = self._gloo.all_to_all("dispatch", self._table[:n], packed, receive_counts, send_counts)
        ids, weights = self._received_metadata(receive_counts)
        wait()
        return Arrived(self._table, np.arange(n), ids, weights, counts, self._zero_row)

    def combine(self, given: Leaving, carried: Carried, status: Refusal) -> Returned:
        self._order.enter(given.call, self._number, status)
        send_counts, receive_counts = carried.counts.tolist(), carried.sending.counts.tolist()
        leaving, returned = self._leaving[: sum(send_counts)], self._returned[: sum(receive_counts)]
        RowSums(given.rows, given.bags, self._home).write(0, len(leaving), leaving[:, : self._hidden])
        statuses, entries = self._order.agree(), None
        if judge_statuses(statuses, self._spec) is None:
            wait = self._gloo.all_to_all("combine", returned, leaving, receive_counts, send_counts)
            if given.entries is not None:
                entries = torch.empty(len(returned), self._topk, device="cpu")
                self._gloo.all_to_all("combine", entries, given.entries, receive_counts, send_counts)()
            wait()
        return Returned(returned[:, : self._hidden], np.arange(len(returned)), statuses, entries)

    def close(self, together: bool) -> None:
        self._gloo.close(together)

    def _fill_metadata(self, sending: Sending, send_counts: list[int]) -> None:
        metadata, most = self._metadata_out.numpy(), self._tokens * self._topk
        metadata[:, 0] = send_counts
        ids, weights = sending.ids.ravel(), sending.weights.ravel().view(np.int32)
        begin = 0
        for rank, rows in enumerate(send_counts):
            end = begin + rows * self._topk
            metadata[rank, 1 : 1 + end - begin] = ids[begin:end]
            metadata[rank, 1 + most : 1 + most + end - begin] = weights[begin:end]
            begin = end

    def _received_metadata(self, receive_counts: list[int]) -> tuple[Array, Array]:
        metadata, most = self._metadata_in.numpy(), self._tokens * self._topk
        ids = [metadata[source, 1 : 1 + rows * self._topk] for source, rows in enumerate(receive_counts)]
        weights = [
            metadata[source, 1 + most : 1 + most + rows * self._topk] for source, rows in enumerate(receive_counts)
        ]
        flat = np.concatenate(weights).view(np.float32)
        return np.concatenate(ids).reshape(-1, self._topk), flat.reshape(-1, self._topk)
