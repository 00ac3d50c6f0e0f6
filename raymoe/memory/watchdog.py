"""The host's eye on waits that the GPU cannot bound by itself: those by stream memory operations.

For each word that a stream waits for there is a pair of 32-bit words in host memory, `{waiting, marked}`, 8 bytes:

- `waiting`  written by the stream: 1 before the wait, 0 after it
- `marked`   written 1 by the watchdog when it sees `waiting`, and 0 by the stream after the wait

Both words after the wait are one 64-bit store. A mark that is still there, with `waiting` 1 each time that the watchdog
looked, says that no wait for this word has ended since, so it is one and the same. (A wait may end between the look and
the mark, which then stays, and speaks for the next wait: too early by at most one look.) No count is needed, which a
captured stream memory operation could not keep.

Where a wait has lasted too long, or this rank was told to stop, the watchdog stores the awaited value into this rank's
own word, on a stream of its own, so that the stream goes on to its end and the host gets to raise. From then on every
wait ends at once. What the freed stream then still moves and signals was baked into it and cannot be called back, which
is why the failure is final for all these channels: their peers hear of it by the world, or wait in vain themselves.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import HostWords
from raymoe.errors import Aborted, PeerTimeout, RaymoeError
from raymoe.memory.world import World

LOOK_S, LOOK_AFTER_FAILURE_S = 0.01, 0.001


@dataclass
class WatchedWord:
    """One word that streams of this rank wait for to be 1."""

    op: str
    peer: int
    address: int
    since: float | None = None


class Watchdog:
    """A thread that looks after the waits of some channels on one rank until it is closed."""

    def __init__(
        self, world: World, guarded: list[WatchedWord] | None = None, on_abort: Callable[[str], None] | None = None
    ) -> None:
        self._world, self._gpu = world, world.gpu
        self._guarded = guarded or []
        self._on_abort = on_abort
        self._failure: RaymoeError | None = None
        self._ending = threading.Event()
        self._host = HostWords(self._gpu, max(1, len(self._guarded)))
        self._halves = (ctypes.c_uint32 * (2 * len(self._host.words))).from_buffer(self._host.words)
        drv = bindings()
        with self._gpu.current():
            # Streams of one priority may share a hardware queue, and stand behind the very wait that is to be ended.
            _, highest = call("cuCtxGetStreamPriorityRange")
            flags = drv.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = int(call("cuStreamCreateWithPriority", flags, highest))
        self._thread = threading.Thread(target=self._run, name="raymoe watchdog", daemon=True)
        self._thread.start()

    def host_address(self, index: int) -> int:
        """Where the GPU finds the pair of the `index`-th guarded word."""
        return self._host.device_address(index)

    def check(self) -> None:
        """Raise where a wait was ended by this."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """When no stream uses the words any more."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join()
        with self._gpu.current():
            call("cuStreamSynchronize", self._stream)
            call("cuStreamDestroy", self._stream)
        self._host.close()

    def _run(self) -> None:
        told = False
        while not self._ending.wait(LOOK_AFTER_FAILURE_S if self._failure else LOOK_S):
            reason = self._world.waiter.reason
            if reason is not None and not told:
                told = True
                if self._on_abort is not None:
                    self._on_abort(reason)
            now = time.monotonic()
            for index, wait in enumerate(self._guarded):
                self._look(index, wait, now, reason)

    def _look(self, index: int, wait: WatchedWord, now: float, reason: str | None) -> None:
        waiting, marked = self._halves[2 * index], self._halves[2 * index + 1]
        if not waiting:
            wait.since = None
            return
        if wait.since is None or not marked:
            wait.since = now
            self._halves[2 * index + 1] = 1
        waited = now - wait.since
        if self._failure is None:
            me = self._world.rank
            if reason is not None:
                self._failure = Aborted(f"rank {me} was told to stop in {wait.op}: {reason}", wait.peer)
            elif waited >= self._world.timeout_s:
                self._failure = PeerTimeout(wait.op, 0, wait.peer, 1, 0, waited, me)
        if self._failure is not None:
            with self._gpu.current():
                call("cuStreamWriteValue32", self._stream, wait.address, 1, 0)
