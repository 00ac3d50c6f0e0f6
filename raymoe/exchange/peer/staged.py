"""Backend `staged`: dispatch and combine on GPUs in stages, each a launch of its own.

Workspace, words and results are those of `fused`. Only the movement of dispatched rows differs. A kernel of ordinary
loads and stores (alltoallv.cu) moves them with all SMs, between a launch that routes and one that places. If
rows cross as 8-bit floats, the senders of `fused` quantise and push them instead. A combine is a launch that sums and
pushes, and one that adds the ranks' sums. The backend can be captured, like `fused`, which is measured against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raymoe.cuda.driver import call
from raymoe.cuda.launch import Function, Launch, Shape
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.peer import combine, dispatch
from raymoe.exchange.peer.combine import CombineGrid
from raymoe.exchange.peer.dispatch import ANNOUNCE, ANNOUNCE_THREADS, DispatchParams, alltoallv_source, pack_source
from raymoe.exchange.peer.dispatch_grid import DispatchGrid
from raymoe.exchange.peer.fused import DISPATCH_ADDRESSES, FusedBackend
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World


class StagedBackend(FusedBackend):
    """Backend `staged`. Each launch does one kind of work, with as many blocks as `fused` has for all kinds."""

    whole_combine = (combine.REDUCE, combine.SUM)

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        super().__init__(world, spec, workspace, sms)
        self._moving = self._prepare_moving()

    def _whole_dispatch(self, launches: Mapping[int, Launch], tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        placing = self._set_dispatch_addresses(launches[dispatch.PLACE], got, tokens)
        self._enqueue("dispatch", *self._sending(launches, got, tokens), placing)
        return got

    def _whole_parts(self) -> tuple[int, ...]:
        return dispatch.ROUTE, dispatch.PLACE

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Enqueue the stages before the last one."""
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        self._enqueue("dispatch", *self._sending(self._dispatches, got, tokens))
        self.workspace.sent("dispatch", self)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        stages = (self._combine_at(rows, got, weighted, out, part) for part in self.whole_combine)
        self._enqueue("combine", *stages)

    def _known_launches(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> tuple[Launch, ...]:
        moving = self._set_known_addresses(self._moving, x, got, out)
        return moving, self._set_known_addresses(self._prepared_known(), x, got, out)

    def _known_parts(self) -> int:
        return dispatch.PLACE

    def _sending(self, launches: Mapping[int, Launch], got: Dispatched, tokens: Tokens) -> tuple[Launch, ...]:
        routing = self._set_dispatch_addresses(launches[dispatch.ROUTE], got, tokens)
        return routing, self._set_dispatch_addresses(self._moving, got, tokens)

    def _prepare_moving(self) -> Launch:
        """Prepare the launch that moves the rows."""
        if self.build.fp8:
            return self._dispatch_launch(self._dispatch, dispatch.SEND)
        alltoallv = self.workspace.kernels.function(alltoallv_source(self.workspace.stamped))
        shape = Shape(self.dispatch_grid.senders, dispatch.WIDE * 32)
        return Launch(alltoallv, shape, self._dispatch_params(dispatch.SEND), addresses=DISPATCH_ADDRESSES)

    def _dispatch_parts(self) -> tuple[int, ...]:
        return dispatch.ROUTE, dispatch.PLACE

    def _combine_parts(self) -> tuple[int, ...]:
        return self.whole_combine

    def _dispatch_params(self, parts: int) -> DispatchParams:
        """Rows by ordinary stores have no arrival words, so the launch that places waits for `done` of all senders."""
        return replace(super()._dispatch_params(parts), at_once=1)

    def _largest_shapes(self) -> list[Shape]:
        stages = [self.dispatch_grid.shape(part) for part in (dispatch.ROUTE, dispatch.SEND, dispatch.PLACE)]
        return [*stages, *(self.combine_grid.shape(part) for part in self.whole_combine)]

    def _grids(self, sms: int) -> tuple[DispatchGrid, CombineGrid]:
        moving, summing = super()._grids(sms)
        blocks = summing.local_blocks + summing.final_blocks
        if not self.build.fp8:
            moving = replace(moving, senders=blocks, sender_warps=dispatch.WIDE)
        return moving, replace(summing, local_blocks=blocks, final_blocks=blocks)


# `staged` by the copy engine: no SM is busy while rows are on the link.
#
# The copy engine knows no tokens. A rank copies all of its T' rows to every other rank, whatever the ids are. First a
# kernel copies rows into the rank's own slots; pack.cu says why the copies do not start in `x`. Then they go to
# the same slots at the peer. Waits and words are those of the other backends, in kernels of their own.
#
# Stream memory operations cannot replace these kernels. The word that one stores is a constant, so it cannot be an
# epoch and would have to be reset after each run. In a captured step, a rank that has given up would also store it. Its
# rows have not come then, and a peer would place old rows. Waits would need the host to bound them. And it took 6 us
# each way where a kernel takes 1 (4x H200, 2026-11-21).
#
# In the split form the copies run on a stream of their own, beside the work between send and receive. The receive joins
# that stream, so a captured send and its receive are in one graph.


class CopiedBackend(StagedBackend):
    """Backend `staged` by the copy engine. A dispatch routes, packs, copies, announces and places."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        super().__init__(world, spec, workspace, sms)
        announce = self.workspace.kernels.function(ANNOUNCE)
        self._announcers = {
            parts: self._prepared(announce, Shape(1, ANNOUNCE_THREADS), parts)
            for parts in (dispatch.SEND, dispatch.PLACE, dispatch.SEND | dispatch.PLACE)
        }
        block = self.workspace.offset(self.build.rows_region) + world.rank * spec.tokens * self.build.slot_bytes
        own, *peers = [(world.rank + step) % world.size for step in range(world.size)]
        self._source = self.workspace.heap.base(own) + block
        self._targets = [self.workspace.heap.base(peer) + block for peer in peers]
        self._side_stream = self._new_side_stream()

    @property
    def keeps_places(self) -> bool:
        """A rank must not copy before it has the heads of its peers (pack.cu), which only routers store."""
        return False

    def _whole_dispatch(self, launches: Mapping[int, Launch], tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        announcing = self._announce_at(got, tokens, dispatch.SEND | dispatch.PLACE)
        placing = self._set_dispatch_addresses(launches[dispatch.PLACE], got, tokens)
        self._run(*self._sending(launches, got, tokens), lambda stream: self._copy(got, stream), announcing, placing)
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Enqueue the stages up to the copies, which run beside the work that is enqueued next."""
        self.workspace.begin("dispatch")
        got = self._new_result(tokens, out)
        self._run(*self._sending(self._dispatches, got, tokens))
        with self._on_side_stream() as stream:
            self._copy(got, stream)
            self._announce_at(got, tokens, dispatch.SEND)(stream)
        self.workspace.sent("dispatch", self)
        return got

    def dispatch_receive(self, got: Dispatched, tokens: Tokens) -> None:
        self.workspace.begin_receive("dispatch", self)
        self._join()
        self._keep_for_receive(got, tokens)
        self._run(self._announce_at(got, tokens, dispatch.PLACE), self._dispatch_at(got, tokens, dispatch.PLACE))
        self.workspace.received("dispatch")

    def _run(self, *steps: Callable[[int], None]) -> None:
        """Enqueue launches and copies on the current stream."""
        self.workspace.enqueue("dispatch", self.sms, steps)

    def _copy(self, got: Dispatched, stream: int) -> None:
        """Copy to one peer after another, each rank from another peer on: copies side by side are half as fast."""
        for target in self._targets if got.tokens else ():
            self._copy_bytes(target, self._source, got.tokens * self.build.slot_bytes, stream)

    def _announce_at(self, got: Dispatched, tokens: Tokens, parts: int) -> Launch:
        return self._set_dispatch_addresses(self._announcers[parts], got, tokens)

    def _copy_bytes(self, into: int, source: int, nbytes: int, stream: int) -> None:
        with self.world.gpu.current():
            call("cuMemcpyAsync", into, source, nbytes, stream)

    def _new_side_stream(self) -> Any:
        new_stream: Any = torch.cuda.Stream  # has no annotations
        return new_stream(self.world.device)

    @contextmanager
    def _on_side_stream(self) -> Iterator[int]:
        """A stream that waits for the work enqueued so far, and runs beside later work until `_join`."""
        self._side_stream.wait_stream(torch.cuda.current_stream(self.world.device))
        yield self._side_stream.cuda_stream

    def _join(self) -> None:
        torch.cuda.current_stream(self.world.device).wait_stream(self._side_stream)

    def _prepare_moving(self) -> Launch:
        """Prepare the launch that copies rows to the slots from which the copy engine copies."""
        pack = self.workspace.kernels.function(pack_source(self.workspace.stamped))
        return self._prepared(pack, self._pack_shape(), dispatch.SEND)

    def _prepared(self, function: Function, shape: Shape, parts: int) -> Launch:
        return Launch(function, shape, self._dispatch_params(parts), addresses=DISPATCH_ADDRESSES)

    def _pack_shape(self) -> Shape:
        """A warp for each row, up to the blocks of a combine."""
        blocks = -(-self.spec.tokens // dispatch.WIDE)
        return Shape(min(blocks, self.combine_grid.final_blocks), dispatch.WIDE * 32)

    def _largest_shapes(self) -> list[Shape]:
        moving = [self._pack_shape(), *(self.dispatch_grid.shape(part) for part in (dispatch.ROUTE, dispatch.PLACE))]
        return [*moving, *(self.combine_grid.shape(part) for part in self.whole_combine)]

    def _dispatch_params(self, parts: int) -> DispatchParams:
        """One warp of one sender: its word announces all rows."""
        return replace(super()._dispatch_params(parts), senders=1, sender_warps=1)
