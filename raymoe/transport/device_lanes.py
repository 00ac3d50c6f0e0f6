"""The common part of transports between GPU heaps: addresses of slots and words, receive buffers, order of peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from raymoe.memory.layout import WORD_STRIDE
from raymoe.memory.world import World
from raymoe.transport.spec import ChannelSpec, Lane, Requests, turn_of

_WORD_BYTES = WORD_STRIDE * 8


class DeviceLanes:
    """The addresses of slots and words, for this process. Valid until `close`."""

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.world, self.spec = world, spec
        self._heap = world.allocate(spec.layout("cuda"), "channels", where="device")
        self._buffer = self._heap.tensor("buffer")
        self._receive_buffers: dict[int, torch.Tensor] = {}
        if spec.protocol == "get":
            for lane in spec.lanes:
                if lane.destination == world.rank:
                    nbytes = max(1, spec.nbytes)
                    self._receive_buffers[lane.number] = torch.empty(nbytes, dtype=torch.uint8, device=world.device)

    def word(self, name: str, lane: Lane, rank: int) -> int:
        """Return the address of a lane's word on `rank`."""
        return self._heap.address(name, rank) + lane.number * _WORD_BYTES

    def slot(self, lane: Lane) -> int:
        """Return the address of a lane's slot, on this rank or on a peer."""
        return self._heap.address("buffer", lane.owner) + lane.place * self.spec.stride

    def received(self, lane: Lane) -> torch.Tensor:
        """Return the message that this rank receives: the slot with `put`, the receive buffer with `get`."""
        if self.spec.protocol == "put":
            return self.send_buffer(lane)
        return self._receive_buffers[lane.number][: self.spec.nbytes]

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        """Return the slot, which this rank must own."""
        return self._buffer[lane.place, : self.spec.nbytes]

    def close(self) -> None:
        self._heap.close()


@dataclass(frozen=True)
class OrderedBatch:
    """A batch in the order of enqueuing: all releases, then all sends, then all receives, each by `turn_of`."""

    releases: tuple[Lane, ...]
    sends: tuple[tuple[Lane, int], ...]
    """With the address of each message."""
    receives: tuple[Lane, ...]

    @classmethod
    def of(cls, batch: Requests, world: World) -> OrderedBatch:
        def turn(lane: Lane) -> int:
            return turn_of(lane, world.rank, world.size)

        sends = sorted(((lane, message.data_ptr()) for lane, message in batch.sends), key=lambda send: turn(send[0]))
        return cls(tuple(batch.releases), tuple(sends), tuple(sorted(batch.receives, key=turn)))


class GpuMover(ABC):
    """Enqueues batches on the current stream. Each transport implements `enqueue`."""

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.lanes = DeviceLanes(world, spec)
        self.world, self.spec = world, spec
        self._gpu = world.gpu

    def run(self, batch: Requests) -> None:
        stream = torch.cuda.current_stream(self.world.device).cuda_stream
        with self.world.gpu.current():
            self.enqueue(OrderedBatch.of(batch, self.world), stream)

    @abstractmethod
    def enqueue(self, batch: OrderedBatch, stream: int) -> None:
        """Enqueue all of a batch, in order, on a stream."""

    def received(self, lane: Lane) -> torch.Tensor:
        return self.lanes.received(lane)

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        return self.lanes.send_buffer(lane)

    def check_deadline(self, waited_s: float) -> None:  # noqa: B027 - no subclass has anything to do
        """Do nothing: kernels and the watchdog bound every wait."""

    def close(self) -> None:
        """Wait for the GPU, whose waits are all bounded, then free."""
        self._gpu.synchronise()
        self.lanes.close()

    def abandon(self) -> None:
        """Close, which needs no other rank."""
        self.close()
