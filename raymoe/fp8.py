"""The format of rows as 8-bit floats, and the formula by torch.

Kernels compute the same bits: kernels/include/raymoe/peer/dispatch/quantising.cuh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP8 = "float8_e4m3"
FP8_BLOCK = 128
"""Elements of a row that share one float32 scale."""
LARGEST_E4M3 = 448.0
LEAST_REACH = LARGEST_E4M3 * 2.0**-126
"""With a scale below the least normal float32, the scale or its inverse would overflow."""


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [..., H] to values float8_e4m3fn[..., H] and scales float32[..., ceil(H / 128)].

    A block's scale is its largest finite magnitude divided by 448. A block without finite elements other than zero has
    scale 1. An infinity becomes 448 and NaN stays NaN.

    >>> import torch
    >>> values, scales = quantise(torch.tensor([[0.0] * 128 + [3.0, -896.0, torch.inf]]))
    >>> values[0, 127:].tolist(), scales.tolist()
    ([0.0, 1.5, -448.0, 448.0], [[1.0, 2.0]])
    """
    import torch

    H = rows.shape[-1]
    blocks = -(-H // FP8_BLOCK)
    padded = torch.nn.functional.pad(rows, (0, blocks * FP8_BLOCK - H)).view(*rows.shape[:-1], blocks, FP8_BLOCK)
    magnitudes = padded.abs()
    reach = torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax(dim=-1).float()
    bounded = reach.clamp(min=LEAST_REACH)
    one = torch.ones_like(reach)
    # Both operands are tensors: with a number torch multiplies by an inverse instead, which rounds twice.
    largest = torch.full_like(reach, LARGEST_E4M3)
    scales = torch.where(reach == 0, one, bounded / largest)
    factors = torch.where(reach == 0, one, largest / bounded)
    scaled = (padded * factors[..., None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return scaled.flatten(-2)[..., :H].to(torch.float8_e4m3fn), scales
