"""The specification of channels, on which all ranks must agree: pairs of ranks, message size, protocol, transport.

Pure arithmetic. A channel leads from one rank to another and has `slots` mailboxes. A mailbox holds one message at a
time. It has a buffer (the slot) and two words of its own, and shares nothing with any other mailbox. So two messages
can be in flight together only in two mailboxes.

Memory map of the heap (the same on every rank; mailbox n is mailbox `n % slots` of channel `n // slots` of `pairs`):

- `sent [mailboxes]`, at the receiver: the sender writes it when the message may be received (or fetched).
- `taken [mailboxes]`, at the sender: the receiver writes it when it has finished with the message.
- `buffer [places]`, 128-byte aligned. With `put` it is at the receiver, and the sender writes it. With `get` it is at
  the sender, and the receiver reads it. Every rank has as many places as the rank that needs most.
- `sends`, `receives`, `releases` [mailboxes], on GPUs: how often the kernels of this rank have done each.

Each transport says whether its words are 64-bit counts or 0/1, and in which order they are written and read.
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
MAX_SLOTS = 1024


@dataclass(frozen=True)
class Mailbox:
    """The place of one message of a channel. `owner` is the rank that has its slot, `place` the slot's number there."""

    number: int
    source: int
    destination: int
    owner: int
    place: int


