"""Rows as 8-bit floats by torch: the formula of kernels/include/raymoe/dispatch/quantising.cuh."""

from __future__ import annotations

import torch

from raymoe.exchange.spec import FP8_BLOCK

LARGEST_E4M3 = 448.0
LEAST_REACH = LARGEST_E4M3 * 2.0**-126
"""With a scale below the least normal float32, the scale or its inverse would overflow."""

COLUMN_ALIGNMENT = 4
"""A column of scales is padded to so many: 16 bytes, as bulk copies need."""


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map float32[..., H] to values float8_e4m3fn[..., H] and scales float32[..., ceil(H / 128)].

    A block's scale is its largest finite magnitude divided by 448. A block without finite elements other than zero has
    scale 1. An infinity becomes 448 and NaN stays NaN.

    >>> values, scales = quantise(torch.tensor([[0.0] * 128 + [3.0, -896.0, torch.inf]]))
    >>> values[0, 127:].tolist(), scales.tolist()
    ([0.0, 1.5, -448.0, 448.0], [[1.0, 2.0]])
    """
    H = rows.shape[-1]
    blocks = -(-H // FP8_BLOCK)
    padded = torch.nn.functional.pad(rows, (0, blocks * FP8_BLOCK - H)).view(*rows.shape[:-1], blocks, FP8_BLOCK)
    magnitudes = padded.abs()
    reach = torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax(dim=-1)
    bounded = reach.clamp(min=LEAST_REACH)
    one = torch.ones_like(reach)
    scales = torch.where(reach == 0, one, bounded / LARGEST_E4M3)
    factors = torch.where(reach == 0, one, LARGEST_E4M3 / bounded)
    scaled = (padded * factors[..., None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return scaled.flatten(-2)[..., :H].to(torch.float8_e4m3fn), scales


def new_quantised(rows: torch.Size, device: torch.device, column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate values and scales for rows of this shape. Columns of scales lie one behind the other.

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


def quantised(rows: torch.Tensor, column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 rows by torch into new memory with the strides of `new_quantised`."""
    values, scales = new_quantised(rows.shape, rows.device, column)
    made_values, made_scales = quantise(rows)
    return values.copy_(made_values), scales.copy_(made_scales)
