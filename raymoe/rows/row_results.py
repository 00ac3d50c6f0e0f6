"""Allocate the results of the functions over rows, and quantise them by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from raymoe.fp8 import FP8_BLOCK, quantise

COLUMN_ALIGNMENT = 4
"""A column of scales is padded to a multiple of 4, which is 16 bytes, as bulk copies need."""


def new_like(x: Tensor) -> Tensor:
    """Allocate contiguous memory of the shape of x, whatever its strides are."""
    return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def new_total(x: Tensor, residual: Tensor | None) -> Tensor:
    """Allocate x + residual. Without a residual it is empty: an operator may not return its input."""
    return x.new_empty(0) if residual is None else new_like(x)


def new_halved(gate_up: Tensor) -> Tensor:
    """Allocate rows of half the width."""
    *leading, width = gate_up.shape
    return gate_up.new_empty((*leading, width // 2))


def new_quantised(rows: torch.Size, device: torch.device, column: bool) -> tuple[Tensor, Tensor]:
    """Allocate values and scales for rows of this shape. Columns of scales lie one after the other.

    >>> values, scales = new_quantised(torch.Size([5, 256]), torch.device("cpu"), column=True)
    >>> list(values.shape), list(scales.shape), scales.stride()
    ([5, 256], [5, 2], (1, 8))
    """
    *leading, H = rows
    blocks = -(-H // FP8_BLOCK)
    values = torch.empty(rows, dtype=torch.float8_e4m3fn, device=device)
    if not column:
        return values, torch.empty(*leading, blocks, dtype=torch.float32, device=device)
    [T] = leading
    aligned = -(-T // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return values, torch.empty_strided((T, blocks), (1, aligned), dtype=torch.float32, device=device)


def quantised(rows: Tensor, column: bool) -> tuple[Tensor, Tensor]:
    """Quantise float32 rows by torch, in the form of the kernels' results."""
    values, scales = new_quantised(rows.shape, rows.device, column)
    exact_values, exact_scales = quantise(rows)
    return values.copy_(exact_values), scales.copy_(exact_scales)
