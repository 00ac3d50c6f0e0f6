"""Launches on a CPU: each kernel runs at once on an emulator of one rank, in torch's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Field, Shape, value_of
from raymoe.cuda.params import Params
from raymoe.memory.world import World
from tests.emulator.build import Change
from tests.emulator.machine import Emulator

_MOST_STEPS = 100_000_000


class EmulatedLauncher:
    """A launcher of few small blocks, so that every loop wraps. Every launch has its own interleaving."""

    threads = 64
    sms = 13

    def __init__(self, world: World | None = None, seed: int = 0, changes: Sequence[Change] = ()) -> None:
        self._seeds, self._changes = count(seed if world is None else world.rank), tuple(changes)

    def ordered(self, op: str) -> AbstractContextManager[int]:  # noqa: ARG002
        return nullcontext(0)

    def resident(self, source: KernelSource, shape: Shape) -> int:  # noqa: ARG002
        return 4

    def ready(self, source: KernelSource, shape: Shape, params: Params, **memory: Field) -> EmulatedLaunch:
        return EmulatedLaunch(source, shape, params, memory, self._seeds, self._changes)

    def words(self, count: int) -> EmulatedWords:
        return EmulatedWords(torch.zeros(count, dtype=torch.int64))

    def close(self, together: bool) -> None:
        """Do nothing: there is nothing to close."""


@dataclass
class EmulatedWords:
    memory: torch.Tensor

    def read(self, first: int, count: int) -> Sequence[int]:
        return self.memory[first : first + count].tolist()


@dataclass
class EmulatedLaunch:
    source: KernelSource
    shape: Shape
    params: Params
    memory: dict[str, Field]
    seeds: Iterable[int]
    changes: tuple[Change, ...]

    def __call__(self, stream: int, **changed: Field) -> None:
        assert stream == 0
        fields = self.memory | changed
        params = replace(self.params, **{name: value_of(field) for name, field in fields.items()})
        with Emulator(1, _MOST_STEPS, self.changes) as emulator:
            tensors = (field for field in fields.values() if isinstance(field, torch.Tensor))
            for begin, nbytes in {storage_of(tensor) for tensor in tensors if tensor.numel()}:
                emulator.reach(begin, nbytes, f"memory of {self.source.stem}")
            emulator.launch(0, self.source, self.shape, params)
            emulator.run(next(iter(self.seeds)))


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
