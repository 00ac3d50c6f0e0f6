"""Dispatch and combine on GPUs in stages: what is to go where, the rows, their places, each an operation of its own.

The same workspace, words and results as `fused`; what differs is who moves the rows of a dispatch: a kernel of ordinary
loads and stores that has all multiprocessors for itself (kernels/alltoallv.cu), between a launch that routes and one
that places. A combine is a launch that sums and pushes, and one that adds up what came. It can be captured, as
`fused` can, which is measured against it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.device import combine, dispatch
from raymoe.device.alltoallv import alltoallv_source
from raymoe.device.combine import CombineGrid
from raymoe.device.dispatch import DispatchGrid
from raymoe.device.launch import Shape
from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.fused import FusedBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World


class StagedBackend(FusedBackend):
    """Its grids are larger than those of `fused`, whose kinds of work share one launch."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int | str) -> None:
        super().__init__(world, spec, workspace, sms)
        self._alltoallv = self.workspace.kernels.function(alltoallv_source(self.workspace.stamped))

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._send(tokens, out)
        self._launch_dispatch(got, dispatch.PLACE)
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """The stages before the last one."""
        self.workspace.begin("dispatch", self)
        return self._send(tokens, out)

    def _send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        got = self._new(tokens, out)
        self._launch_dispatch(got, dispatch.ROUTE)
        params = self._of(got, dispatch.SEND)
        self._launch(self._alltoallv, Shape(self.dispatch_grid.senders, dispatch.THREADS), params)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        self._launch_combine(rows, got, weighted, out, combine.REDUCE)
        self._launch_combine(rows, got, weighted, out, combine.SUM)

    def _grids(self, sms: int | None) -> tuple[DispatchGrid, CombineGrid]:
        moving, summing = super()._grids(sms)
        all_of_them = summing.reducers + summing.summers
        sending = replace(moving, senders=all_of_them, sender_lanes=dispatch.WARPS)
        return sending, replace(summing, reducers=all_of_them, summers=all_of_them)
