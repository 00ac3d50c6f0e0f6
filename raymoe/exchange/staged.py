"""Dispatch and combine on GPUs in stages: what is to go where, the rows, their places, each an operation of its own.

The same workspace, words and results as `fused`; what differs is who moves the rows of a dispatch: a kernel of ordinary
loads and stores that has all multiprocessors for itself (kernels/alltoallv.cu), between a launch that routes and one
that places. Rows that cross as 8-bit floats are quantised and pushed there by the senders of `fused`. A combine is a
launch that sums and pushes, and one that adds up what came. It can be captured, as `fused` can, which is measured
against it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.device import combine, dispatch
from raymoe.device.alltoallv import alltoallv_source
from raymoe.device.combine import CombineGrid
from raymoe.device.dispatch import DispatchParams
from raymoe.device.dispatch_grid import DispatchGrid
from raymoe.device.launch import Launch, Shape
from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.fused import DISPATCH_ADDRESSES, Aimed, FusedBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World


class StagedBackend(FusedBackend):
    """Each launch does one kind of work, and has as many blocks as all kinds together have in `fused`."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int | str) -> None:
        super().__init__(world, spec, workspace, sms)
        self._mover = self._moving_launch()

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        self._enqueue("dispatch", *self._sending(got), self._aimed(got, dispatch.PLACE))
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """The stages before the last one."""
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        self._enqueue("dispatch", *self._sending(got))
        self.workspace.sent("dispatch", self)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        halves = (self._summing(rows, got, weighted, out, part) for part in (combine.REDUCE, combine.SUM))
        self._enqueue("combine", *halves)

    def _sending(self, got: Dispatched) -> tuple[Launch, ...]:
        return self._aimed(got, dispatch.ROUTE), self._aim(self._mover, got)

    def _moving_launch(self) -> Aimed:
        """Who moves the rows."""
        if self.build.fp8:
            return self._dispatch_launch(dispatch.SEND)
        alltoallv = self.workspace.kernels.function(alltoallv_source(self.workspace.stamped))
        shape = Shape(self.dispatch_grid.senders, dispatch.WIDE * 32)
        launch = Launch(alltoallv, shape, self._dispatch_params(dispatch.SEND))
        return Aimed(launch, DispatchParams, DISPATCH_ADDRESSES)

    def _dispatch_parts(self) -> tuple[int, ...]:
        return dispatch.ROUTE, dispatch.PLACE

    def _combine_parts(self) -> tuple[int, ...]:
        return combine.REDUCE, combine.SUM

    def _dispatch_params(self, parts: int) -> DispatchParams:
        """Rows by ordinary stores have no words of their own: the launch that places waits for all rows."""
        return replace(super()._dispatch_params(parts), at_once=1)

    def _largest(self) -> list[Shape]:
        stages = [self.dispatch_grid.shape(part) for part in (dispatch.ROUTE, dispatch.SEND, dispatch.PLACE)]
        return [*stages, *(self.combine_grid.shape(part) for part in (combine.REDUCE, combine.SUM))]

    def _grids(self, sms: int | None) -> tuple[DispatchGrid, CombineGrid]:
        moving, summing = super()._grids(sms)
        blocks = summing.reducers + summing.summers
        if not self.build.fp8:
            moving = replace(moving, senders=blocks, sender_lanes=dispatch.WIDE)
        return moving, replace(summing, reducers=blocks, summers=blocks)
