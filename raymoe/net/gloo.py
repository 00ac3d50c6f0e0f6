"""Gloo collectives between the ranks of a world, with bounded waits.

The process group is private: the process-wide default group belongs to the user. Inside a domain it listens on the
loopback address only.

Gloo cannot name a rank that is missing. So each rank tells its peers the number of the collective that it enters
(`EnteredNumbers`). A wait that fails names the first peer whose number lags behind.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raymoe.errors import PeerTimeout, RaymoeError, WiringError
from raymoe.memory.heap import Heap
from raymoe.memory.layout import Layout, Region
from raymoe.memory.wait import Waiter
from raymoe.memory.world import World

_SLICE = timedelta(milliseconds=20)  # of one wait; limits the delay of an abort. Gloo wakes the waiter when it is done
_SLICE_OVER = "Operation timed out!"  # torch's message when the slice ends before the work does: not a failure
gloo: Any = dist  # torch's stubs lack most of what a private group needs
_c10d: Any = distributed_c10d
LOOPBACK = "127.0.0.1"


class EnteredNumbers(Protocol):
    """Tells which ranks have entered a collective. It carries no data and orders nothing."""

    def enter(self, number: int) -> None:
        """Tell the peers that this rank enters its collective `number`, counted from 1."""

    def lagging(self, number: int) -> tuple[int, int]:
        """Return the first peer that has not entered it, else the next peer; and the last that this peer entered."""


class PrivateGroup:
    """A process group whose waits end. After a failed wait it cannot be used any more."""

    def __init__(self, group: Any, waiter: Waiter, numbers: EnteredNumbers) -> None:
        self._group, self._waiter, self._numbers = group, waiter, numbers
        self._entered = 0

    @property
    def open(self) -> bool:
        return self._group is not None

    def all_to_all(
        self, op: str, out: torch.Tensor, rows: torch.Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> Callable[[], None]:
        """Start to send `sent[r]` rows to rank r and receive `received[r]` from it, by default equal shares.

        Returns a function that waits for the end.
        """
        received, sent = list(received), list(sent)
        return self._start(op, lambda group: group.alltoall_base(out, rows, received, sent, gloo.AllToAllOptions()))

    def all_gather(self, op: str, out: torch.Tensor, mine: torch.Tensor) -> Callable[[], None]:
        """Start to gather `mine` of all ranks into `out`. Returns a function that waits for the end."""
        return self._start(op, lambda group: group._allgather_base(out, mine, _c10d.AllgatherOptions()))

    def lagging(self) -> int:
        """Return the first peer that has not entered the last collective; the next rank if all have."""
        return self._numbers.lagging(self._entered)[0]

    def drop(self) -> None:
        """Disconnect. All ranks are idle."""
        self._group = None

    def abandon(self) -> None:
        """Drop the group without its destructor, which waits for peers in collectives that have not ended.

        The group is leaked until the process ends, and with it its store. The process has failed by then. A wait on
        another thread ends within one slice.
        """
        group, self._group = self._group, None
        if group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _start(self, op: str, begin: Callable[[Any], dist.Work]) -> Callable[[], None]:
        group = self._still_open(op)
        self._waiter.check()
        self._entered += 1
        self._numbers.enter(self._entered)
        start, work = time.monotonic(), begin(group)
        return lambda: self._finish(op, work, start)

    def _still_open(self, op: str) -> Any:
        if self._group is None:
            raise WiringError(f"{op}: this process group is aborted or closed")
        return self._group

    def _finish(self, op: str, work: dist.Work, start: float) -> None:
        waiter = self._waiter
        try:
            waiter.waiting = (op, self.lagging())
            while not self._done(work, op, start):
                waiter.check()
                self._still_open(op)
                waiter.waiting = (op, self.lagging())
        except RaymoeError:
            self.abandon()
            raise
        finally:
            waiter.waiting = None

    def _done(self, work: dist.Work, op: str, start: float) -> bool:
        try:
            if work.is_completed():
                work.wait()  # raises if the work failed, also if it completed just after the slice had ended
            else:
                work.wait(_SLICE)
            return True
        except RuntimeError as error:
            waited = time.monotonic() - start
            if str(error).startswith(_SLICE_OVER) and waited < self._waiter.timeout_s:
                return False
            self._waiter.check()
            peer, seen = self._numbers.lagging(self._entered)
            raise PeerTimeout(op, self._entered, peer, self._entered, seen, waited, self._waiter.rank) from error


class _Words:
    """Numbers between the ranks of a domain: a word of each rank at each peer."""

    def __init__(self, heap: Heap, rank: int, size: int) -> None:
        self._rank, self._everywhere = rank, [heap.words("entered", peer) for peer in range(size)]
        self._peers = [(rank + step) % size for step in range(1, size)] or [rank]

    def enter(self, number: int) -> None:
        for words in self._everywhere:
            words[self._rank] = number

    def lagging(self, number: int) -> tuple[int, int]:
        words = self._everywhere[self._rank]
        peer = next((peer for peer in self._peers if words[peer] < number), self._peers[0])
        return peer, words[peer]


class Gloo:
    """A private process group of the ranks of a domain."""

    def __init__(self, world: World) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise WiringError("Gloo was asked for and this torch was built without it; CPU ranks can use backend host")
        self._world = world
        layout = Layout.of([Region.words("entered", world.size)])
        self._heap = world.allocate(layout, "gloo words")
        self._file = _nameless_file() if world.rank == 0 else None
        group = self._connect(timedelta(seconds=world.timeout_s))
        self._group = PrivateGroup(group, world.waiter, _Words(self._heap, world.rank, world.size))
        self.all_to_all, self.all_gather = self._group.all_to_all, self._group.all_gather

    def close(self, together: bool) -> None:
        """Close the group. `together` if all ranks close now; else it is abandoned."""
        if self._group.open and together:
            self._world.barrier("gloo: idle")  # no rank disconnects from a peer that still reads
            self._group.drop()
            self._world.barrier("gloo: gone")  # every store writes to the file when it is destroyed
            if self._file is not None:
                os.close(self._file)
        self._group.abandon()
        self._heap.close()

    def _connect(self, timeout: timedelta) -> Any:
        """Connect through a file of rank 0 without a path: a TCP store looks up host names, which can take 5 s."""
        world, group, problem = self._world, None, None
        path = world.swap(f"/proc/{os.getpid()}/fd/{self._file}", "gloo: store")[0]
        try:
            store = gloo.FileStore(path, world.size)
            group = connected(store, world.rank, world.size, LOOPBACK, timeout)
        except (RuntimeError, OSError) as error:
            problem = WiringError(f"Gloo did not connect on {LOOPBACK}: {first_line(error)}")
        world.agree(problem, "gloo: connected")
        return group


def connected(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Connect a process group that listens at `address`. Raises RuntimeError where a peer does not come in time."""
    options = gloo.ProcessGroupGloo._Options()
    options._devices = [gloo.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo.ProcessGroupGloo(store, rank, size, options)


def _nameless_file() -> int:
    """Make a file without a path, which vanishes with its last user. Peers open it through /proc."""
    fd = os.memfd_create("raymoe-gloo-store", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
