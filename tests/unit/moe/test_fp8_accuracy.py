"""Errors of experts of 8-bit floats are within what three bits of mantissa give, and are those of docs/products.md."""

from __future__ import annotations

import re

import pytest
import torch

from raymoe.fp8 import quantise
from tests.python_path import REPOSITORY
from tests.unit.moe import fp8_layer_accuracy
from tests.unit.moe.fp8_accuracy import CASES, HEAD, AccuracyCase, half_units, numbers, table
from tests.unit.moe.grouped_cases import RowsCase
from tests.unit.ranks import RankPool

PAGE = REPOSITORY / "docs" / "products.md"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_within_their_bounds(case: AccuracyCase) -> None:
    errors = numbers(case)
    for name, error, bound in zip(HEAD[1::2], errors[::2], errors[1::2], strict=True):
        assert bound.rms / 4 <= error.rms <= bound.rms, f"{name}: {error}, {bound}"
        assert error.worst_row <= bound.worst_row, f"{name}: {error}, {bound}"


@pytest.mark.parametrize("outliers", [False, True])
def test_scales_that_are_powers_of_two_change_no_bound(outliers: bool) -> None:
    """They leave the mantissa as it is. Elements are up to twice as near to the subnormal ones, of which few are."""
    ordinary, powers = (case for case in CASES if case.outliers == outliers)
    for one, other in zip(numbers(ordinary)[5::2], numbers(powers)[5::2], strict=True):
        assert other.rms == pytest.approx(one.rms, rel=0.01), "the bounds, which no luck changes"


def test_wide_weights_cost_more_than_the_same_ones() -> None:
    for case in CASES:
        *_, same, _, wide, _ = numbers(case)
        assert wide.rms > 1.2 * same.rms


def test_half_a_unit_is_the_largest_error_of_a_rounding() -> None:
    """Of rows over 24 binades, subnormal elements too."""
    rows = RowsCase(()).drawn(64, 256, seed=1).double() * 2.0 ** -torch.arange(256).remainder(24)
    values, scales = quantise(rows)
    units = half_units(values, scales)
    wide = values.double() * scales.double().repeat_interleave(128, dim=1)
    part = ((rows - wide).abs() / units).flatten()
    assert 0.98 < float(part.max()) <= 1 + 2**-18, "the scale and its inverse are rounded to float32"
    assert 0.4 < float(part.mean()) < 0.6, "errors are spread evenly"


def cells_of(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def compare_with_the_page(printed: list[str]) -> list[list[str]]:
    """Return the rows of the table that the page has with this head, if they are those that a command prints."""
    shown, want = PAGE.read_text(), cells_of(printed)
    begin = shown.index(f"| {want[0][0]} |")
    have = cells_of(shown[begin:].split("\n\n")[0].splitlines())
    assert have[:2] == want[:2] and [row[0] for row in have] == [row[0] for row in want]
    for row, computed in zip(have[2:], want[2:], strict=True):
        for cell, other in zip(row[1:], computed[1:], strict=True):
            for number, now in zip(cell.split(" / "), other.split(" / "), strict=True):
                assert float(number) == pytest.approx(float(now), rel=0.02, abs=0.01), (row[0], cell, other)
    return have[2:]


def test_the_page_has_the_table_that_the_command_prints() -> None:
    for row in compare_with_the_page(table()):
        assert all(re.fullmatch(r"\d+\.\d\d / \d+\.\d\d", cell) for cell in row[1:]), row


@pytest.mark.thorough
def test_a_whole_layer_has_the_errors_of_rows_that_torch_quantises(pool: RankPool) -> None:
    rows = compare_with_the_page(fp8_layer_accuracy.table(pool))
    assert len(rows) == len(fp8_layer_accuracy.CASES)
    for name, same, by_torch, ratio, wide, _ in rows:
        assert 1 <= float(ratio) <= 1.15, (name, same, by_torch)
        assert float(same.split(" / ")[0]) < float(wide.split(" / ")[0]) < 7, name
        if name.endswith("with x"):
            assert float(same.split(" / ")[0]) <= 4, name
