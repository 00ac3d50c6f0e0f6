"""The ranks that work together: who they are, their memory, and the rounds in which they meet.

A world is made in two phases. First, every rank opens it alone and hands out a descriptor. After the program has
gathered the descriptors of all ranks, every rank wires them. No rank waits for another before `wire`, and after it
nothing goes through the process that gathered them.

>>> with World.open(rank=0, size=1) as world:
...     world.wire([world.descriptor()])
...     world.swap({"answer": 42}, "a doctest")
[{'answer': 42}]
"""

from __future__ import annotations

import importlib
import os
import pickle
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, Unpack, overload

import torch

from raymoe.errors import Aborted, ConfigError, PeerTimeout, RaymoeError, WiringError
from raymoe.memory import cuda_ipc, host_shm
from raymoe.memory.across import BoundedStore, StoreAddress, StoreBoard, connect, serve
from raymoe.memory.address import address_for, listen, network
from raymoe.memory.board import Board, board_layout
from raymoe.memory.giving_up import E, Farewells, StoredFarewell
from raymoe.memory.group_worlds import GROUP_WORLDS
from raymoe.memory.heap import DeviceHeap, Heap
from raymoe.memory.heaps import DroppedObjects, Heaps, Shared
from raymoe.memory.layout import Layout
from raymoe.memory.member import (
    Member,
    Options,
    check_descriptors,
    check_domain_size,
    check_domain_sizes,
    check_spanning,
    code_hash,
)
from raymoe.memory.one_process import OfOneProcess, tell_of_forks
from raymoe.memory.process_group import Ranks
from raymoe.memory.sleeping import Sleeper
from raymoe.memory.wait import Waiter, named_by_world
from raymoe.memory.wiring import Gathering, act_together, prove, wire_group

if TYPE_CHECKING:
    import raymoe
    from raymoe.cuda.gpu import Gpu

CLOSING_S = 2.0
"""How long a rank that closes its world waits for its peers to close theirs."""


S = TypeVar("S", bound=Shared)


