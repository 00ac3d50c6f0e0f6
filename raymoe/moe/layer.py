"""The Mixture-of-Experts layer: router, exchange and experts put together."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.weights import ExpertShape, expert_weights, generator


class Router(nn.Module):
    """Chooses a token's experts: linear, softmax over all experts, the K largest, renormalised to sum to one.

    Scores are float32 for any dtype of x. In bfloat16, experts with close scores could swap places from machine to
    machine.
    """

    def __init__(self, hidden: int, experts: int, topk: int, source: torch.Generator | None = None) -> None:
        super().__init__()
        if not 1 <= topk <= experts:
            raise ConfigError(f"a router over {experts} experts was asked for the best {topk}; ask for 1 to {experts}")
        self.topk = topk
        weight = torch.randn(experts, hidden, generator=source) * hidden**-0.5
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map x[T', H] to ids int64[T', K], best first, and weights float32[T', K]."""
        scores = nn.functional.linear(x.float(), self.weight).softmax(dim=-1)
        weights, ids = scores.topk(self.topk, dim=-1)
        return ids, weights / weights.sum(dim=-1, keepdim=True)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype in which a CPU multiplies rows of `dtype`.

    Weights are rounded to `dtype` before, so the choice changes results by rounding only.

    Rates in GFLOP/s on one core of an AMD EPYC (torch 2.13, 256 x 1024 -> 1024, 2026-11-21): with AVX512_BF16 bfloat16
    219, float32 99, float16 21; with AVX2 only bfloat16 22, float32 the same.
    """
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return torch.float32


class Experts(nn.Module):
    """The SwiGLU experts of one rank: each row of expert e gives down(silu(gate(x)) * up(x)) with the weights of e.

    `experts` are the global numbers of this rank's experts. Their weights depend on (seed, number) alone.
    """

    def __init__(self, experts: Sequence[int], shape: ExpertShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.arithmetic = arithmetic_dtype(shape.dtype)
        made = [expert_weights(shape, seed, expert) for expert in experts]
        self.gate_up = self._frozen([weights.gate_up for weights in made])
        self.down = self._frozen([weights.down for weights in made])

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Map x[C, H] to rows[C, H]. Local expert i has `counts[i]` rows from `offsets[i]` on; others are unspecified.

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
        """Apply one local expert to its rows."""
        gate, up = nn.functional.linear(x.to(self.arithmetic), self.gate_up[expert]).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down[expert])

    def _frozen(self, weights: list[torch.Tensor]) -> nn.Parameter:
        return nn.Parameter(torch.stack(weights).to(self.arithmetic), requires_grad=False)


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a world. All ranks call it in one order.

    The weights depend on the seed alone: every rank has the same router, and expert e is the same on any rank.
    Forward only: the layer has no gradients.

    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     with MoELayer(world, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), ffn=16) as layer:
    ...         layer(torch.ones(3, 8, dtype=torch.bfloat16)).shape
    torch.Size([3, 8])
    """

    def __init__(self, world: World, spec: ExchangeSpec, ffn: int, *, backend: str = "auto", seed: int = 0) -> None:
        super().__init__()
        self.exchange = Exchange(world, spec, backend)
        local = spec.local_experts(world.size)
        shape = ExpertShape(spec.hidden, ffn, getattr(torch, spec.dtype))
        self.router = Router(spec.hidden, spec.experts, spec.topk, generator("router", seed))
        self.experts = Experts(range(world.rank * local, (world.rank + 1) * local), shape, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x[T', H] to y[T', H]: each token passes through the experts that the router chooses for it."""
        if x.requires_grad and torch.is_grad_enabled():
            raise ConfigError("x requires grad and MoELayer has no backward; call it under torch.no_grad()")
        with torch.no_grad():
            ids, weights = self.router(x)
            return self.routed(x, ids, weights)

    @torch.no_grad()
    def routed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dispatch, apply the experts and combine, for a given routing."""
        got = self.exchange.dispatch(x, ids, weights)
        rows = self.experts(expert_major(got), got.expert_offsets, got.expert_counts)
        return self.exchange.combine(rows, got)

    def close(self, together: bool = True) -> None:
        """Close the exchange. All ranks call this, unless one has failed (`together=False`)."""
        self.exchange.close(together)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)


def expert_major(got: Dispatched) -> torch.Tensor:
    """Return the rows of a dispatch in expert-major order, copied if they are in the slots."""
    return got.x if got.index is None else got.x[got.index]
