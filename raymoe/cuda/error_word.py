"""Bound the waits of kernels, end them early from the host, and report the wait that failed.

The operations of a workspace share one `ErrorWord`, because they are poisoned together.
kernels/include/raymoe/base/sync.cuh describes the words, their writers, their readers and the order.

- **A failure is final.** The record and the poison word are written once; a new generation has new ones.
- **The host may read at any time**, from any thread, without waiting: the abort word and the record are in host memory.
- **Closed last.** `close` waits for the GPU, because a kernel that waits still reads the abort word.
"""

from __future__ import annotations

import threading

from raymoe.cuda.driver import call
from raymoe.cuda.gpu import Gpu, HostWords
from raymoe.cuda.params import U64
from raymoe.cuda.structs import FAILURE_ABORTED, FAILURE_STALE, ErrorRecord, Watch
from raymoe.errors import Aborted, ConfigError, PeerTimeout, RaymoeError

__all__ = ["ErrorWord"]

_ABORT = 0
_RECORD = 16  # 128 bytes after the first word: the host writes the abort word, the GPU the record
_POISON_BYTES = 128
_FIELDS = tuple(ErrorRecord.offsets())
_MOST_NS = 2**63 - 1


class ErrorWord:
    """The abort word, the error record and the poison word of one rank."""

    def __init__(self, gpu: Gpu, rank: int = -1) -> None:
        self.rank = rank
        self._gpu = gpu
        self._lock = threading.Lock()
        self._ops: list[str] = []
        self._reason: str | None = None
        self._closed = False
        self._host = HostWords(gpu, _RECORD + ErrorRecord.nbytes() // 8)
        try:
            self._poison = _zeroed(gpu, _POISON_BYTES)
        except BaseException:
            self._host.close()
            raise

    def number(self, op: str) -> int:
        """Return the number of an operation in kernel parameters; the same for the same name."""
        with self._lock:
            if op not in self._ops:
                self._ops.append(op)
            return self._ops.index(op)

    def watch(self, timeout_s: float) -> Watch:
        """Make the kernel parameter that ends waits after `timeout_s` at the latest."""
        nanoseconds = round(timeout_s * 1e9)
        if not 0 < nanoseconds <= _MOST_NS:
            raise ConfigError(f"timeout_s is {timeout_s}; waits need a positive number of seconds, below 292 years")
        host = self._host
        return Watch(host.device_address(_ABORT), host.device_address(_RECORD), self._poison, nanoseconds)

    def abort(self, reason: str) -> None:
        """End the current wait within about 100 us, and every later wait. Any thread may call this."""
        with self._lock:  # `close` does not free the word meanwhile
            if self._reason is None:
                self._reason = reason
            self._host.words[_ABORT] = 1

    def record(self) -> ErrorRecord | None:
        """Return the record of the first failed wait, or None."""
        words = self._host.words
        if words[_RECORD] == 0:  # the code, which the GPU writes last
            return None
        return ErrorRecord(**{name: int(words[_RECORD + index]) for index, name in enumerate(_FIELDS)})

    def error(self) -> RaymoeError | None:
        """Return the first failed wait as an exception, or None; None after `close`."""
        with self._lock:  # `close` does not free the record meanwhile
            record = None if self._closed else self.record()
            if record is None:
                return None
            op = self._ops[record.op] if record.op < len(self._ops) else f"operation {record.op}"
            reason = self._reason
        if record.code == FAILURE_ABORTED:
            rank = f"rank {self.rank}" if self.rank >= 0 else "this rank"
            return Aborted(f"{rank} was told to stop in {op}: {reason}", record.peer)
        if record.code == FAILURE_STALE:
            return RaymoeError(
                f"{op} {record.expected} on rank {self.rank} read a slot of rank {record.peer} that held the row of "
                f"{record.seen}: the protocol is broken, and results before this one may be wrong too"
            )
        waited_s = record.waited_ns / 1e9
        return PeerTimeout(op, record.epoch, record.peer, record.expected, record.seen, waited_s, self.rank)

    def check(self) -> None:
        """Raise if a wait has failed."""
        if (error := self.error()) is not None:
            raise error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._gpu.synchronise()
        with self._gpu.current():
            call("cuMemFree", self._poison)
        with self._lock:
            self._host.close()


def _zeroed(gpu: Gpu, nbytes: int) -> U64:
    with gpu.current():
        address = int(call("cuMemAlloc", nbytes))
        try:
            call("cuMemsetD8", address, 0, nbytes)
            call("cuCtxSynchronize")  # kernels that read the memory run on streams that do not wait for this one
        except BaseException:
            call("cuMemFree", address)
            raise
        return address
