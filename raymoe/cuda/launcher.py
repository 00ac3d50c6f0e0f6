"""All that an exchange takes from its GPU: launches, words of the host, memory, copies, and the order of streams.

Backends touch the GPU through a `Launcher` alone. So the emulator, which runs kernels on the CPU, needs no more than a
launcher of its own (tests/emulator/ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from raymoe.cuda.driver import call
from raymoe.cuda.error_word import ErrorWord
from raymoe.cuda.gpu import Gpu, HostWords
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Field, Kernels, Launch, Shape
from raymoe.cuda.params import Params
from raymoe.cuda.stream_order import StreamOrder

if TYPE_CHECKING:
    import torch


class Launcher:
    """The kernels of one GPU, and one order of the operations that launch them, on all streams."""

    threads = 256
    """Threads of a block, for kernels that take any number."""
    red_zone = 0
    """Bytes between two arrays of `allocator`. An emulator leaves some, and finds kernels that write there."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kernels = Kernels(gpu)
        self._words: list[HostWords] = []
        self.sms = gpu.sms
        self.order = StreamOrder(gpu)

    def ready(self, source: KernelSource, shape: Shape, params: Params, *addresses: str, **memory: Field) -> Launch:
        """Prepare a launch: `addresses` are fields for `set_addresses`, `memory` has values in place of `params`."""
        return Launch(self._kernels.function(source), shape, params, addresses=addresses, memory=memory)

    def resident(self, source: KernelSource, shape: Shape) -> int:
        """Return the number of blocks of this shape that the GPU holds at once."""
        return self._kernels.function(source).resident_blocks(shape.threads, shape.shared_bytes)

    @contextmanager
    def ordered(self, op: str) -> Iterator[int]:
        """Order the work that is enqueued inside after the last operation. Yields the current stream.

        The kernels wait for no other rank. An operation that fails inside is not recorded: its exchange becomes
        unusable.
        """
        stream, capture = self.order.enter(op, 0)
        yield stream
        self.order.leave(stream, capture)

    def words(self, count: int) -> HostWords:
        """Allocate 64-bit words of the host, zero at first. They live as long as the launcher, if not closed before."""
        words = HostWords(self._gpu, count)
        self._words.append(words)
        return words

    def error_word(self, rank: int) -> ErrorWord:
        return ErrorWord(self._gpu, rank)

    def allocator(
        self, shape: tuple[int, ...], dtype: torch.dtype, arrays: Mapping[str, tuple[int, int]] | None = None
    ) -> Callable[[], torch.Tensor]:
        """Return a function that allocates a tensor. `arrays` locates what kernels write in it: offsets and bytes."""
        import torch

        del arrays  # only the emulator checks where a kernel writes
        # An empty tensor knows the dtype and the device, which `torch.empty` would parse in every call.
        like = torch.empty(0, dtype=dtype, device=torch.device("cuda", self._gpu.ordinal))
        return partial(like.new_empty, *shape)

    def copy(self, into: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy by the copy engine between two addresses, which may lie in the heaps of peers."""
        with self._gpu.current():
            call("cuMemcpyAsync", into, source, nbytes, stream)

    def side_stream(self) -> SideStream:
        return SideStream(self._gpu)

    def synchronise(self) -> None:
        """Wait for the GPU. The wait is bounded, because every wait of the kernels is."""
        import torch

        torch.cuda.synchronize(self._gpu.ordinal)

    def close(self) -> None:
        """Free the words, the events and the kernels. The GPU must be done."""
        for words in self._words:
            words.close()
        self.order.close()
        self._kernels.close()


class Copies:
    """Copies of rows from one address to several, with the interface of a `Launch`. A call sets `fields.tokens`."""

    sms = 0

    def __init__(
        self, copy: Callable[[int, int, int, int], None], source: int, targets: Sequence[int], row_bytes: int
    ) -> None:
        """`copy` is that of a launcher."""
        self._copy, self._source, self._targets, self._row_bytes = copy, source, targets, row_bytes
        self.fields: Any = SimpleNamespace(tokens=0)

    def set_addresses(self, *_: int) -> None:
        """Do nothing: the addresses are the same in all calls."""

    def enqueue(self, stream: int) -> None:
        """Copy to one address after another: copies side by side are half as fast."""
        nbytes = self.fields.tokens * self._row_bytes
        for target in self._targets if nbytes else ():
            self._copy(target, self._source, nbytes, stream)


class SideStream:
    """A stream for work that runs beside the work of the current stream."""

    def __init__(self, gpu: Gpu) -> None:
        import torch

        new_stream: Any = torch.cuda.Stream  # has no annotations
        self._ordinal, self._stream = gpu.ordinal, new_stream(torch.device("cuda", gpu.ordinal))

    def begin(self) -> int:
        """Let the stream wait for the work enqueued so far. Return its number."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._ordinal))
        number: int = self._stream.cuda_stream
        return number

    def join(self) -> None:
        """Let the current stream wait for this one."""
        import torch

        torch.cuda.current_stream(self._ordinal).wait_stream(self._stream)
