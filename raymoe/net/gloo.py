"""Gloo collectives between the ranks of a world, with waits that end like ours.

The process group is private: the process-wide default group is the user's. It listens on the loopback address alone.

Gloo cannot tell who did not come. So each rank writes the number of the collective that it enters into a word at every
peer, and a wait that fails names the first peer whose word lags behind. The words carry no data and order nothing.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raymoe.errors import PeerTimeout, RaymoeError, WiringError
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World

_SLICE = timedelta(milliseconds=20)  # how long an abort can go unnoticed; Gloo itself wakes the waiter when it is done
_SLICE_OVER = "Operation timed out!"  # what torch says when a wait ends before its work does, which is no failure
gloo: Any = dist  # torch's stubs leave out most of what a private group needs
_c10d: Any = distributed_c10d
_LOOPBACK = "127.0.0.1"


class Gloo:
    """A private process group. After a failed wait it is of no further use."""

    def __init__(self, world: World) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise WiringError("this torch was built without Gloo; CPU ranks have backend host, which needs none")
        self._world = world
        self._entered = 0
        layout = Layout.of([Region.words("entered", world.size)])
        self._heap = world.allocate(layout, "gloo words")
        self._words = [self._heap.words("entered", peer) for peer in range(world.size)]
        self._file = _nameless_file() if world.rank == 0 else None
        self._group: Any = self._connect(timedelta(seconds=world.timeout_s))

    def all_to_all(
        self, op: str, out: torch.Tensor, rows: torch.Tensor, taking: Sequence[int] = (), giving: Sequence[int] = ()
    ) -> Callable[[], None]:
        """Start it: `giving[r]` rows to rank r, `taking[r]` from it, equal shares unless said. The result waits."""
        taking, giving = list(taking), list(giving)
        return self._start(op, lambda group: group.alltoall_base(out, rows, taking, giving, gloo.AllToAllOptions()))

    def all_gather(self, op: str, out: torch.Tensor, mine: torch.Tensor) -> Callable[[], None]:
        return self._start(op, lambda group: group._allgather_base(out, mine, _c10d.AllgatherOptions()))

    def close(self, together: bool) -> None:
        if self._group is not None and together:
            self._world.barrier("gloo: idle")  # nobody hangs up on a peer that still reads
            self._group = None
            self._world.barrier("gloo: gone")  # every store writes to the file when it goes
            if self._file is not None:
                os.close(self._file)
        self._abandon()
        self._heap.close()

    def _connect(self, timeout: timedelta) -> Any:
        """Meet over a file of rank 0 that has no name (a TCP store looks names up, which can take a resolver's 5 s)."""
        world, group, problem = self._world, None, None
        path = world.swap(f"/proc/{os.getpid()}/fd/{self._file}", "gloo: store")[0]
        try:
            options = gloo.ProcessGroupGloo._Options()
            options._devices = [gloo.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
            options._timeout = timeout
            group = gloo.ProcessGroupGloo(gloo.FileStore(path, world.size), world.rank, world.size, options)
        except (RuntimeError, OSError) as error:
            problem = WiringError(f"Gloo did not connect on {_LOOPBACK}: {_first_line(error)}")
        world.agree(problem, "gloo: connected")
        return group

    def _start(self, op: str, begin: Callable[[Any], dist.Work]) -> Callable[[], None]:
        if self._group is None:
            raise WiringError(f"{op}: this process group is closed")
        self._world.waiter.check()
        self._entered += 1
        for words in self._words:
            words[self._world.rank] = self._entered
        start, work = time.monotonic(), begin(self._group)
        return lambda: self._finish(op, work, start)

    def _finish(self, op: str, work: dist.Work, start: float) -> None:
        waiter = self._world.waiter
        try:
            waiter.waiting = (op, self._lagging())
            while not self._done(work, op, start):
                waiter.check()
                waiter.waiting = (op, self._lagging())
        except RaymoeError:
            self._abandon()
            raise
        finally:
            waiter.waiting = None

    def _done(self, work: dist.Work, op: str, start: float) -> bool:
        try:
            if work.is_completed():
                work.wait()  # gives the outcome, also of a work that was completed just after its slice had ended
            else:
                work.wait(_SLICE)
            return True
        except RuntimeError as error:
            waited = time.monotonic() - start
            if str(error).startswith(_SLICE_OVER) and waited < self._world.timeout_s:
                return False
            self._world.waiter.check()
            peer = self._lagging()
            seen = self._words[self._world.rank][peer]
            raise PeerTimeout(op, self._entered, peer, self._entered, seen, waited, self._world.rank) from error

    def _lagging(self) -> int:
        """The first peer that has not entered this collective; the next rank if all have."""
        words, me, size = self._words[self._world.rank], self._world.rank, self._world.size
        others = [(me + step) % size for step in range(1, size)] or [me]
        return next((peer for peer in others if words[peer] < self._entered), others[0])

    def _abandon(self) -> None:
        """Let the group go without its destructor, which waits for peers in what is still under way.

        The process has failed by then and is about to end; what is leaked here, and the store's file, last until then.
        """
        group, self._group = self._group, None
        if group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _nameless_file() -> int:
    """A file that is gone with its last user; peers reach it through /proc."""
    fd = os.memfd_create("raymoe-gloo-store", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
