"""Which operation each CPU rank is in: all ranks of a world must be in the same one before any data is exchanged.

Gloo matches messages by their order alone. Ranks in different operations give it buffers of different sizes, and it
ends the process. So each rank first announces the operation that it enters, waits until all ranks have entered one, and
compares. Where they differ all ranks raise, none has sent anything, and the next operation works.

Memory map (a heap on every rank; R ranks; "half" is the number of the operation mod 2):

- `records [2][R]`: {number, operation, exchange, status}, written by rank r, at all ranks, and read by the owner.
- `entered [R]`: word r is the number of the last operation that rank r has entered. It only grows.

Order: record, fence, word; a reader loads the word, fences, loads the record. A half is not overwritten before all have
read it: a rank enters operation n + 2 after all have entered n + 1, so after they have read the records of n.
"""

from __future__ import annotations

import copy

import numpy as np

from raymoe.exchange.arrays import Array
from raymoe.exchange.refusal import NO_REFUSAL, Refusal
from raymoe.job.errors import ConfigError, RaymoeError, WiringError
from raymoe.memory.heap import WORD_STRIDE, Layout, Region
from raymoe.memory.world import World

_OPERATIONS = ("dispatch", "combine")
_SAME, _RECORD = 3, 3 + Refusal.NBYTES // 8
"""Words of a record that must be the same on all ranks, and all of its words."""


class Order:
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
