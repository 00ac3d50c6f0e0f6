"""Messages between CPU ranks, copied through memory that both have mapped.

The words `sent` and `taken` are 64-bit counts that only grow, one writer each.

- The sender waits for `taken` of the lane's previous message (the slot is free), writes the slot, fences and stores
  `sent`.
- The receiver waits for `sent`, fences and reads. Then it fences and stores `taken`. With `get`, which copies the
  message, it does so at once. With `put`, which returns the slot itself, it does so at the release.
"""

from __future__ import annotations

import torch

from raymoe.memory.world import World
from raymoe.transport.spec import ChannelSpec, Lane, Requests


class HostMover:
    """Moves messages between CPU ranks. It waits and copies in the calling thread."""

    name = "host"
    sms: int | None = None
    capturable = False

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self._world, self._spec = world, spec
        self._heap = world.allocate(spec.layout("cpu"), "channels")
        self._sent = [self._heap.words("sent", rank) for rank in range(world.size)]
        self._taken = [self._heap.words("taken", rank) for rank in range(world.size)]
        self._buffer = [self._heap.tensor("buffer", rank) for rank in range(world.size)]
        mine = [lane for lane in spec.lanes if lane.destination == world.rank]
        self._receive_buffers = {
            lane.number: torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu") for lane in mine
        }
        self._messages_sent: dict[int, int] = {}
        self._messages_received: dict[int, int] = {}

    def run(self, batch: Requests) -> None:
        for lane in batch.releases:
            self._release(lane)
        for lane, message in batch.sends:
            self._send(lane, message)
        for lane in batch.receives:
            self._receive(lane)

    def received(self, lane: Lane) -> torch.Tensor:
        return self.send_buffer(lane) if self._spec.protocol == "put" else self._receive_buffers[lane.number]

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        return self._buffer[lane.owner][lane.place, : self._spec.nbytes]

    def check(self) -> None:
        self._world.waiter.check()

    def check_deadline(self, waited_s: float) -> None:
        """Do nothing: the waits themselves are bounded."""

    def close(self) -> None:
        self._heap.close()

    abandon = close

    def _send(self, lane: Lane, message: torch.Tensor) -> None:
        sent = self._messages_sent.get(lane.number, 0)
        words = self._taken[lane.source]
        self._world.waiter.for_epoch("send", words, lane.destination, sent, index=lane.number)
        buffer = self.send_buffer(lane)
        if buffer.data_ptr() != message.data_ptr():
            buffer.copy_(message)
        self._messages_sent[lane.number] = sent + 1
        self._world.waiter.fence()  # orders the message before the word that announces it
        self._sent[lane.destination][lane.number] = sent + 1

    def _receive(self, lane: Lane) -> None:
        expected = self._messages_received.get(lane.number, 0) + 1
        words = self._sent[lane.destination]
        self._world.waiter.for_epoch("receive", words, lane.source, expected, index=lane.number)
        self._messages_received[lane.number] = expected
        if self._spec.protocol == "get":
            self._receive_buffers[lane.number].copy_(self.send_buffer(lane))
            self._release(lane)

    def _release(self, lane: Lane) -> None:
        self._world.waiter.fence()  # orders the loads of the message before the word that frees the slot
        self._taken[lane.source][lane.number] = self._messages_received.get(lane.number, 0)
