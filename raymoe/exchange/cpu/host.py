"""Dispatch and combine between CPU ranks over shared memory: every rank writes into its peers' slots.

Memory map (`spec.py`; a heap on every rank; R ranks, T tokens; p: the parity of the operation's epoch, epoch mod 2):

- `dispatch_rows [2*R*T + 1][H]`: row j of source s at (p*R + s)*T + j; the last row stays zero.
- `dispatch_ids [2][R][T][K]`: the owner's experts that row j of source s is for, -1 for others.
- `dispatch_weights [2][R][T][K]`: their weights.
- `dispatch_head [2][R]`: {epoch, rows} of source s.
- `dispatch_flag [R]`: word s is the last dispatch that source s has sent here.
  Source s writes all five at its index s; the owner reads them.
- `combine_rows [2][R][T][H]`: the sum of rank d's experts for row j of those that the owner sent to d, in the combine
  wire dtype. A row fills whole pieces of 16 bytes.
- `combine_weights [2][R][T][K]`: the gradients of that row's weights; only in a combine of gradients.
- `combine_head [2][R]`: {epoch, -, the status} of rank d.
- `combine_flag [R]`: word d is the last combine that rank d has sent here.
  Rank d writes all four at its index d; the owner reads them.

Rows are one for each (token, destination rank), in token order. Both ends know their number, so combine sends no
counts.

Agreement. A rank writes rows at once, but raises its flags only after all ranks have entered the same operation of the
same exchange (`OperationOrder`). Where the ranks differ, all raise and no flag is raised: the operation did not happen.
The next operation takes its epoch, and so writes the same parity.

Flags. A flag is a 64-bit epoch with one writer, on a cache line of its own. It only grows and is never reset. Dispatch
and combine count separately. Writer: rows, ids, weights, head; fence; flag. Reader: flag, compared by >= (a peer may be
one operation ahead); fence; the rest. In every operation, every rank flags every rank, itself included, even with no
rows to send.

Why no slot is overwritten before it is read. No barrier precedes the rows of an operation. Operation e + 2 of a kind
writes the parity that operation e wrote.

1. Writer w starts e + 2 after it has left e + 1, so every peer p has sent its flag e + 1.
2. A peer p sends flag e + 1 only when its readers of operation e are done.
3. The readers of combine e are done when it returns. With layout `rank`, `x` of dispatch e is the slots themselves, so
   its readers are done when p calls dispatch e + 1: the caller may use `x` until then. With layout `expert` the rows
   have been copied out by then.

So a rank that stops inside an operation must never write again, because peers may still have to read. An error that
ends an operation early poisons the exchange (`exchange.py`), and a poisoned exchange stores nothing to peers.
"""

from __future__ import annotations

import numpy as np
import torch

from raymoe.errors import WiringError
from raymoe.exchange.cpu.cpu_backend import Call, Carrier, OperationOrder, OutgoingSums, ReturnedSums
from raymoe.exchange.cpu.cpu_rows import (
    Array,
    ArrivedRows,
    RowSums,
    SavedRoutes,
    SendPlan,
    places_in_runs,
    starts_of,
)
from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal
from raymoe.exchange.spec import ExchangeSpec, slots_layout
from raymoe.memory.heap import Heap
from raymoe.memory.world import World

