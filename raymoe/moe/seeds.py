"""Random numbers that every rank can draw again, whoever drew them first."""

from __future__ import annotations

import hashlib

import torch


def generator(purpose: str, *key: int, device: torch.device | None = None) -> torch.Generator:
    """A generator of its own for each (purpose, key): streams of neighbouring ranks and steps have nothing in common.

    On a GPU the same key draws other numbers than on a CPU, and the same ones again on every GPU.

    >>> a, b = generator("tokens", 0, 1), generator("tokens", 0, 1)
    >>> bool(torch.equal(torch.rand(4, generator=a), torch.rand(4, generator=b)))
    True
    """
    text = "/".join((purpose, *map(str, key)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator(device or torch.device("cpu")).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
