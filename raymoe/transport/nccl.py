"""Messages between GPU ranks by NCCL's send and receive (`collective`): the transport to compare with.

What a batch asks for goes out as one NCCL group, so no order of asking blocks. `put` and `get` are the same here: NCCL
moves bytes in its own way, through its own memory, and a slot is ordinary memory of the receiver.

NCCL bounds no wait. Each batch is followed by an event that `check` looks at; where the oldest is not over in time, the
group is aborted, which ends its kernels. What was captured into a graph has no event: a replay is bounded where the
host waits for it by `Channels.synchronise`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from raymoe.device.current import capturing
from raymoe.errors import ConfigError, PeerTimeout
from raymoe.memory.world import World
from raymoe.net.nccl import NcclGroup
from raymoe.transport.spec import ChannelSpec, Lane, Requests

_event: Any = torch.cuda.Event  # has no annotations


def members_of(spec: ChannelSpec) -> tuple[int, ...]:
    """The ranks that send or receive.

    >>> members_of(ChannelSpec(((3, 0), (0, 3), (3, 1)), (8,)))
    (0, 1, 3)
    """
    return tuple(sorted({rank for pair in spec.pairs for rank in pair}))


class NcclMover:
    """Where no group is given it makes one, and closes it."""

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
        mine = [lane for lane in spec.lanes if lane.destination == world.rank]
        self._slots = {lane.number: torch.empty(spec.nbytes, dtype=torch.uint8, device=world.device) for lane in mine}

    def run(self, batch: Requests) -> None:
        """Releases need nothing: NCCL has its own credits, and a slot is overwritten only by our next receive."""
        assert self._group is not None
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        for lane, message in batch.sends:
            sends.setdefault(lane.destination, []).append(message)
        for lane in batch.receives:
            receives.setdefault(lane.source, []).append(self._slots[lane.number])
        self._to_self(sends.pop(self._world.rank, []), receives.pop(self._world.rank, []))
        for turn in range(max(map(len, (*sends.values(), *receives.values())), default=0)):
            out, into = (
                {peer: tensors[turn] for peer, tensors in each.items() if turn < len(tensors)}
                for each in (sends, receives)
            )
            self._group.exchange(out, into)
        if (sends or receives) and not capturing(self._world.device):
            over = _event()
            over.record(torch.cuda.current_stream(self._world.device))
            self._pending.append((time.monotonic(), over))

    def received(self, lane: Lane) -> torch.Tensor:
        return self._slots[lane.number]

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        raise ConfigError(f"NCCL fetches nothing from rank {lane.source}; write the message anywhere and send it")

    def check(self) -> None:
        if capturing(self._world.device):
            return  # to ask of an event would break a capture in torch's usual mode; a check after it asks
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        if self._pending:
            self.bound(time.monotonic() - self._pending[0][0])

    def bound(self, waited_s: float) -> None:
        """End and raise where this is too long, or where this rank was told to stop."""
        assert self._group is not None
        if waited_s < self._world.timeout_s and self._world.waiter.reason is None:
            return
        if not self._peers:  # it waits for nobody by NCCL
            self._world.waiter.check()
            return
        peer, seen, mine = self._group.lagging(self._peers)
        self._group.abort()
        self._pending.clear()
        self._world.waiter.check(peer)
        raise PeerTimeout("send and receive", mine, peer, mine, seen, waited_s, self._world.rank)

    def close(self) -> None:
        torch.cuda.synchronize(self._world.device)
        if self._owned is not None:
            self._owned.close()

    def abandon(self) -> None:
        if self._owned is not None:
            self._owned.abort()  # to end it in peace all ranks would have to meet
        self.close()

    def _to_self(self, messages: list[torch.Tensor], slots: list[torch.Tensor]) -> None:
        """NCCL pairs a rank's messages to itself inside one group only; a plain copy does, where both ends are here."""
        if len(messages) != len(slots):
            raise ConfigError("with collective, a send to oneself and its receive are asked for together")
        for message, slot in zip(messages, slots, strict=True):
            slot.copy_(message)
