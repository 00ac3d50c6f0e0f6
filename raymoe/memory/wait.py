"""The bounded wait of CPU ranks, and the fence that goes with it.

A wait ends in one of four ways: the word has come, the deadline has passed (`PeerTimeout`), a thread of this process
told this rank to stop (`Aborted`), or a peer gave up (that peer's error). It never spins: there may be more ranks than
cores, and the awaited peer may need this core. So it yields a few times, then sleeps.
"""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raymoe.errors import Aborted, PeerTimeout, RaymoeError, WiringError
from raymoe.memory.layout import WORD_STRIDE

_YIELDS = 4
_SLEEP_S = 50e-6
_LONG_S = 0.05
_MAX_SLEEP_S = 500e-6  # an abort must end a wait within about a millisecond

_MEMBARRIER_NUMBER = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


class Words:
    """A row of 64-bit words, one per writer, 128 bytes apart.

    A load or a store is one aligned access, so a reader sees the old value or the new one, never a mixture.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("q")

    def __getitem__(self, index: int) -> int:
        return self._view[index * WORD_STRIDE]

    def __setitem__(self, index: int, value: int) -> None:
        self._view[index * WORD_STRIDE] = value

    def __len__(self) -> int:
        return len(self._view) // WORD_STRIDE


class Waiter:
    """The waits of one rank. Any thread may call `abort` and read `waiting`; the rank's own thread waits."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.waiting: tuple[str, int] | None = None
        """The operation and the peer of the wait that is going on."""
        self.watch: Callable[[], None] | None = None
        """Called now and then in a wait that is long. It ends the wait if it raises."""
        self.reason: str | None = None
        """Why this rank was told to stop; None if it was not."""
        self.failure: RaymoeError | None = None
        """The error for which this rank or a peer gave up (`raymoe.memory.giving_up`)."""
        self.beat: Callable[[int], None] | None = None
        """Called now and then in a wait that is long, with the peer. It lets other ranks see that this one waits."""
        self.interrupted: Aborted | None = None
        """The error of a stop that a caller of this rank's waits kept, to give what it had so far."""
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()  # between `abort` and `on_abort`: each listener is called once
        self.fence = _choose_fence()

    def abort(self, reason: str) -> None:
        """End the current wait, if there is one, and every later one."""
        self._end(reason, None)

    def stop(self, error: RaymoeError) -> None:
        """Do the same, because this rank or a peer gave up. Waits raise `error`."""
        self._end(str(error), error)

    def linger(self, peer: int) -> None:
        """Do what a long wait for a peer does now and then. Raises where `watch` ends the wait."""
        if self.beat is not None:
            self.beat(peer)
        if self.watch is not None:
            self.watch()

    def _end(self, reason: str, failure: RaymoeError | None) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, []
            if self.failure is None:
                self.failure, self.reason = failure, reason
        for listener in listeners:
            listener(reason)

    def on_abort(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` on an abort, in the thread that aborts, or now if the abort has been. For waits of kernels.

        Returns a function that removes the listener.
        """
        with self._lock:
            if self.reason is None:
                self._listeners.append(listener)
                return lambda: self._remove(listener)
        listener(self.reason)
        return lambda: None

    def _remove(self, listener: Callable[[str], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def check(self, peer: int | None = None) -> None:
        """Raise if this rank was told to stop: a peer's error, or `Aborted`. `peer` is the peer that it waits for."""
        if self.reason is not None:
            if self.failure is not None:
                raise copy.copy(self.failure)
            raise Aborted(f"rank {self.rank} was told to stop: {self.reason}", peer)

    def for_epoch(
        self,
        op: str,
        words: Words,
        peer: int,
        epoch: int,
        *,
        timeout_s: float | None = None,
        index: int | None = None,
    ) -> None:
        """Wait until the word of `peer` (or that at `index`) is at least `epoch`: a peer may be one operation ahead."""
        at = peer if index is None else index
        seen = words[at]
        if seen < epoch:
            limit = self.timeout_s if timeout_s is None else timeout_s
            start = time.monotonic()
            arrived = self.until(op, peer, lambda: words[at] >= epoch, limit)
            seen = words[at]
            if not arrived:
                raise PeerTimeout(op, epoch, peer, epoch, seen, time.monotonic() - start, self.rank)
        self.fence()  # orders the load of the word before the loads of the announced data

    def until(self, op: str, peer: int, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()`. False if `timeout_s` passed before."""
        start = time.monotonic()
        pauses = 0
        sleep = _SLEEP_S
        self.waiting = (op, peer)
        try:
            while not ready():
                self.check(peer)
                pauses += 1
                if pauses <= _YIELDS:
                    os.sched_yield()
                    continue
                waited = time.monotonic() - start
                if waited > timeout_s:
                    return False
                if waited > _LONG_S:
                    self.linger(peer)
                time.sleep(sleep)
                if pauses > 40:
                    sleep = min(sleep * 1.1, _MAX_SLEEP_S)
            return True
        finally:
            self.waiting = None


@contextmanager
def named_by_world(waiter: Waiter, first: int, op: str | None = None) -> Iterator[None]:
    """Let errors of a domain name ranks by their numbers in the world that `waiter` belongs to.

    `first` is the first rank of the domain. `op` replaces the name of the operation.
    """
    try:
        yield
    except PeerTimeout as error:
        if error.told_by >= 0:  # a rank of the world told this one, by the world's numbers
            raise
        peer, waited_s = first + error.peer, error.waited_s
        raise PeerTimeout(
            op or error.op, error.epoch, peer, error.expected, error.seen, waited_s, waiter.rank
        ) from error
    except Aborted as error:
        waiter.check(None if error.peer is None else first + error.peer)
        raise


def _choose_fence() -> Callable[[], None]:
    """Return the fence between the stores of a payload and of its flag, and between the loads of the two.

    x86-64 keeps stores in order and loads in order, and libc ends its streaming copies with a fence. So it needs none.
    Elsewhere `membarrier` makes every running thread of every registered process pass a full barrier, which orders the
    writer and the reader.
    """
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return _no_fence
    number = _MEMBARRIER_NUMBER.get(machine)
    if number is None:
        raise WiringError(
            f"CPU ranks were asked for on {machine}, which has no known memory fence; use x86_64, aarch64 or riscv64"
        )
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(number, _REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise WiringError(f"CPU ranks on {machine} need membarrier (Linux 4.16 or later), which failed: {reason}")

    def membarrier() -> None:
        if syscall(number, _GLOBAL_EXPEDITED, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "membarrier failed after it was registered")

    return membarrier


def _no_fence() -> None:
    return None
