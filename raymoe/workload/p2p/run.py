"""Copies between ranks: one pair after the other, or all at once, which tells what the links of a machine give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch

from raymoe.config import Case
from raymoe.config.rules import SMS_TRANSPORTS
from raymoe.errors import ConfigError
from raymoe.memory.world import World
from raymoe.moe.weights import generator
from raymoe.transport.channels import Channels, ChannelSpec
from raymoe.workload import Progress, telling
from raymoe.workload.measure import Line, Step, Steps, measure, result_line
from raymoe.workload.traffic import Traffic

# Bytes for a copy, and how many of them arrived wrong.

POISON = 0xA5
_PIECE = 2**20


def drawn(nbytes: int, *key: int) -> torch.Tensor:
    """Random bytes that whoever knows the key can draw again.

    >>> bool((drawn(100, 1, 2) == drawn(100, 1, 2)).all()), bool((drawn(100, 1, 2) == drawn(100, 2, 1)).all())
    (True, False)
    """
    words = -(-nbytes // 8)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (words,), generator=generator("bytes", *key)).view(torch.uint8)[:nbytes]


def share_wrong(found: torch.Tensor, *key: int) -> float:
    """The share of `found` that is not what was drawn with this key.

    >>> copy = drawn(100, 3)
    >>> copy[7] += 1
    >>> share_wrong(copy, 3)
    0.01
    """
    want = drawn(found.numel(), *key)
    wrong = 0
    for start in range(0, found.numel(), _PIECE):  # a mask of everything would be as large again
        piece = slice(start, start + _PIECE)
        wrong += int((found[piece] != want[piece]).count_nonzero())
    return wrong / found.numel()


# What the lines of workload p2p measure.


@dataclass(frozen=True)
class Copy:
    """What one result line measures: `nbytes` from each source to each destination of `pairs`, all at the same time."""

    transport: str
    nbytes: int
    pairs: tuple[tuple[int, int], ...]
    protocol: str = "put"
    sms: int | None = None

    @property
    def traffic(self) -> Traffic:
        """
        >>> Copy("host", 10, ((0, 1), (0, 2), (1, 0))).traffic
        Traffic(total=30, busiest=20)
        """
        ends = [[pair[end] for pair in self.pairs] for end in (0, 1)]
        busiest = max(ranks.count(rank) for ranks in ends for rank in ranks)
        return Traffic(self.nbytes * len(self.pairs), self.nbytes * busiest)


def copies_of(case: Case) -> Iterator[Copy]:
    """Every copy of a case, in the order of its result lines. Of all pairs the source changes slowest."""
    asked, ranks = case.job.p2p, range(case.job.world.ranks)
    every = tuple((source, destination) for source in ranks for destination in ranks if source != destination)
    alone = every if asked.pairs == "all" else asked.pairs
    for transport in asked.transports:
        sms = asked.sms if isinstance(asked.sms, int) and transport in SMS_TRANSPORTS else None
        for nbytes in asked.bytes:
            for together in [every] if asked.pattern == "all_to_all" else [(pair,) for pair in alone]:
                yield Copy(transport, nbytes, together, asked.protocol, sms)


# Copies between ranks: one pair after the other, or all at once. What the links of a machine give.

EXACT = 0.0
"""A copy has no rounding: not one byte may differ."""


class AnyCopyStep(Protocol):
    """A step of one copy, on CPU ranks or GPU ranks."""

    @property
    def keys(self) -> Line:
        """The keys of a result line that only whoever does the copy knows."""

    def __call__(self, index: int, *, verify: bool) -> Step: ...

    def close(self) -> None: ...


def run_p2p(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """A line for each transport and size, and with `pairs` for each pair."""
    steps = Steps(case.job.steps.warmup, case.job.steps.count, case.job.steps.verify, EXACT)
    copies = list(copies_of(case))
    lines = []
    with _opening(case, world) as open_step:
        for place, copy in enumerate(copies):
            tell = telling(progress, len(copies) * steps.total, place * steps.total)
            what = f"{case.name}: {copy.nbytes} bytes by {copy.transport}"
            with closing(open_step(copy)) as do_step:
                measured = measure(world, steps, do_step, tell, what)
                known = do_step.keys
            source, destination = copy.pairs[0] if case.job.p2p.pattern == "pairs" else (None, None)
            line = result_line(case, "copy", copy.traffic, measured, 0) | known
            lines.append(
                line | {"src": source, "dst": destination, "bytes": copy.nbytes, "pattern": case.job.p2p.pattern}
            )
    return lines


@contextmanager
def _opening(case: Case, world: World) -> Iterator[Callable[[Copy], AnyCopyStep]]:
    """What makes the step of a copy, and what all copies of a case share."""
    if world.device.type == "cpu":
        if case.job.p2p.sms != "auto":
            raise ConfigError(f"p2p.sms is {case.job.p2p.sms} and these are CPU ranks, which have no SMs; leave it out")
        yield lambda copy: CopyStep(world, copy)
        return
    from raymoe.workload.p2p.gpu import Bench, GpuCopyStep

    bench = Bench(world)
    yield lambda copy: GpuCopyStep(bench, copy, case.job.steps.graph)
    bench.close()  # after an error the process is about to end, and peers may be gone


class CopyStep:
    """One message through each channel of a copy.

    With `put` the clock sees the sender write into the receiver's memory and the receiver learn of it. With `get` the
    data lie ready at the sender before the clock starts, and it sees the receiver fetch them.
    """

    def __init__(self, world: World, copy: Copy) -> None:
        self.world, self.put, self.nbytes = world, copy.protocol == "put", copy.nbytes
        spec = ChannelSpec(copy.pairs, (copy.nbytes,), protocol=copy.protocol, transport=copy.transport)
        self.channels = Channels(world, spec)
        # Each rank begins with the peer behind it, so that not all of them turn to the same one.
        behind = [(world.rank + step) % world.size for step in range(1, world.size)]
        sources = [peer for peer in behind if (peer, world.rank) in copy.pairs]
        self.data = {peer: drawn(copy.nbytes, world.rank, peer) for peer in behind if (world.rank, peer) in copy.pairs}
        # A message ahead of all others shows where messages land, and touches every page once.
        self._send()
        self.landed = {peer: self.channels.receive(peer) for peer in sources}
        self._release()

    @property
    def keys(self) -> Line:
        return {"transport": self.channels.transport}

    def __call__(self, index: int, *, verify: bool) -> Step:
        if verify:
            for peer in self.data:
                self.data[peer] = drawn(self.nbytes, self.world.rank, peer, index)
            for landed in self.landed.values():
                landed.fill_(POISON)
        if not self.put:
            self._send()
        self.world.barrier("copy: start")
        started = perf_counter_ns()
        if self.put:
            self._send()
        for peer in self.landed:
            self.landed[peer] = self.channels.receive(peer)
        us = (perf_counter_ns() - started) / 1e3 if self.data or self.landed else 0.0
        wrong = [share_wrong(landed, peer, self.world.rank, index) for peer, landed in self.landed.items() if verify]
        self._release()
        return Step((us,), max(wrong, default=0.0) if verify else None)

    def close(self) -> None:
        """Give up the memory of the channels."""
        self.channels.close()

    def _send(self) -> None:
        for peer, message in self.data.items():
            self.channels.send(peer, message)

    def _release(self) -> None:
        """Let the next message come; otherwise its sender would wait for that on the clock."""
        for peer in self.landed:
            self.channels.release(peer)
