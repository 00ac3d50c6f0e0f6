"""Copies between ranks: one pair after the other, or all at once. What the links of a machine give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter_ns

from raymoe.job import Case
from raymoe.memory.world import World
from raymoe.transport.channel import Channels, ChannelSpec
from raymoe.workload.bytes import POISON, drawn, share_wrong
from raymoe.workload.lines import Line, result_line
from raymoe.workload.measure import Step, Steps, measure
from raymoe.workload.progress import Progress, telling
from raymoe.workload.traffic import Traffic

EXACT = 0.0
"""A copy has no rounding: not one byte may differ."""


@dataclass(frozen=True)
class Copy:
    """What one result line measures: `nbytes` from each source to each destination of `pairs`, all at the same time."""

    transport: str
    nbytes: int
    pairs: tuple[tuple[int, int], ...]

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
    """Every copy of a case, in the order of its result lines. Of the pairs the source changes slowest."""
    asked, ranks = case.job.p2p, range(case.job.world.ranks)
    pairs = tuple((source, destination) for source in ranks for destination in ranks if source != destination)
    for transport in asked.transports:
        for nbytes in asked.bytes:
            for together in [pairs] if asked.pattern == "all_to_all" else [(pair,) for pair in pairs]:
                yield Copy("host" if transport == "auto" else transport, nbytes, together)


def run_p2p(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """A line for each transport and size, and with `pairs` for each pair."""
    steps = Steps(case.job.steps.warmup, case.job.steps.count, case.job.steps.verify, EXACT)
    copies = list(copies_of(case))
    lines = []
    for place, copy in enumerate(copies):
        tell = telling(progress, len(copies) * steps.total, place * steps.total)
        what = f"{case.name}: {copy.nbytes} bytes by {copy.transport}"
        with closing(CopyStep(world, copy, case.job.p2p.protocol)) as do_step:
            measured = measure(world, steps, do_step, tell, what)
        source, destination = copy.pairs[0] if case.job.p2p.pattern == "pairs" else (None, None)
        keys: Line = {"src": source, "dst": destination, "bytes": copy.nbytes, "transport": copy.transport}
        line = result_line(case, "copy", copy.traffic, measured, 0)
        lines.append(line | keys | {"pattern": case.job.p2p.pattern})
    return lines


class CopyStep:
    """One message through each channel of a copy.

    With `put` the clock sees the sender write into the receiver's memory and the receiver learn of it. With `get` the
    data lie ready at the sender before the clock starts, and it sees the receiver fetch them.
    """

    def __init__(self, world: World, copy: Copy, protocol: str) -> None:
        self.world, self.put, self.nbytes = world, protocol == "put", copy.nbytes
        self.channels = Channels(world, ChannelSpec(copy.pairs, (copy.nbytes,), protocol=protocol))
        # Each rank begins with the peer behind it, so that not all of them turn to the same one.
        behind = [(world.rank + step) % world.size for step in range(1, world.size)]
        sources = [peer for peer in behind if (peer, world.rank) in copy.pairs]
        self.data = {peer: drawn(copy.nbytes, world.rank, peer) for peer in behind if (world.rank, peer) in copy.pairs}
        # A message ahead of all others shows where messages land, and touches every page once.
        self._send()
        self.landed = {peer: self.channels.receive(peer) for peer in sources}
        self._release()

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
