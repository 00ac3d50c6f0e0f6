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
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

import raymoe
from raymoe.job.errors import Aborted, ConfigError, PeerTimeout, RaymoeError, WiringError
from raymoe.memory import host_shm
from raymoe.memory.board import Board, board_layout
from raymoe.memory.heap import Layout
from raymoe.memory.mapped import Heap
from raymoe.memory.wait import Waiter

_CLOSING_S = 2.0
_AGREED = {"name": str, "size": int, "generation": int, "version": str, "layout_hash": str, "boot_id": str, "kind": str}


class World:
    """Ranks that live and die together; every member calls the collective methods in one order."""

    def __init__(self, rank: int, size: int, generation: int, name: str, timeout_s: float) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(
                f"rank {rank} in a world of {size}; ranks are 0 to size - 1, and a world has at least one"
            )
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s is {timeout_s}; waits need a positive number of seconds")
        self.rank, self.size, self.generation, self.name, self.timeout_s = rank, size, generation, name, timeout_s
        self.device = torch.device("cpu")
        self.waiter = Waiter(rank, timeout_s)
        self._layout = board_layout(size)
        self._own = host_shm.own(f"raymoe-{name}-board", self._layout.nbytes)
        self._heap: Heap | None = None
        self._board: Board | None = None
        self._poison: RaymoeError | None = None
        self._closed = False
        self._workspaces: list[Heap] = []

    @classmethod
    def open(cls, rank: int, size: int, *, generation: int = 0, name: str = "world", timeout_s: float = 30.0) -> Self:
        """This rank's half of a world: its own memory, no peers yet."""
        return cls(rank, size, generation, name, timeout_s)

    def descriptor(self) -> dict[str, object]:
        """Plain values that tell peers who this is and how to reach its memory."""
        mine: dict[str, object] = {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "generation": self.generation,
        }
        mine |= {"version": raymoe.__version__, "layout_hash": self._layout.hash}
        return mine | self._own.descriptor()

    def wire(self, descriptors: Sequence[dict[str, object]]) -> None:
        """Check the descriptors of all ranks, map the peers' memory and prove every mapping."""
        if self._board is not None or self._closed:
            raise WiringError(f"rank {self.rank} is wired or closed already; a new generation is a new World")
        self._check(descriptors)
        segments = [self._own if r == self.rank else host_shm.map_peer(d) for r, d in enumerate(descriptors)]
        self._heap = Heap(self._layout, self.rank, segments)
        self._board = Board(self._heap, self.rank, self.size, self.waiter)
        self._prove(self._heap)
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

    def allocate(self, layout: Layout, what: str) -> Heap:
        """Memory of this layout on every rank, mapped by all. Either all ranks get it or all raise."""
        own: host_shm.Segment | None = None
        problem: RaymoeError | None = None
        try:
            own = host_shm.own(f"raymoe-{self.name}-{what}"[:200], layout.nbytes)
        except RaymoeError as error:
            problem = error
        mine = (own.descriptor(), layout.hash) if own else None
        theirs = self.swap(mine, f"{what}: memory")
        segments: list[host_shm.Segment] = []
        try:
            for peer, other in enumerate(theirs):
                if own is not None and isinstance(other, tuple):
                    if other[1] != layout.hash:
                        raise WiringError(
                            f"{what}: layout {other[1]} on rank {peer}, {layout.hash} on rank {self.rank}"
                        )
                    segments.append(own if peer == self.rank else host_shm.map_peer(other[0]))
        except RaymoeError as error:
            problem = error
        self.agree(problem, f"{what}: mapping")
        assert own is not None
        own.unpublish()
        heap = Heap(layout, self.rank, segments)
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
        """Let go of the workspaces, meet once more if `together`, free. A dead peer delays this by 2 s at most."""
        if self._closed:
            return
        self._closed = True
        for heap in self._workspaces:
            heap.close()
        board, self._board = self._board, None
        try:
            if together and board is not None and self._poison is None and self.waiter.reason is None:
                # A peer that is gone or has failed needs no memory of ours, and the kernel frees what it had.
                with suppress(RaymoeError):
                    board.meet("close", timeout_s=min(self.timeout_s, _CLOSING_S))
        finally:
            if self._heap is not None:
                self._heap.close()
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

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

    def _check(self, descriptors: Sequence[dict[str, object]]) -> None:
        if len(descriptors) != self.size:
            raise WiringError(f"{len(descriptors)} descriptors for a world of {self.size}; every rank gives one")
        mine = self.descriptor()
        for rank, other in enumerate(descriptors):
            host_shm.check_fields(other, _AGREED | {"rank": int})
            if other["rank"] != rank:
                raise WiringError(f"the descriptor at place {rank} is of rank {other['rank']}; they come in rank order")
            for field in _AGREED:
                if other[field] != mine[field]:
                    here = f"{mine[field]} on rank {self.rank}"
                    raise WiringError(f"{field} is {other[field]} on rank {rank} and {here}; all ranks must agree")
        if descriptors[self.rank] != mine:
            raise WiringError(f"the descriptor at place {self.rank} is not the one that this rank gave")

    def _prove(self, heap: Heap) -> None:
        """Show that each mapping is the memory of the rank it is taken for.

        Rank r writes a number that names both r and p into slot r of peer p. Two mappings taken for one another put
        those numbers in each other's place, and the owners see it.
        """
        for peer in range(self.size):
            heap.words("proof", peer)[self.rank] = self._proof(self.rank, peer)
        self.barrier("wiring: proof")
        problem: RaymoeError | None = None
        for peer in range(self.size):
            found, expected = heap.word("proof", peer), self._proof(peer, self.rank)
            if found != expected:
                problem = WiringError(
                    f"rank {peer} wrote {found} into the memory of rank {self.rank}; {expected} was due"
                )
                break
        self.agree(problem, "wiring: verdict")

    def _proof(self, writer: int, owner: int) -> int:
        return (self.generation + 1) * self.size * self.size + writer * self.size + owner
