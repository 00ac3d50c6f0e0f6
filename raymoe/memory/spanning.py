"""Worlds of several domains. Ranks of one domain map one another's memory; between domains a network carries all."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from raymoe.errors import ConfigError, WiringError
from raymoe.memory.across import BoundedStore, StoreAddress, StoreBoard, connect, serve
from raymoe.memory.address import address_for, listen, network
from raymoe.memory.host_shm import check_fields
from raymoe.memory.layout import Layout
from raymoe.memory.member import Member, Options, check_gpus
from raymoe.memory.wait import named_by_world
from raymoe.memory.world import World

if TYPE_CHECKING:
    import socket

_AGREED = ("generation", "version", "code_hash", "device")  # of the worlds of all domains
_FIELDS = {"world": str, "domain": int, "host": str, "inside": dict}


class SpanningWorld(World):
    """The ranks of several domains, all on CPUs or all on GPUs. Rank = domain * L + place, with L ranks in each domain.

    - `domain` is the world of this rank's domain, with memory of its own. Its ranks count from 0, also in its errors.
    - `domain_index` and `place` say where this rank is. The ranks with one place are a *rail* (`raymoe.net.rail`).
    - `address` is where this rank listens for ranks of other domains.
    - Its rounds, and exchanges, cover all ranks. Memory, channels and groups are those of a domain.
    """

    def __init__(self, member: Member, domain: World, address: str) -> None:
        gpu = domain._gpu
        super().__init__(member, None if gpu is None else gpu.device, domain)  # the domain's world closes its GPU
        self._own.close()  # rounds go through the memory of the domain, and through the store
        self._domain, self.address = domain, address
        self.domain_index, self.place = divmod(member.rank, domain.size)
        self._listener: socket.socket | None = None
        self._secret = b""
        self._store: BoundedStore | None = None
        self._rounds: StoreBoard | None = None
        self._pretended = False
        self.waiter.on_abort(domain.abort)

    @classmethod
    def open_rank(cls, member: Member, size: int, address: str) -> SpanningWorld:
        """Open this rank of a world of domains of `size` ranks: memory of its domain, no peers yet.

        `member.domain` is the key of its domain, by default the domain's number. Rank 0 listens at its `address`.
        """
        index, place = divmod(member.rank, size)
        inside = World.open(
            place,
            size,
            name=f"{member.name}-domain{index}",
            generation=member.generation,
            timeout_s=member.timeout_s,
            device=member.device,
            share_gpu=member.share_gpu,
            domain=member.domain or str(index),
        )
        world = cls(member, inside, address)
        if member.rank == 0:
            try:
                world._listener, world._secret = listen(address), secrets.token_bytes(16)
            except WiringError:
                world.close(together=False)
                raise
        return world

    @property
    def domain(self) -> World:
        return self._domain

    @property
    def domains(self) -> int:
        return self.size // self._domain.size

    @property
    def pretended(self) -> bool:
        """Whether ranks of two domains are on one machine, by its boot id. Only a wired world knows."""
        return self._pretended

    @property
    def store(self) -> BoundedStore:
        """A key-value store of all ranks, which rank 0 serves; valid until `close`."""
        self._refuse_if_closed("the store")
        assert self._store is not None, "an open world is connected"
        return self._store

    def global_rank(self, place: int) -> int:
        """Return the rank in this world of a rank of this rank's domain."""
        return self.domain_index * self._domain.size + place

    def descriptor(self) -> dict[str, object]:
        """Return what the other ranks need: how to map this rank's memory, and from rank 0 where its store is."""
        mine: dict[str, object] = {"world": self.name, "domain": self._domain.size, "host": self.address}
        mine["inside"] = self._domain.descriptor()
        if self._listener is not None:
            mine |= {"port": self._listener.getsockname()[1], "secret": self._secret}
        return mine

    def wire(self, descriptors: Sequence[dict[str, Any]]) -> None:
        """Map the memory of this rank's domain, join the store of rank 0, meet all ranks."""
        self._check(descriptors)
        first, size, zero = self.domain_index * self._domain.size, self._domain.size, descriptors[0]
        try:
            with named_by_world(self.waiter, first, "wiring"):
                self._domain.wire([each["inside"] for each in descriptors[first : first + size]])
        except WiringError as error:
            raise WiringError(f"domain {self.domain_index}, whose rank 0 is rank {first}: {error}") from error
        where = StoreAddress(zero["host"], zero["port"], zero["secret"])
        listener, self._listener = self._listener, None
        opens = partial(connect, where, self.timeout_s) if listener is None else partial(serve, where, listener)
        self._store = BoundedStore(where, opens, self.waiter)
        self._board = self._rounds = StoreBoard(self, self._domain, self._store)
        self._rounds.connect()
        self._pretended = len({each["inside"]["boot_id"] for each in descriptors}) < self.domains
        self.barrier("domains: connected")

    def _check(self, descriptors: Sequence[dict[str, Any]]) -> None:
        """Raise unless the descriptors come from all ranks of this world. Those of a domain are checked there too."""
        if len(descriptors) != self.size:
            raise WiringError(f"{len(descriptors)} descriptors for a world of {self.size}; each rank gives one")
        check_fields(descriptors[0], {"port": int, "secret": bytes})
        mine = {"world": self.name, "domain": self._domain.size} | _agreed(descriptors[self.rank])
        for rank, other in enumerate(descriptors):
            check_fields(other, _FIELDS)
            theirs = {"world": other["world"], "domain": other["domain"]} | _agreed(other)
            for field, value in mine.items():
                if theirs[field] != value:
                    here = f"{value} on rank {self.rank}"
                    raise WiringError(f"{field} is {theirs[field]} on rank {rank} and {here}; all ranks must agree")
        if self.device.type == "cuda":
            check_gpus([each["inside"] for each in descriptors])

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
        if self._listener is not None:
            self._listener.close()
        self._store = self._listener = None
        self._domain.close(all_close)


