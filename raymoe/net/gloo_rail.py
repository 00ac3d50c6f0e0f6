"""The rail of CPU ranks, by Gloo.

Ranks of a rail share no memory. If a wait is longer than one slice, the rank writes the number of its operation into
the world's store and reads the numbers of its peers. Shorter waits do not use the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.spanning import SpanningWorld
from raymoe.memory.world import World
from raymoe.net.gloo import PrivateGroup, connected, first_line, gloo

_EVERY_S = 0.2  # how often a rank that waits asks: its questions share the link with the rows
_ASKING_S = 1.0  # for one question to the store. A wait ends late by as much where rank 0 does not answer


class GlooRail:
    """A `Rail` of a world of several domains. The ranks of all rails make theirs together."""

    capturable = False

    def __init__(self, world: World) -> None:
        if not isinstance(world, SpanningWorld):
            raise ConfigError(f"a rail was asked for in a world of {world.domains} domain; rails are between domains")
        if not dist.is_gloo_available():
            raise WiringError("a rail by Gloo was asked for, and this torch was built without it; take another torch")
        self._world = world
        store = gloo.PrefixStore(f"rail {world.place}", world.store.raw)
        self._group = PrivateGroup(self._connect(world, store), world.waiter, _Published(world))

    def gather(self, op: str, out: torch.Tensor, mine: torch.Tensor) -> Callable[[], None]:
        return self._group.all_gather(op, out, mine)

    def swap(self, op: str, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        return self._group.all_to_all(op, received, sent)

    def lagging(self) -> int:
        return self._group.lagging()

    def close(self, together: bool) -> None:
        if self._group.open and together:
            self._world.barrier("rail: idle")  # no rank disconnects from a peer that still reads
            self._group.drop()
        self._group.abandon()

    def _connect(self, world: SpanningWorld, store: Any) -> Any:
        group, problem = None, None
        try:
            timeout = timedelta(seconds=world.timeout_s)
            group = connected(store, world.domain_index, world.domains, world.address, timeout)
        except RuntimeError as error:
            problem = WiringError(f"rail {world.place} did not connect from {world.address}: {first_line(error)}")
        world.agree(problem, "rail: connected")
        return group


class _Published:
    """Numbers between domains: each rank that waits publishes its number in the store."""

    def __init__(self, world: SpanningWorld) -> None:
        self._me, self._domains = world.domain_index, world.domains
        self._per_domain, self._place = world.domain.size, world.place
        self._store = world.store
        self._asked, self._found, self._ask_at = 0, (0, 0), 0.0

    def enter(self, number: int) -> None:
        """Publish nothing yet: most waits end in their first slice."""

    def lagging(self, number: int) -> tuple[int, int]:
        peers = [(self._me + step) % self._domains for step in range(1, self._domains)]
        if self._asked < number:  # the question before the first slice
            self._asked, self._ask_at = number, 0.0
            return self._rank(peers[0]), number - 1
        if time.monotonic() >= self._ask_at:
            self._found = self._first_late(peers, number)
            self._ask_at = time.monotonic() + _EVERY_S
        return self._found

    def _first_late(self, peers: list[int], number: int) -> tuple[int, int]:
        if self._store.busy:
            return 0, 0
        try:
            self._ask("set", self._key(self._me), str(number))
            entered = {peer: self._entered_by(peer) for peer in peers}
        except RuntimeError:  # rank 0, which serves the store, is gone or stopped, or its link is slow
            return 0, 0
        late = [peer for peer in peers if entered[peer] < number]
        peer = (late or peers)[0]
        return self._rank(peer), entered[peer]

    def _entered_by(self, peer: int) -> int:
        key = self._key(peer)
        return int(self._ask("get", key)) if self._ask("check", [key]) else 0

    def _ask(self, method: str, *arguments: object) -> Any:
        return self._store.ask(method, *arguments, timeout_s=_ASKING_S)

    def _key(self, domain: int) -> str:
        return f"entered by {self._rank(domain)}"

    def _rank(self, domain: int) -> int:
        return domain * self._per_domain + self._place
