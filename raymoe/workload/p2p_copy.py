"""What the lines of workload p2p measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raymoe.job import Case
from raymoe.job.rules import SMS_TRANSPORTS
from raymoe.workload.traffic import Traffic


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
