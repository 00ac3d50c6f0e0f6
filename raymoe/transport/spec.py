"""Which ranks send which ranks messages of what size and how: what all ranks of some channels must agree on.

Pure arithmetic. A channel leads from one rank to another and has `slots` lanes. A lane carries one message at a time,
has a buffer (the slot) and two words of its own, and shares nothing with any other lane: two messages are under way
together exactly where they are on two lanes.

Memory map of the heap (the same on every rank; lane n is lane `n % slots` of channel `n // slots` of `pairs`):

- `sent [lanes]`, at the receiver: written by the sender once the message may be received (or fetched).
- `taken [lanes]`, at the sender: written by the receiver once it has done with the message.
- `buffer [places]`, 128-byte aligned: with `put` at the receiver, written by the sender; with `get` at the sender, read
  by the other. A rank has as many places as the rank that owns most.
- on GPUs `sends`, `receives`, `releases` [lanes], of the rank itself: how often its kernels have done each.

Whether the words are 64-bit counts or 0/1, and who orders what, is told by each transport.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import prod
from typing import Protocol

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory.layout import ALIGNMENT, ITEM_BYTES, Layout, Region, round_up
from raymoe.memory.world import World

PROTOCOLS = ("put", "get")
TRANSPORTS = {"cpu": ("auto", "host"), "cuda": ("auto", "copy_engine", "tma", "collective")}
WORDS, COUNTS = ("sent", "taken"), ("sends", "receives", "releases")
MOST_SLOTS = 1024


@dataclass(frozen=True)
class Lane:
    """`place` is the slot's number among those of its owner."""

    number: int
    source: int
    destination: int
    owner: int
    place: int


@dataclass(frozen=True)
class ChannelSpec:
    """All ranks of the world must say the same.

    >>> spec = ChannelSpec(((0, 1), (2, 1), (1, 0)), shape=(16,))
    >>> [spec.lane(source, destination).place for source, destination in spec.pairs]  # at the receivers: put
    [0, 1, 0]
    >>> spec.layout("cpu").region("buffer").shape
    (2, 128)
    >>> two = ChannelSpec(((0, 1), (2, 1)), shape=(3, 100), dtype="bfloat16", protocol="get", slots=2)
    >>> two.lane(2, 1, slot=1), two.nbytes, two.places
    (Lane(number=3, source=2, destination=1, owner=2, place=1), 600, 2)
    """

    pairs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str = "uint8"
    protocol: str = "put"
    transport: str = "auto"
    slots: int = 1
    """Messages of one channel that may be under way at a time."""
    sms: int | None = None
    """SMs that a rank's transfers together may take, where the transport takes any; None: as many as serve it best."""

    def check(self, ranks: int, device: str) -> None:
        """Raise where this cannot be, each option by its own name; there is no silent default."""
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol is {self.protocol!r}; it is one of {', '.join(PROTOCOLS)}")
        if self.transport not in TRANSPORTS[device]:
            known = ", ".join(TRANSPORTS[device])
            raise ConfigError(f"transport is {self.transport!r}; between {device} ranks it is one of {known}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}; it is one of {', '.join(ITEM_BYTES)}")
        if not all(extent >= 0 for extent in self.shape):
            raise ConfigError(f"messages of shape {self.shape}; no dimension is below 0")
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"{self.slots} slots a channel; there are 1 to {MOST_SLOTS}")
        if self.sms is not None and self.sms < 1:
            raise ConfigError(f"sms is {self.sms}; leave it out, or give at least 1")
        if self.sms is not None and self.transport not in ("auto", "tma"):
            raise ConfigError(f"sms is {self.sms} and transport {self.transport} takes no number of SMs; leave it out")
        if not self.pairs or len(set(self.pairs)) != len(self.pairs):
            raise ConfigError(
                f"channels for the pairs {self.pairs}; each pair is named once, and there is at least one"
            )
        for pair in self.pairs:
            if not all(0 <= rank < ranks for rank in pair):
                raise ConfigError(f"a channel from rank {pair[0]} to rank {pair[1]} in a world of {ranks}")

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stride(self) -> int:
        """Bytes from one place to the next."""
        return max(ALIGNMENT, round_up(self.nbytes, ALIGNMENT))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self.lane(*pair, slot) for pair in self.pairs for slot in range(self.slots))

    @property
    def places(self) -> int:
        owners = [self.owner(*pair) for pair in self.pairs]
        return self.slots * max(owners.count(owner) for owner in owners)

    def owner(self, source: int, destination: int) -> int:
        """Whose memory the slots of a channel are in."""
        return destination if self.protocol == "put" else source

    def lane(self, source: int, destination: int, slot: int = 0) -> Lane:
        if (source, destination) not in self.pairs:
            raise ConfigError(f"no channel from rank {source} to rank {destination}; there are {self.pairs}")
        if not 0 <= slot < self.slots:
            raise ConfigError(
                f"slot {slot} of the channel from rank {source} to rank {destination}; it has {self.slots}"
            )
        channel, owner = self.pairs.index((source, destination)), self.owner(source, destination)
        before = sum(self.owner(*pair) == owner for pair in self.pairs[:channel])
        return Lane(channel * self.slots + slot, source, destination, owner, before * self.slots + slot)

    def layout(self, device: str) -> Layout:
        lanes = len(self.pairs) * self.slots
        words = [Region.words(name, lanes) for name in (WORDS if device == "cpu" else WORDS + COUNTS)]
        return Layout.of([*words, Region("buffer", (self.places, self.stride), "uint8")])

    def movers(self) -> int:
        """How many channels the busiest rank moves the bytes of, which share its SMs.

        >>> [ChannelSpec(((0, 1), (0, 2), (1, 0)), (8,), protocol=protocol).movers() for protocol in ("put", "get")]
        [2, 1]
        """
        ranks = [pair[0 if self.protocol == "put" else 1] for pair in self.pairs]
        return max(ranks.count(rank) for rank in ranks)