_EPOCH, _ROWS = 0, 1
_STATUS = slice(2, 2 + Refusal.NBYTES // 8)


class HostSlots(Carrier):
    """The carrier over shared memory: its slots, flags and epochs."""

    def __init__(self, world: World, spec: ExchangeSpec) -> None:
        self._rank, self._size, self._tokens = world.rank, world.size, spec.tokens
        self._waiter = world.waiter
        self._order = world.shared(OperationOrder)
        self._number = self._order.register()
        self._heap = world.allocate(slots_layout(spec, world.size), "exchange slots")
        self._own = _Views(self._heap, spec, world.rank, world.size)
        # The order of writing starts with the next rank, so that not all ranks write to one peer at the same time.
        order = [(world.rank + 1 + step) % world.size for step in range(world.size)]
        self._peers = [(peer, _Views(self._heap, spec, peer, world.size)) for peer in order]
        self._dispatched = 0
        self._combined = 0

    def dispatch(self, x: torch.Tensor, plan: SendPlan, call: Call) -> ArrivedRows:
        self._order.enter(call, self._number)
        epoch = self._dispatched + 1
        parity, me = epoch % 2, self._rank
        starts = starts_of(plan.counts).tolist()
        tokens = torch.from_numpy(plan.tokens)
        for peer, views in self._peers:
            begin, end = starts[peer], starts[peer + 1]
            n = end - begin
            if n:
                torch.index_select(x, 0, tokens[begin:end], out=views.dispatch_rows[parity, me, :n])
                views.ids[parity, me, :n] = plan.ids[begin:end]
                views.weights[parity, me, :n] = plan.weights[begin:end]
            views.dispatch_head[parity, me, : _ROWS + 1] = epoch, n
        self._order.agree()
        self._dispatched = epoch
        self._waiter.fence()  # orders the rows and their metadata before the flags
        for _, views in self._peers:
            views.dispatch_flag[me] = epoch
        return self._arrived(parity)

    def _arrived(self, parity: int) -> ArrivedRows:
        own, counts, refusal = self._own, np.zeros(self._size, np.int64), NO_REFUSAL
        ids, weights = [], []
        for source in range(self._size):
            self._waiter.for_epoch("dispatch", own.dispatch_flag, source, self._dispatched)
            epoch, rows = own.dispatch_head[parity, source, : _ROWS + 1].tolist()
            self._expect(epoch, self._dispatched, source)
            if not 0 <= rows <= self._tokens:
                refusal, rows = refusal or Refusal(Cause.COUNT, source, rows), 0
            counts[source] = rows
            ids.append(own.ids[parity, source, :rows])
            weights.append(own.weights[parity, source, :rows])
        where = places_in_runs(counts, (parity * self._size + np.arange(self._size)) * self._tokens)
        zero_row = 2 * self._size * self._tokens
        return ArrivedRows(own.table, where, np.concatenate(ids), np.concatenate(weights), counts, zero_row, refusal)

    def combine(self, outgoing: OutgoingSums, routes: SavedRoutes, status: Refusal) -> ReturnedSums:
        self._order.enter(outgoing.call, self._number)
        epoch = self._combined + 1
        parity, me = epoch % 2, self._rank
        starts = starts_of(routes.counts).tolist()
        sums = RowSums(outgoing.rows, outgoing.bags, self._own.combine_rows.dtype)
        words = np.frombuffer(status.pack(), np.int64)
        for peer, views in self._peers:
            begin, end = starts[peer], starts[peer + 1]
            sums.write(begin, end, views.combine_rows[parity, me])
            if outgoing.entries is not None:
                views.combine_weights[parity, me, : end - begin] = outgoing.entries[begin:end]
            views.combine_head[parity, me, _EPOCH] = epoch
            views.combine_head[parity, me, _STATUS] = words
        self._order.agree()
        self._combined = epoch
        self._waiter.fence()  # orders the rows and the status before the flags
        for _, views in self._peers:
            views.combine_flag[me] = epoch
        statuses = []
        for peer in range(self._size):
            self._waiter.for_epoch("combine", self._own.combine_flag, peer, self._combined)
            self._expect(int(self._own.combine_head[parity, peer, _EPOCH]), self._combined, peer)
            statuses.append(Refusal.unpack(self._own.combine_head[parity, peer, _STATUS].tobytes()))
        where = places_in_runs(routes.plan.counts, np.arange(self._size) * self._tokens)
        table, entries = self._own.combine_rows[parity].flatten(0, 1), None
        if outgoing.entries is not None:
            entries = self._own.combine_weights[parity].flatten(0, 1)[torch.from_numpy(where)]
        return ReturnedSums(table, where, statuses, entries)

    def _expect(self, held: int, epoch: int, peer: int) -> None:
        if held != epoch:
            raise WiringError(f"the slots of rank {peer} at rank {self._rank} hold epoch {held}; {epoch} was announced")

    def close(self, together: bool) -> None:  # noqa: ARG002
        self._heap.close()  # also without the peers: one that still writes here keeps the pages alive
        self._peers.clear()  # results of dispatch refer to this object, and its views would keep the slots mapped
        del self._own


class _Views:
    """The regions of one rank's heap."""

    def __init__(self, heap: Heap, spec: ExchangeSpec, peer: int, ranks: int) -> None:
        self.table = heap.tensor("dispatch_rows", peer)
        self.dispatch_rows = self.table[:-1].view(2, ranks, spec.tokens, spec.hidden)
        self.combine_rows = heap.tensor("combine_rows", peer)[..., : spec.hidden]
        self.combine_weights = heap.tensor("combine_weights", peer)
        self.ids: Array = heap.tensor("dispatch_ids", peer).numpy()
        self.weights: Array = heap.tensor("dispatch_weights", peer).numpy()
        self.dispatch_head: Array = heap.tensor("dispatch_head", peer).numpy()
        self.combine_head: Array = heap.tensor("combine_head", peer).numpy()
        self.dispatch_flag = heap.words("dispatch_flag", peer)
        self.combine_flag = heap.words("combine_flag", peer)
