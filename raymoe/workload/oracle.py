"""Compute the right result of a step in the slow and obvious way.

The oracle knows no plan, no slots and no exchange. A rank takes its own tokens, their ids and weights, applies the
experts to them and sums in float64. Experts are very different functions, and none is linear through zero. So an error
shows if a row went to the wrong expert, came twice, did not come, or has the weight of another row.

The error of a result is max |y - want| / sum_k |w_k * row_k|. It is relative to the terms of the sum, because the sum
itself may cancel to zero. A token with no expert has no such scale and must be exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint

from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, FP8_BLOCK, quantise, quantise_weight
from raymoe.moe.weights import ExpertShape, ExpertWeights, expert_biases, expert_weights, generator, mlp_weights
from raymoe.workload.inputs import Batch
from raymoe.workload.memory_needed import PIECE_BYTES

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The largest error allowed for an exchange alone, by dtype."""

FLOAT8_BOUND = 6e-2
"""The largest error allowed for an exchange that sends rows to the experts as float8_e4m3."""

LAYER_SLACK = 6
"""The error allowed for a layer, measured with `by_row`, as a multiple of the error allowed for an exchange.

An element of an expert's row is a sum that may cancel, so rounding errors are relative to the row's largest element.
To the exchange's two roundings a layer adds that of the row and four inside an expert (gate, up, silu, product). These
average out over F products. The largest errors seen over many seeds in bfloat16: 0.8e-2 at H=1024, F=512, and 2.9e-2 at
H=8, F=4, where little averages out."""

