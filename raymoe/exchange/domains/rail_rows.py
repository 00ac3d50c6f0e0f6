"""The rows of a dispatch between domains of GPU ranks, while they cross the rail: all at once, or in chunks of tokens.

In chunks, they cross on a stream of their own, and the dispatch inside the domain runs beside it. After each chunk
that stream runs a small kernel, which advances the chunk's word. The dispatch waits for the word before it reads rows
of the chunk (`ChunksBackend`).

- **Order.** The side stream begins after the current one, and the current one goes on after it as soon as the
  dispatch is enqueued. So a CUDA graph holds it as a branch, and no later work runs beside it. The gathers are enqueued
  before the dispatch: if both streams share a queue of the GPU, the dispatch only begins later.
- **Numbers.** A crossing has a number, which is counted on the device, because replays count too. The kernel after a
  chunk copies it to the chunk's word. So a crossing that fails leaves no word that a later one would take for its own.
- **Aborts.** That kernel stores nothing once the rail's word `aborted` is set. So no chunk is announced without its
  rows, and a dispatch that waits for one fails. Rows that cross at once have no word: after an abort the dispatch reads
  those of an earlier crossing (docs/internals/protocol.md says what follows).
- **SMs.** The dispatch must leave some free (`chunks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raymoe.cuda.launch import Shape
from raymoe.cuda.launcher import Launcher
from raymoe.exchange.domains.domain_kernels import ADVANCE_CHUNK, ChunkParams
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.net.nccl import current_stream
from raymoe.net.nccl_rail import NcclRail


class RailRows:
    """The rows of all ranks of a rail, in the order of tokens inside the domain."""

    def __init__(self, shape: DomainShape, rows: torch.Tensor, rail: NcclRail, launcher: Launcher) -> None:
        """`rows` is the memory for the rows of N * T tokens."""
        self.rows = rows
        self._shape, self._rail, self._me = shape, rail, shape.index
        self._blocks = shape.blocks(rows)
        """The rows of each domain, for each chunk."""
        self.words = torch.zeros(1 + len(self._blocks), dtype=torch.int64, device=rows.device)
        """The number of the crossing, then for each chunk the last crossing in which it came."""
        self._side: Any = None
        if len(self._blocks) == 1:
            return
        self._advance = launcher.ready(
            ADVANCE_CHUNK, Shape(1, 32), ChunkParams(), words=self.words, aborted=rail.aborted
        )
        if rows.device.type == "cuda":
            # The priority lets NCCL's blocks get SMs before those of other kernels.
            new_stream: Any = torch.cuda.Stream  # has no annotations
            self._side = new_stream(rows.device, priority=-1)

    def put(self, own: torch.Tensor) -> None:
        """Copy this rank's own rows in. `own` may have fewer rows than T."""
        for block, (begin, end) in zip(self._blocks, self._shape.chunks, strict=True):
            part = own[begin:end]
            block[self._me, : len(part)].copy_(part)

    @contextmanager
    def crossing(self, op: str, *, beside: bool) -> Iterator[None]:
        """Gather the rows.

        With `beside`, the work inside the context may begin before a chunk is there, if there are several.
        """
        if len(self._blocks) == 1:
            self._gather(op, self._blocks[0])
            yield
            return
        self.words[:1].add_(1)
        if self._side is None or not beside:
            self._cross(op, self._current_stream())
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.rows.device))
        with torch.cuda.stream(self._side):
            self._cross(op, self._current_stream())
        yield
        torch.cuda.current_stream(self.rows.device).wait_stream(self._side)

    def _current_stream(self) -> int:
        """Return the driver's number of the current stream; 0 on CPU ranks."""
        return current_stream(self.rows.device) if self.rows.device.type == "cuda" else 0

    def _cross(self, op: str, stream: int) -> None:
        for number, block in enumerate(self._blocks):
            self._gather(op, block)
            self._advance(stream, chunk=number)

    def _gather(self, op: str, block: torch.Tensor) -> None:
        self._rail.gather(op, block.flatten(0, 1), block[self._me])()
