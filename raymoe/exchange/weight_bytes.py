"""Carry float32 numbers in rows of any dtype: one row element for each byte.

The integers 0 to 255 are exact in bfloat16, float16 and float32, and so is their sum with zeros. So a combine of such
rows brings each entry's number home, whatever the dtypes of rows and wire.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Backend, Dispatched
from raymoe.exchange.spec import ROW_BYTES, ExchangeSpec
from raymoe.memory.layout import ITEM_BYTES, round_up

BYTES = 4
NOWHERE = 0xFFFFFFFF
"""The place of an entry whose expert is on another rank, as the kernels store it."""


def byte_spec(spec: ExchangeSpec) -> ExchangeSpec:
    """The spec of the same exchange with rows that hold the bytes of one number for each of K entries, and no more.

    >>> byte_spec(ExchangeSpec(tokens=4096, hidden=7168, experts=256, topk=8)).hidden
    32
    """
    width = round_up(spec.topk * BYTES, ROW_BYTES // ITEM_BYTES[spec.dtype])
    # With layout `rank` it takes the kernels of many tokens, whose slots fit where those of wider rows do.
    return replace(spec, hidden=width, layout="rank")


def spread_bytes(numbers: torch.Tensor, k_of_row: torch.Tensor, topk: int, like: torch.Tensor) -> torch.Tensor:
    """Return rows with the form of `like`, where row i holds `numbers[i]` in the columns of its entry's k.

    >>> rows = spread_bytes(torch.tensor([1.5, -2.0]), torch.tensor([1, 0]), 2, torch.empty(2, 8))
    >>> rows[0].int().tolist(), rows[1].int().tolist()
    ([0, 0, 0, 0, 0, 0, 192, 63], [0, 0, 0, 192, 0, 0, 0, 0])
    """
    each = numbers.contiguous().view(torch.uint8).view(-1, 1, BYTES)
    of_row = k_of_row[:, None] == torch.arange(topk, device=numbers.device)
    rows = torch.zeros_like(like)
    rows[:, : topk * BYTES] = (each * of_row[..., None]).flatten(1).to(like.dtype)
    return rows


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


def gather_bytes(rows: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write the float32 numbers that rows hold to `numbers`, [T', K]. A row of NaN gives NaN.

    >>> numbers = torch.empty(1, 2)
    >>> gather_bytes(torch.tensor([[0, 0, 0, 192, 0, 0, 192, 63]], dtype=torch.bfloat16), numbers)
    >>> numbers.tolist()
    [[-2.0, 1.5]]
    """
    columns = rows[:, : numbers.shape[1] * BYTES]
    found = columns.nan_to_num(nan=0.0).to(torch.uint8).contiguous().view(torch.float32)
    numbers.copy_(torch.where(columns.isnan()[:, :1], torch.nan, found))
