"""Gloo collectives between the ranks of a world, with bounded waits.

The process group is private: the process-wide default group belongs to the user. Inside a domain it listens on the
loopback address only. Its ranks find one another by a round of the world (`_Addresses`), and by no store of torch:
Gloo's questions to a store have no limit.

Gloo cannot name a rank that is missing. So each rank publishes the number of the collective that it enters
(`EnteredNumbers`). A wait that fails names the first peer with a lower number.
"""

from __future__ import annotations

import copy
import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

_SLICE = timedelta(milliseconds=20)  # one wait; it limits the delay of an abort. Gloo wakes the waiter when it is done
_SLICE_OVER = "Operation timed out!"  # torch's message when the slice ends before the work does: not a failure
gloo: Any = dist  # torch's stubs lack most of what a private group needs
_c10d: Any = distributed_c10d
LOOPBACK = "127.0.0.1"
_CONNECT_WAITS = 5  # Gloo waits 5 times its limit for a peer that connects
_ENDED = 4  # ended operations that Gloo's threads may still hold: it has two threads, and each holds one at most


class EnteredNumbers(Protocol):
    """The numbers of the collectives that ranks have entered. They carry no data and order nothing."""

    def enter(self, number: int) -> None:
        """Publish that this rank enters its collective `number`, counted from 1."""

    def lagging(self, number: int) -> tuple[int, int]:
        """Return the first peer that has not entered collective `number`, else the next peer, and the peer's number."""


