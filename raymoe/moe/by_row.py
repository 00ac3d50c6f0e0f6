"""Compute rows so that the bits of each result depend on its row alone: batch invariance.

torch chooses how a product adds by its shape, so a row has other bits among other numbers of rows. A product of a fixed
number of rows has one shape, and adds each of its rows in one order. So rows go through in tiles, the last filled up
with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE_OF_CPU, TILE_OF_GPU = 32, 512
"""Rows of a tile. On GPUs they are as many as the tensor cores' way through `logits_of` needs."""


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function over rows to x[T, H], in tiles of as many rows each.

    >>> in_tiles(lambda rows: rows * len(rows), torch.ones(3, 1))[:, 0].tolist()
    [32.0, 32.0, 32.0]
    """
    tile = TILE_OF_CPU if x.device.type == "cpu" else TILE_OF_GPU
    missing = -len(x) % tile
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x  # a pad of nothing copies
    return torch.cat([function(part) for part in torch.split(padded, tile)])[: len(x)]


def sigmoid(x: Tensor) -> Tensor:
    """Compute a sigmoid whose bits do not depend on the place of a number in the tensor.

    torch's takes other instructions for the last numbers of a float32 tensor on a CPU, or of the part of a thread. Its
    softmax takes the same for each row.

    >>> sigmoid(torch.tensor([0.0, 1.0])).tolist() == torch.tensor([0.0, 1.0]).sigmoid().tolist()
    True
    >>> sigmoid(torch.tensor([-torch.inf, torch.inf, torch.nan])).tolist()
    [0.0, 1.0, nan]
    """
    if x.device.type != "cpu":
        return x.sigmoid()
    bounded = x.clamp(max=100.0)  # where a sigmoid is one; softmax makes NaN of an infinity
    return torch.stack((bounded, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]
