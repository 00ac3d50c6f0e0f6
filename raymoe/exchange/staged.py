"""Dispatch and combine on GPUs in stages: what is to go where, the rows, their places, each an operation of its own.

The same workspace, words and results as `fused`; what differs is who moves the rows of a dispatch: a kernel of ordinary
loads and stores that has all multiprocessors for itself (kernels/alltoallv.cu), between a launch that routes and one
that places. Rows that cross as 8-bit floats are quantised and pushed there by the senders of `fused`. A combine is a
launch that sums and pushes, and one that adds up what came. It can be captured, as `fused` can, which is measured
against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raymoe.device import combine, dispatch
from raymoe.device.combine import CombineGrid
from raymoe.device.dispatch import ANNOUNCE, ANNOUNCE_THREADS, DispatchParams, alltoallv_source, pack_source
from raymoe.device.dispatch_grid import DispatchGrid
from raymoe.device.driver import call
from raymoe.device.kernels import Function, Launch, Shape
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.fused import DISPATCH_ADDRESSES, Aimed, FusedBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World


class StagedBackend(FusedBackend):
    """Each launch does one kind of work, and has as many blocks as all kinds together have in `fused`."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        super().__init__(world, spec, workspace, sms)
        self._mover = self._moving_launch()

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        self._enqueue("dispatch", *self._sending(got, tokens), self._aimed(got, tokens, dispatch.PLACE))
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """The stages before the last one."""
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        self._enqueue("dispatch", *self._sending(got, tokens))
        self.workspace.sent("dispatch", self)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        halves = (self._summing(rows, got, weighted, out, part) for part in (combine.REDUCE, combine.SUM))
        self._enqueue("combine", *halves)

    def _sending(self, got: Dispatched, tokens: Tokens) -> tuple[Launch, ...]:
        return self._aimed(got, tokens, dispatch.ROUTE), self._aim(self._mover, got, tokens)

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

    def _grids(self, sms: int) -> tuple[DispatchGrid, CombineGrid]:
        moving, summing = super()._grids(sms)
        blocks = summing.reducers + summing.summers
        if not self.build.fp8:
            moving = replace(moving, senders=blocks, sender_lanes=dispatch.WIDE)
        return moving, replace(summing, reducers=blocks, summers=blocks)


# `staged`, whose rows go by the copy engine: no multiprocessor is busy while they are on the link.
#
# The copy engine knows no tokens: a rank sends all of its rows, T' of them, to every other rank, whatever ids say. They
# go from its own slots to the same slots there, after a kernel that has put them into its own (kernels/pack.cu says why
# not right out of `x`). Waits and words are those of the other backends, in kernels of their own. A word that a stream
# memory operation stores is a constant: it cannot carry an epoch, would have to be taken back after each run, and is
# stored in a captured step also by a rank that has given up, whose rows are not there, so that a peer would place what
# was sent before. Its waits need the host to bound them, and it took 6 us each way where a kernel takes 1 (4x H200,
# 2026-11-21).
#
# In halves, the copies run beside what comes between the halves: on a stream of their own, which the second half joins.
# So halves that are captured are captured in one graph.


class CopiedBackend(StagedBackend):
    """A dispatch routes, packs, copies, announces and places; a combine is that of `staged`."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        super().__init__(world, spec, workspace, sms)
        announce = self.workspace.kernels.function(ANNOUNCE)
        self._announcers = {
            parts: self._aimable(announce, Shape(1, ANNOUNCE_THREADS), parts)
            for parts in (dispatch.SEND, dispatch.PLACE, dispatch.SEND | dispatch.PLACE)
        }
        block = self.workspace.offset(self.build.rows_region) + world.rank * spec.tokens * self.build.slot_bytes
        own, *peers = [(world.rank + step) % world.size for step in range(world.size)]
        self._source = self.workspace.heap.base(own) + block
        self._targets = [self.workspace.heap.base(peer) + block for peer in peers]
        self._side = self._new_side()

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        telling = self._telling(got, tokens, dispatch.SEND | dispatch.PLACE)
        placing = self._aimed(got, tokens, dispatch.PLACE)
        self._run(*self._sending(got, tokens), lambda stream: self._copy(got, stream), telling, placing)
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Up to the copies, which go on beside what is enqueued next."""
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        self._run(*self._sending(got, tokens))
        with self._beside() as side:
            self._copy(got, side)
            self._telling(got, tokens, dispatch.SEND)(side)
        self.workspace.sent("dispatch", self)
        return got

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:
        self.workspace.begin_receive("dispatch", self)
        self._join()
        self._lend(got, tokens)
        self._run(self._telling(got, tokens, dispatch.PLACE), self._aimed(got, tokens, dispatch.PLACE))
        self.workspace.received("dispatch")

    def _run(self, *steps: Callable[[int], None]) -> None:
        """Launches and copies, on the current stream."""
        self.workspace.enqueue("dispatch", self.sms, steps)

    def _copy(self, got: Dispatched, stream: int) -> None:
        """One after another, each rank beginning with another: side by side the engines are half as fast."""
        for target in self._targets if got.tokens else ():
            self._copy_bytes(target, self._source, got.tokens * self.build.slot_bytes, stream)

    def _telling(self, got: Dispatched, tokens: Tokens, parts: int) -> Launch:
        return self._aim(self._announcers[parts], got, tokens)

    def _copy_bytes(self, into: int, source: int, nbytes: int, stream: int) -> None:
        with self.world.gpu.current():
            call("cuMemcpyAsync", into, source, nbytes, stream)

    def _new_side(self) -> Any:
        new_stream: Any = torch.cuda.Stream  # has no annotations
        return new_stream(self.world.device)

    @contextmanager
    def _beside(self) -> Iterator[int]:
        """A stream that runs after what is enqueued so far, and beside what will be, up to the join."""
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        yield self._side.cuda_stream

    def _join(self) -> None:
        torch.cuda.current_stream(self.world.device).wait_stream(self._side)

    def _moving_launch(self) -> Aimed:
        """Who puts rows where the copy engine takes them from."""
        pack = self.workspace.kernels.function(pack_source(self.workspace.stamped))
        return self._aimable(pack, self._pack_shape(), dispatch.SEND)

    def _aimable(self, function: Function, shape: Shape, parts: int) -> Aimed:
        return Aimed(Launch(function, shape, self._dispatch_params(parts)), DispatchParams, DISPATCH_ADDRESSES)

    def _pack_shape(self) -> Shape:
        """A warp for each row, as far as there is room."""
        blocks = -(-self.spec.tokens // dispatch.WIDE)
        return Shape(min(blocks, self.combine_grid.summers), dispatch.WIDE * 32)

    def _largest(self) -> list[Shape]:
        moving = [self._pack_shape(), *(self.dispatch_grid.shape(part) for part in (dispatch.ROUTE, dispatch.PLACE))]
        return [*moving, *(self.combine_grid.shape(part) for part in (combine.REDUCE, combine.SUM))]

    def _dispatch_params(self, parts: int) -> DispatchParams:
        """One lane of one sender: its word stands for the whole block."""
        return replace(super()._dispatch_params(parts), senders=1, sender_lanes=1)
