"""Channels: messages of one size from rank to rank, in order, by any transport, between CPU ranks or GPU ranks.

With `put` the receiver says that a slot is free, the sender moves the message there and says so. With `get` the sender
says that a message lies ready in its own slot, the receiver fetches it and says so. `spec.py` has the memory map.

On GPUs nothing here waits on the host: `send` and `receive` enqueue on the current stream. After a `send` in that
stream's order the message may be overwritten; after a `receive` it may be read. What is captured into a CUDA graph has
its addresses, size and slots baked; both ends must go through a channel's slots in the same order, so where one end
replays a graph of n messages and the other does not, n is a multiple of the slots, or the slots are named. A captured
receive is captured with its release.

A rank that must send and receive in one step asks for both `together`, in any order: asked for one by one, a receive
holds up the sends behind it, in a ring for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory.world import World
from raymoe.transport.choice import chosen
from raymoe.transport.spec import PROTOCOLS, ChannelSpec, Lane, Mover, Requests, agree

if TYPE_CHECKING:
    from raymoe.net.nccl import NcclGroup


# From a transport's name to the thing that moves bytes. What GPU ranks need is imported for them alone.


def open_mover(world: World, spec: ChannelSpec, transport: str, group: NcclGroup | None) -> Mover:
    """The mover of this rank; all ranks open theirs together, by the same name."""
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
"""How long a stream is given to end after this rank was told to stop."""

_PAUSE_S = 50e-6


class Channels:
    """All channels of a spec. Making them is collective; sending and receiving is between the two ends."""

    def __init__(self, world: World, spec: ChannelSpec, group: NcclGroup | None = None) -> None:
        """`group`, for transport collective: the caller's, who closes it; making one takes a second."""
        self.world, self.spec = world, spec
        agree(world, spec)
        self._mover: Mover | None = open_mover(world, spec, chosen(world, spec), group)
        self.transport, self.sms, self.capturable = self._mover.name, self._mover.sms, self._mover.capturable
        """The transport that is used, the SMs that it takes on a rank, and whether a CUDA graph can hold it."""
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._held: dict[int, Lane] = {}  # received and not released, the oldest first
        self._batch: Requests | None = None
        self.broken: RaymoeError | None = None
        name = f"channels by {self.transport} of rank {world.rank} of world {world.name!r}"
        at_once = world.device.type == "cpu"
        self._forget = world.unclosed.watch(self, name, self._mover.abandon, at_once=at_once)

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        return self.spec.nbytes

    def send(self, destination: int, message: torch.Tensor, slot: int | None = None) -> None:
        """Hand over one message, in the next slot unless one is named; waits until the one before there is released."""
        lane = self._lane(self._sent, (self.world.rank, destination), slot)
        self._add(Requests(sends=[(lane, self._flat(message))]))
        self._count(self._sent, lane, slot)

    def receive(self, source: int, slot: int | None = None) -> torch.Tensor:
        """The next message from `source`, valid until it is released or its slot is received again."""
        lane = self._lane(self._received, (source, self.world.rank), slot)
        self._add(Requests(releases=self._let_go(lane), receives=[lane]))
        self._count(self._received, lane, slot)
        if self.spec.protocol == "put":
            self._held[lane.number] = lane
        return self._shaped(self._open().received(lane))

    def release(self, source: int, slot: int | None = None) -> None:
        """Done with the oldest message held from `source`, or the one in `slot`: its sender may send the next there."""
        pair = source, self.world.rank
        named = self.spec.lane(*pair, slot or 0)
        held = [lane for lane in self._held.values() if (lane.source, lane.destination) == pair]
        for lane in [lane for lane in held if slot is None or lane == named][:1]:
            self._add(Requests(releases=self._let_go(lane)))

    def send_buffer(self, destination: int, slot: int | None = None) -> torch.Tensor:
        """Where the next message with `get` is fetched from; one that is written here needs no copy when it is sent."""
        pair = self.world.rank, destination
        lane = self.spec.lane(*pair, self._sent.get(pair, 0) % self.spec.slots if slot is None else slot)
        if self.spec.protocol != "get":
            raise ConfigError("the slots of a put are the receivers'; write the message anywhere and send it")
        return self._shaped(self._open().send_buffer(lane))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is asked for inside happens at the end, in an order that cannot block; until then nothing is there."""
        if self._batch is not None:
            raise ConfigError("channels are asked for things together already; once is enough")
        batch = self._batch = Requests()
        before = dict(self._sent), dict(self._received), dict(self._held)
        try:
            yield
        except BaseException:
            self._sent, self._received, self._held = before  # nothing of it happens
            raise
        finally:
            self._batch = None
        self._run(batch)

    def check(self) -> None:
        """Raise where a wait has failed: `PeerTimeout` names the peer."""
        if self.broken is not None:
            raise self.broken
        try:
            self._open().check()
        except RaymoeError as error:
            self.broken = error
            raise

    def synchronise(self) -> None:
        """Until the current stream is done, or a wait in it has failed."""
        if self.world.device.type == "cuda":
            stream = torch.cuda.current_stream(self.world.device)
            started, told = time.monotonic(), None
            while not stream.query():
                self.check()
                self._open().bound(time.monotonic() - started)
                if self.world.waiter.reason is not None:
                    told = told or time.monotonic()
                    if time.monotonic() - told > ABORT_S:  # a wait of ours would have ended, and named its peer
                        break
                time.sleep(_PAUSE_S)
        self.check()
        self.world.waiter.check()

    def close(self) -> None:
        mover, self._mover = self._mover, None
        if mover is not None:
            self._forget()
            mover.close()

    def _add(self, batch: Requests) -> None:
        if self._batch is None:
            self._run(batch)
            return
        busy = [lane for lane in self._batch.receives if lane in batch.receives]
        busy += [lane for lane, _ in self._batch.sends if lane in [other for other, _ in batch.sends]]
        if busy:
            raise ConfigError(
                f"two messages from rank {busy[0].source} to rank {busy[0].destination} together in one slot; a "
                f"channel carries as many at a time as it has slots, here {self.spec.slots}"
            )
        early = [lane for lane in batch.releases if lane in self._batch.receives]
        if early:
            raise ConfigError(
                f"a message from rank {early[0].source} to be released together with its receive; nothing is there "
                "before the end of what is asked for together, so release it after that"
            )
        self._batch.releases += batch.releases
        self._batch.sends += batch.sends
        self._batch.receives += batch.receives

    def _run(self, batch: Requests) -> None:
        self.check()
        try:
            self._open().run(batch)
        except ConfigError:
            raise
        except RaymoeError as error:
            # Both ends count messages; whoever leaves in the middle of one has lost count.
            self.broken = error
            raise

    def _let_go(self, lane: Lane) -> list[Lane]:
        return [self._held.pop(lane.number)] if lane.number in self._held else []

    def _lane(self, counts: dict[tuple[int, int], int], pair: tuple[int, int], slot: int | None) -> Lane:
        if self.broken is not None:
            raise self.broken
        return self.spec.lane(*pair, counts.get(pair, 0) % self.spec.slots if slot is None else slot)

    def _count(self, counts: dict[tuple[int, int], int], lane: Lane, slot: int | None) -> None:
        pair = lane.source, lane.destination
        counts[pair] = counts.get(pair, 0) + (slot is None)

    def _open(self) -> Mover:
        if self._mover is None:
            raise ConfigError("these channels are closed; make new ones")
        if self.world.closed:
            raise ConfigError("the world of these channels is closed; make a new world and channels")
        return self._mover

    def _flat(self, message: torch.Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        if tuple(message.shape) != self.spec.shape or message.dtype != dtype:
            there, here = f"{dtype} {list(self.spec.shape)}", f"{message.dtype} {list(message.shape)}"
            raise ConfigError(f"{here} to be copied into {there}; both ends need one shape and dtype")
        if message.device != self.world.device:
            raise ConfigError(f"a message on {message.device}; these channels are between ranks on {self.world.device}")
        if not message.is_contiguous():
            raise ConfigError(f"a message with strides {message.stride()}; only contiguous ones move, so copy it first")
        return message.view(-1).view(torch.uint8)

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return flat.view(dtype).view(self.spec.shape)
