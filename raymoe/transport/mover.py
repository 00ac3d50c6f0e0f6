"""What channels ask of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from raymoe.transport.spec import Lane


@dataclass
class Batch:
    """Operations of one rank that were asked for together. Their order means nothing; each lane is in one list once.

    A transport enqueues all releases, then all sends, then all receives. So no order in which the ranks ask can block
    them: releases wait for nothing, a send waits only for the release of an earlier message of its lane, a receive only
    for a send, which its sender has enqueued before any receive of the same batch.
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


def group_by_peer(lanes: Sequence[Lane], rank: int) -> list[list[Lane]]:
    """Lanes to or from one peer stay in their order; different peers have nothing to wait for in one another."""
    groups: dict[int, list[Lane]] = {}
    for lane in lanes:
        groups.setdefault(lane.destination if lane.source == rank else lane.source, []).append(lane)
    return list(groups.values())