def agree(world: World, spec: ChannelSpec) -> None:
    """Raise on all ranks unless this spec can be and all gave the same."""
    problem: RaymoeError | None = None
    try:
        spec.check(world.size, world.device.type)
    except ConfigError as error:
        problem = error
    mine = asdict(spec)
    theirs: object
    for rank, theirs in enumerate(world.swap(mine, "channels: spec")):
        assert isinstance(theirs, dict)
        for key, value in mine.items():
            if problem is None and theirs[key] != value:
                here = f"{value} on rank {world.rank}"
                problem = ConfigError(
                    f"{key} is {theirs[key]} on rank {rank} and {here}; both ends need one size and kind"
                )
    world.agree(problem, "channels: agreed")


# What channels ask of a transport.


@dataclass
class Requests:
    """Operations of one rank that were asked for together. Their order means nothing; each lane is in one list once.

    A transport enqueues all releases, then all sends, then all receives, one after another. So no order in which the
    ranks ask can block them: releases wait for nothing, sends only for releases of messages of earlier batches, and
    receives only for sends, which their senders have enqueued before any receive of the same batch. A send whose slot
    is not released holds up the others of its batch.
    """

    releases: list[Lane] = field(default_factory=list)
    sends: list[tuple[Lane, torch.Tensor]] = field(default_factory=list)
    receives: list[Lane] = field(default_factory=list)


class Mover(Protocol):
    """Moves the messages of some channels for one rank. On GPUs everything is ordered by the current stream."""

    name: str
    sms: int | None
    """SMs that a rank's transfers take together; None where the question makes no sense."""
    capturable: bool

    def run(self, batch: Requests) -> None: ...

    def received(self, lane: Lane) -> torch.Tensor:
        """What the receiver gets: always the same memory for a lane, flat bytes."""

    def send_buffer(self, lane: Lane) -> torch.Tensor:
        """Flat bytes at the sender: a message that already lies here is not copied once more before it is fetched."""

    def check(self) -> None:
        """Raise where a wait has failed."""

    def bound(self, waited_s: float) -> None:
        """Where nothing else bounds a wait on the GPU: end it and raise if the host has waited too long for it."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """As `close`, alone: the other ranks may not close theirs now."""


def turn_of(lane: Lane, rank: int, size: int) -> int:
    """When the peer of a lane has its turn: every rank begins with the one behind it.

    So at any time each rank sends to another one, and no two to the same. Copy engines that pushed 64 to 256 MiB to
    each of three peers in turns reached 376 to 389 GB/s a rank, side by side 191 to 232; pulls 362 to 384 and 192 to
    230; kernels pushed 359 and 345 (4x H200, 2026-11-21).

    >>> everybody = [Lane(0, 2, peer, peer, 0) for peer in range(4)]
    >>> [lane.destination for lane in sorted(everybody, key=lambda lane: turn_of(lane, 2, 4))]
    [3, 0, 1, 2]
    """
    peer = lane.destination if lane.source == rank else lane.source
    return (peer - rank - 1) % size
