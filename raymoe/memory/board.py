"""The notice board of a world: every member posts a small message and reads everybody's.

Memory map of a control heap (one per rank, the same on all):

- `proof [R]`: word r is written once by rank r, while the world is wired, and read by the owner (see `world.py`).
- `arrived [R]`: word r is written by rank r (a plain 64-bit store into this heap) and read by the owner. It holds the
  epoch of the last round in which rank r has posted; it only grows.
- `mail [2][MAIL]`: written by the owner, read by everybody. Round e uses half e mod 2: a header, the name of the round,
  the message.

Order: mail, fence, `arrived` at every peer; a reader loads `arrived`, fences, loads the mail.

A half is never overwritten before all have read it. Round e+2 writes the half of round e; its writer has left round
e+1, so it has seen e+1 from every peer, and a peer posts e+1 only when it has left round e, its reading done. For the
same reason a peer may be one round ahead of its reader, never two, and comparisons are >=.
"""

from __future__ import annotations

import struct

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.heap import Heap
from raymoe.memory.layout import Layout, Region
from raymoe.memory.wait import Waiter

MAX_MESSAGE = 64 * 1024
_MAX_NAME = 256
_HEADER = struct.Struct("<qqqqq")  # epoch, rank, bytes of the name, bytes of the message, 1 if the message is a refusal
_MAIL = _HEADER.size + _MAX_NAME + MAX_MESSAGE


def board_layout(size: int) -> Layout:
    mail = Region("mail", (2, _MAIL), "uint8")
    return Layout.of([Region.words("proof", size), Region.words("arrived", size), mail])


class Board:
    """Rounds in which all members take part, in one order."""

    def __init__(self, heap: Heap, rank: int, size: int, waiter: Waiter) -> None:
        self._rank = rank
        self._waiter = waiter
        self._epoch = 0
        self._arrived = heap.words("arrived")
        self._arrived_at = [heap.words("arrived", peer) for peer in range(size)]
        self._mail = [heap.bytes("mail", peer, 0, 2 * _MAIL) for peer in range(size)]

    def meet(self, what: str, message: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        """Post `message`, wait for all, give the messages in rank order.

        A member that cannot post (its message is too long) posts a refusal instead, so that all raise in this round.
        """
        refusal = len(message) > MAX_MESSAGE
        if refusal:
            message = f"{len(message)} bytes posted in {what}; a message holds at most {MAX_MESSAGE}".encode()
        self._waiter.check()
        self._epoch += 1
        self._post(what.encode(errors="replace")[:_MAX_NAME], message, refusal)
        for peer in range(len(self._mail)):
            self._waiter.for_epoch(what, self._arrived, peer, self._epoch, timeout_s=timeout_s)
        return [self._read(what, peer) for peer in range(len(self._mail))]

    def _post(self, name: bytes, message: bytes, refusal: bool) -> None:
        mail, start = self._mail[self._rank], self._epoch % 2 * _MAIL
        _HEADER.pack_into(mail, start, self._epoch, self._rank, len(name), len(message), refusal)
        start += _HEADER.size
        mail[start : start + len(name)] = name
        mail[start + len(name) : start + len(name) + len(message)] = message
        self._waiter.fence()  # orders the mail before the words that announce it
        for words in self._arrived_at:
            words[self._rank] = self._epoch

    def _read(self, what: str, peer: int) -> bytes:
        mail, start = self._mail[peer], self._epoch % 2 * _MAIL
        epoch, rank, name_bytes, message_bytes, refusal = _HEADER.unpack_from(mail, start)
        if (epoch, rank) != (self._epoch, peer):
            raise WiringError(f"the mail of rank {peer}, round {self._epoch}, reads as rank {rank}, round {epoch}")
        start += _HEADER.size
        name = bytes(mail[start : start + name_bytes])
        if name != what.encode(errors="replace")[:_MAX_NAME]:
            there = name.decode(errors="replace")
            raise ConfigError(
                f"rank {self._rank} is in {what} while rank {peer} is in {there}; all must keep one order"
            )
        start += name_bytes
        message = bytes(mail[start : start + message_bytes])
        if refusal:
            raise ConfigError(f"rank {peer}: {message.decode()}")
        return message
