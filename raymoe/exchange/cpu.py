"""Dispatch and combine between CPU ranks: the arithmetic is here, carriers (`host.py`, `gloo.py`) move the rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from raymoe.errors import ConfigError, DataRefused, RaymoeError, WiringError
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.cpu_rows import Array, Arrived, Bags, Placement, RowSums, Sending
from raymoe.exchange.refusal import NO_REFUSAL, Refusal, judge_statuses, status_of
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import WORD_STRIDE, Layout, Region
from raymoe.memory.world import World

# What moves rows, and what is told about them, between CPU ranks. All arithmetic is `OnCpu`'s.
#
# Both operations are collective and raise `PeerTimeout` or `Aborted` when a peer does not take part in time.


@dataclass
class Returned:
    """What came back: row `where[i]` of `table` belongs to row i of the sending; `statuses` are what all ranks said.
    Where they say that the step is refused, no row need be there."""

    table: torch.Tensor  # of the dtype in which sums cross
    where: Array
    statuses: Sequence[Refusal]


@dataclass
class Visit:
    """What one rank keeps of a dispatch in order to send its rows home."""

    sending: Sending
    counts: Array  # [R] rows that arrived from each source
    where: Array  # [N] the row of the carrier's table in which each came
    number: int
    """Which of the exchange's dispatches it is, the same on all ranks."""


class Carrier(Protocol):
    def dispatch(self, x: torch.Tensor, sending: Sending) -> Arrived:
        """Send rows `sending.tokens` of `x` and bring what the others send here."""

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, status: Refusal) -> Returned:
        """Send home bag i's sum of `rows` for arrived row i, rounded once to the dtype in which sums cross, and this
        rank's status; bring what the others send."""

    def close(self, together: bool) -> None:
        """Give up memory and connections; `together` if all ranks close now."""


# Which operation each CPU rank is in: all ranks of a world must be in the same one before any data is exchanged.
#
# Gloo matches messages by their order alone. Ranks in different operations give it buffers of different sizes, and it
# ends the process. So each rank first announces the operation that it enters, waits until all ranks have entered one,
# and compares. Where they differ all ranks raise, none has sent anything, and the next operation works.
#
# Memory map (a heap on every rank; R ranks; "half" is the number of the operation mod 2):
#
# - `records [2][R]`: {number, operation, exchange, status}, written by rank r, at all ranks, and read by the owner.
# - `entered [R]`: word r is the number of the last operation that rank r has entered. It only grows.
#
# Order: record, fence, word; a reader loads the word, fences, loads the record. A half is not overwritten before all
# have read it: a rank enters operation n + 2 after all have entered n + 1, so after they have read the records of n.

_OPERATIONS = ("dispatch", "combine")
_SAME, _RECORD = 3, 3 + Refusal.NBYTES // 8
"""Words of a record that must be the same on all ranks, and all of its words."""


class OperationOrder:
    """One for all exchanges of a world (`World.shared`). Once a wait has failed it is of no further use."""

    def __init__(self, world: World) -> None:
        self._rank, self._size, self._waiter = world.rank, world.size, world.waiter
        records = Region("records", (2, world.size, WORD_STRIDE), "int64")
        layout = Layout.of([Region.words("entered", world.size), records])
        self._heap = world.allocate(layout, "order of operations")
        self._records: Array = self._heap.tensor("records").numpy()
        self._entered = self._heap.words("entered")
        self._at = [
            (self._heap.tensor("records", peer).numpy(), self._heap.words("entered", peer))
            for peer in range(world.size)
        ]
        self._exchanges = 0
        self._number = 0
        self._failure: RaymoeError | None = None

    def register(self) -> int:
        """The number of a new exchange. All ranks make theirs in one order, so it is the same everywhere."""
        self._exchanges += 1
        return self._exchanges

    def enter(self, op: str, exchange: int, status: Refusal = NO_REFUSAL) -> None:
        """Announce the operation that comes next, with what `agree` is to tell all ranks."""
        self._waiter.check()
        if self._failure is not None:
            raise copy.copy(self._failure)
        self._number += 1
        words = np.frombuffer(status.pack(), np.int64).tolist()
        record = (self._number, _OPERATIONS.index(op), exchange, *words)
        for records, _ in self._at:
            records[self._number % 2, self._rank, : len(record)] = record
        self._waiter.fence()  # orders the records before the words
        for _, entered in self._at:
            entered[self._rank] = self._number

    def agree(self) -> list[Refusal]:
        """Wait until all ranks have entered an operation, and raise on all of them unless it is the same one. What each
        rank has entered it with."""
        records = self._records[self._number % 2]
        mine: list[int] = records[self._rank, :_SAME].tolist()
        try:
            for peer in range(self._size):
                self._waiter.for_epoch(_OPERATIONS[mine[1]], self._entered, peer, self._number)
        except RaymoeError as error:
            self._failure = copy.copy(error)
            raise
        for peer in range(self._size):
            theirs = records[peer, :_SAME].tolist()
            if theirs[0] != mine[0]:
                self._failure = WiringError(
                    f"rank {peer} announced operation {mine[0]} to rank {self._rank}, and its record is of {theirs[0]}"
                )
                raise copy.copy(self._failure)
            if theirs != mine:
                raise ConfigError(self._difference(mine, peer, theirs))
        return [Refusal.unpack(records[peer, _SAME:_RECORD].tobytes()) for peer in range(self._size)]

    def close(self, together: bool) -> None:  # noqa: ARG002
        """With the world."""
        self._heap.close()

    def _difference(self, mine: list[int], peer: int, theirs: list[int]) -> str:
        here, there = ((_OPERATIONS[record[1]], record[2]) for record in (mine, theirs))
        if here[1] == there[1]:
            places = f"{here[0]} while rank {peer} is in {there[0]} of the same exchange"
        else:
            places = f"{here[0]} of exchange {here[1]} while rank {peer} is in {there[0]} of exchange {there[1]}"
        return (
            f"rank {self._rank} is in {places}; call the same operations in one order on all ranks (exchanges are "
            "numbered as they were made)"
        )


# Dispatch and combine between CPU ranks: the arithmetic that is the same however rows are carried.


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
        topk_idx, topk_weights = tokens.topk_idx.numpy()[:n], tokens.topk_weights.numpy()[:n]
        sending = Sending.of(topk_idx, topk_weights, self._size, self._spec.experts)
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
