"""The common part of transports between GPU heaps: addresses of slots and words, receive buffers, order of peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from raymoe.memory.layout import WORD_STRIDE
from raymoe.memory.world import World
from raymoe.transport.spec import ChannelSpec, Mailbox, Requests, turn_of

_WORD_BYTES = WORD_STRIDE * 8


@dataclass(frozen=True)
class OrderedBatch:
    """A batch in the order of enqueuing: all releases, then all sends, then all receives, each by `turn_of`."""

    releases: tuple[Mailbox, ...]
    sends: tuple[tuple[Mailbox, int], ...]
    """Each with the address of its message."""
    receives: tuple[Mailbox, ...]

    @classmethod
    def of(cls, batch: Requests, world: World) -> OrderedBatch:
        def turn(mailbox: Mailbox) -> int:
            return turn_of(mailbox, world.rank, world.size)

        sends = [(mailbox, message.data_ptr()) for mailbox, message in batch.sends]
        sends.sort(key=lambda send: turn(send[0]))
        return cls(tuple(batch.releases), tuple(sends), tuple(sorted(batch.receives, key=turn)))


class GpuMover(ABC):
    """Enqueues batches on the current stream. Each transport implements `enqueue`.

    The addresses of slots and words are those of this process. They are valid until `close`.
    """

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.world, self.spec = world, spec
        self._heap = world.allocate(spec.layout("cuda"), "channels", where="device")
        self._buffer = self._heap.tensor("buffer")
        self._receive_buffers: dict[int, torch.Tensor] = {}
        """The memory of received messages by number of mailbox, with `get`; a message received by `put` is its slot."""
        if spec.protocol == "get":
            for mailbox in spec.mailboxes:
                if mailbox.destination == world.rank:
                    nbytes = max(1, spec.nbytes)
                    self._receive_buffers[mailbox.number] = torch.empty(nbytes, dtype=torch.uint8, device=world.device)

    def run(self, batch: Requests) -> None:
        stream = torch.cuda.current_stream(self.world.device).cuda_stream
        with self.world.gpu.current():
            self.enqueue(OrderedBatch.of(batch, self.world), stream)

    @abstractmethod
    def enqueue(self, batch: OrderedBatch, stream: int) -> None:
        """Enqueue all of a batch, in order, on a stream."""

    def word(self, name: str, mailbox: Mailbox, rank: int) -> int:
        """Return the address of a mailbox's word on `rank`."""
        return self._heap.address(name, rank) + mailbox.number * _WORD_BYTES

    def slot(self, mailbox: Mailbox) -> int:
        """Return the address of a mailbox's slot, on this rank or on a peer."""
        return self._heap.address("buffer", mailbox.owner) + mailbox.place * self.spec.stride

    def received(self, mailbox: Mailbox) -> torch.Tensor:
        if self.spec.protocol == "put":
            return self.send_buffer(mailbox)
        return self._receive_buffers[mailbox.number][: self.spec.nbytes]

    def send_buffer(self, mailbox: Mailbox) -> torch.Tensor:
        return self._buffer[mailbox.place, : self.spec.nbytes]

    def check_deadline(self, waited_s: float) -> None:  # noqa: B027 - no subclass has anything to do
        """Do nothing: kernels and the watchdog bound every wait."""

    def close(self) -> None:
        """Wait for the GPU, whose waits are all bounded, then free."""
        self.world.gpu.synchronise()
        self._heap.close()

    def abandon(self) -> None:
        """Close, which needs no other rank."""
        self.close()