class World(OfOneProcess, Sleeper):
    """Ranks that live and die together. All ranks call the collective methods in one order.

    - `World.of(group)` makes one from a torch.distributed process group: torchrun, Ray Train and the like.
    - `raymoe.join(name, rank, size)` makes one from Ray actors or tasks.
    - `World.open(rank, size)` and `wire` make one from any processes that can swap descriptors.

    `device` is where its tensors are: `cpu`, or one GPU of this process, which need not be torch's current device.
    A process may have several worlds. A process that is forked from it cannot use them. The board, and with it every
    round, is in host memory for CPU and GPU ranks alike: all ranks are on one machine. Only ranks in several domains
    may be on several machines (`SpanningWorld`).
    """

    def __init__(self, member: Member, device: cuda_ipc.GpuMemory | None, parent: World | None = None) -> None:
        self.member = member
        self.rank, self.size, self.generation = member.rank, member.size, member.generation
        self.name, self.timeout_s = member.name, member.timeout_s
        self.device = torch.device("cpu") if device is None else torch.device("cuda", member.ordinal or 0)
        self.waiter = Waiter(member.rank, member.timeout_s)
        self._made_from: weakref.ref[Any] | None = None
        self._gpu = None if device is None else cuda_ipc.DeviceMemory(device)
        self._layout, self._code = board_layout(member.size), code_hash()
        self._own = host_shm.own(f"raymoe-{member.name}-board", self._layout.nbytes)
        self._heap: Heap | None = None
        self._board: Board | StoreBoard | None = None
        self._farewells = Farewells(self.waiter)
        self._poison: RaymoeError | None = None
        self.halt: RaymoeError | None = None
        """Why no exchange may run now (`raymoe.memory.missing_weights`). It is the same on all ranks."""
        self._closed, self._forked, self._pid = False, False, os.getpid()
        tell_of_forks(self)
        self.unclosed = DroppedObjects()
        self._heaps = Heaps(self._gpu, self.device, self.waiter)
        self._parent = parent
        self._group_count = 0
        self._groups: list[tuple[World, tuple[int, ...]]] = []
        self._shared: dict[Callable[[World], Any], Any] = {}

    @classmethod
    def open(cls, rank: int, size: int, **options: Unpack[Options]) -> Self:
        """Open a world on this rank: its own memory, no peers yet. `Member` explains the options."""
        return cls.of_member(Member(rank, size, **options))

    @classmethod
    def of_member(cls, member: Member) -> Self:
        """Open the world of a rank: its own memory, no peers yet."""
        return cls(member, None if member.ordinal is None else cuda_ipc.GpuMemory.open(member.ordinal))

    @classmethod
    def of(
        cls,
        group: object = None,
        *,
        device: str | torch.device = "auto",
        timeout_s: float = 60.0,
        domain: int | None = None,
        shared: bool = False,
    ) -> World:
        """Make a world of the ranks of a `ProcessGroup`, of a `DeviceMesh`'s `ep` dimension, or of the default group.

        All ranks of the group call this, in one order with their other collectives. It returns when every rank has
        mapped every other; if one rank cannot take part, all raise. The world does not use the group afterwards.

        `device`: `auto` is the group's bound device, else torch's current one if the group has a backend of its own for
        GPUs (NCCL), else the CPU. `cuda` is the same but never the CPU. `cuda:1` is any GPU that this process sees.
        `timeout_s` bounds every wait for a peer, except the gathers here, which the group's own timeout bounds.
        `domain` is the number of ranks in a domain; by default all ranks are in one.
        With `shared`, later calls for the group return the same world, on each rank alone. It is closed with the group.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with World.of() as world:
        ...     world.rank, world.size, world.device
        (0, 1, device(type='cpu'))
        >>> dist.destroy_process_group()
        """
        ranks, world, descriptor = Ranks(group), None, None
        if shared:
            found = GROUP_WORLDS.of(
                ranks.group,
                (str(device), timeout_s, domain),
                lambda: cls.of(group, device=device, timeout_s=timeout_s, domain=domain),
            )
            assert isinstance(found, World)
            return found
        if domain is not None and domain != ranks.size:
            spanning = SpanningWorld.of_ranks(ranks, domain, str(device), timeout_s)
            spanning._made_from = weakref.ref(ranks.group)
            return spanning
        problem: Exception | None = None
        try:
            where = ranks.device(str(device))
            world = cls.open(ranks.rank, ranks.size, name=ranks.name, timeout_s=timeout_s, device=where)
            descriptor = world.descriptor()
        except OSError as error:  # usually too many open files
            problem = WiringError(f"a world on rank {ranks.rank} could not be opened: {error}")
        except Exception as error:  # noqa: BLE001  `gather` raises it after the other ranks have its text
            problem = error
        try:
            name, descriptors = ranks.gather(world.device if world else None, descriptor, problem)
            assert world is not None, "a rank without a world has a problem"
            world._wire_as(name, descriptors)
            world._made_from = weakref.ref(ranks.group)
        except BaseException:
            if world is not None:
                world.close(together=False)
            raise
        return world

    @property
    def domain(self) -> World:
        """The world of this rank's domain, whose ranks map one another's memory: this one, unless it has several."""
        return self

    @property
    def domains(self) -> int:
        """The number of domains. Rank r is in domain r // (size // domains)."""
        return 1

    @property
    def gpu(self) -> Gpu:
        """The GPU of this rank, to compile, launch and copy with; valid until `close`."""
        self._refuse_if_closed("gpu")
        if self._gpu is None or not isinstance(self._gpu.device, cuda_ipc.GpuMemory):
            raise ConfigError(f"the GPU of rank {self.rank} was asked for; its world is on {self.device}")
        return self._gpu.device.gpu

    @property
    def process_group(self) -> Any:
        """The process group of this world's ranks: the one that `of` was given, also for a group of all its ranks.

        None if there was none, or it is gone. The world itself does not use it.
        """
        return None if self._made_from is None else self._made_from()

    @property
    def closed(self) -> bool:
        """Whether the world is closed. It is in a forked process too: peers would take its writes for its parent's."""
        return self._closed or self._forked

    def descriptor(self) -> dict[str, object]:
        """Return what peers need to identify this rank and map its memory, as plain values. Only before `wire`."""
        if self._board is not None or self._closed:
            state = "closed" if self._closed else "wired already"
            raise WiringError(f"descriptor on rank {self.rank}: its world is {state}; make a new World")
        device = self._gpu.device if self._gpu else None
        gpu = {"gpu": device.uuid if device else "", "driver": device.driver if device else 0}
        code = {"code_hash": self._code, "layout_hash": self._layout.hash}
        return self.member.descriptor() | code | gpu | self._own.descriptor()

    def wire(self, descriptors: Sequence[dict[str, object]]) -> None:
        """Check the descriptors of all ranks, map the peers' memory and prove every mapping."""
        if self._board is not None or self._closed:
            raise WiringError(f"rank {self.rank} is wired or closed already; make a new World")
        check_descriptors(descriptors, self.descriptor())
        self._heap = Heap(self._layout, self.rank, host_shm.map_all(self._own, self.rank, descriptors))
        self._board = Board(self._heap, self.rank, self.size, self.waiter)
        heap = self._heap
        prove(
            self,
            "wiring",
            lambda peer, value: heap.words("proof", peer).__setitem__(self.rank, value),
            lambda peer: heap.word("proof", peer),
        )
        self._farewells.listen(heap, self.size)  # each mapping leads to its rank now
        self._own.unpublish()

    def swap(self, value: object, what: str, timeout_s: float | None = None) -> list[object]:
        """Return the values of all ranks, in rank order. `what` names the round and must be the same on all ranks."""
        return [pickle.loads(message) for message in self._meet(what, pickle.dumps(value), timeout_s)]

    def barrier(self, what: str, timeout_s: float | None = None) -> None:
        """Wait for every rank, by default for the world's timeout."""
        self._meet(what, timeout_s=timeout_s)

    def agree(self, problem: RaymoeError | None, what: str) -> None:
        """Raise on all ranks if any has a problem: a rank's own problem if it has one, else the first rank's."""
        try:
            texts = [text for text in self.swap(None if problem is None else str(problem), what) if text is not None]
        finally:
            if problem is not None:  # also if the round failed: then the problem is the likely cause
                raise problem
        if texts:
            raise WiringError(str(texts[0]))

    @overload
    def allocate(self, layout: Layout, what: str, where: Literal["host"] = "host") -> Heap: ...

    @overload
    def allocate(self, layout: Layout, what: str, where: Literal["device"]) -> DeviceHeap: ...

    def allocate(self, layout: Layout, what: str, where: Literal["host", "device"] = "host") -> Heap | DeviceHeap:
        """Make memory of this layout on every rank, mapped by all. Either all ranks get it or all raise.

        The CPUs of all ranks access a host heap. Their kernels access a device heap, which needs a world of GPU ranks.
        """
        self._refuse_if_closed(what)
        self.unclosed.free()
        if where == "device":
            return self._heaps.make_on_device(self, layout, what)
        if where != "host":
            raise ConfigError(f"{what}: memory was asked for in {where}; it is in host or device")
        return self._heaps.make_on_host(self, layout, what)

    def shared(self, kind: Callable[[World], S]) -> S:
        """Return the one object of this kind in this world. The first call makes it; `close` of the world closes it.

        If making it is collective, so is the first call.
        """
        self._refuse_if_closed("a shared object")
        if kind not in self._shared:
            self._shared[kind] = kind(self)
        shared: S = self._shared[kind]
        return shared

    def exchange(self, spec: raymoe.ExchangeSpec, backend: str = "auto", *, sms: int | str = "auto") -> raymoe.Exchange:
        """Return the one exchange of this spec, backend and `sms` in this world; the first call makes it.

        All ranks make new ones in one order. Layers that run one after another share it. The world closes it.
        """
        # Exchanges are made above this folder, so they are loaded by name.
        shared: Any = importlib.import_module("raymoe.exchange.shared")
        exchange: raymoe.Exchange = self.shared(shared.SharedExchanges).of(spec, backend, sms)
        return exchange

    def group(self, ranks: Sequence[int]) -> World | None:
        """Make a world of these ranks alone, in this order; None on the other ranks. All ranks of this world call it.

        It has its own board, memory and names. Its ranks count from 0, also in its errors. Its timeout is this world's.
        Aborting or closing this world does the same to its groups.
        """
        self._refuse_if_closed("group")
        self._group_count += 1
        wanted, group, problem = tuple(ranks), None, None
        try:
            member = self.member.in_group(wanted, self._group_count)
            group = None if member is None else World(member, self._gpu.device if self._gpu else None, self)
        except RaymoeError as error:
            problem = error
        try:
            theirs = self.swap((wanted, group.descriptor() if group else None), "group: ranks")
            self.agree(problem, "group: possible")
            act_together(self, lambda: wire_group(wanted, group, theirs), "group: wired")
        except RaymoeError:
            if group is not None:
                group.close(together=False)
            raise
        if group is not None:
            if wanted == tuple(range(self.size)):
                group._made_from = self._made_from
            self._groups.append((group, wanted))
            self.waiter.on_abort(group.abort)
        return group

    def abort(self, reason: str) -> None:
        """End this rank's current wait and every later one. Any thread may call it; it has no effect after `close`."""
        self.waiter.abort(reason)

    def give_up(self, error: E) -> E | RaymoeError:
        """Tell the other ranks that this one leaves an operation because of `error`, and so all later ones.

        They stop at once, and so does this one. Returns the error to raise: it names the rank at the end of a chain of
        waits, or is the error of a peer that told this rank first. Call it only where no later operation can work. A
        world that this one is a group of lives.
        """
        return self._farewells.give_up(error)

    @property
    def waiting(self) -> tuple[str, int] | None:
        """The operation and the peer that this rank waits for at this moment, in this world or in one of its groups."""
        for group, ranks in self._groups:
            if (waiting := group.waiting) is not None:
                return waiting[0], ranks[waiting[1]]
        return self.waiter.waiting

    def close(self, together: bool = True) -> None:
        """Close the heaps, meet the peers once more if `together`, free. A dead peer delays this by 2 s at most.

        Closing again does nothing; every other method raises `WiringError` from then on.

        Device memory is freed if every peer has unmapped it, else with the process.
        """
        if self.closed:
            return
        self._farewells.closing = True  # a peer that does not come to close has work of its own
        all_close = together and self._poison is None and self.waiter.reason is None
        for group, _ in self._groups:
            group.close(all_close)
        for shared in reversed(self._shared.values()):
            with suppress(RaymoeError):  # as in `_meet_to_close`
                shared.close(all_close)
        self._closed = True
        board, self._board = self._board, None
        self._farewells.close()
        with ExitStack() as cleanup:  # runs from the last to the first, all of them even if one raises
            cleanup.callback(self._free)
            if together and board is not None and self._poison is None and self.waiter.reason is None:
                cleanup.callback(self._meet_to_close, board)
            self._heaps.close_in(cleanup)
            cleanup.callback(self.unclosed.free)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _wire_as(self, name: str, descriptors: Sequence[dict[str, object]]) -> None:
        """Wire under the name that all ranks have agreed on, which replaces the one that each rank gave at first."""
        self.name, self.member = name, replace(self.member, name=name)
        self.wire([descriptor | {"name": name} for descriptor in descriptors])

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise WiringError(f"{what} on rank {self.rank}: its world is closed; make a new one")
        if self.closed:
            raise WiringError(
                f"{what} on rank {self.rank}: its world is that of process {self._pid}, which this one was forked "
                "from; make a new one"
            )

    def _meet_to_close(self, board: Board | StoreBoard) -> None:
        # A peer that is gone or has failed does not use this rank's memory, and the kernel frees its own.
        with suppress(RaymoeError):
            board.meet("close", timeout_s=min(self.timeout_s, CLOSING_S))

    def _free(self) -> None:
        # Memory that a peer may still map needs its context. A group uses the context of its parent.
        if self._gpu is not None and self._parent is None and not self._is_mapped():
            self._gpu.device.close()
        if self._heap is not None:
            self._heap.close()
        self._own.close()

    def _is_mapped(self) -> bool:
        """Free what no peer maps. Return whether a peer may still map device memory of this rank."""
        return any([not self._heaps.free_unmapped(), *(group._is_mapped() for group, _ in self._groups)])

    def _meet(self, what: str, message: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        self._refuse_if_closed(what)
        if self._board is None:
            raise WiringError(f"{what} on rank {self.rank}: its world is not wired yet")
        if self._poison is not None:
            raise self._poison
        try:
            return self._board.meet(what, message, timeout_s)
        except (PeerTimeout, Aborted) as error:
            # Other ranks may still be in the round that this rank leaves: its next post would overwrite what they read.
            # The rounds of a domain are a part of those of its world, which tells.
            self._poison = told = error if self._farewells.inside else self.give_up(error)
            if told is error:
                raise
            raise told from error


class SpanningWorld(World):
    """The ranks of several domains, all on CPUs or all on GPUs. Rank = domain * L + place, with L ranks in each domain.

    - `domain` is the world of this rank's domain, with memory of its own. Its ranks count from 0, also in its errors.
    - `domain_index` and `place` say where this rank is. The ranks with one place are a *rail* (`raymoe.net.rail`).
    - `address` is where this rank listens for ranks of other domains.
    - Its rounds, and exchanges, cover all ranks. Memory, channels and groups belong to a domain.
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
        first = self.domain_index * domain.size
        self._farewells.span(domain._farewells, range(first, first + domain.size))

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

    @classmethod
    def of_ranks(
        cls, ranks: Gathering, size: int, device: str, timeout_s: float, share_gpu: bool = False
    ) -> SpanningWorld:
        """Make a world of domains of `size` ranks each. All ranks call this; either all get it or all raise.

        There are two gathers: networks, by which the ranks choose their addresses, then descriptors.
        """
        own: dict[str, object] | None = None
        problem: Exception | None = None
        where = "cpu"
        try:
            check_domain_size(size, ranks.size)
            where = ranks.device(device)
            own = {"domain": size, "network": network()}
        except Exception as error:  # noqa: BLE001  `gather` raises it after the other ranks have its text
            problem = error
        name, theirs = ranks.gather(None, own, problem)
        check_domain_sizes(theirs, size)  # all ranks find the same, so none calls the second gather
        world: SpanningWorld | None = None
        try:
            try:
                address = address_for([other["network"] for other in theirs], ranks.known_address)
                options: Options = {"name": name, "timeout_s": timeout_s, "device": where, "share_gpu": share_gpu}
                member = Member(ranks.rank, ranks.size, **options)
                world = cls.open_rank(member, size, address)
                own = world.descriptor()
            except Exception as error:  # noqa: BLE001  as above
                problem = error
            _, theirs = ranks.gather(None, own, problem)
            assert world is not None, "a rank without a world has a problem"
            world.wire(theirs)
        except BaseException:
            if world is not None:
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

    @property
    def farewell(self) -> StoredFarewell:
        """The reason of a rank that gave up, for ranks of all domains. Only a wired world has it."""
        assert self._farewells.stored is not None, "an open world is connected"
        return self._farewells.stored

    def global_rank(self, place: int) -> int:
        """Return the rank in this world of a rank of this rank's domain."""
        return self.domain_index * self._domain.size + place

    def descriptor(self) -> dict[str, object]:
        """Return what the other ranks need: how to map this rank's memory, and from rank 0 where its store is."""
        own: dict[str, object] = {"world": self.name, "domain": self._domain.size, "host": self.address}
        own["inside"] = self._domain.descriptor()
        if self._listener is not None:
            own |= {"port": self._listener.getsockname()[1], "secret": self._secret}
        return own

    def wire(self, descriptors: Sequence[dict[str, Any]]) -> None:
        """Map the memory of this rank's domain, join the store of rank 0, meet all ranks."""
        own = {"world": self.name, "domain": self._domain.size}
        check_spanning(descriptors, self.rank, self.size, own)
        first, size, zero = self.domain_index * self._domain.size, self._domain.size, descriptors[0]
        try:
            with named_by_world(self.waiter, first, "wiring"):
                self._domain.wire([descriptor["inside"] for descriptor in descriptors[first : first + size]])
        except WiringError as error:
            raise WiringError(f"domain {self.domain_index}, whose rank 0 is rank {first}: {error}") from error
        where = StoreAddress(zero["host"], zero["port"], zero["secret"])
        listener, self._listener = self._listener, None
        opens = partial(connect, where, self.timeout_s) if listener is None else partial(serve, where, listener)
        self._store = BoundedStore(where, opens, self.waiter)
        self._farewells.stored = StoredFarewell(self._store, self.waiter, self._domain.waiter, first)
        self.waiter.watch = self._domain.waiter.watch = self.farewell.check_timeouts
        self._board = self._rounds = StoreBoard(self, self._domain, self._store, self.waiter)
        self._rounds.connect()
        self._pretended = len({descriptor["inside"]["boot_id"] for descriptor in descriptors}) < self.domains
        self.barrier("domains: connected")

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
        if (inside := self._domain.waiting) is not None:
            return inside[0], self.global_rank(inside[1])
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
