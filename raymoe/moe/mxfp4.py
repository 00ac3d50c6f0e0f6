"""Weights of 4-bit floats (MXFP4) as 8-bit floats, bit for bit.

MXFP4 has 32 elements of a row, e2m1, and one scale for them, a power of two. The products take e4m3 with one scale for
each 128 rows and 128 columns. An element of e2m1 has at most two bits, so e4m3 holds it wherever its lowest bit is at
least 2^-9 and its highest at most 2^8. A power of two as the block's scale puts all elements of a block there, if
their bits are at most 17 places apart.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.fp8 import FP8_BLOCK

MX_GROUP = 32
"""Elements of a row that share one scale."""
MX_BIAS = 127
"""A scale's byte is its exponent plus this."""
MX_NAN = 255
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the codes 0 to 7. Codes 8 to 15 are the same with a minus."""
_HIGHEST_BITS = (-1, 0, 0, 1, 1, 2, 2)  # of the codes 1 to 7
_LOWEST_BITS = (-1, 0, -1, 1, 0, 2, 1)
_HIGHEST, _LOWEST = 8, -9
"""Exponents of e4m3's highest bit and of its lowest, a subnormal step."""
_LEAST_NORMAL = -126
_FAR = 1000  # beyond all exponents
_SHIFTS = 16
"""Beyond the shifts of groups that are not zero: -9 - 2, which takes 4 to 2^-9, to 8 + 1, which takes 0.5 to 2^8."""


def reencode_mxfp4(blocks: Tensor, scales: Tensor, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """Map MXFP4 to values float8_e4m3fn[N, K] and scales float32[ceil(N / 128), ceil(K / 128)], without an error.

    `blocks` are uint8[N, K / 2], two elements each, the first in the low bits. `scales` are uint8[N, K / 32]. A block
    whose elements have bits more than 17 places apart is refused. Messages call the weight `name`.

    >>> blocks = torch.tensor([[0x71] + 15 * [0], [0xA0] + 15 * [0]], dtype=torch.uint8)
    >>> values, scales = reencode_mxfp4(blocks, torch.tensor([[127], [130]], dtype=torch.uint8))
    >>> (values.float() * scales)[:, :2].tolist(), scales.tolist()
    ([[0.5, 6.0], [0.0, -8.0]], [[0.03125]])
    """
    rows, groups = scales.shape
    pairs = blocks.reshape(rows, groups, MX_GROUP // 2)
    if bool((scales == MX_NAN).any()):
        raise ConfigError(f"{name} has a scale of NaN (byte {MX_NAN}); the checkpoint is damaged, or no MXFP4")
    highest, lowest = _bits_of_groups(pairs, scales)
    exponents = _exponents_of_blocks(highest, lowest, name)
    exponents_of_groups = _to_groups(exponents, rows, groups)
    shifts = (scales.int() - MX_BIAS - exponents_of_groups).clamp(-_SHIFTS, _SHIFTS)  # groups of zeros stay zero
    places = (shifts + _SHIFTS)[..., None] * 256 + pairs
    table = _encoded_pairs().to(blocks.device)
    values = table.index_select(0, places.flatten()).view(torch.float8_e4m3fn)
    return values.view(rows, groups * MX_GROUP), _powers_of_two(exponents)


def _bits_of_groups(pairs: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponents of the highest and of the lowest bit in each group: int32[N, K / 32]."""
    highest_bits, lowest_bits = (table.to(pairs.device) for table in _bits_of_pairs())
    codes, exponents = pairs.flatten().int(), scales.int() - MX_BIAS
    highest = highest_bits.index_select(0, codes).view(pairs.shape).amax(dim=-1)
    lowest = lowest_bits.index_select(0, codes).view(pairs.shape).amin(dim=-1)
    zero = highest == -_FAR
    return torch.where(zero, -_FAR, highest + exponents), torch.where(zero, _FAR, lowest + exponents)


def _exponents_of_blocks(highest: Tensor, lowest: Tensor, name: str) -> Tensor:
    """Return the exponent of each block's scale, which takes its highest bit to e4m3's: int32[N / 128, K / 128]."""
    highest, lowest = -_least_of_blocks(-highest), _least_of_blocks(lowest)
    exponents = (highest - _HIGHEST).clamp(min=_LEAST_NORMAL)
    wrong = ((lowest - exponents < _LOWEST) & (highest > -_FAR)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ConfigError(
            f"{name}, the block from row {row * FP8_BLOCK} and column {column * FP8_BLOCK} on: its elements have bits "
            f"from 2^{int(lowest[row, column])} to 2^{int(highest[row, column])}, and one scale of 8-bit floats spans "
            f"{_HIGHEST - _LOWEST} powers of two; make the weights bfloat16 and round them by quantise_experts"
        )
    return torch.where(highest == -_FAR, 0, exponents)


def _least_of_blocks(numbers: Tensor) -> Tensor:
    """Return the least number of each 128 rows and 128 columns, of numbers [N, K / 32]."""
    rows, groups = numbers.shape
    of_block = FP8_BLOCK // MX_GROUP
    padding = (0, -groups % of_block, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(numbers, padding, value=_FAR)
    return padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, of_block).amin(dim=(1, 3))


def _to_groups(numbers: Tensor, rows: int, groups: int) -> Tensor:
    wide = numbers.repeat_interleave(FP8_BLOCK // MX_GROUP, dim=1)[:, :groups]
    return wide.repeat_interleave(FP8_BLOCK, dim=0)[:rows]


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents, of normal floats, by their bits: torch.exp2 may round."""
    return ((exponents + 127) << 23).view(torch.float32)


# Tables of bytes: a byte has two elements.


@functools.cache
def _bits_of_pairs() -> tuple[Tensor, Tensor]:
    """Return the exponents of the highest and the lowest bit in each byte: int32[256]. A zero has none."""
    highest = torch.tensor((-_FAR, *_HIGHEST_BITS) * 2, dtype=torch.int32)
    lowest = torch.tensor((_FAR, *_LOWEST_BITS) * 2, dtype=torch.int32)
    return (
        torch.maximum(highest[:, None], highest[None, :]).flatten(),
        torch.minimum(lowest[:, None], lowest[None, :]).flatten(),
    )


@functools.cache
def _encoded_pairs() -> Tensor:
    """Return each byte's elements times 2^-16 to 2^16 as two bytes of e4m3: int16[33 * 256]."""
    magnitudes = torch.tensor(E2M1)
    elements = torch.cat((magnitudes, -magnitudes))
    bytes_ = torch.arange(256)
    pairs = torch.stack((elements[bytes_ & 15], elements[bytes_ >> 4]), dim=-1)
    factors = _powers_of_two(torch.arange(-_SHIFTS, _SHIFTS + 1, dtype=torch.int32))
    return (pairs * factors[:, None, None]).to(torch.float8_e4m3fn).view(torch.int16).flatten()
