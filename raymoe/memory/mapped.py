"""A layout in memory: this rank's own segment and its peers', as tensors and words."""

from __future__ import annotations

from math import prod

import torch

from raymoe.job.errors import WiringError
from raymoe.memory.heap import Layout
from raymoe.memory.host_shm import Segment
from raymoe.memory.wait import Words


class Heap:
    """The same regions on every rank. Views stay valid after `close`; it only gives up this object's hold on them."""

    def __init__(self, layout: Layout, rank: int, segments: list[Segment]) -> None:
        self.layout = layout
        self.rank = rank
        self._segments: list[Segment] | None = segments

    def tensor(self, name: str, peer: int | None = None) -> torch.Tensor:
        """A region of this rank, or of a peer, without a copy."""
        placed = self.layout.find(name)
        dtype: torch.dtype = getattr(torch, placed.region.dtype)
        shape = placed.region.shape
        buffer = self._segment(peer).buffer
        return torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=placed.offset).view(shape)

    def words(self, name: str, peer: int | None = None) -> Words:
        placed = self.layout.find(name)
        return Words(self.bytes(name, peer, 0, placed.region.nbytes))

    def word(self, name: str, index: int, peer: int | None = None) -> int:
        return self.words(name, peer)[index]

    def bytes(self, name: str, peer: int | None, start: int, nbytes: int) -> memoryview:
        """A piece of a region as raw bytes."""
        placed = self.layout.find(name)
        if start + nbytes > placed.region.nbytes:
            raise WiringError(f"bytes up to {start + nbytes} asked of region {name}, which has {placed.region.nbytes}")
        return self._segment(peer).view(placed.offset + start, nbytes)

    def close(self) -> None:
        for segment in self._segments or ():
            segment.close()
        self._segments = None

    def _segment(self, peer: int | None) -> Segment:
        if self._segments is None:
            raise WiringError("this heap is closed; take tensors and words from it before closing it")
        rank = self.rank if peer is None else peer
        if not 0 <= rank < len(self._segments):
            raise WiringError(f"the heap of rank {rank} asked for in a world of {len(self._segments)}")
        return self._segments[rank]
