"""One step of workload p2p between GPU ranks: eager, or replayed from a CUDA graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from raymoe.cuda.graph import Graph
from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory.world import World
from raymoe.net.nccl import NcclGroup
from raymoe.transport.channels import Channels, ChannelSpec
from raymoe.transport.nccl import members_of
from raymoe.workload.clock import Gate, StreamBarrier
from raymoe.workload.measure import Line, Step
from raymoe.workload.p2p.copies import POISON, Copy

# Bytes that any GPU can compute from a key, and their comparison.

_PIECE = 2**25  # bytes made or compared at a time
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64, as signed numbers


def fill_drawn(into: torch.Tensor, *key: int) -> None:
    """Fill `into` with the bytes of this key: splitmix64 of the index of each 8 bytes, so no piece needs another.

    >>> a, b = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    >>> fill_drawn(a, 1, 2), fill_drawn(b, 2, 1)
    (None, None)
    >>> wrong_bytes(a, 1, 2), wrong_bytes(b, 1, 2) > 90
    (0, True)
    """
    for start, piece in _pieces(into.numel(), into.device, key):
        into[start : start + piece.numel()] = piece


def wrong_bytes(received: torch.Tensor, *key: int) -> int:
    """Count the bytes that differ from those of the key."""
    wrong = torch.zeros((), dtype=torch.int64, device=received.device)
    for start, want in _pieces(received.numel(), received.device, key):
        wrong += (received[start : start + want.numel()] != want).count_nonzero()
    return int(wrong)


def _pieces(nbytes: int, device: torch.device, key: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    seed = int.from_bytes(digest[:8], "little", signed=True)
    for start in range(0, nbytes, _PIECE):
        size = min(_PIECE, nbytes - start)
        first = start // 8
        x = torch.arange(first, first + -(-size // 8), dtype=torch.int64, device=device)
        x = x * _MULTIPLIERS[0] + seed
        for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
            x = (x ^ _shifted(x, shift)) * multiplier
        yield start, (x ^ _shifted(x, 31)).view(torch.uint8)[:size]


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right and fill with zeros; torch's own shift keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


class StreamClock:
    """Times work on a stream, from a barrier of all ranks in their streams on.

    All ranks make one, use it for the same samples, and close it. A gate holds the stream while the host enqueues
    (raymoe/workload/clock.py). After the gate come the barrier, the first event, the work and the second event. The
    host waits by polling, because with any transport it must notice that a peer has died.
    """

    def __init__(self, world: World, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._barrier = StreamBarrier(world)
        self._gate = Gate(world.gpu)
        event: Any = torch.cuda.Event  # has no annotations
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)

    def us(self, work: Callable[[], None], channels: Channels) -> float:
        """Return the microseconds that the stream takes for the work that `work` enqueues."""
        stream = self._stream.cuda_stream
        with self._gate.held(stream):
            self._barrier(stream)
            self._begin.record(self._stream)
            work()
            self._end.record(self._stream)
        try:
            channels.synchronise()
        finally:
            self._barrier.check()
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def close(self) -> None:
        self._barrier.close()
        self._gate.close()


CALLS, SMALL_BYTES = 20, 256 << 10


def calls_of(nbytes: int) -> int:
    """Return how many messages one sample is the mean of. A small one takes less time than events resolve.

    >>> calls_of(4096), calls_of(2**20)
    (20, 1)
    """
    return CALLS if nbytes <= SMALL_BYTES else 1


class NcclGroups:
    """NCCL communicators, one for each set of ranks that take part in a copy. Making one takes a second."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[int, ...], NcclGroup] = {}

    def of(self, spec: ChannelSpec) -> NcclGroup | None:
        """Return the communicator of these channels. All ranks ask for the same ones in the same order."""
        if spec.transport != "collective":
            return None
        members = members_of(spec)
        if members not in self._groups:
            self._groups[members] = NcclGroup(self._world, members)
        return self._groups[members]

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()


class Bench:
    """The stream, clock and communicators that all copies of a case share.

    Ranks meet to make a clock, which takes longer than timing a small copy.
    """

    def __init__(self, world: World) -> None:
        self.world, self.groups = world, NcclGroups(world)
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.stream: torch.cuda.Stream = new_stream(world.device)
        self.clock = StreamClock(world, self.stream)

    def close(self) -> None:
        self.clock.close()
        self.groups.close()


