"""The result of a dispatch by our kernels: one piece of memory, and tensors over it that are made when asked for.

Seven allocations cost more host time than the launch, and so would the tensors: most callers look at one or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from raymoe.device.dispatch import Got
from raymoe.exchange.backend import Dispatched
from raymoe.memory.layout import ALIGNMENT, round_up

_VIEWS = ("weights", "expert_offsets", "expert_counts", "index")
"""What a caller sees of it."""


class Metadata:
    """Where each array of a dispatch's metadata begins, the same in every call of an exchange.

    >>> metadata = Metadata({"weights": ((64,), torch.float32), "expert_counts": ((4,), torch.int32)})
    >>> metadata.at, metadata.nbytes
    ({'weights': 0, 'expert_counts': 256}, 384)
    >>> metadata.view(torch.zeros(metadata.nbytes // 4, dtype=torch.int32), "expert_counts").tolist()
    [0, 0, 0, 0]
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.arrays = arrays
        self.at: dict[str, int] = {}
        end = 0
        for name in arrays:
            self.at[name] = end
            end = round_up(end + self.nbytes_of(name), ALIGNMENT)
        self.nbytes = end

    @classmethod
    def of(cls, ranks: int, tokens: int, topk: int, local: int, capacity: int, *, indexed: bool) -> Self:
        """Of a spec, for `indexed` with the slots of rows."""
        arrays = {
            "got": ((Got.nbytes(),), torch.uint8),
            "home": ((ranks, tokens, topk), torch.int64),  # of each entry of all ranks, its place and its weight
            "masks": ((tokens,), torch.int32),  # the ranks that each token of this rank went to
            "weights": ((capacity,), torch.float32),
            "expert_offsets": ((local + 1,), torch.int32),
            "expert_counts": ((local,), torch.int32),
        }
        return cls(arrays | ({"index": ((capacity,), torch.int64)} if indexed else {}))

    def nbytes_of(self, name: str) -> int:
        shape, dtype = self.arrays[name]
        return prod(shape) * dtype.itemsize

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """An array of one dimension; `memory` is int32, as most of them are, which saves an operation."""
        (shape, dtype), begin = self.arrays[name], self.at[name] // 4
        words = memory[begin : begin + prod(shape) * dtype.itemsize // 4]
        return words if dtype is torch.int32 else words.view(dtype)


@dataclass(slots=True)
class Home:
    """The metadata of a dispatch on the device, which its combine reads."""

    memory: torch.Tensor
    address: int
    metadata: Metadata
    stream: int
    """Where the dispatch was enqueued, by the driver's number. Torch gives `memory` only to that stream again."""


def lend(*memory: torch.Tensor | None) -> None:
    """Keep memory until the current stream has done what is enqueued on it now, also when its tensors go before.

    Torch would give it at once to whoever allocates on the stream that it was allocated on.
    """
    for each in memory:
        if each is not None:
            each.record_stream(torch.cuda.current_stream(each.device))


class KernelDispatched(Dispatched):
    """Its `weights`, `expert_offsets`, `expert_counts` and `index` are made when first asked for."""

    @classmethod
    def over(cls, x: torch.Tensor, scales: torch.Tensor | None, tokens: int, home: Home, owner: object) -> Self:
        got = cls.__new__(cls)  # the dataclass's own would want all tensors now
        got.x, got.scales, got.tokens = x, scales, tokens
        got._home, got._owner = home, owner
        return got

    def __getattr__(self, name: str) -> torch.Tensor | None:
        """Called for what is not there yet."""
        if name not in _VIEWS:
            raise AttributeError(f"a dispatch's result has no attribute {name!r}")
        home = self._home
        assert isinstance(home, Home)
        view = home.metadata.view(home.memory, name) if name in home.metadata.at else None
        setattr(self, name, view)
        return view
