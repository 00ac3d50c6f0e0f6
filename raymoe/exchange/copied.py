"""`staged`, whose rows go by the copy engine: no multiprocessor is busy while they are on the link.

The copy engine knows no tokens: a rank sends all of its rows, T' of them, to every other rank, whatever ids say. They
go from its own slots to the same slots there, after a kernel that has put them into its own (kernels/pack.cu says why
not right out of `x`). Waits and words are those of the other backends, in kernels of their own. A word that a stream
memory operation stores is a constant: it cannot carry an epoch, would have to be taken back after each run, and is
stored in a captured step also by a rank that has given up, whose rows are not there, so that a peer would place what
was sent before. Its waits need the host to bound them, and it took 6 us each way where a kernel takes 1 (4x H200,
2026-11-21).

In halves, the copies run beside what comes between the halves: on a stream of their own, which the second half joins.
So halves that are captured are captured in one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raymoe.device import combine, dispatch
from raymoe.device.blocks import ANNOUNCE, ANNOUNCE_THREADS, pack_source
from raymoe.device.dispatch import DispatchParams
from raymoe.device.driver import call
from raymoe.device.launch import Shape
from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.staged import StagedBackend
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World


class CopiedBackend(StagedBackend):
    """A dispatch routes, packs, copies, announces and places; a combine is that of `staged`."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int | str) -> None:
        super().__init__(world, spec, workspace, sms)
        kernels = self.workspace.kernels
        self._pack = kernels.function(pack_source(self.workspace.stamped))
        self._announce = kernels.function(ANNOUNCE)
        block = self.workspace.offset(self.build.rows_region) + world.rank * spec.tokens * self.build.slot_bytes
        own, *peers = [(world.rank + step) % world.size for step in range(world.size)]
        self._source = self.workspace.heap.base(own) + block
        self._targets = [self.workspace.heap.base(peer) + block for peer in peers]
        self._side = self._new_side()

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._packed(tokens, out)
        self._copy(got)
        self._tell(got, dispatch.SEND | dispatch.PLACE)
        self._launch_dispatch(got, dispatch.PLACE)
        return got

    def dispatch_send(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        """Up to the copies, which go on beside what is enqueued next."""
        self.workspace.begin("dispatch", self)
        got = self._packed(tokens, out)
        with self._beside():
            self._copy(got)
            self._tell(got, dispatch.SEND)
        return got

    def dispatch_receive(self, got: Dispatched) -> None:
        self.workspace.end("dispatch", self)
        self._join()
        self._tell(got, dispatch.PLACE)
        self._launch_dispatch(got, dispatch.PLACE)

    def _packed(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        got = self._new(tokens, out)
        self._launch_dispatch(got, dispatch.ROUTE)
        self._launch(self._pack, self._pack_shape(), self._of(got, dispatch.SEND))
        return got

    def _copy(self, got: Dispatched) -> None:
        """One after another, each rank beginning with another: side by side the engines are half as fast."""
        for target in self._targets if got.tokens else ():
            self._copy_bytes(target, self._source, got.tokens * self.build.slot_bytes)

    def _tell(self, got: Dispatched, parts: int) -> None:
        self._launch(self._announce, Shape(1, ANNOUNCE_THREADS), self._of(got, parts))

    def _copy_bytes(self, into: int, source: int, nbytes: int) -> None:
        with self.world.gpu.current():
            call("cuMemcpyAsync", into, source, nbytes, torch.cuda.current_stream(self.world.device).cuda_stream)

    def _new_side(self) -> Any:
        new_stream: Any = torch.cuda.Stream  # has no annotations
        return new_stream(self.world.device)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """After what is enqueued so far, and beside what will be, up to the join."""
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        torch.cuda.current_stream(self.world.device).wait_stream(self._side)

    def _pack_shape(self) -> Shape:
        """A warp for each row, as far as there is room."""
        blocks = -(-self.spec.tokens // dispatch.WIDE)
        return Shape(min(blocks, self.combine_grid.summers), dispatch.WIDE * 32)

    def _largest(self) -> list[Shape]:
        moving = [self._pack_shape(), *(self.dispatch_grid.shape(part) for part in (dispatch.ROUTE, dispatch.PLACE))]
        return [*moving, *(self.combine_grid.shape(part) for part in (combine.REDUCE, combine.SUM))]

    def _of(self, got: Dispatched, parts: int) -> DispatchParams:
        """One lane of one sender: its word stands for the whole block."""
        return replace(super()._of(got, parts), senders=1, sender_lanes=1)
