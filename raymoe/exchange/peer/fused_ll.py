"""Backend `fused` for few tokens: rows travel in lines that hold their epoch, so no flag follows them.

The kernels for many tokens keep the links busy. For few tokens most of the time is the wait, the fence and the flag
after each row. peer/ll/lines.cuh explains the idea, dispatch_ll.cu and combine_ll.cu the protocol.
Epochs are those of `fused`, so both kinds of exchange share a workspace. The split form is that of `fused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Launch
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.peer import ll
from raymoe.exchange.peer.combine import CombineParams, with_ll_statuses
from raymoe.exchange.peer.dispatch import ALL_PARTS, routed_again
from raymoe.exchange.peer.fused import COMBINE_ADDRESSES, COMBINES, DISPATCH_ADDRESSES, FusedBackend
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World


@dataclass(frozen=True)
class _SentDealing:
    """How a call's tokens are dealt out to routers and senders."""

    routers: int
    runs: int
    rows: Any
    """The C struct of a Dealing."""


class FusedLlBackend(FusedBackend):
    """Backend `fused` for specs for which `is_ll` is true."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        super().__init__(world, spec, workspace, sms)
        fp8, ranks = self.build.fp8, world.size
        # A second round of blocks shares the SMs of the first only if there are no other SMs.
        rounds = ll.ROUNDS if sms == world.gpu.sms else 1
        # Units of a row of dispatch, and of a sum; a unit is the least that a warp moves.
        self._row_units = ll.row_units(spec.row_bytes, spec.hidden, fp8)
        self._sum_units = ll.row_units(spec.row_bytes, spec.hidden, fp8=False)
        self._dispatch_ll_grid = ll.dispatch_ll_grid(self._row_units, spec.tokens, ranks, sms, rounds, fp8)
        self._combine_ll_grid = ll.combine_ll_grid(self._sum_units, spec.tokens, ranks, sms, rounds)
        self._groups_sent = 1 if fp8 else ll.SENT
        self._dispatch_ll = {ALL_PARTS: self._ll_dispatch_launch(again=False)}
        self._combine_ll = self._ll_combine_launch()
        self._sent_dealings: dict[int, _SentDealing] = {}
        self._summed_dealings: dict[int, Any] = {}

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        return self._whole_dispatch(self._dispatch_ll, tokens, out)

    def _whole_dispatch(self, launches: Mapping[int, Launch], tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        launch = self._set_dispatch_addresses(launches[ALL_PARTS], got, tokens)
        sent = self._sent_dealings.get(got.tokens) or self._deal_sent(got.tokens)
        launch.fields.routers = sent.routers
        launch.fields.router_runs = sent.runs
        launch.fields.sent = sent.rows
        self._enqueue("dispatch", launch)
        return got

    @property
    def keeps_places(self) -> bool:
        """No line of this path comes without counts: they tell a sender that its peers' readers are done."""
        return False

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        launch = self._set_combine_addresses(self._combine_ll, rows, got, weighted, out)
        summed = self._summed_dealings.get(got.tokens)
        if summed is None:
            summed = self._summed_dealings[got.tokens] = self._combine_ll_grid.arrive(
                self._sum_units, ll.SUMMED, got.tokens
            ).packed()
        launch.fields.summed = summed
        self._enqueue("combine", launch)

    def _combine_source(self, carries: bool) -> KernelSource:
        """The kernel of many tokens; in a backward pass with the statuses of this path's own combine."""
        source = super()._combine_source(carries)
        return with_ll_statuses(source) if carries else source

    def _combine_params(self, parts: int, carries: bool = False) -> CombineParams:
        params = super()._combine_params(parts, carries)
        return replace(params, statuses=self.workspace.buffers("ll_statuses")) if carries else params

    def _all_combines(self) -> list[Launch]:
        return [*super()._all_combines(), self._combine_ll]

    def _deal_sent(self, tokens: int) -> _SentDealing:
        """Deal so many tokens out, and keep the result for the next call with as many."""
        routers, runs = ll.ll_routers(tokens * self.spec.topk, self._dispatch_ll_grid.arriving)
        rows = self._dispatch_ll_grid.leave(self._row_units, self._groups_sent, tokens).packed()
        sent = self._sent_dealings[tokens] = _SentDealing(routers, runs, rows)
        return sent

    def _again_launches(self) -> dict[int, Launch]:
        return {ALL_PARTS: self._ll_dispatch_launch(again=True)}

    def _ll_dispatch_launch(self, again: bool) -> Launch:
        space, grid, fp8 = self.workspace, self._dispatch_ll_grid, self.build.fp8
        source = self.build.finding_places(ll.dispatch_ll_source(self.spec.dtype, fp8, space.traces))
        function = space.kernels.function(routed_again(source) if again else source)
        sent = grid.leave(self._row_units, self._groups_sent, self.spec.tokens)
        placed = grid.arrive(self._row_units, 1 if fp8 else ll.PLACED, self.spec.tokens, self.world.size)
        params = self.build.dispatch_ll_params(grid, sent, placed)
        shape = grid.shape(ll.ll_shared_bytes(self.spec.experts, fp8))
        return Launch(function, shape, params, addresses=DISPATCH_ADDRESSES)

    def _ll_combine_launch(self) -> Launch:
        space, grid = self.workspace, self._combine_ll_grid
        function = space.kernels.function(ll.combine_ll_source(self.spec.dtype, space.traces))
        reduced = grid.leave(self._sum_units, ll.REDUCED, self.spec.tokens, self.world.size - 1)
        summed = grid.arrive(self._sum_units, ll.SUMMED, self.spec.tokens)
        params = self.build.combine_ll_params(grid, reduced, summed, self._record(COMBINES))
        return Launch(function, grid.shape(), params, addresses=COMBINE_ADDRESSES)
