"""Experts with gaps, and their products in float64: for tests on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups


@dataclass(frozen=True)
class RowsCase:
    """Experts with `counts` rows, which start at multiples of `alignment` after a gap, on a device.

    Rows of no expert are NaN, and so are rows after the last offset.
    """

    counts: Sequence[int]
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    alignment: int = 16
    after: int = 5

    @property
    def starts(self) -> list[int]:
        """The offsets of the experts. A gap has a row at least."""
        offsets = [0]
        for count in self.counts:
            offsets.append(offsets[-1] + -(-(count + 1) // self.alignment) * self.alignment)
        return offsets

    @property
    def capacity(self) -> int:
        return self.starts[-1] + self.after

    @property
    def groups(self) -> Groups:
        places = (
            torch.tensor(numbers, dtype=torch.int32, device=self.device) for numbers in (self.starts, self.counts)
        )
        return Groups(*places)

    def own(self) -> Tensor:
        """Whether each row has an expert."""
        return self.groups.expert_of_row(self.capacity) < len(self.counts)

    def zeroed_gaps(self) -> Tensor:
        """Whether each row is in a gap that becomes zero where gradients are needed."""
        zeroed = torch.zeros(self.capacity, dtype=torch.bool, device=self.device)
        for start, following, count in zip(self.starts, self.starts[1:], self.counts, strict=False):
            zeroed[start + count : min(start + -(-count // 16) * 16, following)] = True
        return zeroed

    def rows(self, columns: int, seed: int) -> Tensor:
        rows = self.drawn(self.capacity, columns, seed=seed)
        rows[~self.own()] = nan
        return rows

    def row_weights(self, seed: int) -> Tensor:
        weights = torch.rand(self.capacity, generator=torch.Generator().manual_seed(seed)).to(self.device) + 0.25
        return weights.where(self.own(), nan)

    def drawn(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
        return drawn.to(self.device, self.dtype)


@dataclass(frozen=True)
class Exact:
    """The formulas in float64, of tensors that may need gradients. Rows of no expert are zero."""

    groups: Groups

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, row_weights: Tensor | None = None
    ) -> Tensor:
        y = self.products(x, weight, bias)
        return y if row_weights is None else y * self._own(row_weights[:, None].double())

    def products(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.zeros(len(x), weight.shape[1], dtype=torch.float64, device=x.device)
        for expert, (start, count) in enumerate(
            zip(self.groups.offsets.tolist(), self.groups.counts.tolist(), strict=False)
        ):
            part = x[start : start + count].double() @ weight[expert].double().T
            part = part if bias is None else part + bias[expert].double()
            y = torch.cat((y[:start], part, y[start + count :]))
        return y

    def gated(
        self,
        x: Tensor,
        weight: Tensor,
        form: ActivationForm,
        bias: Tensor | None = None,
        row_weights: Tensor | None = None,
    ) -> Tensor:
        products = self.products(x, weight, bias)
        gate, up = (products[:, ::2], products[:, 1::2]) if form.interleaved else products.chunk(2, dim=1)
        if form.limit != inf:
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        h = gate * torch.sigmoid(form.alpha * gate) * (up + form.up_plus)
        return h if row_weights is None else h * self._own(row_weights[:, None].double())

    def _own(self, rows: Tensor) -> Tensor:
        there = self.groups.expert_of_row(len(rows)) < len(self.groups.counts)
        return torch.where(there[:, None], rows, 0)


def near(have: Tensor, want: Tensor, bound: float) -> None:
    """Compare by norms; NaN is not near."""
    error = float(
        (have.detach().double() - want.detach().double()).norm() / want.detach().double().norm().clamp(min=1e-30)
    )
    assert error <= bound, f"{list(have.shape)}: {error}"
