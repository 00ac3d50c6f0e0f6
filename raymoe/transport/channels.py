"""Channels: messages of one size from rank to rank, in order, by any transport, between CPU ranks or GPU ranks.

With `put` the receiver announces a free slot, and the sender moves the message there and announces it. With `get` the
sender announces a message in its own slot, and the receiver fetches it and frees the slot. The memory map is in
`spec.py`.

On GPUs nothing here waits on the host: `send` and `receive` enqueue on the current stream. In that stream's order the
message may be overwritten after its `send`, and read after its `receive`.

A CUDA graph holds the addresses, the size and the slots of the calls that it captured. Both ends must use a channel's
slots in the same order. If only one end replays a graph of n messages, n must be a multiple of the slots. Otherwise the
calls must name their slots. A receive must be captured with its release.

A rank that sends and receives in one step makes both calls `together`, in any order. One by one, a receive holds up the
sends after it, and in a ring of ranks that is a deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory.world import World
from raymoe.transport.choice import choose_transport
from raymoe.transport.spec import PROTOCOLS, ChannelSpec, Mailbox, Mover, Requests, agree

if TYPE_CHECKING:
    from raymoe.net.nccl import NcclGroup


def open_mover(world: World, spec: ChannelSpec, transport: str, group: NcclGroup | None) -> Mover:
    """Make this rank's mover for a transport; all ranks make theirs together. Only GPU ranks import GPU modules."""
    if transport == "host":
        from raymoe.transport.host import HostMover

        return HostMover(world, spec)
    if transport == "tma":
        from raymoe.transport.tma import TmaMover

        return TmaMover(world, spec)
    if transport == "copy_engine":
        from raymoe.transport.copy_engine import CopyEngineMover

        return CopyEngineMover(world, spec)
    from raymoe.transport.nccl import NcclMover

    return NcclMover(world, spec, group)


__all__ = ["PROTOCOLS", "ChannelSpec", "Channels"]

ABORT_S = 1.0
"""The longest time that a stream may go on after an abort of this rank."""

_PAUSE_S = 50e-6