class GpuCopyStep:
    """Times `calls` messages through each channel, each in its own slot, so that every credit is given beforehand.

    With `put`, senders write into the receivers' memory and signal, and the time ends when receivers see the signal.
    With `get`, messages are ready and announced before the clock starts, and receivers fetch them and say so. The
    release of messages that were put is off the clock.
    """

    ops = (("copy", None),)

    def __init__(self, bench: Bench, copy: Copy, graph: Literal["auto"] | bool) -> None:
        self.world, self.stream, self.clock = bench.world, bench.stream, bench.clock
        world, self.copy, self.calls = bench.world, copy, calls_of(copy.nbytes)
        spec = ChannelSpec(
            copy.pairs,
            (copy.nbytes,),
            protocol=copy.protocol,
            transport=copy.transport,
            slots=self.calls,
            sms=copy.sms,
        )
        self.channels = Channels(world, spec, bench.groups.of(spec))
        self.fetched = copy.protocol == "get" and self.channels.transport != "collective"
        # Each rank begins with the next one, so that not all begin with the same peer.
        peers = [(world.rank + step) % world.size for step in range(1, world.size)]
        self.sources = [peer for peer in peers if (peer, world.rank) in copy.pairs]
        self.destinations = [peer for peer in peers if (world.rank, peer) in copy.pairs]
        self.graph = False
        self._graphs: list[Graph] = []
        self.data: dict[tuple[int, int], torch.Tensor] = {}
        self.landed: dict[tuple[int, int], torch.Tensor] = {}
        with torch.cuda.stream(self.stream):
            for peer in self.destinations:
                for slot in range(self.calls):
                    self.data[peer, slot] = self._source(peer, slot)
            self._draw(-1)
            self._offer()
            self._work()  # shows where messages land, makes late connections, and touches every page once
            self._release()
            self.channels.synchronise()
            world.barrier("copy: made")
            if graph is not False:
                self._capture(must=graph is True)

    @property
    def keys(self) -> Line:
        """The keys of a result line about this copy, with the transport that `auto` chose."""
        used = self.channels.transport
        return {
            "transport": f"auto:{used}" if self.copy.transport == "auto" else used,
            "graph": self.graph,
            "sms": self.channels.sms,
            "runs": self.calls,
            "device": torch.cuda.get_device_name(self.world.device),
        }

    def __call__(self, index: int, *, verify: bool) -> Step:
        with torch.cuda.stream(self.stream):
            if verify:
                # Peers may still be fetching the last step's messages, and all poison must be there before any put.
                self.world.barrier("copy: done")
                self._draw(index)
                for landed in self.landed.values():
                    landed.fill_(POISON)
                self.stream.synchronize()
                self.world.barrier("copy: drawn")
            self._offer()
            us = self.clock.us(lambda: self._do(self._work, 0), self.channels) / self.calls
            wrong = self._wrong(index) if verify else None
            self._do(self._release, 1)
            return Step((us if self.data or self.landed else 0.0,), wrong)

    def close(self) -> None:
        """Close the graphs, and free the memory of the channels."""
        for graph in self._graphs:
            graph.close()
        self.landed.clear()
        self.data.clear()
        self.channels.close()

    def _do(self, work: Callable[[], None], index: int) -> None:
        if self._graphs:
            self._graphs[index].replay(self.stream.cuda_stream)
        else:
            work()

    def _work(self) -> None:
        for slot in range(self.calls):
            with self.channels.together():
                if not self.fetched:
                    for peer in self.destinations:
                        self.channels.send(peer, self.data[peer, slot], slot)
                for peer in self.sources:
                    self.landed[peer, slot] = self.channels.receive(peer, slot)

    def _offer(self) -> None:
        """Announce, with `get`, the messages. They were written into the slots from which peers fetch them."""
        with self.channels.together():
            for (peer, slot), message in self.data.items() if self.fetched else ():
                self.channels.send(peer, message, slot)

    def _release(self) -> None:
        """Release the slots for the next messages; otherwise senders would wait for that on the clock."""
        with self.channels.together():
            for peer, slot in self.landed:
                self.channels.release(peer, slot)

    def _capture(self, must: bool) -> None:
        """Make a graph of the work and one of the releases. All ranks replay, or none does."""
        problem: RaymoeError | None = None
        if not self.channels.capturable:
            problem = ConfigError(f"transport {self.channels.transport} cannot be captured in a CUDA graph")
        elif self.destinations or self.sources:
            try:
                self._graphs += [self._captured(self._work), self._captured(self._release)]
            except (RaymoeError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
                problem = ConfigError(f"transport {self.channels.transport} could not be captured: {error}")
        answers = self.world.swap(None if problem is None else str(problem), "copy: captured")
        problems = [str(text) for text in answers if text is not None]
        self.graph = not problems
        if problems and (must or self.channels.transport != "collective"):
            raise problem or ConfigError(problems[0])
        if problems:
            self._graphs.clear()
            self._release()  # of messages received only in the capture; for NCCL it does nothing

    def _captured(self, work: Callable[[], None]) -> Graph:
        return Graph.capture(self.world.gpu, self.stream.cuda_stream, work, self.channels)

    def _source(self, peer: int, slot: int) -> torch.Tensor:
        if self.fetched:
            return self.channels.send_buffer(peer, slot)
        return torch.empty(self.copy.nbytes, dtype=torch.uint8, device=self.world.device)

    def _draw(self, index: int) -> None:
        for (peer, slot), message in self.data.items():
            fill_drawn(message, self.world.rank, slot, peer, index)

    def _wrong(self, index: int) -> float:
        """Return the share of bytes that differ from those that their sender drew."""
        me = self.world.rank
        wrong = sum(wrong_bytes(landed, peer, slot, me, index) for (peer, slot), landed in self.landed.items())
        return wrong / (self.copy.nbytes * max(1, len(self.landed)))
