"""Errors of experts of 8-bit floats on a CPU, and their bounds: `python -m tests.unit.moe.fp8_accuracy`.

A bound follows from e4m3's three bits of mantissa alone. A rounding of an element is at most half a unit of its last
bit. Squares of these are added up through the products and SwiGLU, as those of errors whose signs do not depend on one
another. Roundings that are spread evenly over a unit have 1 / sqrt(3) of the bound.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe.fp8 import quantise
from raymoe.moe import QuantisedExperts, quantise_experts
from raymoe.moe.experts import SWIGLU, Experts, ModelWeights
from raymoe.moe.product_fp8_operators import ScaledOperands, gate_scaled
from raymoe.moe.product_operators import Added
from tests.unit.moe.emulated_product_fp8 import dequantised
from tests.unit.moe.grouped_cases import Exact, RowsCase

HIDDEN, INNER = 256, 256
COUNTS = (30, 42)
OUTLIERS, TIMES = (3, 130, 131, 200), 100
"""Channels of the rows that are a hundred times as large as the others."""
BFLOAT16_ROUNDING = 2.0**-8
"""The error of a rounding to bfloat16, of the number."""
FLOAT32_ROUNDING = 2.0**-24


class Norms(NamedTuple):
    """The norm of an error in relation to that of the results, of all rows and of the worst row."""

    rms: float
    worst_row: float

    @classmethod
    def of(cls, errors: Tensor, results: Tensor) -> Norms:
        rows = errors.norm(dim=1) / results.norm(dim=1)
        return cls(float(errors.norm() / results.norm()), float(rows.max()))


@dataclass(frozen=True)
class AccuracyCase:
    """Experts and rows that are drawn, and the formula's results beside those in float64."""

    outliers: bool
    power_of_two: bool

    def __str__(self) -> str:
        rows = f"{len(OUTLIERS)} channels × {TIMES}" if self.outliers else "random"
        return f"{rows}; {'powers of two' if self.power_of_two else 'any'}"

    @property
    def case(self) -> RowsCase:
        return RowsCase(COUNTS)

    @functools.cached_property
    def own(self) -> Tensor:
        return self.case.own()

    @functools.cached_property
    def x(self) -> Tensor:
        x = self.case.drawn(self.case.capacity, HIDDEN, seed=1)
        if self.outliers:
            x[:, OUTLIERS] *= TIMES
        return x

    @functools.cached_property
    def experts(self) -> Experts:
        up = self.case.drawn(len(COUNTS), 2 * INNER, HIDDEN, seed=2, scale=HIDDEN**-0.5)
        return Experts(ModelWeights(up, self.case.drawn(len(COUNTS), HIDDEN, INNER, seed=3, scale=INNER**-0.5)))

    @functools.cached_property
    def quantised(self) -> QuantisedExperts:
        return quantise_experts(self.experts, power_of_two=self.power_of_two)

    @functools.cached_property
    def up_operands(self) -> ScaledOperands:
        made = self.quantised
        return ScaledOperands(*quantise(self.x), made.gate_up_proj.detach(), made.gate_up_proj_scale_inv.detach())

    @functools.cached_property
    def h(self) -> tuple[Tensor, Tensor]:
        """The 8-bit rows between the products, with their scales."""
        return gate_scaled(self.up_operands, self.case.groups, Added(None), SWIGLU.form, quantise=True)

    @functools.cached_property
    def y(self) -> Tensor:
        with torch.no_grad():
            rows: Tensor = self.quantised(self.x, self.case.groups.offsets, self.case.groups.counts)
        return rows[self.own].double()

    def weights(self, quantised: bool) -> tuple[Tensor, Tensor]:
        """Return both weights in float64, as they were or as they are quantised."""
        source = self.quantised if quantised else self.experts
        names = ("gate_up_proj", "down_proj")
        up, down = (getattr(source, name).detach().double() for name in names)
        if not quantised:
            return up, down
        scales = (getattr(source, f"{name}_scale_inv").detach() for name in names)
        up, down = (dequantised(values, of, 128) for values, of in zip((up, down), scales, strict=True))
        return up, down

    def exact(self, quantised_weights: bool) -> Tensor:
        """Compute the experts in float64 of rows that are not quantised."""
        up, down = self.weights(quantised_weights)
        exact = Exact(self.case.groups)
        return exact.linear(exact.gated(self.x, up, SWIGLU.form), down)[self.own]

    def error(self, quantised_weights: bool) -> Norms:
        want = self.exact(quantised_weights)
        return Norms.of(self.y - want, want)

    # Errors of the products alone, of the same 8-bit operands.

    def up_error(self) -> tuple[Norms, Norms]:
        """Return the error of rows after gate, up and SwiGLU, and its bound."""
        rows, _ = gate_scaled(self.up_operands, self.case.groups, Added(None), SWIGLU.form)
        x, (weight, _) = self._wide(self.up_operands.x, self.up_operands.x_scales), self.weights(quantised=True)
        want = Exact(self.case.groups).gated(x, weight, SWIGLU.form)
        sums = self._rounding_of_sums(x, weight)
        gate, up = Exact(self.case.groups).linear(x, weight).chunk(2, dim=1)
        of_gate, of_up = sums.chunk(2, dim=1)
        bound = BFLOAT16_ROUNDING * want.abs() + _steepness(gate, up) * of_gate + _silu(gate).abs() * of_up
        own = self.own
        return Norms.of((rows.double() - want)[own], want[own]), Norms.of(bound[own], want[own])

    def down_error(self) -> tuple[Norms, Norms]:
        """Return the error of the rows of the second product, and its bound."""
        h, (_, weight) = self._wide(*self.h), self.weights(quantised=True)
        want = Exact(self.case.groups).linear(h, weight)[self.own]
        bound = BFLOAT16_ROUNDING * want.abs() + self._rounding_of_sums(h, weight)[self.own]
        return Norms.of(self.y - want, want), Norms.of(bound, want)

    def _rounding_of_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the error of float32 sums at most: a rounding for each column, and two for the scales."""
        magnitudes = Exact(self.case.groups).linear(x.abs(), weight.abs())
        return (x.shape[1] + 2) * FLOAT32_ROUNDING * magnitudes

    def _wide(self, values: Tensor, scales: Tensor) -> Tensor:
        return torch.where(self.own[:, None], dequantised(values.double(), scales), 0)

    # The bound of what 8 bits cost.

    def bound(self, quantised_weights: bool) -> Norms:
        """Bound the error in relation to weights that are quantised too, or were not."""
        made, linear = self.quantised, Exact(self.case.groups).linear
        up, down = self.weights(quantised_weights)
        rounded = 0.0 if quantised_weights else 1.0  # whether weights have been rounded
        up_squares = rounded * half_units(made.gate_up_proj.detach(), made.gate_up_proj_scale_inv.detach(), 128) ** 2
        down_squares = rounded * half_units(made.down_proj.detach(), made.down_proj_scale_inv.detach(), 128) ** 2
        x = torch.where(self.own[:, None], self.x.double(), 0)
        x_squares = half_units(self.up_operands.x, self.up_operands.x_scales) ** 2
        gate, gate_up = linear(x, up).chunk(2, dim=1)
        of_products = linear(x**2, up_squares) + linear(x_squares, up**2 + up_squares)
        of_gate, of_up = of_products.chunk(2, dim=1)
        h = _silu(gate) * gate_up
        h_squares = _steepness(gate, gate_up) ** 2 * of_gate + _silu(gate) ** 2 * of_up + half_units(*self.h) ** 2
        y = linear(h, down)
        y_squares = linear(h**2, down_squares) + linear(h_squares, down**2 + down_squares)
        y_squares = y_squares + (BFLOAT16_ROUNDING * y) ** 2
        return Norms.of(y_squares.sqrt()[self.own], y[self.own])


def half_units(values: Tensor, scales: Tensor, rows: int = 1) -> Tensor:
    """Return half a unit in the last of three bits of each element, in float64; subnormal elements have the least's."""
    exponents = torch.frexp(values.double().abs()).exponent - 1
    exponents = torch.where(values.double() == 0, -6, exponents).clamp(min=-6)
    return dequantised(2.0 ** (exponents.double() - 4), scales, rows)


