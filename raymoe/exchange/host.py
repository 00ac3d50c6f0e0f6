"""Dispatch and combine between CPU ranks over shared memory: every rank writes straight into its peers' slots.

Memory map (`spec.py`; every rank owns a heap of it; R ranks, T tokens; "half" is the operation's epoch mod 2):

- `dispatch_rows [2*R*T + 1][H]`: half h, source s, row j at (h*R + s)*T + j; the last row stays zero.
- `dispatch_ids [2][R][T][K]`: the owner's experts that row j of source s is for, -1 for others.
- `dispatch_weights [2][R][T][K]`: their weights.
- `dispatch_head [2][R]`: {epoch, rows} of source s.
- `dispatch_flag [R]`: word s is the last dispatch that source s has sent here.
  All five are written by source s, at s, and read by the owner.
- `combine_rows [2][R][T][H]`: the sum of rank d's experts for row j of those that the owner sent to d, in the dtype in
  which sums cross; a row fills whole pieces of 16 bytes.
- `combine_head [2][R]`: {epoch, -, the status} of rank d.
- `combine_flag [R]`: word d is the last combine that rank d has sent here.
  All three are written by rank d, at d, and read by the owner.

Rows are one for each (token, destination rank), in token order. Both ends know their number, so combine sends no
counts.

Order. A rank writes rows at once and its flags after all ranks have entered the same operation of the same exchange
(`OperationOrder`). Where they differ all raise and no flag was raised, so the operation did not happen; its epoch is
used by the next one, which writes the same half.

Words. A flag is a 64-bit epoch that only grows, one writer each, on cache lines of its own; it is never reset. Dispatch
and combine count separately. Writer: rows, ids, weights, head; fence; flag. Reader: flag, compared by >= (a peer may be
one operation ahead); fence; the rest. Every rank flags every peer in every operation, itself too, also with no rows.

Why no slot is overwritten before it is read. There is no barrier before an operation writes rows. Operation e + 2 of a
kind writes the half that operation e of that kind wrote. Its writer w has left operation e + 1, so every peer p had
sent its flag e + 1; and p sends that flag only when its readers of operation e are done. For combine they are done when
combine e returns. For dispatch, where `x` with layout `rank` is the slots themselves, they are done when p calls
dispatch e + 1: that is how long the caller may use `x`. With layout `expert` the rows have been copied out by then.

So a rank that stops in the middle of an operation must never write again: others may be unable to read on. Whatever
ends an operation early poisons the exchange (`exchange.py`), and a poisoned exchange stores nothing to peers.
"""

from __future__ import annotations

import numpy as np
import torch

from raymoe.errors import WiringError
from raymoe.exchange.cpu import OperationOrder, Returned, Visit
from raymoe.exchange.cpu_rows import Array, Arrived, Bags, RowSums, Sending, places_in_runs, starts_of
from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal
from raymoe.exchange.spec import ExchangeSpec, slots_layout
from raymoe.memory.heap import Heap
from raymoe.memory.world import World

