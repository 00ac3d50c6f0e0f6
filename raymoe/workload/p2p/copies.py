"""The copies that workload p2p measures, and their bytes, which every rank can draw again."""

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
    """Draw random bytes; the same key gives the same bytes on any rank.

    >>> bool((drawn(100, 1, 2) == drawn(100, 1, 2)).all()), bool((drawn(100, 1, 2) == drawn(100, 2, 1)).all())
    (True, False)
    """
    words = -(-nbytes // 8)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (words,), generator=generator("bytes", *key)).view(torch.uint8)[:nbytes]


def share_wrong(received: torch.Tensor, *key: int) -> float:
    """Return the share of `received` that differs from the bytes drawn with this key.

    >>> copy = drawn(100, 3)
    >>> copy[7] += 1
    >>> share_wrong(copy, 3)
    0.01
    """
    want = drawn(received.numel(), *key)
    wrong = 0
    for start in range(0, received.numel(), _PIECE):  # a mask of all bytes would be as large as `received`
        piece = slice(start, start + _PIECE)
        wrong += int((received[piece] != want[piece]).count_nonzero())
    return wrong / received.numel()


@dataclass(frozen=True)
class Copy:
    """The copies of one result line: `nbytes` from source to destination of each of `pairs`, all at the same time."""

    transport: str
    nbytes: int
    pairs: tuple[tuple[int, int], ...]
    protocol: str = "put"
    sms: int | None = None

    @property
    def traffic(self) -> Traffic:
        """The bytes of all copies, and of the busiest port.

        >>> Copy("host", 10, ((0, 1), (0, 2), (1, 0))).traffic
        Traffic(total=30, busiest=20)
        """
        ends = [[pair[end] for pair in self.pairs] for end in (0, 1)]
        busiest = max(ranks.count(rank) for ranks in ends for rank in ranks)
        return Traffic(self.nbytes * len(self.pairs), self.nbytes * busiest)


def copies_of(case: Case) -> Iterator[Copy]:
    """Yield every copy of a case, in the order of its result lines. In `pairs: all`, the source changes slowest."""
    section, ranks = case.job.p2p, range(case.job.world.ranks)
    every = tuple((source, destination) for source in ranks for destination in ranks if source != destination)
    alone = every if section.pairs == "all" else section.pairs
    for transport in section.transports:
        sms = section.sms if isinstance(section.sms, int) and transport in SMS_TRANSPORTS else None
        for nbytes in section.bytes:
            for together in [every] if section.pattern == "all_to_all" else [(pair,) for pair in alone]:
                yield Copy(transport, nbytes, together, section.protocol, sms)
