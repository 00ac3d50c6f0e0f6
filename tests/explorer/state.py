"""The state of an exploration, and the actions that change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Log = Callable[[str], None]
Key = tuple[bytes, bytes, bytes, tuple["Landing", ...]]


class BrokenError(Exception):
    """The protocol is broken."""


class Landing(NamedTuple):
    """A store that has not landed."""

    at: int
    order: int  # launch and step of the store
    value: int
    thread: int


class Action(NamedTuple):
    """A possible next action: a step of `thread`, the failure of its wait, or the landing of a store."""

    kind: str
    thread: int
    landing: Landing | None = None


class State:
    """The whole state. `at` (the next step) and `epoch` are by thread; an ended thread's epoch is 0 or RETURNED."""

    __slots__ = ("at", "epoch", "memory", "pending")

    def __init__(self, key: Key) -> None:
        self.at, self.epoch, self.memory = bytearray(key[0]), bytearray(key[1]), bytearray(key[2])
        self.pending = list(key[3])

    def key(self) -> Key:
        return bytes(self.at), bytes(self.epoch), bytes(self.memory), tuple(sorted(self.pending))
