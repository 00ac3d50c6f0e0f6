"""`fused` for few tokens: rows travel in lines that say themselves of which epoch they are, so nothing follows them.

The kernels of many tokens keep the links busy; where there is little to send, what takes time is that each row is
awaited, fenced and announced. kernels/include/raymoe/lines.cuh has the idea, dispatch_few.cu and combine_few.cu the
protocol. Epochs are those of `fused`, so both kinds of exchange share a workspace; the split form is that of `fused`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from raymoe.device import combine, dispatch
from raymoe.device.dispatch import THREADS
from raymoe.device.few import combine_few_source, dispatch_few_source, few_blocks, few_shared_bytes
from raymoe.device.launch import Shape
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
        space, most = self.workspace, self.combine_grid.reducers + self.combine_grid.summers
        blocks = few_blocks(spec.row_bytes, spec.tokens * world.size, most)
        self._few_shape = Shape(blocks, THREADS, few_shared_bytes(spec.experts, self.build.fp8))
        self._dispatch_few = space.kernels.function(dispatch_few_source(spec.dtype, self.build.fp8, space.traces))
        self._combine_few = space.kernels.function(combine_few_source(spec.dtype, space.traces))

    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        self.workspace.begin("dispatch")
        got = self._new(tokens, out)
        params = replace(self._of(got, dispatch.ALL_PARTS), placers=self._few_shape.blocks, routers=1)
        self._launch(self._dispatch_few, self._few_shape, params)
        return got

    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        self.workspace.begin("combine")
        params = self._sums_of(rows, got, weighted, out, combine.ALL_PARTS)
        self._launch(self._combine_few, Shape(self._few_shape.blocks, THREADS), params)
