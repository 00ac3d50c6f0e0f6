"""Worlds of several domains. Ranks of one domain map one another's memory; between domains a network carries all."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.across import (
    LOOPBACK,
    BoundedStore,
    StoreAddress,
    StoreBoard,
    connect,
    listen,
    network,
    outside_address,
    serve,
)
from raymoe.memory.layout import Layout
from raymoe.memory.member import Member
from raymoe.memory.world import World

if TYPE_CHECKING:
    from raymoe.memory.process_group import Ranks


class SpanningWorld(World):
    """The CPU ranks of several domains. Rank = domain * L + place, where L is the number of ranks in each.

    - `domain` is the world of this rank's domain, with memory of its own. Its ranks count from 0, also in its errors.
    - `domain_index` and `place` say where this rank is. The ranks with one place are a *rail* (`raymoe.net.rail`).
    - `address` is where this rank listens for ranks of other domains.
    - Its rounds, and exchanges, cover all ranks. Memory, channels and groups are those of a domain.
    """

    def __init__(self, member: Member, domain: World, index: int) -> None:
        super().__init__(member, None)
        self._own.close()  # rounds go through the memory of the domain, and through the store
        self._domain, self.domain_index, self.place = domain, index, domain.rank
        self.address = LOOPBACK
        self._store: BoundedStore | None = None
        self._rounds: StoreBoard | None = None
        self.waiter.on_abort(domain.abort)

    @property
    def domain(self) -> World:
        return self._domain

    @property
    def domains(self) -> int:
        return self.size // self._domain.size

    @property
    def store(self) -> BoundedStore:
        """A key-value store of all ranks, which rank 0 serves; valid until `close`."""
        self._refuse_if_closed("the store")
        assert self._store is not None, "an open world is connected"
        return self._store

    def global_rank(self, place: int) -> int:
        """Return the rank in this world of a rank of this rank's domain."""
        return self.domain_index * self._domain.size + place

    def connect(self, where: StoreAddress, address: str, listener: socket.socket | None) -> None:
        """Join the store, which rank 0 serves at `listener`, and meet all ranks. `address` is this rank's own."""
        store = connect(where, self.timeout_s) if listener is None else serve(where, listener)
        self._store = BoundedStore(store, self.waiter)
        self.address = address
        self._board = self._rounds = StoreBoard(self, self._domain, self._store, where.secret)
        self.barrier("domains: connected")

    def descriptor(self) -> NoReturn:
        raise WiringError(f"descriptor on rank {self.rank}: a world of {self.domains} domains is wired when it is made")

    def wire(self, descriptors: Sequence[dict[str, object]]) -> NoReturn:  # noqa: ARG002
        raise WiringError(f"wire on rank {self.rank}: a world of {self.domains} domains is wired when it is made")

    def allocate(self, layout: Layout, what: str, where: Literal["host", "device"] = "host") -> NoReturn:  # noqa: ARG002
        raise WiringError(
            f"{what}: memory for all ranks was asked for in a world of {self.domains} domains; ranks map one another's "
            "memory inside a domain only: take world.domain"
        )

    def group(self, ranks: Sequence[int]) -> World | None:
        raise WiringError(
            f"a group of ranks {list(ranks)} was asked for in a world of {self.domains} domains; groups are inside a "
            "domain: take world.domain.group"
        )

    @property
    def waiting(self) -> tuple[str, int] | None:
        if (found := self._domain.waiting) is not None:
            return found[0], self.global_rank(found[1])
        return self.waiter.waiting

    def close(self, together: bool = True) -> None:
        if self.closed:
            return
        all_close = together and self._poison is None and self.waiter.reason is None
        super().close(together)
        if self._rounds is not None:
            self._rounds.close(all_close)
        self._store = None
        self._domain.close(all_close)


def span(ranks: Ranks, size: int, device: str, timeout_s: float) -> SpanningWorld:
    """Make a world of domains of `size` ranks each. All ranks of the process group call this.

    Either all ranks get it or all raise. The group carries two gathers: descriptors, then the address of the store.
    """
    inside, mine = None, None
    problem: Exception | None = None
    try:
        index, place = _place_of(ranks, size)
        _refuse_gpus(ranks.device(device), ranks.size // size)
        inside = World.open(place, size, name=ranks.name, timeout_s=timeout_s, domain=str(index))
        mine = {"inside": inside.descriptor(), "domain": size, "network": network()}
    except Exception as error:  # noqa: BLE001  `gather` raises it after the other ranks have its text
        problem = error
    world: SpanningWorld | None = None
    try:
        name, theirs = ranks.gather(None, mine, problem)
        assert inside is not None, "a rank without a world has a problem"
        _check_sizes(theirs, size)  # all ranks find the same, so none calls the second gather
        try:
            first = index * size
            inside._wire_as(f"{name}-domain{index}", [each["inside"] for each in theirs[first : first + size]])
            world = SpanningWorld(Member(ranks.rank, ranks.size, name=name, timeout_s=timeout_s), inside, index)
            one_machine = all(each["network"] == theirs[0]["network"] for each in theirs)
            address = LOOPBACK if one_machine else outside_address()
            listener = listen(address) if ranks.rank == 0 else None
            mine = {} if listener is None else {"port": listener.getsockname()[1], "secret": secrets.token_bytes(16)}
            mine["host"] = address
        except Exception as error:  # noqa: BLE001  as above
            problem = error
        _, theirs = ranks.gather(None, mine, problem)
        assert world is not None, "a rank without a world has a problem"
        world.connect(StoreAddress(theirs[0]["host"], theirs[0]["port"], theirs[0]["secret"]), address, listener)
    except BaseException:
        for made in (world, inside):
            if made is not None:
                made.close(together=False)
        raise
    return world


def _place_of(ranks: Ranks, size: int) -> tuple[int, int]:
    """Return this rank's domain and its place there."""
    if type(size) is not int or size < 1 or ranks.size % size:
        raise ConfigError(
            f"domain is {size!r} in a world of {ranks.size} ranks; it is the number of ranks in a domain, and all "
            "domains have the same number"
        )
    return divmod(int(ranks.rank), size)


def _refuse_gpus(device: str, domains: int) -> None:
    if device != "cpu":
        raise ConfigError(
            f"a world of {domains} domains was asked for on {device}; only CPU ranks can be in several: pass "
            "device='cpu', or make one world for each domain"
        )


def _check_sizes(theirs: Sequence[dict[str, Any]], size: int) -> None:
    for rank, other in enumerate(theirs):
        if other.get("domain") != size or "inside" not in other:
            found = other["domain"] if "inside" in other else "left out"
            raise ConfigError(f"domain is {found} on rank {rank} and {size} here; all ranks must agree")
