"""Memory for pools of tensors, of CPUs and of GPUs: segments that others can map, marks of a stream, copies.

A *mark* is a place in the work of a stream. On GPUs it is an event that other processes can open, so a reader sees when
the owner's writes are done. On CPUs work is done when the call returns, so there a mark is always done.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from raymoe.cuda.current import capturing, on
from raymoe.cuda.driver import call
from raymoe.cuda.gpu import Gpu
from raymoe.cuda.graph import relaxed_capture_mode
from raymoe.errors import CaptureError
from raymoe.memory import host_shm
from raymoe.memory.cuda_ipc import DeviceMemory, DeviceSegment, GpuMemory
from raymoe.memory.heap import DeviceBytes
from raymoe.memory.host_shm import HostSegment


class Mark(Protocol):
    """A place in the work of a stream."""

    @property
    def handle(self) -> bytes | None:
        """The bytes that open the mark in another process; None where there is nothing to open."""
        ...

    def is_done(self) -> bool:
        """Return whether all work before it is done."""
        ...


@dataclass(frozen=True)
class Done:
    """The mark of work that is done."""

    handle: bytes | None = None

    def is_done(self) -> bool:
        return True


@dataclass(frozen=True)
class PeerPiece:
    """Bytes of a segment, and the tensor that they are copied to."""

    target: Tensor
    segment: Any
    start: int
    nbytes: int


class PoolDevice(Protocol):
    """Memory of one kind, on one device of this process. Any thread may call."""

    device: torch.device
    has_streams: bool
    """Whether work may be under way that this process has enqueued."""

    def own(self, name: str, nbytes: int) -> Any:
        """Make a segment of at least so many bytes."""
        ...

    def map_peer(self, descriptor: dict[str, object]) -> Any:
        """Map a segment of another process."""
        ...

    def address(self, segment: Any) -> int: ...

    def piece(self, segment: Any, start: int, nbytes: int) -> tuple[Tensor, object]:
        """Return bytes of an own segment, and an object that lives as long as a tensor over them does."""
        ...

    def mark(self) -> Mark:
        """Mark the current stream, for other processes."""
        ...

    def recycle(self, mark: Mark) -> None:
        """Take back a mark that is done and that nobody looks at any more."""
        ...

    def open_mark(self, handle: bytes | None) -> Mark:
        """Open the mark of another process."""
        ...

    def copy(self, pieces: Sequence[PeerPiece]) -> Mark:
        """Start to copy; return the mark of the end."""
        ...

    def check_can_enqueue(self) -> None:
        """Refuse to work while the current stream is captured into a graph."""
        ...

    def synchronise(self) -> None:
        """Wait until all work of this process on the device is done."""
        ...


class HostPoolDevice:
    """Shared memory of CPUs."""

    has_streams = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def own(self, name: str, nbytes: int) -> HostSegment:
        return host_shm.own(name, nbytes)

    def map_peer(self, descriptor: dict[str, object]) -> HostSegment:
        return host_shm.map_peer(descriptor)

    def address(self, segment: HostSegment) -> int:
        return ctypes.addressof(segment.buffer)

    def piece(self, segment: HostSegment, start: int, nbytes: int) -> tuple[Tensor, object]:
        memory = (ctypes.c_ubyte * nbytes).from_buffer(segment.buffer, start)
        return torch.frombuffer(memory, dtype=torch.uint8), memory

    def mark(self) -> Mark:
        return Done()

    def recycle(self, mark: Mark) -> None:
        del mark

    def open_mark(self, handle: bytes | None) -> Mark:
        del handle
        return Done()

    def copy(self, pieces: Sequence[PeerPiece]) -> Mark:
        for piece in pieces:
            source = torch.frombuffer(piece.segment.buffer, dtype=torch.uint8, count=piece.nbytes, offset=piece.start)
            as_bytes(piece.target).copy_(source)
        return Done()

    def check_can_enqueue(self) -> None:
        """CPUs have no graphs."""

    def synchronise(self) -> None:
        """CPUs have no stream."""


class Event:
    """A CUDA event as a mark. Torch destroys it."""

    def __init__(self, event: Any, gpu: Gpu) -> None:
        self.event, self._gpu = event, gpu
        self.handle: bytes | None = None

    def is_done(self) -> bool:
        with beside_captures(self._gpu):
            return bool(self.event.query())


@dataclass(frozen=True)
class _OwnSegment:
    """A segment of this process's own pool, for its own reader."""

    address: int

    def close(self) -> None:
        """The pool owns the memory."""


