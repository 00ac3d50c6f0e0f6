"""`fused` for few tokens: rows travel in lines that say themselves of which epoch they are, so nothing follows them.

The kernels of many tokens keep the links busy; where there is little to send, what takes time is that each row is
awaited, fenced and announced. kernels/include/raymoe/ll/lines.cuh has the idea, dispatch_ll.cu and combine_ll.cu the
protocol. Epochs are those of `fused`, so both kinds of exchange share a workspace; the split form is that of `fused`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from raymoe.device import combine, dispatch, ll
from raymoe.device.combine import CombineParams
from raymoe.device.dispatch import DispatchParams
from raymoe.device.kernels import Launch
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.fused import COMBINE_ADDRESSES, DISPATCH_ADDRESSES, Aimed, FusedBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World


@dataclass(frozen=True)
class _Sent:
    """How the tokens of a call are dealt out to routers and senders."""

    routers: int
    runs: int
    rows: Any
    """The C struct of a Dealing."""


class FusedLlBackend(FusedBackend):
    """For specs that `is_ll` is true of."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        super().__init__(world, spec, workspace, sms)
        fp8, ranks = self.build.fp8, world.size
        # A second round of blocks finds the SMs of the first only where there are no others left.
        rounds = ll.ROUNDS if sms == world.gpu.sms else 1
        # Of a row there and of its sum back, the least units that a warp moves.
        self._there = ll.row_units(spec.row_bytes, spec.hidden, fp8)
        self._back = ll.row_units(spec.row_bytes, spec.hidden, fp8=False)
        self._sending_ll = ll.dispatch_ll_grid(self._there, spec.tokens, ranks, sms, rounds, fp8)
        self._summing_ll = ll.combine_ll_grid(self._back, spec.tokens, ranks, sms, rounds)
        self._most_sent = 1 if fp8 else ll.SENT
        self._dispatch_ll = self._ll_dispatch_launch(fp8)
        self._combine_ll = self._ll_combine_launch()
        self._sent: dict[int, _Sent] = {}
        self._summed: dict[int, Any] = {}

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        launch = self._aim(self._dispatch_ll, got, tokens)
        sent = self._sent.get(got.tokens) or self._sent_by(got.tokens)
        launch.fields.routers = sent.routers
        launch.fields.router_runs = sent.runs
        launch.fields.ll_sent = sent.rows
        self._enqueue("dispatch", launch)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        launch = self._aim_sums(self._combine_ll, rows, got, weighted, out)
        summed = self._summed.get(got.tokens)
        if summed is None:
            summed = self._summed[got.tokens] = self._summing_ll.arrive(self._back, ll.SUMMED, got.tokens).packed()
        launch.fields.ll_summed = summed
        self._enqueue("combine", launch)

    def _sent_by(self, tokens: int) -> _Sent:
        """How so many tokens are dealt out, kept for the next call that has as many."""
        routers, runs = ll.ll_routers(tokens * self.spec.topk, self._sending_ll.arriving)
        rows = self._sending_ll.leave(self._there, self._most_sent, tokens).packed()
        sent = self._sent[tokens] = _Sent(routers, runs, rows)
        return sent

    def _ll_dispatch_launch(self, fp8: bool) -> Aimed:
        space, grid = self.workspace, self._sending_ll
        function = space.kernels.function(ll.dispatch_ll_source(self.spec.dtype, fp8, space.traces))
        params = replace(
            self._dispatch_params(dispatch.ALL_PARTS),
            senders=grid.leaving,
            placers=grid.arriving,
            ll_placed=grid.arrive(self._there, 1 if fp8 else ll.PLACED, self.spec.tokens, self.world.size),
        )
        shape = grid.shape(ll.ll_shared_bytes(self.spec.experts, fp8))
        return Aimed(Launch(function, shape, params), DispatchParams, DISPATCH_ADDRESSES)

    def _ll_combine_launch(self) -> Aimed:
        space, grid = self.workspace, self._summing_ll
        function = space.kernels.function(ll.combine_ll_source(self.spec.dtype, space.traces))
        params = replace(
            self._combine_params(combine.ALL_PARTS),
            reducers=grid.leaving,
            summers=grid.arriving,
            ll_reduced=grid.leave(self._back, ll.REDUCED, self.spec.tokens, self.world.size - 1),
        )
        return Aimed(Launch(function, grid.shape(), params), CombineParams, COMBINE_ADDRESSES)
