"""Bytes for a copy, and how many of them arrived wrong."""

from __future__ import annotations

import torch

from raymoe.moe.seeds import generator

POISON = 0xA5
_PIECE = 2**20


def drawn(nbytes: int, *key: int) -> torch.Tensor:
    """Random bytes that whoever knows the key can draw again.

    >>> bool((drawn(100, 1, 2) == drawn(100, 1, 2)).all()), bool((drawn(100, 1, 2) == drawn(100, 2, 1)).all())
    (True, False)
    """
    words = -(-nbytes // 8)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (words,), generator=generator("bytes", *key)).view(torch.uint8)[:nbytes]


def share_wrong(found: torch.Tensor, *key: int) -> float:
    """The share of `found` that is not what was drawn with this key.

    >>> copy = drawn(100, 3)
    >>> copy[7] += 1
    >>> share_wrong(copy, 3)
    0.01
    """
    want = drawn(found.numel(), *key)
    wrong = 0
    for start in range(0, found.numel(), _PIECE):  # a mask of everything would be as large again
        piece = slice(start, start + _PIECE)
        wrong += int((found[piece] != want[piece]).count_nonzero())
    return wrong / found.numel()
