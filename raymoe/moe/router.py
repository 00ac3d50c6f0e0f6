"""Which experts a token goes to, decided by the token itself."""

from __future__ import annotations

import torch
from torch import nn

from raymoe.job.errors import ConfigError


class Router(nn.Module):
    """Linear, softmax over all experts, the K largest, renormalised to sum to one. Scores are float32 whatever x is:
    two experts that differ by less than a bfloat16 step must not swap places from machine to machine."""

    def __init__(self, hidden: int, experts: int, topk: int, source: torch.Generator | None = None) -> None:
        super().__init__()
        if not 1 <= topk <= experts:
            raise ConfigError(f"a router over {experts} experts was asked for the best {topk}: ask for 1 to {experts}")
        self.topk = topk
        weight = torch.randn(experts, hidden, generator=source) * hidden**-0.5
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x[T', H] -> ids int64[T', K], best first, and weights float32[T', K]."""
        scores = nn.functional.linear(x.float(), self.weight).softmax(dim=-1)
        weights, ids = scores.topk(self.topk, dim=-1)
        return ids, weights / weights.sum(dim=-1, keepdim=True)