def _silu(gate: Tensor) -> Tensor:
    return gate * gate.sigmoid()


def _steepness(gate: Tensor, up: Tensor) -> Tensor:
    """Return by how much the gated activation changes with the gate."""
    sigmoid = gate.sigmoid()
    return (up * sigmoid * (1 + gate * (1 - sigmoid))).abs()


CASES = [AccuracyCase(outliers, power_of_two) for outliers in (False, True) for power_of_two in (False, True)]
HEAD = (
    "rows; scales of weights",
    "gate, up, SwiGLU",
    "bound",
    "down",
    "bound",
    "all, same weights",
    "bound",
    "all, wide weights",
    "bound",
)


@functools.cache
def numbers(case: AccuracyCase) -> list[Norms]:
    """Return the errors in a row of the table, each before its bound."""
    errors = [*case.up_error(), *case.down_error()]
    for quantised_weights in (True, False):
        errors += [case.error(quantised_weights), case.bound(quantised_weights)]
    return errors


def table() -> list[str]:
    """Return the lines of the table in docs/products.md: percentages, of all rows and of the worst one."""
    lines = [HEAD, ["---"] * len(HEAD)]
    lines += [[str(case), *(f"{100 * rms:.2f} / {100 * worst:.2f}" for rms, worst in numbers(case))] for case in CASES]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print("\n".join(table()))
