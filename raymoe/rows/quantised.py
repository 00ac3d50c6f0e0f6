"""Rows as 8-bit floats by torch, in the form of the kernels' results."""

from __future__ import annotations

import torch

from raymoe.fp8 import quantise
from raymoe.rows.results import new_quantised


def quantised(rows: torch.Tensor, column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 rows by torch into new memory with the strides of `new_quantised`."""
    values, scales = new_quantised(rows.shape, rows.device, column)
    made_values, made_scales = quantise(rows)
    return values.copy_(made_values), scales.copy_(made_scales)
