"""The layer: router, exchange and experts put together."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import nn

from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.job.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.experts import Experts
from raymoe.moe.router import Router
from raymoe.moe.seeds import generator
from raymoe.moe.weights import ExpertShape


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a world; every rank calls it in step.

    The weights follow from the seed: every rank has the same router, and expert e is the same wherever it lives.
    Forward only: nothing here has gradients yet.

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
        """x[T', H] -> y[T', H], each token through the experts that the router chooses for it."""
        if x.requires_grad and torch.is_grad_enabled():
            raise ConfigError("x requires grad and MoELayer has no backward yet: call it under torch.no_grad()")
        with torch.no_grad():
            ids, weights = self.router(x)
            return self.routed(x, ids, weights)

    @torch.no_grad()
    def routed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts, combine, for a routing that was decided elsewhere."""
        got = self.exchange.dispatch(x, ids, weights)
        rows = self.experts(expert_major(got), got.expert_offsets, got.expert_counts)
        return self.exchange.combine(rows, got)

    def close(self, together: bool = True) -> None:
        """Give up the exchange's memory; all ranks do."""
        self.exchange.close(together)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)


def expert_major(got: Dispatched) -> torch.Tensor:
    """The rows of a dispatch expert by expert, copied out of the slots if they are still there."""
    return got.x if got.index is None else got.x[got.index]
