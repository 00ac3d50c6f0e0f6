"""What every transport between GPU heaps shares: where a lane's slot and words lie, side by side streams, landings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu
from raymoe.memory.heap import WORD_STRIDE
from raymoe.memory.world import World
from raymoe.transport.mover import Batch, group_by_peer
from raymoe.transport.spec import ChannelSpec, Lane

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
        return self.room(lane) if self.spec.protocol == "put" else self._landing[lane.number][: self.spec.nbytes]

    def room(self, lane: Lane) -> torch.Tensor:
        """The slot, at its owner."""
        return self._buffer[lane.place, : self.spec.nbytes]

    def close(self) -> None:
        self._heap.close()


class SideStreams:
    """Runs work for different peers side by side, forked from a stream and joined to it; captures take it in too."""

    def __init__(self, gpu: Gpu, most: int) -> None:
        self._gpu = gpu
        self._fork: Any = None
        self._sides: list[tuple[int, Any]] = []
        drv = bindings()
        with gpu.current():
            self._fork = call("cuEventCreate", drv.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            for _ in range(most):
                stream = int(call("cuStreamCreate", drv.CUstream_flags.CU_STREAM_NON_BLOCKING))
                self._sides.append((stream, call("cuEventCreate", drv.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def run(self, stream: int, work: Sequence[Callable[[int], None]]) -> None:
        """Each of `work` takes the stream that it goes on: the first `stream` itself, the others one beside it."""
        beside = work[1:]
        if beside:
            call("cuEventRecord", self._fork, stream)
        used = []
        for place, each in enumerate(beside):
            side, done = self._sides[place % len(self._sides)]
            if place < len(self._sides):
                call("cuStreamWaitEvent", side, self._fork, 0)
                used.append((side, done))
            each(side)
        for each in work[:1]:
            each(stream)
        for side, done in used:
            call("cuEventRecord", done, side)
            call("cuStreamWaitEvent", stream, done, 0)

    def close(self) -> None:
        with self._gpu.current():
            while self._sides:
                side, done = self._sides.pop()
                call("cuStreamDestroy", side)
                call("cuEventDestroy", done)
            if self._fork is not None:
                call("cuEventDestroy", self._fork)
                self._fork = None


MOST_SIDES = 7  # a GPU works on 8 streams at a time (CUDA_DEVICE_MAX_CONNECTIONS) unless it is told otherwise


class Enqueuing:
    """The order of a batch on the current stream, with peers side by side. Transports say what each operation is."""

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.lanes = DeviceLanes(world, spec)
        self.world, self.spec = world, spec
        peers = {rank for pair in spec.pairs if world.rank in pair for rank in pair}
        self._sides = SideStreams(world.gpu, min(MOST_SIDES, max(0, len(peers) - 1)))

    def run(self, batch: Batch) -> None:
        stream = torch.cuda.current_stream(self.world.device).cuda_stream
        messages = {lane.number: message for lane, message in batch.sends}
        with self.world.gpu.current():
            for lane in batch.releases:
                self.release(lane, stream)
            self._side_by_side(
                stream,
                [lane for lane, _ in batch.sends],
                lambda lane, side: self.send(lane, messages[lane.number], side),
            )
            self._side_by_side(stream, batch.receives, self.receive)

    def _side_by_side(self, stream: int, lanes: Sequence[Lane], act: Callable[[Lane, int], None]) -> None:
        def of(group: list[Lane]) -> Callable[[int], None]:
            def enqueue(side: int) -> None:
                for lane in group:
                    act(lane, side)

            return enqueue

        # Each rank begins with the peer behind it, so that not all of them turn to the same one.
        me, size = self.world.rank, self.world.size
        ordered = sorted(lanes, key=lambda lane: (lane.source + lane.destination - 2 * me - 1) % size)
        self._sides.run(stream, [of(group) for group in group_by_peer(ordered, me)])

    def send(self, lane: Lane, message: torch.Tensor, stream: int) -> None:
        raise NotImplementedError

    def receive(self, lane: Lane, stream: int) -> None:
        raise NotImplementedError

    def release(self, lane: Lane, stream: int) -> None:
        raise NotImplementedError

    def received(self, lane: Lane) -> torch.Tensor:
        return self.lanes.received(lane)

    def room(self, lane: Lane) -> torch.Tensor:
        return self.lanes.room(lane)

    def bound(self, waited_s: float) -> None:
        """Kernels and the watchdog bound every wait already."""

    def close(self) -> None:
        """Wait for the GPU, whose waits are all bounded, then let go."""
        self.world.gpu.synchronise()
        self._sides.close()
        self.lanes.close()
