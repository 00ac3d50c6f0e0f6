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

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack, overload

import torch

import raymoe
from raymoe.job.errors import Aborted, ConfigError, PeerTimeout, RaymoeError, WiringError
from raymoe.memory import cuda_ipc, gpu_memory, host_shm
from raymoe.memory.board import Board, board_layout
from raymoe.memory.device_heap import DeviceHeap, Setting, let_go_layout, with_proof
from raymoe.memory.heap import Layout
from raymoe.memory.mapped import Heap
from raymoe.memory.member import Member, Options, check_descriptors, code_hash
from raymoe.memory.segments import share
from raymoe.memory.wait import Waiter

if TYPE_CHECKING:
    from raymoe.device.gpu import Gpu

_CLOSING_S = 2.0


class World:
    """Ranks that live and die together; every member calls the collective methods in one order.

    The board, and with it every round, is in host memory for CPU and GPU ranks alike: all are on one machine.
    """

    def __init__(self, member: Member, device: cuda_ipc.Device | None) -> None:
        self.member = member
        self.rank, self.size, self.generation = member.rank, member.size, member.generation
        self.name, self.timeout_s = member.name, member.timeout_s
        self.device = torch.device("cpu") if device is None else torch.device("cuda", 0)
        self.waiter = Waiter(member.rank, member.timeout_s)
        self._gpu = None if device is None else cuda_ipc.DeviceMemory(device)
        self._layout, self._code = board_layout(member.size), code_hash()
        self._own = host_shm.own(f"raymoe-{member.name}-board", self._layout.nbytes)
        self._heap: Heap | None = None
        self._board: Board | None = None
        self._poison: RaymoeError | None = None
        self._closed = False
        self._workspaces: list[Heap] = []
        self._on_device: list[DeviceHeap] = []
        self._made_on_device = 0

    @classmethod
    def open(cls, rank: int, size: int, **options: Unpack[Options]) -> Self:
        """This rank's half of a world: its own memory, no peers yet. `Member` says what the options mean."""
        member = Member(rank, size, **options)
        return cls(member, gpu_memory.GpuMemory.open() if member.device == "cuda" else None)

    @property
    def gpu(self) -> Gpu:
        """The GPU of this rank, for those who compile, launch and copy; until `close`."""
        if self._gpu is None or not isinstance(self._gpu.device, gpu_memory.GpuMemory):
            raise ConfigError(f"the GPU of rank {self.rank} asked for; its world is on {self.device}")
        return self._gpu.device.gpu

    def descriptor(self) -> dict[str, object]:
        """Plain values that tell peers who this is and how to reach its memory."""
        mine: dict[str, object] = {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "generation": self.generation,
        }
        mine |= {"version": raymoe.__version__, "code_hash": self._code, "layout_hash": self._layout.hash}
        mine |= {"device": self.member.device, "share_gpu": self.member.share_gpu}
        device = self._gpu.device if self._gpu else None
        mine |= {"gpu": device.uuid if device else "", "driver": device.driver if device else 0}
        return mine | self._own.descriptor()

    def wire(self, descriptors: Sequence[dict[str, object]]) -> None:
        """Check the descriptors of all ranks, map the peers' memory and prove every mapping."""
        if self._board is not None or self._closed:
            raise WiringError(f"rank {self.rank} is wired or closed already; a new generation is a new World")
        check_descriptors(descriptors, self.descriptor())
        segments = [self._own if r == self.rank else host_shm.map_peer(d) for r, d in enumerate(descriptors)]
        self._heap = Heap(self._layout, self.rank, segments)
        self._board = Board(self._heap, self.rank, self.size, self.waiter)
        heap = self._heap
        self._prove(
            "wiring",
            lambda peer, value: heap.words("proof", peer).__setitem__(self.rank, value),
            lambda peer: heap.word("proof", peer),
        )
        self._own.unpublish()

    def swap(self, value: object, what: str) -> list[object]:
        """Everybody's value, in rank order. `what` names the round in errors and must be the same on all ranks."""
        return [pickle.loads(message) for message in self._meet(what, pickle.dumps(value))]

    def barrier(self, what: str) -> None:
        self._meet(what)

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
        if where == "device":
            return self._allocate_on_device(layout, what)
        if where != "host":
            raise ConfigError(f"{what}: memory asked for in {where}; it is in host or device")
        heap = Heap(layout, self.rank, share(self, host_shm, layout, what))
        self._workspaces.append(heap)
        return heap

    def abort(self, reason: str) -> None:
        """From any thread of this process: end this rank's wait, now and from now on."""
        self.waiter.abort(reason)

    @property
    def waiting(self) -> tuple[str, int] | None:
        """The operation and the peer that this rank waits for at this moment."""
        return self.waiter.waiting

    def close(self, together: bool = True) -> None:
        """Let go of the workspaces, meet once more if `together`, free. A dead peer delays this by 2 s at most.

        Device memory is freed where every peer has let go of it, and else left to the end of the process.
        """
        if self._closed:
            return
        self._closed = True
        board, self._board = self._board, None
        with ExitStack() as leaving:  # from the last to the first, all of them even if one raises
            leaving.callback(self._free)
            if together and board is not None and self._poison is None and self.waiter.reason is None:
                leaving.callback(self._meet_to_close, board)
            for heap in self._on_device:
                leaving.callback(heap.let_go)
            for workspace in self._workspaces:
                leaving.callback(workspace.close)

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
            self._prove(what, heap.prove_to, heap.proof_of, serial)
        except RaymoeError:
            heap.close()
            raise
        return heap

    def _meet_to_close(self, board: Board) -> None:
        # A peer that is gone or has failed needs no memory of ours, and the kernel frees what it had.
        with suppress(RaymoeError):
            board.meet("close", timeout_s=min(self.timeout_s, _CLOSING_S))

    def _free(self) -> None:
        left = [heap for heap in self._on_device if not heap.free_if_let_go()]
        if self._gpu is not None and not left:  # memory that a peer may still map needs its context
            self._gpu.device.close()
        if self._heap is not None:
            self._heap.close()
        self._own.close()

    def _meet(self, what: str, message: bytes = b"") -> list[bytes]:
        if self._closed or self._board is None:
            state = "closed" if self._closed else "not wired yet"
            raise WiringError(f"{what} on rank {self.rank}: its world is {state}")
        if self._poison is not None:
            raise self._poison
        try:
            return self._board.meet(what, message)
        except (PeerTimeout, Aborted) as error:
            # This rank has left a round that others may still be in: its next post would overwrite what they read.
            self._poison = error
            raise

    def _prove(self, what: str, write: Callable[[int, int], None], read: Callable[[int], int], serial: int = 0) -> None:
        """Show that each mapping is the memory of the rank it is taken for.

        Rank r writes a number that names both r and p into slot r of peer p. Two mappings taken for one another put
        those numbers in each other's place, and the owners see it.
        """

        def prove() -> None:
            for peer in range(self.size):
                write(peer, self._proof(self.rank, peer, serial))

        def judge() -> None:
            for peer in range(self.size):
                found, expected = read(peer), self._proof(peer, self.rank, serial)
                if found != expected:
                    raise WiringError(
                        f"{what}: rank {peer} wrote {found} into the memory of rank {self.rank}; {expected} was due"
                    )

        self._together(prove, f"{what}: proof")
        self._together(judge, f"{what}: verdict")

    def _together(self, act: Callable[[], None], what: str) -> None:
        """Act, then raise on all ranks if any could not."""
        problem: RaymoeError | None = None
        try:
            act()
        except RaymoeError as error:
            problem = error
        self.agree(problem, what)

    def _proof(self, writer: int, owner: int, serial: int) -> int:
        return ((self.generation + 1 << 24) + serial) * self.size**2 + writer * self.size + owner
