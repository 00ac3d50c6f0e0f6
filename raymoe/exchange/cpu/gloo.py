"""The carriers over Gloo, for backends `allgather` and `collective` between CPU ranks."""

from __future__ import annotations

import numpy as np
import torch

from raymoe.exchange.cpu.cpu_backend import Call, Carrier, OperationOrder, OutgoingSums, ReturnedSums
from raymoe.exchange.cpu.cpu_rows import Array, ArrivedRows, RowSums, SavedRoutes, SendPlan
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


class GlooAllgather(Carrier):
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
        self._padded = torch.zeros(T, H, dtype=dtype, device="cpu")
        # T*K global ids, -1 where a token is absent or has no expert, and the bits of T*K weights.
        self._metadata_out = torch.empty(2, T, spec.topk, dtype=torch.int32, device="cpu")
        self._metadata_in = torch.empty(world.size, 2, T, spec.topk, dtype=torch.int32, device="cpu")
        # The last row of each block holds the status.
        wire: torch.dtype = getattr(torch, spec.combine_wire)
        self._sums_out = torch.empty(world.size, T + 1, spec.combine_width, dtype=wire, device="cpu")
        self._sums_in = torch.empty_like(self._sums_out)

    def dispatch(self, x: torch.Tensor, plan: SendPlan, call: Call) -> ArrivedRows:
        self._order.enter(call, self._number)
        rows = x
        if len(x) < self._tokens:
            self._padded[: len(x)].copy_(x)
            rows = self._padded
        self._order.agree()
        wait_rows = self._gloo.all_gather("dispatch", self._table[:-1], rows)
        ids, weights = self._metadata_out.numpy()
        ids.fill(-1)
        ids[: len(plan.topk_idx)] = plan.topk_idx
        weights[: len(plan.topk_idx)] = plan.topk_weights.view(np.int32)
        self._gloo.all_gather("dispatch", self._metadata_in.flatten(0, 1), self._metadata_out)()
        arrived = self._pick()
        wait_rows()
        return arrived

    def _pick(self) -> ArrivedRows:
        """Pick the tokens of all ranks that have an expert here, in the order (source, token)."""
        metadata: Array = self._metadata_in.numpy()
        ids = metadata[:, 0].reshape(-1, self._topk) - self._rank * self._local
        elsewhere = (ids < 0) | (ids >= self._local)
        where = np.flatnonzero(~elsewhere.all(axis=1))
        ids[elsewhere] = -1
        weights = metadata[:, 1].reshape(-1, self._topk)[where].view(np.float32)
        counts = np.bincount(where // self._tokens, minlength=self._size)
        return ArrivedRows(self._table, where, ids[where], weights, counts, len(self._table) - 1)

    def combine(self, outgoing: OutgoingSums, routes: SavedRoutes, status: Refusal) -> ReturnedSums:
        self._order.enter(outgoing.call, self._number)
        words = torch.frombuffer(bytearray(status.pack()), dtype=torch.uint8)
        stride = self._tokens + 1
        sums_out, sums_in = self._sums_out.flatten(0, 1), self._sums_in.flatten(0, 1)
        where = routes.where // self._tokens * stride + routes.where % self._tokens
        sums = RowSums(outgoing.rows, outgoing.bags.spread(where, len(sums_out)), sums_out.dtype)
        sums.write(0, len(sums_out), sums_out[:, : self._hidden])
        self._sums_out.view(torch.uint8)[:, self._tokens, : Refusal.NBYTES] = words
        self._order.agree()
        self._gloo.all_to_all("combine", sums_in, sums_out)()
        packed = self._sums_in.view(torch.uint8)[:, self._tokens, : Refusal.NBYTES].numpy()
        statuses = [Refusal.unpack(block.tobytes()) for block in packed]
        where = routes.plan.ranks * stride + routes.plan.tokens
        entries = None if outgoing.entries is None else self._return_entries(outgoing.entries, routes)
        return ReturnedSums(sums_in[:, : self._hidden], where, statuses, entries)

    def _return_entries(self, entries: torch.Tensor, routes: SavedRoutes) -> torch.Tensor:
        entries_out = torch.zeros(self._size * self._tokens, self._topk, device="cpu")
        entries_out[torch.from_numpy(routes.where)] = entries
        entries_in = torch.empty_like(entries_out)
        self._gloo.all_to_all("combine", entries_in, entries_out)()
        return entries_in[torch.from_numpy(routes.plan.ranks * self._tokens + routes.plan.tokens)]

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


class GlooCollective(Carrier):
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
        self._wire: torch.dtype = getattr(torch, spec.combine_wire)
        self._spec = spec
        self._sums_out = torch.empty(most, spec.combine_width, dtype=self._wire, device="cpu")
        self._sums_in = torch.empty_like(self._sums_out)
        # For each rank: the number of rows, T*K ids, and the bits of T*K weights.
        self._metadata_out = torch.zeros(world.size, 1 + 2 * spec.tokens * spec.topk, dtype=torch.int32, device="cpu")
        self._metadata_in = torch.zeros_like(self._metadata_out)

    def dispatch(self, x: torch.Tensor, plan: SendPlan, call: Call) -> ArrivedRows:
        self._order.enter(call, self._number)
        send_counts = plan.counts.tolist()
        self._fill_metadata(plan, send_counts)
        self._order.agree()
        wait = self._gloo.all_to_all("dispatch", self._metadata_in, self._metadata_out)
        packed = self._packed[: len(plan.tokens)]
        torch.index_select(x, 0, torch.from_numpy(plan.tokens), out=packed)
        wait()
        counts: Array = self._metadata_in[:, 0].numpy().astype(np.int64)
        receive_counts = counts.tolist()
        n = sum(receive_counts)
        wait = self._gloo.all_to_all("dispatch", self._table[:n], packed, receive_counts, send_counts)
        ids, weights = self._received_metadata(receive_counts)
        wait()
        return ArrivedRows(self._table, np.arange(n), ids, weights, counts, self._zero_row)

    def combine(self, outgoing: OutgoingSums, routes: SavedRoutes, status: Refusal) -> ReturnedSums:
        self._order.enter(outgoing.call, self._number, status)
        send_counts, receive_counts = routes.counts.tolist(), routes.plan.counts.tolist()
        sums_out, sums_in = self._sums_out[: sum(send_counts)], self._sums_in[: sum(receive_counts)]
        RowSums(outgoing.rows, outgoing.bags, self._wire).write(0, len(sums_out), sums_out[:, : self._hidden])
        statuses, entries = self._order.agree(), None
        if judge_statuses(statuses, self._spec) is None:
            wait = self._gloo.all_to_all("combine", sums_in, sums_out, receive_counts, send_counts)
            if outgoing.entries is not None:
                entries = torch.empty(len(sums_in), self._topk, device="cpu")
                self._gloo.all_to_all("combine", entries, outgoing.entries, receive_counts, send_counts)()
            wait()
        return ReturnedSums(sums_in[:, : self._hidden], np.arange(len(sums_in)), statuses, entries)

    def close(self, together: bool) -> None:
        self._gloo.close(together)

    def _fill_metadata(self, plan: SendPlan, send_counts: list[int]) -> None:
        metadata, most = self._metadata_out.numpy(), self._tokens * self._topk
        metadata[:, 0] = send_counts
        ids, weights = plan.ids.ravel(), plan.weights.ravel().view(np.int32)
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
