"""Channels: messages of one size from rank to rank, in order, each channel with a buffer of its own.

Memory map of the heap (the same on every rank; channel c is the c-th of `ChannelSpec.pairs`):

- `buffer [slots]`: with `put` at the receiver, written by the sender; with `get` at the sender, read by the other.
  A rank has as many slots as the rank that owns most.
- `sent [channels]`, at the receiver: word c is the last message of channel c whose data are ready. Written by the
  sender, read by the receiver.
- `taken [channels]`, at the sender: word c is the last message that the receiver has done with. Written by the
  receiver, read by the sender.

The words are 64-bit epochs that only grow. The sender waits for `taken` of the message before (the buffer is free),
writes the buffer, fences, stores `sent`. The receiver waits for `sent`, fences, reads; then it fences and stores
`taken`: at once with `get`, which copies; at `release` or at the next `receive` with `put`, which gives the buffer
itself. So one message of a channel is under way at a time, and a rank may send to itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from raymoe.job.errors import ConfigError, RaymoeError
from raymoe.memory.heap import Layout, Region
from raymoe.memory.world import World
from raymoe.transport.host_copy import copy

PROTOCOLS = ("put", "get")


@dataclass(frozen=True)
class ChannelSpec:
    """Which ranks send which ranks a message of what size; all ranks of the world must say the same.

    >>> spec = ChannelSpec(((0, 1), (2, 1), (1, 0)), shape=(16,))
    >>> [spec.slot(source, destination) for source, destination in spec.pairs]  # at the receivers: put
    [0, 1, 0]
    >>> spec.layout().region("buffer").shape
    (2, 16)
    """

    pairs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str = "uint8"
    protocol: str = "put"

    def check(self, ranks: int) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol is {self.protocol!r}; it is one of {', '.join(PROTOCOLS)}")
        if not self.pairs or len(set(self.pairs)) != len(self.pairs):
            raise ConfigError(
                f"channels for the pairs {self.pairs}; each pair is named once, and there is at least one"
            )
        for pair in self.pairs:
            if not all(0 <= rank < ranks for rank in pair):
                raise ConfigError(f"a channel from rank {pair[0]} to rank {pair[1]} in a world of {ranks}")

    def number(self, source: int, destination: int) -> int:
        if (source, destination) not in self.pairs:
            raise ConfigError(f"no channel from rank {source} to rank {destination}; there are {self.pairs}")
        return self.pairs.index((source, destination))

    def owner(self, source: int, destination: int) -> int:
        return destination if self.protocol == "put" else source

    def slot(self, source: int, destination: int) -> int:
        """Which of its owner's buffers a channel has."""
        before = self.pairs[: self.number(source, destination)]
        owner = self.owner(source, destination)
        return sum(self.owner(*pair) == owner for pair in before)

    def layout(self) -> Layout:
        slots = 1 + max(self.slot(*pair) for pair in self.pairs)
        words = [Region.words(name, len(self.pairs)) for name in ("sent", "taken")]
        return Layout.of([*words, Region("buffer", (slots, *self.shape), self.dtype)])


class Channels:
    """All channels of a spec. Making them is collective; sending and receiving is between the two ends."""

    def __init__(self, world: World, spec: ChannelSpec) -> None:
        self.world, self.spec = world, spec
        _agree(world, spec)
        self._heap = world.allocate(spec.layout(), "channels")
        self._ends = {pair: _End(world, self, pair) for pair in spec.pairs if world.rank in pair}
        self.broken: RaymoeError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        region = self._heap.layout.region("buffer")
        return region.nbytes // region.shape[0]

    def send(self, destination: int, message: torch.Tensor) -> None:
        """Hand over one message; waits until the one before has been taken."""
        self._end(self.world.rank, destination).send(message)

    def receive(self, source: int) -> torch.Tensor:
        """The next message from `source`, valid until it is released or the one after it is received."""
        return self._end(source, self.world.rank).receive()

    def release(self, source: int) -> None:
        """Done with the last message from `source`: its sender may send the next."""
        self._end(source, self.world.rank).release()

    def close(self) -> None:
        self._ends = {}
        self._heap.close()

    def _end(self, source: int, destination: int) -> _End:
        if self.broken is not None:
            raise self.broken
        self.spec.number(source, destination)
        if (source, destination) not in self._ends:
            raise ConfigError("these channels are closed; make new ones")
        return self._ends[source, destination]


class _End:
    """What one rank knows of one channel; both ends of it where a rank sends to itself."""

    def __init__(self, world: World, channels: Channels, pair: tuple[int, int]) -> None:
        spec, heap = channels.spec, channels._heap
        self._world, self._channels, self._pair, self._number = world, channels, pair, spec.number(*pair)
        self._sent, self._taken = heap.words("sent", pair[1]), heap.words("taken", pair[0])
        self._buffer = heap.tensor("buffer", spec.owner(*pair))[spec.slot(*pair)]
        copies = spec.protocol == "get" and world.rank == pair[1]
        self._landing = torch.empty_like(self._buffer) if copies else None
        self._messages_sent = self._messages_received = 0

    def send(self, message: torch.Tensor) -> None:
        self._wait("send", self._pair[1], self._messages_sent)
        copy(self._buffer, message)
        self._messages_sent += 1
        self._world.waiter.fence()  # orders the message before the word that announces it
        self._sent[self._number] = self._messages_sent

    def receive(self) -> torch.Tensor:
        self.release()
        self._wait("receive", self._pair[0], self._messages_received + 1)
        self._messages_received += 1
        if self._landing is None:
            return self._buffer
        copy(self._landing, self._buffer)
        self.release()
        return self._landing

    def release(self) -> None:
        self._world.waiter.fence()  # orders our loads of the message before the word that lets it be overwritten
        self._taken[self._number] = self._messages_received

    def _wait(self, op: str, peer: int, epoch: int) -> None:
        words = self._taken if op == "send" else self._sent
        waiter = self._world.waiter
        try:
            waiter.for_epoch(op, words, peer, epoch, index=self._number)
        except RaymoeError as error:
            # Both ends count messages; whoever leaves in the middle of one has lost count.
            self._channels.broken = error
            raise


def _agree(world: World, spec: ChannelSpec) -> None:
    problem: RaymoeError | None = None
    try:
        spec.check(world.size)
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
