"""What channels ask of a transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from raymoe.transport.spec import Lane


@dataclass
class Batch:
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

    def run(self, batch: Batch) -> None: ...

    def received(self, lane: Lane) -> torch.Tensor:
        """What the receiver gets: always the same memory for a lane, flat bytes."""

    def room(self, lane: Lane) -> torch.Tensor:
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
