"""Who we are and who our peers are.

A world is made in two phases: every rank opens it alone and hands out a descriptor; when somebody has gathered the
descriptors of all, every rank wires them. Nothing is waited for before all are there, and nothing goes through whoever
gathered them afterwards.

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
from raymoe.memory.heap import DeviceHeap, Heap, Setting, let_go_layout, with_proof
from raymoe.memory.layout import Layout
from raymoe.memory.member import Member, Options, check_descriptors, code_hash
from raymoe.memory.unclosed import Unclosed
from raymoe.memory.wait import Waiter
from raymoe.memory.wiring import act_together, prove, share

if TYPE_CHECKING:
    from raymoe.device.gpu import Gpu

CLOSING_S = 2.0
_WORLDS: weakref.WeakSet[World] = weakref.WeakSet()  # of this process


class Shared(Protocol):
    """What users of a world share."""

    def close(self, together: bool) -> None:
        """`together` if all ranks close now."""


S = TypeVar("S", bound=Shared)


class World:
    """Ranks that live and die together; every member calls the collective methods in one order.

    - `World.of(group)` makes one of the ranks of a torch.distributed process group: torchrun, Ray Train and the like.
    - `raymoe.join(name, rank, size)` makes one of Ray actors or tasks.
    - `World.open(rank, size)` and `wire` make one of any processes that can swap descriptors.

    `device` is where its tensors are: `cpu`, or one GPU of this process, which need not be torch's current device.
    A process may have several worlds. One that is forked from it has none of them. The board, and with it every round,
    is in host memory for CPU and GPU ranks alike: all are on one machine.
    """

    def __init__(self, member: Member, device: cuda_ipc.GpuMemory | None, parent: World | None = None) -> None:
        self.member = member
        self.rank, self.size, self.generation = member.rank, member.size, member.generation
        self.name, self.timeout_s = member.name, member.timeout_s
        self.device = torch.device("cpu") if device is None else torch.device("cuda", member.ordinal or 0)
        self.waiter = Waiter(member.rank, member.timeout_s)
        self._gpu = None if device is None else cuda_ipc.DeviceMemory(device)
        self._layout, self._code = board_layout(member.size), code_hash()
        self._own = host_shm.own(f"raymoe-{member.name}-board", self._layout.nbytes)
        self._heap: Heap | None = None
        self._board: Board | None = None
        self._poison: RaymoeError | None = None
        self._closed, self._forked, self._pid = False, False, os.getpid()
        _WORLDS.add(self)
        self.unclosed = Unclosed()
        self._workspaces: weakref.WeakSet[Heap] = weakref.WeakSet()  # whoever drops one lets go of its memory
        self._on_device: list[DeviceHeap] = []
        self._made_on_device = 0
        self._parent = parent
        self._made_groups = 0
        self._groups: list[tuple[World, tuple[int, ...]]] = []
        self._shared: dict[Callable[[World], Any], Any] = {}

    @classmethod
    def open(cls, rank: int, size: int, **options: Unpack[Options]) -> Self:
        """This rank's half of a world: its own memory, no peers yet. `Member` says what the options mean."""
        member = Member(rank, size, **options)
        return cls(member, None if member.ordinal is None else cuda_ipc.GpuMemory.open(member.ordinal))

    @classmethod
    def of(cls, group: object = None, *, device: str | torch.device = "auto", timeout_s: float = 60.0) -> Self:
        """Make a world of the ranks of a `ProcessGroup`, of a `DeviceMesh`'s `ep` dimension, or of the default group.

        All ranks of the group call this, in one order with their other collectives. It returns when every rank has
        mapped every other; where one rank cannot take part, all raise. The world does not use the group afterwards.

        `device`: `auto` is the group's bound device, else torch's current one if the group has a backend of its own for
        GPUs (NCCL), else the CPU. `cuda` is the same and never the CPU. `cuda:1` is any GPU that this process sees.
        `timeout_s` bounds every wait for a peer but the one gather, which the group's own timeout bounds.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with World.of() as world:
        ...     world.rank, world.size, world.device
        (0, 1, device(type='cpu'))
        >>> dist.destroy_process_group()
        """
        from raymoe.memory.process_group import Ranks  # loads torch.distributed

        ranks, made, mine = Ranks(group), None, None
        problem: Exception | None = None
        try:
            where = ranks.device(str(device))
            made = cls.open(ranks.rank, ranks.size, name=ranks.name, timeout_s=timeout_s, device=where)
            mine = made.descriptor()
        except OSError as error:  # too many open files, as a rule
            problem = WiringError(f"a world on rank {ranks.rank} could not be opened: {error}")
        except Exception as error:  # noqa: BLE001  `gather` raises it, once the other ranks know of it
            problem = error
        try:
            name, descriptors = ranks.gather(made, mine, problem)
            assert made is not None, "a rank without a world has a problem"
            made._wire_as(name, descriptors)
        except BaseException:
            if made is not None:
                made.close(together=False)
            raise
        return made

    @property
    def gpu(self) -> Gpu:
        """The GPU of this rank, for those who compile, launch and copy; until `close`."""
        self._refuse_if_closed("its GPU asked for")
        if self._gpu is None or not isinstance(self._gpu.device, cuda_ipc.GpuMemory):
            raise ConfigError(f"the GPU of rank {self.rank} asked for; its world is on {self.device}")
        return self._gpu.device.gpu

    @property
    def closed(self) -> bool:
        """Also in a forked process: what it wrote would be taken for its parent's."""
        return self._closed or self._forked

    def descriptor(self) -> dict[str, object]:
        """Plain values that tell peers who this is and how to reach its memory; before `wire`."""
        if self._board is not None or self._closed:
            state = "closed" if self._closed else "wired already"
            raise WiringError(f"descriptor on rank {self.rank}: its world is {state}; a new generation is a new World")
        mine: dict[str, object] = {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "generation": self.generation,
        }
        mine |= {"version": raymoe.__version__, "code_hash": self._code, "layout_hash": self._layout.hash}
        mine |= {"device": self.member.kind, "share_gpu": self.member.share_gpu, "host": socket.gethostname()}
        device = self._gpu.device if self._gpu else None
        mine |= {"gpu": device.uuid if device else "", "driver": device.driver if device else 0}
        return mine | self._own.descriptor()

    def wire(self, descriptors: Sequence[dict[str, object]]) -> None:
        """Check the descriptors of all ranks, map the peers' memory and prove every mapping."""
        if self._board is not None or self._closed:
            raise WiringError(f"rank {self.rank} is wired or closed already; a new generation is a new World")
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

    def swap(self, value: object, what: str) -> list[object]:
        """Everybody's value, in rank order. `what` names the round in errors and must be the same on all ranks."""
        return [pickle.loads(message) for message in self._meet(what, pickle.dumps(value))]

    def barrier(self, what: str, timeout_s: float | None = None) -> None:
        """Wait for every rank, as long as the world's waits may take unless said."""
        self._meet(what, timeout_s=timeout_s)

    def agree(self, problem: RaymoeError | None, what: str) -> None:
        """Raise on all ranks if any has a problem: the own one where there is one, else the first rank's."""
        try:
            found = [text for text in self.swap(None if problem is None else str(problem), what) if text is not None]
        finally:
            if problem is not None:  # also where the round failed: then it is the likely cause
                raise problem
        if found:
            raise WiringError(str(found[0]))

    @overload
    def allocate(self, layout: Layout, what: str, where: Literal["host"] = "host") -> Heap: ...

    @overload
    def allocate(self, layout: Layout, what: str, where: Literal["device"]) -> DeviceHeap: ...

    def allocate(self, layout: Layout, what: str, where: Literal["host", "device"] = "host") -> Heap | DeviceHeap:
        """Memory of this layout on every rank, mapped by all. Either all ranks get it or all raise.

        A host heap is what the processors of all ranks see; a device heap, of a GPU world, is what their kernels see.
        """
        self._refuse_if_closed(what)
        self.unclosed.free()
        if where == "device":
            return self._allocate_on_device(layout, what)
        if where != "host":
            raise ConfigError(f"{what}: memory asked for in {where}; it is in host or device")
        heap = Heap(layout, self.rank, share(self, host_shm, layout, what))
        self._workspaces.add(heap)
        return heap

    def shared(self, kind: Callable[[World], S]) -> S:
        """The one object of this kind that all users of this world have: made for the first, closed with the world.

        Where making it is collective, so is the first call.
        """
        self._refuse_if_closed("what its users share")
        if kind not in self._shared:
            self._shared[kind] = kind(self)
        made: S = self._shared[kind]
        return made

    def group(self, ranks: Sequence[int]) -> World | None:
        """A world of these ranks alone, in this order; None on the others. All ranks of this world call it.

        It has a board, memory and names of its own, and its ranks count from 0, also in its errors. Its timeout is this
        world's; what aborts or closes this world does so to its groups.
        """
        self._refuse_if_closed("group")
        self._made_groups += 1
        wanted, made, problem = tuple(ranks), None, None
        try:
            member = self.member.in_group(wanted, self._made_groups)
            made = None if member is None else World(member, self._gpu.device if self._gpu else None, self)
        except RaymoeError as error:
            problem = error
        try:
            theirs = self.swap((wanted, made.descriptor() if made else None), "group: ranks")
            self.agree(problem, "group: possible")
            act_together(self, lambda: _join(wanted, made, theirs), "group: wired")
        except RaymoeError:
            if made is not None:
                made.close(together=False)
            raise
        if made is not None:
            self._groups.append((made, wanted))
            self.waiter.on_abort(made.abort)
        return made

    def abort(self, reason: str) -> None:
        """From any thread of this process: end this rank's wait, now and from now on. Nothing after `close`."""
        self.waiter.abort(reason)

    @property
    def waiting(self) -> tuple[str, int] | None:
        """The operation and the peer that this rank waits for at this moment, in this world or in a group of it."""
        for group, ranks in self._groups:
            if (found := group.waiting) is not None:
                return found[0], ranks[found[1]]
        return self.waiter.waiting

    def close(self, together: bool = True) -> None:
        """Let go of the workspaces, meet once more if `together`, free. A dead peer delays this by 2 s at most.

        Closing again does nothing; every other method raises `WiringError` from then on.

        Device memory is freed where every peer has let go of it, and else left to the end of the process.
        """
        if self.closed:
            return
        peaceful = together and self._poison is None and self.waiter.reason is None
        for group, _ in self._groups:
            group.close(peaceful)
        for shared in reversed(self._shared.values()):
            with suppress(RaymoeError):  # as with the meeting below
                shared.close(peaceful)
        self._closed = True
        board, self._board = self._board, None
        with ExitStack() as leaving:  # from the last to the first, all of them even if one raises
            leaving.callback(self._free)
            if together and board is not None and self._poison is None and self.waiter.reason is None:
                leaving.callback(self._meet_to_close, board)
            for heap in self._on_device:
                leaving.callback(heap.let_go)
            for workspace in list(self._workspaces):
                leaving.callback(workspace.close)
            leaving.callback(self.unclosed.free)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _allocate_on_device(self, layout: Layout, what: str) -> DeviceHeap:
        if self._gpu is None:
            raise ConfigError(f"{what}: device memory asked for; the world of rank {self.rank} is on {self.device}")
        # Ranks make device memory in one order, so this number is the same on all.
        self._made_on_device += 1
        serial = self._made_on_device
        self._on_device = [heap for heap in self._on_device if not heap.free_if_let_go()]
        let_go = self.allocate(let_go_layout(self.size), f"{what}: let go")
        segments = share(self, self._gpu, with_proof(layout, self.size), what)
        heap = DeviceHeap(layout, segments, Setting(self._gpu.device, self.device, self.waiter, let_go))
        self._on_device.append(heap)
        try:
            prove(self, what, heap.prove_to, heap.proof_of, serial)
        except RaymoeError:
            heap.close()
            raise
        return heap

    def _segments(self, descriptors: Sequence[dict[str, object]]) -> list[host_shm.HostSegment]:
        """The memory of all ranks. Tells of every rank that is gone: one of them may have left because of another."""
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
        """Wire under the name that all ranks have agreed on, in place of the one that each opened its world by."""
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

    def _meet_to_close(self, board: Board) -> None:
        # A peer that is gone or has failed needs no memory of ours, and the kernel frees what it had.
        with suppress(RaymoeError):
            board.meet("close", timeout_s=min(self.timeout_s, CLOSING_S))

    def _free(self) -> None:
        # Memory that a peer may still map needs its context, and a group's context is its world's.
        if self._gpu is not None and self._parent is None and not self._is_mapped():
            self._gpu.device.close()
        if self._heap is not None:
            self._heap.close()
        self._own.close()

    def _is_mapped(self) -> bool:
        """Whether a peer may map device memory of this rank still."""
        left = [heap for heap in self._on_device if not heap.free_if_let_go()]
        return any([bool(left), *(group._is_mapped() for group, _ in self._groups)])

    def _meet(self, what: str, message: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        self._refuse_if_closed(what)
        if self._board is None:
            raise WiringError(f"{what} on rank {self.rank}: its world is not wired yet")
        if self._poison is not None:
            raise self._poison
        try:
            return self._board.meet(what, message, timeout_s)
        except (PeerTimeout, Aborted) as error:
            # This rank has left a round that others may still be in: its next post would overwrite what they read.
            self._poison = error
            raise


def _join(ranks: tuple[int, ...], made: World | None, theirs: Sequence[object]) -> None:
    """Wire a group, after making sure that all ranks of its world mean the same one."""
    for rank, other in enumerate(theirs):
        assert isinstance(other, tuple)
        if other[0] != ranks:
            raise ConfigError(f"rank {rank} asks for a group of {list(other[0])} while another asks for {list(ranks)}")
    if made is not None:
        found = [other[1] for other in theirs if isinstance(other, tuple)]
        made.wire([found[rank] for rank in ranks])


def _disown() -> None:
    for world in _WORLDS:
        world._forked = True


os.register_at_fork(after_in_child=_disown)  # asking for the process at every call would cost more