@dataclass(frozen=True)
class ChannelSpec:
    """Channels of one kind. All ranks of the world must give the same.

    >>> spec = ChannelSpec(((0, 1), (2, 1), (1, 0)), shape=(16,))
    >>> [spec.mailbox(source, destination).place for source, destination in spec.pairs]  # at the receivers: put
    [0, 1, 0]
    >>> spec.layout("cpu").region("buffer").shape
    (2, 128)
    >>> two = ChannelSpec(((0, 1), (2, 1)), shape=(3, 100), dtype="bfloat16", protocol="get", slots=2)
    >>> two.mailbox(2, 1, slot=1), two.nbytes, two.places
    (Mailbox(number=3, source=2, destination=1, owner=2, place=1), 600, 2)
    """

    pairs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str = "uint8"
    protocol: str = "put"
    transport: str = "auto"
    slots: int = 1
    """Messages of one channel that may be in flight at a time."""
    sms: int | None = None
    """SMs that all transfers of a rank may take together, if the transport takes any. None: the transport chooses."""

    def check(self, ranks: int, device: str) -> None:
        """Raise if this spec is impossible. The error names the option."""
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol is {self.protocol!r}; it is one of {', '.join(PROTOCOLS)}")
        if self.transport not in TRANSPORTS[device]:
            known = ", ".join(TRANSPORTS[device])
            raise ConfigError(f"transport is {self.transport!r}; between {device} ranks it is one of {known}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}; it is one of {', '.join(ITEM_BYTES)}")
        if not all(extent >= 0 for extent in self.shape):
            raise ConfigError(f"messages of shape {self.shape} were asked for; no dimension may be below 0")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ConfigError(f"{self.slots} slots a channel were asked for; a channel has 1 to {MAX_SLOTS}")
        if self.sms is not None and self.sms < 1:
            raise ConfigError(f"sms is {self.sms}; leave it out, or give at least 1")
        if self.sms is not None and self.transport not in ("auto", "tma"):
            raise ConfigError(f"sms is {self.sms} and transport {self.transport} takes no number of SMs; leave it out")
        if not self.pairs or len(set(self.pairs)) != len(self.pairs):
            raise ConfigError(
                f"channels for the pairs {self.pairs} were asked for; name at least one, and each pair is named once"
            )
        for pair in self.pairs:
            if not all(0 <= rank < ranks for rank in pair):
                raise ConfigError(
                    f"a channel from rank {pair[0]} to rank {pair[1]} in a world of {ranks} was asked for; ranks are 0 "
                    f"to {ranks - 1}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stride(self) -> int:
        """Bytes from one place to the next."""
        return max(ALIGNMENT, round_up(self.nbytes, ALIGNMENT))

    @property
    def mailboxes(self) -> tuple[Mailbox, ...]:
        return tuple(self.mailbox(*pair, slot) for pair in self.pairs for slot in range(self.slots))

    @property
    def places(self) -> int:
        owners = [self.owner(*pair) for pair in self.pairs]
        return self.slots * max(owners.count(owner) for owner in owners)

    def owner(self, source: int, destination: int) -> int:
        """Return the rank that has the slots of a channel in its memory."""
        return destination if self.protocol == "put" else source

    def mailbox(self, source: int, destination: int, slot: int = 0) -> Mailbox:
        if (source, destination) not in self.pairs:
            raise ConfigError(f"no channel from rank {source} to rank {destination}; there are {self.pairs}")
        if not 0 <= slot < self.slots:
            raise ConfigError(
                f"slot {slot} of the channel from rank {source} to rank {destination}; it has {self.slots}"
            )
        channel, owner = self.pairs.index((source, destination)), self.owner(source, destination)
        before = sum(self.owner(*pair) == owner for pair in self.pairs[:channel])
        return Mailbox(channel * self.slots + slot, source, destination, owner, before * self.slots + slot)

    def layout(self, device: str) -> Layout:
        mailboxes = len(self.pairs) * self.slots
        words = [Region.words(name, mailboxes) for name in (WORDS if device == "cpu" else WORDS + COUNTS)]
        return Layout.of([*words, Region("buffer", (self.places, self.stride), "uint8")])

    def busiest_channels(self) -> int:
        """Count the channels of the rank that moves the bytes of most. They share its SMs.

        >>> puts, gets = (ChannelSpec(((0, 1), (0, 2), (1, 0)), (8,), protocol=protocol) for protocol in PROTOCOLS)
        >>> puts.busiest_channels(), gets.busiest_channels()
        (2, 1)
        """
        movers = [pair[0 if self.protocol == "put" else 1] for pair in self.pairs]
        return max(movers.count(rank) for rank in movers)


def agree(world: World, spec: ChannelSpec) -> None:
    """Raise on all ranks unless the spec is possible and all ranks gave the same."""
    problem: RaymoeError | None = None
    try:
        spec.check(world.size, world.device.type)
    except ConfigError as error:
        problem = error
    own = asdict(spec)
    theirs: object
    for rank, theirs in enumerate(world.swap(own, "channels: spec")):
        assert isinstance(theirs, dict)
        for key, value in own.items():
            if problem is None and theirs[key] != value:
                here = f"{value} on rank {world.rank}"
                problem = ConfigError(f"{key} is {theirs[key]} on rank {rank} and {here}; all ranks must give one spec")
    world.agree(problem, "channels: agreed")


# The interface between channels and a transport


@dataclass
class Requests:
    """A batch: operations of one rank, in any order. A mailbox is in each list once at most.

    A transport enqueues all releases, then all sends, then all receives, one after another. So no order of calls can
    block the ranks:

    - Releases wait for nothing.
    - Sends wait only for releases of messages of earlier batches.
    - Receives wait only for sends, which the senders have enqueued before any receive of their batch.

    A send that waits for its slot holds up the other sends of its batch.
    """

    releases: list[Mailbox] = field(default_factory=list)
    sends: list[tuple[Mailbox, torch.Tensor]] = field(default_factory=list)
    receives: list[Mailbox] = field(default_factory=list)


class Mover(Protocol):
    """Moves the messages of some channels for one rank. On GPUs the current stream orders everything."""

    name: str
    sms: int | None
    """SMs that all transfers of a rank take together; None if that is unknown (NCCL) or there are none (CPU)."""
    capturable: bool

    def run(self, batch: Requests) -> None: ...

    def received(self, mailbox: Mailbox) -> torch.Tensor:
        """Return the memory of received messages as flat bytes: always the same memory for a mailbox."""

    def send_buffer(self, mailbox: Mailbox) -> torch.Tensor:
        """Return the sender's slot as flat bytes. A message that is written here is sent without a copy."""

    def check(self) -> None:
        """Raise if a wait has failed."""

    def check_deadline(self, waited_s: float) -> None:
        """If nothing else bounds waits on the GPU: end the wait and raise if the host has waited too long."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Close without the other ranks, which may not close theirs now."""


def turn_of(mailbox: Mailbox, rank: int, size: int) -> int:
    """Return the turn of a mailbox's peer. Every rank begins with the next rank, so no two ranks send to the same peer.

    Rates for 64 to 256 MiB to each of three peers, in GB/s a rank (4x H200, 2026-11-21):

    - Copy engines push 376 to 389 in turns, 191 to 232 side by side.
    - Copy engines pull 362 to 384 in turns, 192 to 230 side by side.
    - Kernels push 359 in turns, 345 side by side.

    >>> mailboxes = [Mailbox(0, 2, peer, peer, 0) for peer in range(4)]
    >>> [mailbox.destination for mailbox in sorted(mailboxes, key=lambda mailbox: turn_of(mailbox, 2, 4))]
    [3, 0, 1, 2]
    """
    peer = mailbox.destination if mailbox.source == rank else mailbox.source
    return (peer - rank - 1) % size
