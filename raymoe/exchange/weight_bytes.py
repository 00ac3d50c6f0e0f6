"""Carry float32 numbers in rows of any dtype, where NCCL moves them: one row element for each byte.

The integers 0 to 255 are exact in bfloat16, float16 and float32, and so is their sum with zeros. So a combine of such
rows brings each entry's number home, whatever the dtypes of rows and wire. kernels/spread_weights.cu writes these rows,
and gather_weights.cu reads the sums that came home.
"""

from __future__ import annotations

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Backend, Dispatched
from raymoe.exchange.spec import ExchangeSpec

BYTES = 4


def combine_twice(
    backend: Backend, rows: torch.Tensor, spread: torch.Tensor, got: Dispatched, out: torch.Tensor
) -> torch.Tensor:
    """Combine rows without weights into `out`, and then rows that hold bytes; return the latter's sums."""
    returned = torch.empty_like(out)
    backend.combine(rows, got, False, out)
    backend.combine(spread, got, False, returned)
    return returned


def check_width(spec: ExchangeSpec) -> None:
    """Raise if rows are too short for the bytes of K numbers.

    >>> check_width(ExchangeSpec(tokens=1, hidden=16, experts=8, topk=5))
    Traceback (most recent call last):
    raymoe.errors.ConfigError: gradients of 5 weights a token in rows of 16; each takes 4 elements: take a smaller topk
    """
    if spec.topk * BYTES > spec.hidden:
        raise ConfigError(
            f"gradients of {spec.topk} weights a token in rows of {spec.hidden}; each takes {BYTES} elements: take a "
            "smaller topk"
        )
