"""Compare tensors of floats as integers, bit by bit."""

from __future__ import annotations

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both have the same dtype, shape and bits: NaN equals NaN, and 0 is not -0."""
    kind = INTEGERS[a.element_size()]
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert same_bits(a, b), f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}: {(a != b).sum()} differ"