Rows = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, x float64[N, H]) -> rows float64[N, H]."""


def bound_of(spec: ExchangeSpec) -> float:
    """Return the error allowed for an exchange: that of the coarsest dtype to which its rows or sums are rounded.

    >>> bound_of(ExchangeSpec(8, 64, 4, 2, dtype="float32", wire={"combine": "bfloat16"}))
    0.01
    """
    if spec.dispatch_wire == FP8:
        return FLOAT8_BOUND
    return max(BOUNDS[getattr(torch, name)] for name in (spec.dtype, spec.combine_wire))


@dataclass(frozen=True)
class Want:
    """The right result `y`, and the `scale` that errors are relative to, both float64[T', H]."""

    y: torch.Tensor
    scale: torch.Tensor

    def error_of(self, y: torch.Tensor) -> float:
        """Return the largest relative error. Infinite for NaN, and for a nonzero element where nothing was added up.

        >>> want = Want(torch.tensor([[2.0, 0.0]]), torch.tensor([[4.0, 0.0]]))
        >>> want.error_of(torch.tensor([[3.0, 0.0]])), want.error_of(torch.tensor([[2.0, 0.1]]))
        (0.25, inf)
        """
        if y.shape != self.y.shape:
            return torch.inf
        error = (y.double() - self.y).abs()
        relative = torch.where(error == 0, 0.0, error / self.scale)
        return float(relative.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if relative.numel() else 0.0


def want(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: Rows, *, by_row: bool = False) -> Want:
    """Sum w_k * rows(id_k, x) over k for each token of a rank. With `by_row`, a row's scale is its largest element.

    >>> x, ids = torch.ones(1, 2), torch.tensor([[3, -1]])
    >>> want(x, ids, torch.tensor([[0.5, 0.5]]), lambda expert, x: x + expert).y.tolist()
    [[2.0, 2.0]]
    """
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    scale = torch.zeros_like(y)
    x, weights = x.double(), weights.double()
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        row = rows(expert, x[token])
        size = row.abs().amax(dim=-1, keepdim=True).expand_as(row) if by_row else row.abs()
        weight = weights[token, choice, None]
        y.index_add_(0, token, weight * row)
        scale.index_add_(0, token, weight.abs() * size)
    return Want(y, scale)


def error_of(y: torch.Tensor, batch: Batch, rows: Rows, *, by_row: bool = False) -> float:
    """Return the largest relative error of `y`, the result for a batch."""
    if y.shape != batch.x.shape:
        return torch.inf
    piece = max(1, PIECE_BYTES // (8 * y.shape[1]))
    worst = 0.0
    for start in range(0, len(y), piece):
        part = slice(start, start + piece)
        expected = want(batch.x[part], batch.ids[part], batch.weights[part], rows, by_row=by_row)
        worst = max(worst, expected.error_of(y[part]))
    return worst


def wrong_result(y: torch.Tensor, batch: Batch, rows: Rows, spec: ExchangeSpec) -> str | None:
    """Say how wrong the result of an exchange is; None if its error is allowed."""
    error, bound = error_of(y, batch, rows), bound_of(spec)
    return None if error <= bound else f"an error of {error:.2g}, at most {bound:g} is allowed"


@dataclass(frozen=True)
class AffineExperts:
    """Experts x -> a * x + b, rounded to `dtype`. Each expert has its own `a` and `b` for each column.

    For |x| <= 1 the elements of a row lie between 1 and 4 in size (0.5 <= |a| <= 1, 2 <= |b| <= 3). So each rounding on
    the way is relative to the terms of the sum. There are two: each rank's sum and the result. They add at most
    2 * 2**-8 < 1e-2 if both are bfloat16, and 2 * 2**-11 < 2e-3 if both are float16. If rows cross as float8_e4m3, an
    element of x is off by at most 1/28 before (numbers up to 448 lie 32 apart: half of that), 5e-2 in all.
    """

    hidden: int
    dtype: torch.dtype
    seed: int = 0
    _known: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if (expert, x.device) not in self._known:
            a, b = self._drawn(expert)
            self._known[expert, x.device] = a.to(x.device), b.to(x.device)
        a, b = self._known[expert, x.device]
        return (a * x.double() + b).to(self.dtype).double()

    def _drawn(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = generator("affine expert", self.seed, expert)
        drawn = torch.rand(4, self.hidden, dtype=torch.float64, generator=source)
        signs = torch.where(drawn[2:] < 0.5, 1.0, -1.0)
        return (0.5 + 0.5 * drawn[0]) * signs[0], (2.0 + drawn[1]) * signs[1]


@dataclass(frozen=True)
class LayerExperts:
    """The layer's own experts in float64, from the same weights; `kind` and `experts_dtype` as in `LayerSection`.

    An expert is drawn where `x` is. A backward pass draws it once more, so no more than one is held in float64. 8-bit
    experts take the quantised values of weights, of rows, and of the rows between the products.
    """

    shape: ExpertShape
    seed: int = 0
    kind: str = "swiglu"
    experts_dtype: str | None = None

    def __call__(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = checkpoint(self._rows, expert, x, use_reentrant=False, preserve_rng_state=False)
        return rows

    def _rows(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights(expert, x.device)
        gate_up = self._rounded(x) @ self._rounded_weight(weights.gate_up, 2).T
        down = self._rounded_weight(weights.down).T
        if self.kind == "swiglu":
            gate, up = gate_up.chunk(2, dim=-1)
            rows: torch.Tensor = self._rounded(gate * gate.sigmoid() * up) @ down
            return rows
        biases = expert_biases(self.shape, self.seed, expert, x.device)
        gate_up = gate_up + biases.gate_up.double()
        gate, up = gate_up[:, 0::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
        rows = self._rounded(gate * (1.702 * gate).sigmoid() * (up + 1.0)) @ down
        return rows + biases.down.double()

    def _weights(self, expert: int, device: torch.device) -> ExpertWeights:
        return expert_weights(self.shape, self.seed, expert, device)

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows as the products take them, float64."""
        if self.experts_dtype is None:
            return rows.double()
        values, scales = quantise(rows.float())
        return _scaled_blocks(values, scales)

    def _rounded_weight(self, weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """Return a weight as the products take it, float64. Each of its `parts` has blocks of its own."""
        if self.experts_dtype is None:
            return weight.double()
        if self.kind != "swiglu":  # gate and up take turns
            parts = 1
        rounded = []
        for part in weight.chunk(parts):
            values, scales = quantise_weight(part)
            rounded.append(_scaled_blocks(values, scales.repeat_interleave(FP8_BLOCK, dim=0)[: len(part)]))
        return torch.cat(rounded)


class SharedExpert(LayerExperts):
    """The layer's shared expert in float64, as `LayerExperts`."""

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self._rows(0, x)

    def _weights(self, expert: int, device: torch.device) -> ExpertWeights:
        del expert
        return mlp_weights(self.shape, generator("shared", self.seed, device=device))


def _scaled_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply values [N, K] by the scales [N, ceil(K / 128)] of their blocks, in float64."""
    return values.double() * scales.double().repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