def _agreed(descriptor: dict[str, Any]) -> dict[str, object]:
    inside: dict[str, object] = descriptor["inside"]
    return {field: inside.get(field) for field in _AGREED}


class Gathering(Protocol):
    """Ranks that can gather: those of a process group, or those that meet in Ray."""

    rank: int
    size: int
    known_address: str | None  # at which ranks on other machines reach this one, if something else has found that out

    def device(self, asked: str) -> str:
        """Choose the device of this rank's world."""

    def gather(
        self, world: World | None, descriptor: dict[str, object] | None, problem: Exception | None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Gather a name for the world, and what all ranks give. Where one has a problem, all ranks raise."""


def span(ranks: Gathering, size: int, device: str, timeout_s: float, share_gpu: bool = False) -> SpanningWorld:
    """Make a world of domains of `size` ranks each. All ranks call this; either all get it or all raise.

    There are two gathers: networks, by which the ranks choose their addresses, then descriptors.
    """
    mine: dict[str, object] | None = None
    problem: Exception | None = None
    where = "cpu"
    try:
        _check_domain(size, ranks.size)
        where = ranks.device(device)
        mine = {"domain": size, "network": network()}
    except Exception as error:  # noqa: BLE001  `gather` raises it after the other ranks have its text
        problem = error
    name, theirs = ranks.gather(None, mine, problem)
    _check_sizes(theirs, size)  # all ranks find the same, so none calls the second gather
    world: SpanningWorld | None = None
    try:
        try:
            address = address_for([each["network"] for each in theirs], ranks.known_address)
            options: Options = {"name": name, "timeout_s": timeout_s, "device": where, "share_gpu": share_gpu}
            member = Member(ranks.rank, ranks.size, **options)
            world = SpanningWorld.open_rank(member, size, address)
            mine = world.descriptor()
        except Exception as error:  # noqa: BLE001  as above
            problem = error
        _, theirs = ranks.gather(None, mine, problem)
        assert world is not None, "a rank without a world has a problem"
        world.wire(theirs)
    except BaseException:
        if world is not None:
            world.close(together=False)
        raise
    return world


def _check_domain(size: object, ranks: int) -> None:
    if type(size) is not int or size < 1 or ranks % size:
        raise ConfigError(
            f"domain is {size!r} in a world of {ranks} ranks; it is the number of ranks in a domain, and all "
            "domains have the same number"
        )


def _check_sizes(theirs: Sequence[dict[str, Any]], size: int) -> None:
    for rank, other in enumerate(theirs):
        if other.get("domain") != size or "network" not in other:
            found = other["domain"] if "network" in other else "left out"
            raise ConfigError(f"domain is {found} on rank {rank} and {size} here; all ranks must agree")
