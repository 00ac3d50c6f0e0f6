"""`fused` for few tokens: rows travel in lines that say themselves of which epoch they are, so nothing follows them.

The kernels of many tokens keep the links busy; where there is little to send, what takes time is that each row is
awaited, fenced and announced. kernels/include/raymoe/lines.cuh has the idea, dispatch_few.cu and combine_few.cu the
protocol. Epochs are those of `fused`, so both kinds of exchange share a workspace; the split form is that of `fused`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.device import combine, dispatch, few
from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.fused import FusedBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World


class FewBackend(FusedBackend):
    """For specs that `is_few` is true of."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int | str) -> None:
        super().__init__(world, spec, workspace, sms)
        space, fp8, ranks = self.workspace, self.build.fp8, world.size
        most = self.sms if sms == "auto" else min(self.sms, int(sms))
        # A second round of blocks finds the multiprocessors of the first only where there are no others left.
        rounds = few.ROUNDS if most == world.gpu.sms else 1
        # Of a row there and of its sum back, the least units that a warp moves.
        self._there = few.row_units(spec.row_bytes, spec.hidden, fp8)
        self._back = few.row_units(spec.row_bytes, spec.hidden, fp8=False)
        self._sending = few.dispatch_few_grid(self._there, spec.tokens, ranks, most, rounds, fp8)
        self._summing = few.combine_few_grid(self._back, spec.tokens, ranks, most, rounds)
        self._most_sent, most_placed = (1, 1) if fp8 else (few.SENT, few.PLACED)
        self._placed = self._sending.arrive(self._there, most_placed, spec.tokens, ranks)
        self._reduced = self._summing.leave(self._back, few.REDUCED, spec.tokens, ranks - 1)
        self._shared_bytes = few.few_shared_bytes(spec.experts, fp8)
        self._dispatch_few = space.kernels.function(few.dispatch_few_source(spec.dtype, fp8, space.traces))
        self._combine_few = space.kernels.function(few.combine_few_source(spec.dtype, space.traces))

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got, grid = self._new(tokens, out), self._sending
        params = self._of(got, dispatch.ALL_PARTS)
        routers, runs = few.few_routers(params.tokens * self.spec.topk, grid.arriving)
        params = replace(
            params,
            senders=grid.leaving,
            placers=grid.arriving,
            routers=routers,
            router_runs=runs,
            few_sent=grid.leave(self._there, self._most_sent, params.tokens),
            few_placed=self._placed,
        )
        self._launch(self._dispatch_few, grid.shape(self._shared_bytes), params)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        grid = self._summing
        params = self._sums_of(rows, got, weighted, out, combine.ALL_PARTS)
        params = replace(
            params,
            reducers=grid.leaving,
            summers=grid.arriving,
            few_reduced=self._reduced,
            few_summed=grid.arrive(self._back, few.SUMMED, params.tokens),
        )
        self._launch(self._combine_few, grid.shape(), params)
