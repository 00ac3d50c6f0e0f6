"""The copies that the lines of workload p2p measure, and their bytes, which every rank can draw again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymoe.config import Case
from raymoe.config.rules import SMS_TRANSPORTS
from raymoe.moe.weights import generator
from raymoe.workload.traffic import Traffic

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
