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

import os
import pickle
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, Unpack, overload

import torch

import raymoe
from raymoe.errors import Aborted, ConfigError, PeerTimeout, RaymoeError, WiringError
from raymoe.memory import cuda_ipc, host_shm
from raymoe.memory.board import Board, board_layout
from raymoe.memory.heap import DeviceHeap, Heap, HeapContext, unmapped_layout, with_proof
from raymoe.memory.layout import Layout
from raymoe.memory.member import Member, Options, check_descriptors, code_hash
from raymoe.memory.unclosed import Unclosed
from raymoe.memory.unpicklable import OfOneProcess
from raymoe.memory.wait import Waiter
from raymoe.memory.wiring import act_together, prove, share

if TYPE_CHECKING:
    from raymoe.cuda.gpu import Gpu

CLOSING_S = 2.0
"""How long a rank that closes its world waits for its peers to close theirs."""
_WORLDS: weakref.WeakSet[World] = weakref.WeakSet()  # of this process


class Shared(Protocol):
    """An object that the users of a world share."""

    def close(self, together: bool) -> None:
        """Close it. `together` if all ranks close now."""


S = TypeVar("S", bound=Shared)


class AnyBoard(Protocol):
    """Carries the rounds of a world: `Board`, or `StoreBoard` between domains."""

    def meet(self, what: str, message: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        """Post a message in the round `what`, wait for all ranks, return their messages in rank order."""


class World(OfOneProcess):
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
        self._board: AnyBoard | None = None
        self._poison: RaymoeError | None = None
        self._closed, self._forked, self._pid = False, False, os.getpid()
        _WORLDS.add(self)
        self.unclosed = Unclosed()
        self._host_heaps: weakref.WeakSet[Heap] = weakref.WeakSet()  # weak: a dropped heap frees its memory
        self._device_heaps: list[DeviceHeap] = []
        self._device_heap_count = 0
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
    ) -> World:
        """Make a world of the ranks of a `ProcessGroup`, of a `DeviceMesh`'s `ep` dimension, or of the default group.

        All ranks of the group call this, in one order with their other collectives. It returns when every rank has
        mapped every other; if one rank cannot take part, all raise. The world does not use the group afterwards.

        `device`: `auto` is the group's bound device, else torch's current one if the group has a backend of its own for
        GPUs (NCCL), else the CPU. `cuda` is the same but never the CPU. `cuda:1` is any GPU that this process sees.
        `timeout_s` bounds every wait for a peer, except the gathers here, which the group's own timeout bounds.
        `domain` is the number of ranks in a domain; by default all ranks are in one.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with World.of() as world:
        ...     world.rank, world.size, world.device
        (0, 1, device(type='cpu'))
        >>> dist.destroy_process_group()
        """
        from raymoe.memory.process_group import Ranks  # loads torch.distributed

        ranks, made, mine = Ranks(group), None, None
        if domain is not None and domain != ranks.size:
            from raymoe.memory.spanning import span

            spanning = span(ranks, domain, str(device), timeout_s)
            spanning._made_from = weakref.ref(ranks.group)
            return spanning
        problem: Exception | None = None
        try:
            where = ranks.device(str(device))
            made = cls.open(ranks.rank, ranks.size, name=ranks.name, timeout_s=timeout_s, device=where)
            mine = made.descriptor()
        except OSError as error:  # usually too many open files
            problem = WiringError(f"a world on rank {ranks.rank} could not be opened: {error}")
        except Exception as error:  # noqa: BLE001  `gather` raises it after the other ranks have its text
            problem = error
        try:
            name, descriptors = ranks.gather(made, mine, problem)
            assert made is not None, "a rank without a world has a problem"
            made._wire_as(name, descriptors)
            made._made_from = weakref.ref(ranks.group)
        except BaseException:
            if made is not None:
                made.close(together=False)
            raise
        return made

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
        mine: dict[str, object] = {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "generation": self.generation,
        }
        mine |= {"version": raymoe.__version__, "code_hash": self._code, "layout_hash": self._layout.hash}
        mine |= {"device": self.member.kind, "share_gpu": self.member.share_gpu, "host": socket.gethostname()}
        mine["domain"] = self.member.domain
        device = self._gpu.device if self._gpu else None
        mine |= {"gpu": device.uuid if device else "", "driver": device.driver if device else 0}
        return mine | self._own.descriptor()

    def wire(self, descriptors: Sequence[dict[str, object]]) -> None:
        """Check the descriptors of all ranks, map the peers' memory and prove every mapping."""
        if self._board is not None or self._closed:
            raise WiringError(f"rank {self.rank} is wired or closed already; make a new World")
        check_descriptors(descriptors, self.descriptor())
        self._heap = Heap(self._layout, self.rank, self._segments(descriptors))
        self._board = Board(self._heap, self.rank, self.size, self.waiter)
        heap = self._heap
        prove(
            self,
            "wiring",
            lambda peer, value: heap.words("proof", peer).__setitem__(self.rank, value),
            lambda peer: heap.word("proof", peer),
        )
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
            return self._allocate_on_device(layout, what)
        if where != "host":
            raise ConfigError(f"{what}: memory was asked for in {where}; it is in host or device")
        heap = Heap(layout, self.rank, share(self, host_shm, layout, what))
        self._host_heaps.add(heap)
        return heap

    def shared(self, kind: Callable[[World], S]) -> S:
        """Return the one object of this kind in this world. The first call makes it; `close` of the world closes it.

        If making it is collective, so is the first call.
        """
        self._refuse_if_closed("a shared object")
        if kind not in self._shared:
            self._shared[kind] = kind(self)
        made: S = self._shared[kind]
        return made

    def group(self, ranks: Sequence[int]) -> World | None:
        """Make a world of these ranks alone, in this order; None on the other ranks. All ranks of this world call it.

        It has its own board, memory and names. Its ranks count from 0, also in its errors. Its timeout is this world's.
        Aborting or closing this world does the same to its groups.
        """
        self._refuse_if_closed("group")
        self._group_count += 1
        wanted, made, problem = tuple(ranks), None, None
        try:
            member = self.member.in_group(wanted, self._group_count)
            made = None if member is None else World(member, self._gpu.device if self._gpu else None, self)
        except RaymoeError as error:
            problem = error
        try:
            theirs = self.swap((wanted, made.descriptor() if made else None), "group: ranks")
            self.agree(problem, "group: possible")
            act_together(self, lambda: _wire_group(wanted, made, theirs), "group: wired")
        except RaymoeError:
            if made is not None:
                made.close(together=False)
            raise
        if made is not None:
            if wanted == tuple(range(self.size)):
                made._made_from = self._made_from
            self._groups.append((made, wanted))
            self.waiter.on_abort(made.abort)
        return made

    def abort(self, reason: str) -> None:
        """End this rank's current wait and every later one. Any thread may call it; it has no effect after `close`."""
        self.waiter.abort(reason)

    @property
    def waiting(self) -> tuple[str, int] | None:
        """The operation and the peer that this rank waits for at this moment, in this world or in one of its groups."""
        for group, ranks in self._groups:
            if (found := group.waiting) is not None:
                return found[0], ranks[found[1]]
        return self.waiter.waiting

    def close(self, together: bool = True) -> None:
        """Close the heaps, meet the peers once more if `together`, free. A dead peer delays this by 2 s at most.

        Closing again does nothing; every other method raises `WiringError` from then on.

        Device memory is freed if every peer has unmapped it, else with the process.
        """
        if self.closed:
            return
        all_close = together and self._poison is None and self.waiter.reason is None
        for group, _ in self._groups:
            group.close(all_close)
        for shared in reversed(self._shared.values()):
            with suppress(RaymoeError):  # as in `_meet_to_close`
                shared.close(all_close)
        self._closed = True
        board, self._board = self._board, None
        with ExitStack() as cleanup:  # runs from the last to the first, all of them even if one raises
            cleanup.callback(self._free)
            if together and board is not None and self._poison is None and self.waiter.reason is None:
                cleanup.callback(self._meet_to_close, board)
            for device_heap in self._device_heaps:
                cleanup.callback(device_heap.unmap_peers)
            for host_heap in list(self._host_heaps):
                cleanup.callback(host_heap.close)
            cleanup.callback(self.unclosed.free)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _allocate_on_device(self, layout: Layout, what: str) -> DeviceHeap:
        if self._gpu is None:
            raise ConfigError(f"{what}: device memory was asked for; the world of rank {self.rank} is on {self.device}")
        # All ranks make device memory in one order, so this number is the same on all.
        self._device_heap_count += 1
        serial = self._device_heap_count
        self._device_heaps = [heap for heap in self._device_heaps if not heap.free_if_unmapped()]
        unmapped = self.allocate(unmapped_layout(self.size), f"{what}: unmapped")
        segments = share(self, self._gpu, with_proof(layout, self.size), what)
        heap = DeviceHeap(layout, segments, HeapContext(self._gpu.device, self.device, self.waiter, unmapped))
        self._device_heaps.append(heap)
        try:
            prove(self, what, heap.prove_to, heap.proof_of, serial)
        except RaymoeError:
            heap.close()
            raise
        return heap

    def _segments(self, descriptors: Sequence[dict[str, object]]) -> list[host_shm.HostSegment]:
        """Map the memory of all ranks. The error names every rank that failed: one may have left because of another."""
        segments, problems = [], []
        for rank, descriptor in enumerate(descriptors):
            try:
                segments.append(self._own if rank == self.rank else host_shm.map_peer(descriptor))
            except WiringError as error:
                problems.append(f"rank {rank}: {error}")
        if problems:
            raise WiringError("; ".join(problems))
        return segments

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

    def _meet_to_close(self, board: AnyBoard) -> None:
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
        """Free what no peer maps. Tell whether a peer may still map device memory of this rank."""
        mapped = [heap for heap in self._device_heaps if not heap.free_if_unmapped()]
        return any([bool(mapped), *(group._is_mapped() for group, _ in self._groups)])

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
            self._poison = error
            raise


def _wire_group(ranks: tuple[int, ...], made: World | None, theirs: Sequence[object]) -> None:
    """Wire a group, after a check that all ranks of its world asked for the same one."""
    for rank, other in enumerate(theirs):
        assert isinstance(other, tuple)
        if other[0] != ranks:
            raise ConfigError(f"rank {rank} asks for a group of {list(other[0])} while another asks for {list(ranks)}")
    if made is not None:
        descriptors = [other[1] for other in theirs if isinstance(other, tuple)]
        made.wire([descriptors[rank] for rank in ranks])


def _mark_forked() -> None:
    for world in _WORLDS:
        world._forked = True


os.register_at_fork(after_in_child=_mark_forked)  # cheaper than a call of getpid in every method