class PrivateGroup:
    """A process group whose waits end. After a failed wait it cannot be used any more, and says why.

    Gloo's threads let go of an operation after its waiter has gone on, or when Gloo gives it up. If that frees tensors
    of Python's while Python ends, the thread cannot get the interpreter's lock, and C++ ends the process by SIGABRT. So
    the group keeps the operations that Gloo may still hold, and with them their tensors. They stay as long as the
    process, unless `drop` ends Gloo's threads first.
    """

    def __init__(self, group: Any, store: object, waiter: Waiter, numbers: EnteredNumbers) -> None:
        self._group, self._waiter, self._numbers = group, waiter, numbers
        self._store = store  # the group's; a lazy device asks it again
        self._entered = 0
        self._failure: RaymoeError | None = None
        self._running: list[dist.Work] = []
        self._ended: deque[dist.Work] = deque(maxlen=_ENDED)
        for works in (self._running, self._ended):
            _keep(works)

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

    def all_gather(self, op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        """Start to gather `own` of all ranks into `out`. Returns a function that waits for the end."""
        return self._start(op, lambda group: group._allgather_base(out, own, _c10d.AllgatherOptions()))

    def lagging(self) -> int:
        """Return the first peer that has not entered the last collective; the next rank if all have."""
        return self._numbers.lagging(self._entered)[0]

    def drop(self) -> None:
        """Disconnect. All ranks are idle."""
        self._group = None  # its destructor waits for Gloo's threads
        self._running.clear()
        self._ended.clear()

    def abandon(self, failure: RaymoeError | None = None) -> None:
        """Drop the group without its destructor, which waits for peers in collectives that have not ended.

        The group is leaked until the process ends, and with it its operations. The process has failed by then. A wait
        on another thread ends within one slice. Later calls raise `failure`.
        """
        group, self._group = self._group, None
        if group is not None:
            self._failure = copy.copy(failure)
            _keep(group)

    def _start(self, op: str, begin: Callable[[Any], dist.Work]) -> Callable[[], None]:
        group = self._still_open(op)
        self._waiter.check()
        self._entered += 1
        self._numbers.enter(self._entered)
        start, work = time.monotonic(), begin(group)
        self._running.append(work)
        return lambda: self._finish(op, work, start)

    def _still_open(self, op: str) -> Any:
        if self._group is None:
            raise copy.copy(self._failure) or WiringError(f"{op}: this process group is aborted or closed")
        return self._group

    def _finish(self, op: str, work: dist.Work, start: float) -> None:
        waiter = self._waiter
        try:
            waiter.waiting = (op, self.lagging())
            while not self._done(work, op, start):
                waiter.check()
                waiter.linger(waiter.waiting[1])
                self._still_open(op)
                waiter.waiting = (op, self.lagging())
        except RaymoeError as error:
            self.abandon(error)
            raise
        finally:
            waiter.waiting = None
        self._running.remove(work)
        self._ended.append(work)

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


class _EnteredWords:
    """`EnteredNumbers` of the ranks of a domain: a word of each rank at each peer."""

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
        words = _EnteredWords(self._heap, world.rank, world.size)
        self._group = connected(Members("gloo", range(world.size), LOOPBACK), world, words)
        self.all_to_all, self.all_gather = self._group.all_to_all, self._group.all_gather

    def close(self, together: bool) -> None:
        """Close the group. `together` if all ranks close now; else it is abandoned."""
        try:
            if self._group.open and together:
                self._world.barrier("gloo: idle")  # no rank disconnects from a peer that still reads
                self._group.drop()
        finally:
            self._group.abandon()
            self._heap.close()


@dataclass(frozen=True)
class Members:
    """A group that is to be connected: ranks of a world, in the group's order, and where this rank listens for them."""

    what: str
    ranks: Sequence[int]
    address: str


def connected(members: Members, world: World, numbers: EnteredNumbers) -> PrivateGroup:
    """Connect a group. All ranks of the world call this, each with the members of its own group.

    Either all ranks connect or all raise. Gloo gets half of the world's time. Where a rank does not come, those that
    wait for it in Gloo are then still in time for the next round, which names the rank that is missing.
    """
    what, address = members.what, members.address
    addresses = _Addresses(world, members)
    group, problem = None, None
    try:
        options = gloo.ProcessGroupGloo._Options()
        options._devices = [gloo.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=world.timeout_s / 2 / _CONNECT_WAITS)
        group = gloo.ProcessGroupGloo(addresses, members.ranks.index(world.rank), len(members.ranks), options)
        group._set_default_timeout(timedelta(seconds=world.timeout_s))
    except RuntimeError as error:
        problem = WiringError(f"{what} did not connect at {address}: {first_line(error)}")
    addresses.swap()  # also where Gloo failed before it asked: the other ranks are in this round
    texts = world.swap(None if problem is None else str(problem), f"{what}: connected")
    if problem is not None:
        raise problem
    for text in texts:
        if text is not None:
            raise WiringError(str(text))
    return PrivateGroup(group, addresses, world.waiter, numbers)


class _Addresses(gloo.Store):  # type: ignore[misc]  # torch's stubs lack it
    """The store of a Gloo group while it connects: the addresses of all ranks cross in one round of a world.

    Gloo sets its own address, then waits for that of each member and gets it. So the round is in the first wait. It has
    the world's limit, and names the rank that does not come.
    """

    def __init__(self, world: World, members: Members) -> None:
        super().__init__()
        self._world, self._members = world, members
        self._own: dict[str, bytes] = {}
        self._all: dict[str, bytes] | None = None

    def swap(self) -> dict[str, bytes]:
        """Swap addresses at the first call. Returns the members' addresses."""
        if self._all is None:
            self._all = {}  # not again where the round fails
            everywhere: list[Any] = self._world.swap(self._own, f"{self._members.what}: addresses")
            for rank in self._members.ranks:
                self._all |= everywhere[rank]
        return self._all

    def set(self, key: str, value: bytes) -> None:
        self._own[key] = value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  the round has its own
        if missing := set(keys) - set(self.swap()):
            raise RuntimeError(f"a rank has given no address ({', '.join(sorted(missing))})")

    def get(self, key: str) -> bytes:
        return self.swap()[key]


def _keep(value: object) -> None:
    """Keep an object until the process ends, also while Python frees everything at its end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
