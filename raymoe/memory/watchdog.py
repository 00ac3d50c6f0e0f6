"""Bound the waits of stream memory operations from the host, because the GPU cannot bound them.

For each word that a stream waits for there is a pair of 32-bit words in host memory, `{waiting, marked}`, 8 bytes:

- `waiting`: the stream writes 1 before the wait and 0 after it.
- `marked`: the watchdog writes 1 when it sees `waiting`; the stream writes 0 after the wait.

After the wait the stream clears both words by one 64-bit store. While `marked` stays 1 and each poll finds `waiting` 1,
no wait for this word has ended: it is still the same one. (A wait may end between the poll and the mark. The mark then
counts for the next wait, too early by at most one poll.) So no count is needed. A captured stream memory operation
could not keep one.

If a wait lasts too long, or this rank was told to stop, the watchdog stores the awaited value into this rank's own
word. It does so on a stream of its own. Then the waiting stream runs to its end and the host can raise. From then on
every wait ends at once. The copies and signals that are left in the stream cannot be taken back. So the failure is
final for all these channels: their peers learn of it through the world, or their own waits time out.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import HostWords
from raymoe.errors import Aborted, PeerTimeout, RaymoeError
from raymoe.memory.world import World

POLL_S, POLL_AFTER_FAILURE_S = 0.01, 0.001


@dataclass
class WatchedWord:
    """A word of this rank that its streams wait for until it is 1."""

    op: str
    peer: int
    address: int
    since: float | None = None
    """When the watchdog first saw the current wait, on the monotonic clock."""


class Watchdog:
    """A thread that bounds the waits of some channels on one rank until it is closed."""

    def __init__(self, world: World, watched: list[WatchedWord]) -> None:
        self._world, self._gpu = world, world.gpu
        self._watched = watched
        self._failure: RaymoeError | None = None
        self._ending = threading.Event()
        self._host = HostWords(self._gpu, max(1, len(self._watched)))
        self._pairs = (ctypes.c_uint32 * (2 * len(self._host.words))).from_buffer(self._host.words)
        drv = bindings()
        with self._gpu.current():
            # Streams of one priority may share a hardware queue: the store would stand behind the wait that it ends.
            _, highest = call("cuCtxGetStreamPriorityRange")
            flags = drv.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = int(call("cuStreamCreateWithPriority", flags, highest))
        self._thread = threading.Thread(target=self._run, name="raymoe watchdog", daemon=True)
        self._thread.start()

    def host_address(self, index: int) -> int:
        """Return the address, for the GPU, of the pair of the watched word `index`."""
        return self._host.device_address(index)

    def check(self) -> None:
        """Raise if the watchdog has ended a wait."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread and free the words. No stream may use them any more."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join()
        with self._gpu.current():
            call("cuStreamSynchronize", self._stream)
            call("cuStreamDestroy", self._stream)
        self._host.close()

    def _run(self) -> None:
        while not self._ending.wait(POLL_AFTER_FAILURE_S if self._failure else POLL_S):
            reason, now = self._world.waiter.reason, time.monotonic()
            for index, word in enumerate(self._watched):
                self._poll(index, word, now, reason)

    def _poll(self, index: int, word: WatchedWord, now: float, reason: str | None) -> None:
        waiting, marked = self._pairs[2 * index], self._pairs[2 * index + 1]
        if not waiting:
            word.since = None
            return
        if word.since is None or not marked:
            word.since = now
            self._pairs[2 * index + 1] = 1
        waited = now - word.since
        if self._failure is None:
            me = self._world.rank
            if reason is not None:
                self._failure = Aborted(f"rank {me} was told to stop in {word.op}: {reason}", word.peer)
            elif waited >= self._world.timeout_s:
                self._failure = PeerTimeout(word.op, 0, word.peer, 1, 0, waited, me)
        if self._failure is not None:
            with self._gpu.current():
                call("cuStreamWriteValue32", self._stream, word.address, 1, 0)
