"""MXFP4 weights become 8-bit floats without an error, or are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.moe.mxfp4 import reencode_mxfp4
from tests.unit.moe.checkpoint_cases import by_definition

LEAST = torch.finfo(torch.float32).tiny


def drawn(rows: int, columns: int, exponents: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw all codes, and scales with exponents in a range, both ends included."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    least, most = (exponent + 127 for exponent in exponents)
    scales = torch.randint(least, most + 1, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def numbers_of(values: Tensor, scales: Tensor) -> Tensor:
    """Return values times scales in float64."""
    wide = scales.double().repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return values.double() * wide[: values.shape[0], : values.shape[1]]


def check_exact(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    values, made = reencode_mxfp4(blocks, scales)
    numbers, want = numbers_of(values, made), by_definition(blocks, scales)
    assert values.dtype == torch.float8_e4m3fn and values.shape == want.shape and values.is_contiguous()
    assert torch.equal(numbers, want) and torch.equal(numbers.signbit(), want.signbit())
    assert made.dtype == torch.float32 and bool((torch.frexp(made).mantissa == 0.5).all())
    assert bool((made >= LEAST).all()), "a scale below the least normal float may be flushed to zero"
    return values, made


@pytest.mark.parametrize("sizes", [(1, 32), (128, 128), (130, 160), (300, 288), (64, 2880)], ids=str)
@pytest.mark.parametrize("exponents", [(-4, 3), (-14, 0), (-127, -113), (113, 127), (127, 127)], ids=str)
def test_all_codes_keep_their_bits(sizes: tuple[int, int], exponents: tuple[int, int]) -> None:
    check_exact(*drawn(*sizes, exponents))


def test_groups_of_zeros_may_have_any_exponent() -> None:
    blocks, scales = drawn(200, 256, (0, 0))
    blocks[:, 16:32], scales[:, 1] = 0x80, 254  # zeros, one of each pair with a minus
    blocks[:, 32:48], scales[:, 2] = 0, 0
    check_exact(blocks, scales)
    blocks[:128, :64] = 0
    _, made = check_exact(blocks, scales)
    assert made[0, 0] == 1, "as quantise_weight scales a block of zeros"


def test_each_block_has_a_scale_of_its_own() -> None:
    blocks, scales = drawn(256, 256, (0, 0))
    scales[:128, :4], scales[128:, 4:] = 10, 244
    _, made = check_exact(blocks, scales)
    assert made.tolist() == [[2.0 ** (10 - 127 + 2 - 8), 2.0**-6], [2.0**-6, 2.0 ** (244 - 127 + 2 - 8)]]


def one_block(first: tuple[int, int], second: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a block of zeros with two elements, each a code and an exponent, in two groups."""
    blocks, scales = torch.zeros(128, 64, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8)
    (blocks[3, 0], scales[3, 0]), (blocks[127, 63], scales[127, 3]) = ((c, e + 127) for c, e in (first, second))
    return blocks, scales


BITS = {1: (-1, -1), 2: (0, 0), 3: (0, -1), 4: (1, 1), 5: (1, 0), 6: (2, 2), 7: (2, 1)}
"""The exponents of the highest and of the lowest bit of each magnitude: 0.5, 1, 1.5, 2, 3, 4, 6."""


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(BITS)), st.sampled_from(list(BITS)), st.integers(-127, 127), st.integers(0, 24), st.booleans()
)
def test_two_elements_are_exact_just_where_their_bits_are_17_places_apart(
    one: int, other: int, exponent: int, apart: int, negative: bool
) -> None:
    low = max(-127, exponent - apart)
    highest = max(BITS[one][0] + exponent, BITS[other][0] + low)
    lowest = min(BITS[one][1] + exponent, BITS[other][1] + low)
    operands = one_block((one + 8 * negative, exponent), (other << 4, low))
    if highest - lowest <= 17:
        check_exact(*operands)
        return
    with pytest.raises(ConfigError, match=rf"have bits from 2\^{lowest} to 2\^{highest}, .* spans 17 powers of two"):
        reencode_mxfp4(*operands)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 140),
    st.integers(1, 6),
    st.integers(-127, 127),
    st.integers(0, 14),
    st.integers(0, 2**31),
)
def test_drawn_weights_keep_their_bits(rows: int, groups: int, most: int, spread: int, seed: int) -> None:
    check_exact(*drawn(rows, 32 * groups, (max(-127, most - spread), most), seed))


def test_the_sentence_names_the_weight_and_the_block() -> None:
    blocks, scales = drawn(300, 320, (0, 0))
    blocks[260, 130], scales[260, 8] = 7, 127 - 30
    with pytest.raises(ConfigError) as caught:
        reencode_mxfp4(blocks, scales, "gate_up_proj_blocks, expert 3")
    message = str(caught.value)
    assert message.startswith("gate_up_proj_blocks, expert 3, the block from row 256 and column 256 on: ")
    assert "2^-31 to 2^2" in message and message.endswith("round them by quantise_experts")


def test_scales_of_nan_are_refused() -> None:
    blocks, scales = drawn(4, 64, (0, 0))
    scales[2, 1] = 255
    with pytest.raises(ConfigError, match="the weight has a scale of NaN"):
        reencode_mxfp4(blocks, scales)
