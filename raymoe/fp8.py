"""The format of rows and weights as 8-bit floats, and the formulas by torch.

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


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Map values [..., H] and their scales [..., ceil(H / 128)] to float32[..., H].

    >>> import torch
    >>> dequantise(*quantise(torch.tensor([[3.0, -896.0]]))).tolist()
    [[3.0, -896.0]]
    """
    return values.float() * scales.repeat_interleave(FP8_BLOCK, dim=-1)[..., : values.shape[-1]]


# Weights have a scale for each 128 rows and 128 columns.


def quantise_weight(weight: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [..., N, K] to values float8_e4m3fn[..., N, K] and scales float32[..., ceil(N / 128), ceil(K / 128)].

    Scales are as `quantise` chooses them; with `power_of_two` the next power of two from there on.

    >>> import torch
    >>> values, scales = quantise_weight(torch.tensor([[0.5, -448.0]] * 128 + [[3.0, 0.0]]))
    >>> values[127:].tolist(), scales.tolist()
    ([[0.5, -448.0], [448.0, 0.0]], [[1.0], [0.0066964286379516125]])
    >>> quantise_weight(torch.tensor([[3.0]]), power_of_two=True)[1].tolist()
    [[0.0078125]]
    """
    import torch

    N, K = weight.shape[-2:]
    row_blocks, column_blocks = -(-N // FP8_BLOCK), -(-K // FP8_BLOCK)
    padding = (0, column_blocks * FP8_BLOCK - K, 0, row_blocks * FP8_BLOCK - N)
    sizes = *weight.shape[:-2], row_blocks, FP8_BLOCK, column_blocks, FP8_BLOCK
    padded = torch.nn.functional.pad(weight.float(), padding).reshape(sizes)
    magnitudes = padded.abs()
    reach = torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax(dim=(-3, -1))
    scales = torch.where(reach == 0, 1.0, reach.clamp(min=LEAST_REACH) / torch.full_like(reach, LARGEST_E4M3))
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), torch.where(mantissa == 0.5, exponent - 1, exponent))
    scaled = (padded / scales[..., :, None, :, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    values = scaled.flatten(-4, -3).flatten(-2)[..., :N, :K].contiguous()
    return values.to(torch.float8_e4m3fn), scales


def dequantise_weight(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Map values [..., N, K] and their scales [..., ceil(N / 128), ceil(K / 128)] to float32[..., N, K].

    >>> import torch
    >>> weight = torch.tensor([[0.5, -448.0]] * 128 + [[3.0, 0.0]])
    >>> torch.equal(dequantise_weight(*quantise_weight(weight)), weight)
    True
    """
    return dequantise(values, scales.repeat_interleave(FP8_BLOCK, dim=-2)[..., : values.shape[-2], :])
