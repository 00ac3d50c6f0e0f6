"""Messages between CPU ranks, copied through memory that both have mapped.

The words `sent` and `taken` are 64-bit counts that only grow, one writer each.

- The sender waits for `taken` of the mailbox's previous message (the slot is free), writes the slot, fences and stores
  `sent`.
- The receiver waits for `sent`, fences and reads. Then it fences and stores `taken`. With `get`, which copies the
  message, it does so at once. With `put`, which returns the slot itself, it does so at the release.
"""

from __future__ import annotations

import torch

from raymoe.memory.world import World
from raymoe.transport.spec import ChannelSpec, Mailbox, Requests


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
        self._receive_buffers = {
            mailbox.number: torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
            for mailbox in spec.mailboxes
            if mailbox.destination == world.rank
        }
        self._messages_sent: dict[int, int] = {}
        self._messages_received: dict[int, int] = {}

    def run(self, batch: Requests) -> None:
        for mailbox in batch.releases:
            self._release(mailbox)
        for mailbox, message in batch.sends:
            self._send(mailbox, message)
        for mailbox in batch.receives:
            self._receive(mailbox)

    def received(self, mailbox: Mailbox) -> torch.Tensor:
        return self.send_buffer(mailbox) if self._spec.protocol == "put" else self._receive_buffers[mailbox.number]

    def send_buffer(self, mailbox: Mailbox) -> torch.Tensor:
        return self._buffer[mailbox.owner][mailbox.place, : self._spec.nbytes]

    def check(self) -> None:
        self._world.waiter.check()

    def check_deadline(self, waited_s: float) -> None:
        """Do nothing: the waits themselves are bounded."""

    def close(self) -> None:
        self._heap.close()

    abandon = close

    def _send(self, mailbox: Mailbox, message: torch.Tensor) -> None:
        sent = self._messages_sent.get(mailbox.number, 0)
        words = self._taken[mailbox.source]
        self._world.waiter.for_epoch("send", words, mailbox.destination, sent, index=mailbox.number)
        buffer = self.send_buffer(mailbox)
        if buffer.data_ptr() != message.data_ptr():
            buffer.copy_(message)
        self._messages_sent[mailbox.number] = sent + 1
        self._world.waiter.fence()  # orders the message before the word that announces it
        self._sent[mailbox.destination][mailbox.number] = sent + 1

    def _receive(self, mailbox: Mailbox) -> None:
        expected = self._messages_received.get(mailbox.number, 0) + 1
        words = self._sent[mailbox.destination]
        self._world.waiter.for_epoch("receive", words, mailbox.source, expected, index=mailbox.number)
        self._messages_received[mailbox.number] = expected
        if self._spec.protocol == "get":
            self._receive_buffers[mailbox.number].copy_(self.send_buffer(mailbox))
            self._release(mailbox)

    def _release(self, mailbox: Mailbox) -> None:
        self._world.waiter.fence()  # orders the loads of the message before the word that frees the slot
        self._taken[mailbox.source][mailbox.number] = self._messages_received.get(mailbox.number, 0)
