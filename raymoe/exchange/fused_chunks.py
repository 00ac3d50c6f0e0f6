"""Backend `fused` whose dispatch begins before its rows are there: they come over the rail while the kernel runs.

`rail_rows.py` sends the rows in chunks, and counts them in words on the device. The kernel waits for a token's chunk
before it reads the row (kernels/include/raymoe/dispatch/chunks.cuh). All else is backend `fused`.
"""

from __future__ import annotations

import torch

from raymoe.device.dispatch import ChunkedDispatchParams, dispatch_source
from raymoe.device.jit import KernelSource
from raymoe.exchange.fused import FusedBackend
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World

RAIL_OP = "rows over the rail"
"""The operation that an error names where a chunk did not come in time."""


class FusedChunksBackend(FusedBackend):
    """Backend `fused`, between `await_chunks` and its close: `x` of each dispatch comes in chunks."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        self._words: torch.Tensor | None = None
        self._chunk_tokens = 0
        super().__init__(world, spec, workspace, sms)

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        """Wait for chunks of so many tokens from now on, by `words` of `rail_rows.py`. They live as long as this."""
        self._words, self._chunk_tokens = words, tokens
        for prepared in (*self._dispatches.values(), *((self._known,) if self._known else ())):
            prepared.launch.fields.chunks, prepared.launch.fields.chunk_tokens = words.data_ptr(), tokens

    def _dispatch_source(self, known: bool) -> KernelSource:
        space = self.workspace
        fp8 = self.build.fp8
        return dispatch_source(self.spec.dtype, fp8, space.stamped, space.traces, known=known, chunked=True)

    def _dispatch_params(self, parts: int) -> ChunkedDispatchParams:
        return ChunkedDispatchParams(
            **vars(super()._dispatch_params(parts)),
            chunks=0 if self._words is None else self._words.data_ptr(),
            chunk_tokens=self._chunk_tokens,
            rail_op=self.workspace.error.number(RAIL_OP),
        )
