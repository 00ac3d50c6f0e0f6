"""Backend `fused` beside a rail, which carries the rows of its tokens in chunks.

- A dispatch begins before its rows are there. `rail_rows.py` sends them in chunks, and counts these in words on the
  device. The kernel waits for a token's chunk before it reads the row (peer/dispatch/chunks.cuh).
- A combine can be several launches, each of some tokens, so that `rail_sums.py` sends the first sums while later ones
  are added. Each launch is a combine of its own to the ranks of the domain, with an epoch of its own.

All else is backend `fused`.
"""

from __future__ import annotations

import torch

from raymoe.exchange.backend import Dispatched
from raymoe.exchange.peer.build import Build, Grids
from raymoe.exchange.peer.dispatch import ChunkedDispatchParams
from raymoe.exchange.peer.fused import fused_table
from raymoe.exchange.peer.peer_backend import PeerBackend
from raymoe.exchange.peer.table import BackendKind, LaunchTable, Stages

PLACE_BYTES, MASK_BYTES = 8, 4
"""Bytes of an entry (token, k), and of a token, in the metadata of a dispatch."""

RAIL_OP = "rows over the rail"
"""The operation that an error names where a chunk did not come in time."""


def chunks_table(build: Build, grids: Grids) -> LaunchTable:
    return fused_table(build, grids, Stages(build, grids, rail_op=build.space.error.number(RAIL_OP)))


CHUNKS = BackendKind("fused in chunks", Build.fused_grids, chunks_table)


class ChunksBackend(PeerBackend):
    """Runs the table of `CHUNKS`. Between `await_chunks` and its close, `x` of each dispatch comes in chunks."""

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        """Wait for chunks of so many tokens from now on, by `words` of `rail_rows.py`. They live as long as this."""
        self._set_in_all(ChunkedDispatchParams, chunks=words, chunk_tokens=tokens)

    def combine_tokens(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, tokens: tuple[int, int]
    ) -> None:
        """Combine the tokens from `tokens[0]` on, to `tokens[1]`, of each rank, and write their rows of `out`."""
        begin, end = tokens
        self.workspace.begin("combine")
        self._set_combine(self._combine, rows, got, weighted, out)
        (launch,) = self._combine.launches
        fields = launch.fields
        fields.entry_places += begin * self.spec.topk * PLACE_BYTES
        fields.masks += begin * MASK_BYTES
        fields.y += begin * self.spec.row_bytes
        fields.tokens = max(0, min(end, got.tokens) - begin)
        fields.first_token, fields.most_tokens = begin, end - begin
        try:
            self.workspace.enqueue("combine", self._combine.sms, self._combine.launches)
        finally:
            fields.first_token, fields.most_tokens = 0, self.spec.tokens  # other calls combine all tokens