@contextmanager
def beside_captures(gpu: Gpu) -> Iterator[None]:
    """Make a GPU current for calls that must not break a capture of another thread."""
    with gpu.current(), relaxed_capture_mode():
        yield


class GpuPoolDevice:
    """Device memory that CUDA IPC maps, and a stream of its own for copies, which the copy engine does."""

    has_streams = True

    def __init__(self, memory: GpuMemory, cuda: Any = torch.cuda) -> None:
        self.device = torch.device("cuda", memory.gpu.ordinal)
        self._memory, self._gpu, self._cuda = memory, memory.gpu, cuda
        self._segments = DeviceMemory(memory, retry_s=0.5)
        self._stream: Any = None
        self._free_events: list[Event] = []
        self._own: dict[object, Any] = {}  # by handle: CUDA opens no handle in the process that made it
        self._lock = threading.Lock()

    @classmethod
    def open(cls, ordinal: int) -> GpuPoolDevice:
        """Open a GPU by its number in this process."""
        return cls(GpuMemory.open(ordinal))

    def own(self, name: str, nbytes: int) -> DeviceSegment:
        with beside_captures(self._gpu):
            segment = self._segments.own(name, nbytes)
        self._own[segment.descriptor()["handle"]] = _OwnSegment(segment.address)
        return segment

    def map_peer(self, descriptor: dict[str, object]) -> Any:
        if descriptor["handle"] in self._own:
            return self._own[descriptor["handle"]]
        with beside_captures(self._gpu):
            return self._segments.map_peer(descriptor)

    def address(self, segment: DeviceSegment) -> int:
        return segment.address

    def piece(self, segment: DeviceSegment, start: int, nbytes: int) -> tuple[Tensor, object]:
        memory = DeviceBytes(segment.address + start, nbytes, segment.owner)
        return torch.as_tensor(memory, device=self.device), memory

    def mark(self) -> Mark:
        with on(self.device):
            event = self._new_event()
            event.event.record(self._cuda.current_stream(self.device))
            if event.handle is None:
                event.handle = bytes(event.event.ipc_handle())
                self._own[event.handle] = event
        return event

    def recycle(self, mark: Mark) -> None:
        assert isinstance(mark, Event)
        with self._lock:
            self._free_events.append(mark)

    def open_mark(self, handle: bytes | None) -> Mark:
        assert handle is not None
        if handle in self._own:
            own: Event = self._own[handle]
            return own
        with beside_captures(self._gpu):
            return Event(self._cuda.Event.from_ipc_handle(self.device, handle), self._gpu)

    def copy(self, pieces: Sequence[PeerPiece]) -> Mark:
        """The memory of a target may have been freed by work that its stream has not done yet, so copies wait for it.

        The driver is called with addresses: torch takes a peer's memory for memory of this process's own GPU.
        """
        with self._lock, beside_captures(self._gpu):
            if self._stream is None:
                self._stream = self._cuda.Stream(self.device)
            stream = self._stream
            for device in {piece.target.device for piece in pieces if piece.target.is_cuda}:
                stream.wait_stream(self._cuda.current_stream(device))
            for piece in pieces:
                source = piece.segment.address + piece.start
                call("cuMemcpyAsync", piece.target.data_ptr(), source, piece.nbytes, stream.cuda_stream)
            event = self._cuda.Event()
            event.record(stream)
        return Event(event, self._gpu)

    def check_can_enqueue(self) -> None:
        if capturing(self.device):
            raise CaptureError("tensors cannot be given to Ray while their stream is captured; do it after the capture")

    def synchronise(self) -> None:
        self._memory.synchronise()

    def _new_event(self) -> Event:
        with self._lock:
            if self._free_events:
                return self._free_events.pop()
        return Event(self._cuda.Event(interprocess=True), self._gpu)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes. One with a single element counts as contiguous, whatever its strides are."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
