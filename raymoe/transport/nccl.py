"""Messages between GPU ranks by NCCL's send and receive (`collective`), to compare the other transports with.

A batch goes out as one NCCL group, or as several if it has several messages for one peer. So no order of requests
blocks. `put` and `get` are the same here: NCCL moves the bytes through its own memory, and a slot is ordinary memory of
the receiver.

NCCL bounds no wait. Each batch is followed by an event, which `check` queries. If the oldest event does not come in
time, the group is aborted, which ends its kernels. A captured batch has no event: its replay is bounded while the host
waits for it in `Channels.synchronise`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from raymoe.cuda.current import capturing
from raymoe.errors import ConfigError, PeerTimeout
from raymoe.memory.world import World
from raymoe.net.nccl import NcclGroup
from raymoe.transport.spec import ChannelSpec, Mailbox, Requests

_event: Any = torch.cuda.Event  # has no annotations


def members_of(spec: ChannelSpec) -> tuple[int, ...]:
    """Return the ranks that send or receive.

    >>> members_of(ChannelSpec(((3, 0), (0, 3), (3, 1)), (8,)))
    (0, 1, 3)
    """
    return tuple(sorted({rank for pair in spec.pairs for rank in pair}))


class NcclMover:
    """Moves messages by NCCL. If no group is given it makes one, and closes it."""

    name = "collective"
    sms: int | None = None
    capturable = True

    def __init__(self, world: World, spec: ChannelSpec, group: NcclGroup | None) -> None:
        self._world = world
        self._owned = NcclGroup(world, members_of(spec)) if group is None else None
        self._group = group or self._owned
        ends = {rank for pair in spec.pairs if world.rank in pair for rank in pair}
        self._peers = sorted(ends - {world.rank})
        self._pending: deque[tuple[float, Any]] = deque()
        self._slots = {
            mailbox.number: torch.empty(spec.nbytes, dtype=torch.uint8, device=world.device)
            for mailbox in spec.mailboxes
            if mailbox.destination == world.rank
        }

    def run(self, batch: Requests) -> None:
        """Enqueue sends and receives. Releases need nothing: only this rank's next receive overwrites a slot."""
        assert self._group is not None
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        for mailbox, message in batch.sends:
            sends.setdefault(mailbox.destination, []).append(message)
        for mailbox in batch.receives:
            receives.setdefault(mailbox.source, []).append(self._slots[mailbox.number])
        self._to_self(sends.pop(self._world.rank, []), receives.pop(self._world.rank, []))
        for turn in range(max(map(len, (*sends.values(), *receives.values())), default=0)):
            out, into = (
                {peer: tensors[turn] for peer, tensors in by_peer.items() if turn < len(tensors)}
                for by_peer in (sends, receives)
            )
            self._group.exchange(out, into)
        if (sends or receives) and not capturing(self._world.device):
            done = _event()
            done.record(torch.cuda.current_stream(self._world.device))
            self._pending.append((time.monotonic(), done))

    def received(self, mailbox: Mailbox) -> torch.Tensor:
        return self._slots[mailbox.number]

    def send_buffer(self, mailbox: Mailbox) -> torch.Tensor:
        raise ConfigError(
            f"a send buffer on rank {mailbox.source} was asked for; transport collective has none: write the message "
            "anywhere and send it"
        )

    def check(self) -> None:
        if capturing(self._world.device):
            return  # a query of an event would break a capture in torch's default mode; a later check does it
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        if self._pending:
            self.check_deadline(time.monotonic() - self._pending[0][0])

    def check_deadline(self, waited_s: float) -> None:
        """Abort the group and raise if the wait was too long or this rank was aborted."""
        assert self._group is not None
        if waited_s < self._world.timeout_s and self._world.waiter.reason is None:
            return
        if not self._peers:  # this rank waits for no peer by NCCL
            self._world.waiter.check()
            return
        peer, seen, expected = self._group.lagging(self._peers)
        self._group.abort()
        self._pending.clear()
        self._world.waiter.check(peer)
        raise PeerTimeout("send and receive", expected, peer, expected, seen, waited_s, self._world.rank)

    def close(self) -> None:
        torch.cuda.synchronize(self._world.device)
        if self._owned is not None:
            self._owned.close()

    def abandon(self) -> None:
        if self._owned is not None:
            self._owned.abort()  # to close it, all ranks would have to meet
        self.close()

    def _to_self(self, messages: list[torch.Tensor], slots: list[torch.Tensor]) -> None:
        """Copy a rank's messages to itself, because NCCL pairs them only inside one group."""
        if len(messages) != len(slots):
            raise ConfigError("with collective, a send of a rank to itself and its receive go together() in one block")
        for message, slot in zip(messages, slots, strict=True):
            slot.copy_(message)
