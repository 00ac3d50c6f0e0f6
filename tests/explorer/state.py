"""What changes in an exploration, and what may change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Log = Callable[[str], None]
Key = tuple[bytes, bytes, bytes, tuple["Landing", ...]]


class BrokenError(Exception):
    """The protocol does what it must not."""


class Landing(NamedTuple):
    """A store under way."""

    at: int
    order: int  # among the stores of its thread
    value: int
    thread: int


class Action(NamedTuple):
    """What may happen next: a step of `thread`, the failure of its wait, or the landing of a store."""

    what: str
    thread: int
    landing: Landing | None = None


class State:
    """Everything that changes. `at` and `epoch` are by thread; the epoch of an ended thread is 0, or RETURNED."""

    __slots__ = ("at", "epoch", "memory", "pending")

    def __init__(self, key: Key) -> None:
        self.at, self.epoch, self.memory = bytearray(key[0]), bytearray(key[1]), bytearray(key[2])
        self.pending = list(key[3])

    def key(self) -> Key:
        return bytes(self.at), bytes(self.epoch), bytes(self.memory), tuple(sorted(self.pending))
