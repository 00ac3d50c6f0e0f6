"""What every transport between GPU heaps shares: where a lane's slot and words lie, landings, the order of peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from raymoe.memory.layout import WORD_STRIDE
from raymoe.memory.world import World
from raymoe.transport.spec import ChannelSpec, Lane, Requests, turn_of

_WORD_BYTES = WORD_STRIDE * 8


class DeviceLanes:
    """Addresses of one rank. Valid until `close`."""

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.world, self.spec = world, spec
        self._heap = world.allocate(spec.layout("cuda"), "channels", where="device")
        self._buffer = self._heap.tensor("buffer")
        self._landing: dict[int, torch.Tensor] = {}
        if spec.protocol == "get":
            for lane in spec.lanes:
                if lane.destination == world.rank:
                    shape = max(1, spec.nbytes)
                    self._landing[lane.number] = torch.empty(shape, dtype=torch.uint8, device=world.device)

    def word(self, name: str, lane: Lane, rank: int) -> int:
        """The address, for this process, of a lane's word on `rank`."""
        return self._heap.address(name, rank) + lane.number * _WORD_BYTES

    def slot(self, lane: Lane) -> int:
        """The address, for this process, of a lane's slot, wherever it is."""
        return self._heap.address("buffer", lane.owner) + lane.place * self.spec.stride

    def received(self, lane: Lane) -> torch.Tensor:
        return self.send_buffer(lane) if self.spec.protocol == "put" else self._landing[lane.number][: self.spec.nbytes]

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        """The slot, at its owner."""
        return self._buffer[lane.place, : self.spec.nbytes]

    def close(self) -> None:
        self._heap.close()


@dataclass(frozen=True)
class Ordered:
    """A batch as it is enqueued: all releases, then all sends, then all receives, peers in their turn."""

    releases: tuple[Lane, ...]
    sends: tuple[tuple[Lane, int], ...]
    """With the address of each message."""
    receives: tuple[Lane, ...]

    @classmethod
    def of(cls, batch: Requests, world: World) -> Ordered:
        def turn(lane: Lane) -> int:
            return turn_of(lane, world.rank, world.size)

        sends = sorted(((lane, message.data_ptr()) for lane, message in batch.sends), key=lambda send: turn(send[0]))
        return cls(tuple(batch.releases), tuple(sends), tuple(sorted(batch.receives, key=turn)))


class Enqueuing(ABC):
    """Batches on the current stream. Transports say what is enqueued."""

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.lanes = DeviceLanes(world, spec)
        self.world, self.spec = world, spec
        self._gpu = world.gpu

    def run(self, batch: Requests) -> None:
        stream = torch.cuda.current_stream(self.world.device).cuda_stream
        with self.world.gpu.current():
            self.enqueue(Ordered.of(batch, self.world), stream)

    @abstractmethod
    def enqueue(self, batch: Ordered, stream: int) -> None:
        """Everything of a batch, in order, on a stream."""

    def received(self, lane: Lane) -> torch.Tensor:
        return self.lanes.received(lane)

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        return self.lanes.send_buffer(lane)

    def bound(self, waited_s: float) -> None:  # noqa: B027 - there is nothing to do, for any of them
        """Kernels and the watchdog bound every wait already."""

    def close(self) -> None:
        """Wait for the GPU, whose waits are all bounded, then let go."""
        self._gpu.synchronise()
        self.lanes.close()

    def abandon(self) -> None:
        """The same: no order of closing is asked for."""
        self.close()