_EPOCH, _ROWS = 0, 1
_STATUS = slice(2, 2 + Refusal.NBYTES // 8)


class HostSlots:
    """One workspace: slots, flags and epochs."""

    def __init__(self, world: World, spec: ExchangeSpec) -> None:
        self._rank, self._size, self._tokens = world.rank, world.size, spec.tokens
        self._waiter = world.waiter
        self._order = world.shared(OperationOrder)
        self._number = self._order.register()
        self._heap = world.allocate(slots_layout(spec, world.size), "exchange slots")
        self._mine = _Views(self._heap, spec, world.rank, world.size)
        # Peers in the order in which this rank writes to them: each begins elsewhere, so that none is written by all.
        order = [(world.rank + 1 + step) % world.size for step in range(world.size)]
        self._peers = [(peer, _Views(self._heap, spec, peer, world.size)) for peer in order]
        self._dispatched = 0
        self._combined = 0

    def dispatch(self, x: torch.Tensor, sending: Sending) -> Arrived:
        self._order.enter("dispatch", self._number)
        epoch = self._dispatched + 1
        half, me = epoch % 2, self._rank
        starts = starts_of(sending.counts).tolist()
        tokens = torch.from_numpy(sending.tokens)
        for peer, at in self._peers:
            begin, end = starts[peer], starts[peer + 1]
            n = end - begin
            if n:
                torch.index_select(x, 0, tokens[begin:end], out=at.dispatch_rows[half, me, :n])
                at.ids[half, me, :n] = sending.ids[begin:end]
                at.weights[half, me, :n] = sending.weights[begin:end]
            at.dispatch_head[half, me, : _ROWS + 1] = epoch, n
        self._order.agree()
        self._dispatched = epoch
        self._waiter.fence()  # orders the rows and their metadata before the flags
        for _, at in self._peers:
            at.dispatch_flag[me] = epoch
        return self._arrived(half)

    def _arrived(self, half: int) -> Arrived:
        mine, counts, refusal = self._mine, np.zeros(self._size, np.int64), NO_REFUSAL
        ids, weights = [], []
        for source in range(self._size):
            self._waiter.for_epoch("dispatch", mine.dispatch_flag, source, self._dispatched)
            epoch, rows = mine.dispatch_head[half, source, : _ROWS + 1].tolist()
            self._expect(epoch, self._dispatched, source)
            if not 0 <= rows <= self._tokens:
                refusal, rows = refusal or Refusal(Cause.COUNT, source, rows), 0
            counts[source] = rows
            ids.append(mine.ids[half, source, :rows])
            weights.append(mine.weights[half, source, :rows])
        where = places_in_runs(counts, (half * self._size + np.arange(self._size)) * self._tokens)
        zero_row = 2 * self._size * self._tokens
        return Arrived(mine.table, where, np.concatenate(ids), np.concatenate(weights), counts, zero_row, refusal)

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, status: Refusal) -> Returned:
        self._order.enter("combine", self._number)
        epoch = self._combined + 1
        half, me = epoch % 2, self._rank
        starts = starts_of(visit.counts).tolist()
        sums = RowSums(rows, bags, self._mine.combine_rows.dtype)
        words = np.frombuffer(status.pack(), np.int64)
        for peer, at in self._peers:
            begin, end = starts[peer], starts[peer + 1]
            sums.write(begin, end, at.combine_rows[half, me])
            at.combine_head[half, me, _EPOCH] = epoch
            at.combine_head[half, me, _STATUS] = words
        self._order.agree()
        self._combined = epoch
        self._waiter.fence()  # orders the rows and the status before the flags
        for _, at in self._peers:
            at.combine_flag[me] = epoch
        statuses = []
        for peer in range(self._size):
            self._waiter.for_epoch("combine", self._mine.combine_flag, peer, self._combined)
            self._expect(int(self._mine.combine_head[half, peer, _EPOCH]), self._combined, peer)
            statuses.append(Refusal.unpack(self._mine.combine_head[half, peer, _STATUS].tobytes()))
        where = places_in_runs(visit.sending.counts, np.arange(self._size) * self._tokens)
        return Returned(self._mine.combine_rows[half].flatten(0, 1), where, statuses)

    def _expect(self, found: int, epoch: int, peer: int) -> None:
        if found != epoch:
            raise WiringError(
                f"the slots of rank {peer} at rank {self._rank} hold epoch {found}; {epoch} was announced"
            )

    def close(self, together: bool) -> None:  # noqa: ARG002
        self._heap.close()  # alone or together: a peer that still writes here keeps the pages alive
        self._peers.clear()  # what was dispatched refers to this, and views of the slots would keep them mapped
        del self._mine


class _Views:
    """The regions of one rank's heap."""

    def __init__(self, heap: Heap, spec: ExchangeSpec, peer: int, ranks: int) -> None:
        self.table = heap.tensor("dispatch_rows", peer)
        self.dispatch_rows = self.table[:-1].view(2, ranks, spec.tokens, spec.hidden)
        self.combine_rows = heap.tensor("combine_rows", peer)[..., : spec.hidden]
        self.ids: Array = heap.tensor("dispatch_ids", peer).numpy()
        self.weights: Array = heap.tensor("dispatch_weights", peer).numpy()
        self.dispatch_head: Array = heap.tensor("dispatch_head", peer).numpy()
        self.combine_head: Array = heap.tensor("combine_head", peer).numpy()
        self.dispatch_flag = heap.words("dispatch_flag", peer)
        self.combine_flag = heap.words("combine_flag", peer)
