"""The experts of one rank, over rows that lie expert by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from raymoe.moe.weights import ExpertShape, expert_weights


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a CPU multiplies in. Rows keep their own, and weights are rounded to that first, so that this
    choice changes results by no more than rounding.

    Measured on one core of an AMD EPYC with AVX512_BF16 (torch 2.13, 256 x 1024 -> 1024, 2026-11-21): bfloat16 219
    GFLOP/s, float32 99, float16 21; with AVX2 only, bfloat16 falls to 22 and float32 stays.
    """
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return torch.float32


class Experts(nn.Module):
    """SwiGLU experts: down(silu(gate(x)) * up(x)) with the weights of the expert that the row lies under.

    `experts` are the numbers of this rank's experts in the gang; their weights follow from (seed, number).
    """

    def __init__(self, experts: Sequence[int], shape: ExpertShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.arithmetic = arithmetic_dtype(shape.dtype)
        made = [expert_weights(shape, seed, expert) for expert in experts]
        self.gate_up = self._frozen([weights.gate_up for weights in made])
        self.down = self._frozen([weights.down for weights in made])

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x[C, H] -> rows[C, H]. Local expert i has `counts[i]` rows from `offsets[i]` on; other rows are unspecified.

        >>> experts = Experts([0, 1], ExpertShape(hidden=8, ffn=4, dtype=torch.float32))
        >>> x = torch.randn(32, 8)
        >>> rows = experts(x, torch.tensor([0, 16, 32]), torch.tensor([3, 1]))
        >>> bool(torch.equal(rows[16:17], experts.one(1, x[16:17])))
        True
        """
        rows = torch.empty_like(x)
        for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
            if count:
                rows[start : start + count] = self.one(expert, x[start : start + count])
        return rows

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The rows of one local expert."""
        gate, up = nn.functional.linear(x.to(self.arithmetic), self.gate_up[expert]).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down[expert])

    def _frozen(self, weights: list[torch.Tensor]) -> nn.Parameter:
        return nn.Parameter(torch.stack(weights).to(self.arithmetic), requires_grad=False)
