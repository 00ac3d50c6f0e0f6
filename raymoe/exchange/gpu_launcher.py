"""Launches of kernels that take tensors, with nothing made anew between calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from raymoe.device.host_words import HostWords
from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Function, Kernels
from raymoe.device.launch import Launch, Shape
from raymoe.device.params import Params
from raymoe.device.stream_order import StreamOrder
from raymoe.exchange.rounds import Field
from raymoe.memory.world import World


def address(field: Field) -> int:
    """
    >>> address(None), address(7)
    (0, 7)
    """
    return field.data_ptr() if isinstance(field, torch.Tensor) else field or 0


class GpuLauncher:
    """The kernels of a world's GPU, and the order of operations that NCCL has a part in, on whichever streams they are
    enqueued. All exchanges of a world share one (`World.shared`)."""

    threads = 256

    def __init__(self, world: World) -> None:
        self._gpu, self._order = world.gpu, StreamOrder(world.gpu)
        self._kernels = Kernels(world.gpu)
        self.sms = world.gpu.sms
        self._words: list[GpuWords] = []

    @contextmanager
    def ordered(self, op: str) -> Iterator[int]:
        """An operation that fails inside is no longer waited for: its exchange is of no further use."""
        # Kernels of ours wait for nobody here, and NCCL's take what NCCL takes: no SMs are asked for.
        stream, capture = self._order.enter(op, 0)
        yield stream
        self._order.leave(stream, capture)

    def resident(self, source: KernelSource, shape: Shape) -> int:
        return self._kernels.function(source).resident_blocks(shape.threads, shape.shared_bytes)

    def ready(self, source: KernelSource, shape: Shape, params: Params, **memory: Field) -> ReadyLaunch:
        return ReadyLaunch(self._kernels.function(source), shape, params, memory)

    def words(self, count: int) -> GpuWords:
        self._words.append(GpuWords(HostWords(self._gpu, count)))
        return self._words[-1]

    def close(self, together: bool) -> None:  # noqa: ARG002
        """With the world, behind whoever enqueued on its GPU."""
        self._gpu.synchronise()
        for words in self._words:
            words.close()
        self._order.close()
        self._kernels.close()


class ReadyLaunch(Launch):
    """A launch whose parameters are packed once; a call sets those that changed."""

    def __init__(self, function: Function, shape: Shape, params: Params, memory: dict[str, Field]) -> None:
        super().__init__(function, shape, params)
        self._memory = memory  # lives as long as its addresses are used
        for name, field in memory.items():
            setattr(self.fields, name, address(field))

    def __call__(self, stream: int, **changed: Field) -> None:
        fields = self.fields
        for name, field in changed.items():  # as `address` has it, without a call for each
            setattr(fields, name, field if isinstance(field, int) else 0 if field is None else field.data_ptr())
        super().__call__(stream)


class GpuWords:
    """Page-locked words that the GPU writes and the host reads."""

    def __init__(self, words: HostWords) -> None:
        self._words = words

    @property
    def memory(self) -> int:
        return self._words.device_address()

    def read(self, first: int, count: int) -> Sequence[int]:
        found: list[int] = self._words.words[first : first + count]
        return found

    def close(self) -> None:
        self._words.close()
