"""Backend `fused` beside a rail, which carries the rows of its tokens in chunks.

- A dispatch begins before its rows are there. `rail_rows.py` sends them in chunks, and counts these in words on the
  device. The kernel waits for a token's chunk before it reads the row (peer/dispatch/chunks.cuh).
- A combine can be several launches, each of some tokens, so that `rail_sums.py` sends the first sums while later ones
  are added. Each launch is a combine of its own to the ranks of the domain, with an epoch of its own.

All else is backend `fused`.
"""

from __future__ import annotations

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.peer.combine import ALL_PARTS
from raymoe.exchange.peer.dispatch import ChunkedDispatchParams, dispatch_source
from raymoe.exchange.peer.fused import FusedBackend
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World

HOME_BYTES, MASK_BYTES = 8, 4
"""Of an entry (token, k), and of a token, in the metadata of a dispatch."""

RAIL_OP = "rows over the rail"
"""The operation that an error names where a chunk did not come in time."""


class FusedChunksBackend(FusedBackend):
    """Backend `fused`. Between `await_chunks` and its close, `x` of each dispatch comes in chunks."""

    def __init__(self, world: World, spec: ExchangeSpec, workspace: Workspace | None, sms: int) -> None:
        self._words: torch.Tensor | None = None
        self._chunk_tokens = 0
        super().__init__(world, spec, workspace, sms)

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        """Wait for chunks of so many tokens from now on, by `words` of `rail_rows.py`. They live as long as this."""
        self._words, self._chunk_tokens = words, tokens
        known = (self._known,) if self._known else ()
        for prepared in (*self._dispatches.values(), *self._again.values(), *known):
            prepared.fields.chunks, prepared.fields.chunk_tokens = words.data_ptr(), tokens

    def combine_tokens(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, tokens: tuple[int, int]
    ) -> None:
        """Combine the tokens from `tokens[0]` on, to `tokens[1]`, of each rank, and write their rows of `out`."""
        begin, end = tokens
        self.workspace.begin("combine")
        launch = self._combine_at(rows, got, weighted, out, ALL_PARTS)
        fields = launch.fields
        fields.home += begin * self.spec.topk * HOME_BYTES
        fields.masks += begin * MASK_BYTES
        fields.y += begin * self.spec.row_bytes
        fields.tokens = max(0, min(end, got.tokens) - begin)
        fields.first_token, fields.most_tokens = begin, end - begin
        try:
            self._enqueue("combine", launch)
        finally:
            fields.first_token, fields.most_tokens = 0, self.spec.tokens  # other calls combine all tokens

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
