"""Bytes on a GPU that whoever knows the key can make again, on any GPU, and how many of some are not those."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

_PIECE = 2**25  # bytes made or compared at a time
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64, as signed numbers


def fill_drawn(into: torch.Tensor, *key: int) -> None:
    """Fill with the bytes of this key: splitmix64 of the place of each 8 bytes, so every piece can be made by itself.

    >>> a, b = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    >>> fill_drawn(a, 1, 2), fill_drawn(b, 2, 1)
    (None, None)
    >>> wrong_bytes(a, 1, 2), wrong_bytes(b, 1, 2) > 90
    (0, True)
    """
    for start, piece in _pieces(into.numel(), into.device, key):
        into[start : start + piece.numel()] = piece


def wrong_bytes(found: torch.Tensor, *key: int) -> int:
    """How many bytes are not what the key gives."""
    wrong = torch.zeros((), dtype=torch.int64, device=found.device)
    for start, want in _pieces(found.numel(), found.device, key):
        wrong += (found[start : start + want.numel()] != want).count_nonzero()
    return int(wrong)


def _pieces(nbytes: int, device: torch.device, key: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    seed = int.from_bytes(digest[:8], "little", signed=True)
    for start in range(0, nbytes, _PIECE):
        size = min(_PIECE, nbytes - start)
        first = start // 8
        x = torch.arange(first, first + -(-size // 8), dtype=torch.int64, device=device)
        x = x * _MULTIPLIERS[0] + seed
        for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
            x = (x ^ _shifted(x, shift)) * multiplier
        yield start, (x ^ _shifted(x, 31)).view(torch.uint8)[:size]


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros following; torch's own shift keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