class Channels:
    """All channels of a spec. All ranks make them together; only the two ends of a channel send and receive."""

    def __init__(self, world: World, spec: ChannelSpec, group: NcclGroup | None = None) -> None:
        """`group`, for transport collective, belongs to the caller, who closes it. Making one takes a second."""
        self.world, self.spec = world, spec
        agree(world, spec)
        self._mover: Mover | None = open_mover(world, spec, choose_transport(world, spec), group)
        self.transport, self.sms, self.capturable = self._mover.name, self._mover.sms, self._mover.capturable
        """The transport in use, the SMs that it takes on a rank, and whether a CUDA graph can capture it."""
        self._sent: dict[tuple[int, int], int] = {}  # messages by channel, without those that named their slot
        self._received: dict[tuple[int, int], int] = {}
        self._held: dict[int, Mailbox] = {}  # received and not released, the oldest first
        self._batch: Requests | None = None
        self.broken: RaymoeError | None = None
        name = f"channels by {self.transport} of rank {world.rank} of world {world.name!r}"
        at_once = world.device.type == "cpu"
        self._end_watch = world.unclosed.watch(self, name, self._mover.abandon, at_once=at_once)

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        return self.spec.nbytes

    def send(self, destination: int, message: torch.Tensor, slot: int | None = None) -> None:
        """Send one message, in the next slot unless one is named. Waits until that slot's last message is released."""
        mailbox = self._mailbox(self._sent, (self.world.rank, destination), slot)
        self._add(Requests(sends=[(mailbox, self._flat(message))]))
        self._count(self._sent, mailbox, slot)

    def receive(self, source: int, slot: int | None = None) -> torch.Tensor:
        """Receive the next message from `source`. It is valid until it is released or its slot is received again."""
        mailbox = self._mailbox(self._received, (source, self.world.rank), slot)
        self._add(Requests(releases=self._take_held(mailbox), receives=[mailbox]))
        self._count(self._received, mailbox, slot)
        if self.spec.protocol == "put":
            self._held[mailbox.number] = mailbox
        return self._shaped(self._mover_in_use().received(mailbox))

    def release(self, source: int, slot: int | None = None) -> None:
        """Release the oldest held message from `source`, or the one in `slot`: its sender may send the next there."""
        pair = source, self.world.rank
        named = self.spec.mailbox(*pair, slot or 0)
        held = [mailbox for mailbox in self._held.values() if (mailbox.source, mailbox.destination) == pair]
        for mailbox in [mailbox for mailbox in held if slot is None or mailbox == named][:1]:
            self._add(Requests(releases=self._take_held(mailbox)))

    def send_buffer(self, destination: int, slot: int | None = None) -> torch.Tensor:
        """Return the slot of the next message with `get`. A message written here is sent without a copy."""
        pair = self.world.rank, destination
        mailbox = self.spec.mailbox(*pair, self._sent.get(pair, 0) % self.spec.slots if slot is None else slot)
        if self.spec.protocol != "get":
            raise ConfigError("with put the slots are at the receivers; write the message anywhere and send it")
        return self._shaped(self._mover_in_use().send_buffer(mailbox))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do all calls made inside at the end, in an order that cannot block. Before the end nothing has arrived."""
        if self._batch is not None:
            raise ConfigError("together() was called inside together(); use one block")
        batch = self._batch = Requests()
        before = dict(self._sent), dict(self._received), dict(self._held)
        try:
            yield
        except BaseException:
            self._sent, self._received, self._held = before  # none of the calls happens
            raise
        finally:
            self._batch = None
        self._run(batch)

    def check(self) -> None:
        """Raise if a wait has failed. `PeerTimeout` names the peer."""
        if self.broken is not None:
            raise self.broken
        try:
            self._mover_in_use().check()
        except RaymoeError as error:
            self._break(error)
            raise

    def synchronise(self) -> None:
        """Wait until the current stream is done. Raises if a wait in it has failed."""
        if self.world.device.type == "cuda":
            stream = torch.cuda.current_stream(self.world.device)
            started, aborted_at = time.monotonic(), None
            while not stream.query():
                self.check()
                self._mover_in_use().check_deadline(time.monotonic() - started)
                if self.world.waiter.reason is not None:
                    aborted_at = aborted_at or time.monotonic()
                    if time.monotonic() - aborted_at > ABORT_S:  # a channel's wait would have ended and named its peer
                        break
                time.sleep(_PAUSE_S)
        self.check()
        self.world.waiter.check()

    def close(self) -> None:
        mover, self._mover = self._mover, None
        if mover is not None:
            self._end_watch()
            mover.close()

    def _add(self, batch: Requests) -> None:
        if self._batch is None:
            self._run(batch)
            return
        busy = [mailbox for mailbox in self._batch.receives if mailbox in batch.receives]
        busy += [mailbox for mailbox, _ in self._batch.sends if mailbox in [other for other, _ in batch.sends]]
        if busy:
            raise ConfigError(
                f"two messages from rank {busy[0].source} to rank {busy[0].destination} together in one slot; a "
                f"channel carries as many at a time as it has slots, here {self.spec.slots}"
            )
        early = [mailbox for mailbox in batch.releases if mailbox in self._batch.receives]
        if early:
            raise ConfigError(
                f"a message from rank {early[0].source} to be released together with its receive; it arrives only at "
                "the end of the block, so release it after that"
            )
        self._batch.releases += batch.releases
        self._batch.sends += batch.sends
        self._batch.receives += batch.receives

    def _run(self, batch: Requests) -> None:
        self.check()
        try:
            self._mover_in_use().run(batch)
        except ConfigError:
            raise
        except RaymoeError as error:
            # Both ends count messages, and a call that fails in the middle of one leaves its count wrong.
            self._break(error)
            raise

    def _break(self, error: RaymoeError) -> None:
        """Make the channels unusable, and tell the other ranks. Raises instead of `error` what a peer told first."""
        self.broken = told = self.world.give_up(error)
        if told is not error:
            raise told from error

    def _take_held(self, mailbox: Mailbox) -> list[Mailbox]:
        """Remove the mailbox from `_held` and return it; return nothing if it holds no message."""
        return [self._held.pop(mailbox.number)] if mailbox.number in self._held else []

    def _mailbox(self, counts: dict[tuple[int, int], int], pair: tuple[int, int], slot: int | None) -> Mailbox:
        if self.broken is not None:
            raise self.broken
        return self.spec.mailbox(*pair, counts.get(pair, 0) % self.spec.slots if slot is None else slot)

    def _count(self, counts: dict[tuple[int, int], int], mailbox: Mailbox, slot: int | None) -> None:
        pair = mailbox.source, mailbox.destination
        counts[pair] = counts.get(pair, 0) + (slot is None)

    def _mover_in_use(self) -> Mover:
        """Return the mover. Raises if these channels or their world are closed."""
        if self._mover is None:
            raise ConfigError("these channels are closed; make new ones")
        if self.world.closed:
            raise ConfigError("the world of these channels is closed; make a new world and channels")
        return self._mover

    def _flat(self, message: torch.Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        if tuple(message.shape) != self.spec.shape or message.dtype != dtype:
            want, have = f"{dtype} {list(self.spec.shape)}", f"{message.dtype} {list(message.shape)}"
            raise ConfigError(f"{have} to be copied into {want}; both ends need one shape and dtype")
        if message.device != self.world.device:
            raise ConfigError(
                f"the message is on {message.device}; the ranks of these channels are on {self.world.device}"
            )
        if not message.is_contiguous():
            raise ConfigError(f"the message has strides {message.stride()}; it must be contiguous: call .contiguous()")
        return message.view(-1).view(torch.uint8)

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return flat.view(dtype).view(self.spec.shape)
