"""The rail of CPU ranks, by Gloo. A wait that is longer than one slice names the peer that is late (`published.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from raymoe.errors import ConfigError, RaymoeError, WiringError
from raymoe.memory.world import SpanningWorld, World
from raymoe.net.gloo import Members, connected
from raymoe.net.published import PublishedNumbers


class GlooRail:
    """A `Rail` of a world of several domains. The ranks of all rails make theirs together."""

    capturable = False

    def __init__(self, world: World) -> None:
        if not isinstance(world, SpanningWorld):
            raise ConfigError(f"a rail was asked for in a world of {world.domains} domain; rails are between domains")
        if not dist.is_gloo_available():
            raise WiringError("a rail by Gloo was asked for, and this torch was built without it; take another torch")
        self._world = world
        ranks = range(world.place, world.size, world.domain.size)
        self._numbers = PublishedNumbers(world)
        self._group = connected(Members("rail", ranks, world.address), world, self._numbers)

    def gather(self, op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        return self._group.all_gather(op, out, own)

    def swap(self, op: str, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        return self._group.all_to_all(op, received, sent)

    def settle(self, op: str) -> None:
        """Do nothing: an operation has ended when the function that waits for it returns."""

    def lagging(self) -> int:
        return self._group.lagging()

    def fail(self, reason: str) -> None:
        """Publish the reason, which ranks that wait for this rail or another read, and give the group up."""
        self._group.abandon(RaymoeError(reason))
        self._numbers.fail(reason)

    def check_failed(self) -> None:
        self._numbers.check_failed()

    def abort(self) -> None:
        """Give the group up. A wait that goes on ends within one slice, and raises `WiringError`."""
        self._group.abandon()

    def close(self, together: bool) -> None:
        try:
            if self._group.open and together:
                self._world.barrier("rail: idle")  # no rank disconnects from a peer that still reads
                self._group.drop()
        finally:
            self._group.abandon()
