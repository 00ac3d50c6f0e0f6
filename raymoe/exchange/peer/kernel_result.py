"""The result of a dispatch by kernels: one allocation, and tensors over it that are made on first use.

Seven allocations cost more host time than the launch, and so do the tensors. Most callers use one or two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from raymoe.exchange.backend import Backend, Dispatched
from raymoe.exchange.peer.dispatch import DispatchSummary
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import ALIGNMENT, round_up

_VIEWS = ("weights", "expert_offsets", "expert_counts", "index")
"""The arrays that callers see."""


class Metadata:
    """The layout of a dispatch's metadata: where each array begins, the same in every call of an exchange.

    >>> metadata = Metadata({"weights": ((64,), torch.float32), "expert_counts": ((4,), torch.int32)})
    >>> metadata.at, metadata.nbytes
    ({'weights': 0, 'expert_counts': 256}, 384)
    >>> metadata.view(torch.zeros(metadata.nbytes // 4, dtype=torch.int32), "expert_counts").tolist()
    [0, 0, 0, 0]
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], red_zone: int = 0) -> None:
        """`red_zone`: unused bytes after each array (`Launcher.red_zone`)."""
        self.arrays = arrays
        self.at: dict[str, int] = {}
        end = 0
        for name in arrays:
            self.at[name] = end
            end = round_up(end + self.nbytes_of(name), ALIGNMENT) + red_zone
        self.nbytes = end

    @classmethod
    def of(cls, spec: ExchangeSpec, ranks: int, red_zone: int = 0) -> Self:
        """Lay out the metadata of a spec; layout rank adds the slots of rows."""
        tokens, local, capacity = spec.tokens, spec.local_experts(ranks), spec.rows(ranks)
        arrays = {
            "summary": ((DispatchSummary.nbytes(),), torch.uint8),
            "entry_places": ((ranks, tokens, spec.topk), torch.int64),  # place and weight of each entry of all ranks
            "masks": ((tokens,), torch.int32),  # the ranks that each token of this rank went to
            "weights": ((capacity,), torch.float32),
            "expert_offsets": ((local + 1,), torch.int32),
            "expert_counts": ((local,), torch.int32),
        }
        return cls(arrays | ({"index": ((capacity,), torch.int64)} if spec.layout == "rank" else {}), red_zone)

    def places(self) -> dict[str, tuple[int, int]]:
        """Return the offset and the bytes of each array."""
        return {name: (self.at[name], self.nbytes_of(name)) for name in self.arrays}

    def nbytes_of(self, name: str) -> int:
        shape, dtype = self.arrays[name]
        return prod(shape) * dtype.itemsize

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """Return a one-dimensional array of `memory`, which is int32 like most arrays: that saves an operation."""
        (shape, dtype), begin = self.arrays[name], self.at[name] // 4
        words = memory[begin : begin + prod(shape) * dtype.itemsize // 4]
        return words if dtype is torch.int32 else words.view(dtype)


@dataclass(slots=True)
class SavedMetadata:
    """The metadata of a dispatch on the device, which its combine reads."""

    memory: torch.Tensor
    address: int
    metadata: Metadata
    stream: int
    """The driver's number of the dispatch's stream, on which `memory` was allocated."""


class KernelDispatched(Dispatched):
    """A result whose `weights`, `expert_offsets`, `expert_counts` and `index` are made on first use."""

    @classmethod
    def over(
        cls, x: torch.Tensor, scales: torch.Tensor | None, tokens: int, saved: SavedMetadata, owner: Backend
    ) -> Self:
        """Make a result over the memory in `saved`."""
        got = cls.__new__(cls)  # the dataclass's constructor would need all tensors now
        got.x, got.scales, got.tokens = x, scales, tokens
        got._saved, got._owner, got.site = saved, owner, 0
        return got

    def __getattr__(self, name: str) -> torch.Tensor | None:
        """Make a view on first use: Python calls this only for attributes that are not set."""
        if name not in _VIEWS:
            raise AttributeError(f"a dispatch's result has no attribute {name!r}")
        saved = self.saved(SavedMetadata)
        view = saved.metadata.view(saved.memory, name) if name in saved.metadata.at else None
        setattr(self, name, view)
        return view
