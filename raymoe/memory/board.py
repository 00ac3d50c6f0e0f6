"""The notice board of a world: in each round every rank posts a small message and reads the messages of all ranks.

Memory map of the board's heap (one per rank, the same layout on all):

- `proof [R]`: rank r writes word r once, while the world is wired. The owner reads it (`wiring.prove`).
- `arrived [R]`: rank r writes word r by a plain 64-bit store into this heap. The owner reads it. The word holds the
  epoch of the last round in which rank r has posted, and only grows.
- `mail [2][MAIL]`: the owner writes it, all ranks read it. Round e uses buffer e mod 2. A buffer holds a header, the
  name of the round and the message.
- `beat`, `bell`, `farewell`: see `raymoe.memory.bell`.

Order: the writer stores the mail, fences, then stores `arrived` at every peer. A reader loads `arrived`, fences, then
loads the mail.

No buffer is overwritten before all ranks have read it. Round e+2 writes the buffer of round e. Its writer has left
round e+1, so it has seen e+1 from every peer. A peer posts e+1 only after it has left round e, its reading done. So a
peer may be one round ahead of its reader, never two, and comparisons are >=.
"""

from __future__ import annotations

import struct

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.bell import bell_regions
from raymoe.memory.heap import Heap
from raymoe.memory.layout import Layout, Region
from raymoe.memory.wait import Waiter

MAX_MESSAGE = 64 * 1024
_MAX_NAME = 256
_HEADER = struct.Struct("<qqqqq")  # epoch, rank, bytes of the name, bytes of the message, 1 if the message is an error
_MAIL = _HEADER.size + _MAX_NAME + MAX_MESSAGE


def board_layout(size: int) -> Layout:
    mail = Region("mail", (2, _MAIL), "uint8")
    return Layout.of([Region.words("proof", size), Region.words("arrived", size), mail, *bell_regions()])


class Board:
    """Rounds in which all ranks take part, in one order."""

    def __init__(self, heap: Heap, rank: int, size: int, waiter: Waiter) -> None:
        self._rank = rank
        self._waiter = waiter
        self._epoch = 0
        self._arrived = heap.words("arrived")
        self._arrived_at = [heap.words("arrived", peer) for peer in range(size)]
        self._mail = [heap.bytes("mail", peer, 0, 2 * _MAIL) for peer in range(size)]

    def meet(self, what: str, message: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        """Post `message`, wait for all ranks, return their messages in rank order.

        `what` names the round. A rank whose message is too long posts an error instead, so that all raise.
        """
        too_long = len(message) > MAX_MESSAGE
        if too_long:
            message = f"{len(message)} bytes posted in {what}; a message holds at most {MAX_MESSAGE}".encode()
        self._waiter.check()
        self._epoch += 1
        self._post(what.encode(errors="replace")[:_MAX_NAME], message, too_long)
        for peer in range(len(self._mail)):
            self._waiter.for_epoch(what, self._arrived, peer, self._epoch, timeout_s=timeout_s)
        return [self._read(what, peer) for peer in range(len(self._mail))]

    def _post(self, name: bytes, message: bytes, is_error: bool) -> None:
        mail, start = self._mail[self._rank], self._epoch % 2 * _MAIL
        _HEADER.pack_into(mail, start, self._epoch, self._rank, len(name), len(message), is_error)
        start += _HEADER.size
        mail[start : start + len(name)] = name
        mail[start + len(name) : start + len(name) + len(message)] = message
        self._waiter.fence()  # orders the mail before the words that announce it
        for words in self._arrived_at:
            words[self._rank] = self._epoch

    def _read(self, what: str, peer: int) -> bytes:
        mail, start = self._mail[peer], self._epoch % 2 * _MAIL
        epoch, rank, name_bytes, message_bytes, is_error = _HEADER.unpack_from(mail, start)
        if (epoch, rank) != (self._epoch, peer):
            raise WiringError(
                f"the mail of rank {peer} in round {self._epoch} has a header of rank {rank}, round {epoch}; "
                "make a new world"
            )
        start += _HEADER.size
        name = bytes(mail[start : start + name_bytes])
        if name != what.encode(errors="replace")[:_MAX_NAME]:
            other = name.decode(errors="replace")
            raise ConfigError(
                f"rank {self._rank} is in {what} while rank {peer} is in {other}; all ranks must call in one order"
            )
        start += name_bytes
        message = bytes(mail[start : start + message_bytes])
        if is_error:
            raise ConfigError(f"rank {peer}: {message.decode()}")
        return message
