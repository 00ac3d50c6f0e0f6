"""The bell of a rank: peers that give up ring it, and leave a farewell. See `raymoe.memory.giving_up` for the reasons.

Memory map (regions of a board's heap, one heap per rank; `raymoe.memory.board`):

- `beat [1]`: {1 + the awaited rank, 32 bits; count, 32 bits}. The owner writes it in long waits, all ranks read it.
- `farewell [BYTES]`: the owner writes its own farewell, once. All ranks read it.
- `bell [1]`: 0, and then 1 + r when rank r gives up. Any peer writes it by a plain store, and each value is a true one.
  The owner writes `_END` when it closes its world.

Order: farewell, fence, bell; the reader loads the bell, fences, loads the farewell of that rank.

A thread of each rank sleeps in the kernel on its bell (a futex). It costs nothing until a peer rings. Then it also ends
waits of kernels, while the rank's own thread may be in a call of CUDA.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raymoe.errors import PeerTimeout, RaymoeError
from raymoe.memory.heap import Heap
from raymoe.memory.layout import Region
from raymoe.memory.wait import Waiter

Beat = tuple[int, int]
"""The rank that a rank waits for, and a count that grows while it waits."""

BYTES = 2048
_LONGEST = 300  # letters of a text in that memory: JSON may take 6 bytes for each
_LENGTH_BYTES = 4

_FUTEX_NUMBER = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1
_SILENT, _END = 0, 2**32 - 1
_JOIN_S = 1.0
_BEATS_S = 0.05  # a rank that waits beats more often than once in this time: a slice of Gloo's is 20 ms


@dataclass(frozen=True)
class Farewell:
    """Why a rank gives up: a wait that ran out of time, or the text of another error.

    >>> timeout = PeerTimeout("dispatch", 7, peer=1, expected=7, seen=6, waited_s=2.0, rank=0)
    >>> print(Farewell.unpack(Farewell.of(timeout, 0).pack()).error_on(2))
    rank 0 waited 2.0 s for rank 1 in dispatch (epoch 7): expected 7, seen 6; rank 2 was told
    >>> Farewell.unpack(Farewell.of(MemoryError(), 0).pack()).error_on(2)
    RaymoeError('rank 0 left an operation because of MemoryError')
    """

    reason: str
    timeout: PeerTimeout | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Farewell:
        if isinstance(error, PeerTimeout):
            return cls("", error)
        if type(error) is RaymoeError:  # the reason of a rank that failed
            return cls(str(error))
        text = f": {error}" if str(error) else ""
        return cls(f"rank {rank} left an operation because of {type(error).__name__}{text}")

    def pack(self, longest: int | None = None) -> bytes:
        """Return the farewell as bytes, with at most so many letters of a text."""
        if (timeout := self.timeout) is None:
            return json.dumps({"reason": self.reason[:longest]}).encode()
        rank = timeout.told_by if timeout.told_by >= 0 else timeout.rank
        numbers = timeout.epoch, timeout.peer, timeout.expected, timeout.seen, timeout.waited_s, rank, timeout.through
        return json.dumps({"op": timeout.op[:longest], "numbers": numbers}).encode()

    @classmethod
    def unpack(cls, record: bytes) -> Farewell:
        fields: dict[str, Any] = json.loads(record)
        if "reason" in fields:
            return cls(fields["reason"])
        epoch, peer, expected, seen, waited_s, rank, through = fields["numbers"]
        return cls("", PeerTimeout(fields["op"], epoch, peer, expected, seen, waited_s, rank, through=through))

    def error_on(self, rank: int) -> RaymoeError:
        """Return the error that `rank` raises because of it."""
        if self.timeout is None:
            return RaymoeError(self.reason)
        waited = self.timeout.rank
        return self.timeout if waited == rank else replace(self.timeout, rank=rank, told_by=waited)


def bell_regions() -> list[Region]:
    return [Region.words("beat", 1), Region.words("bell", 1), Region("farewell", (BYTES,), "uint8")]


class Bell:
    """The bell of one rank, and those of its peers. A peer that rings stops `waiter`."""

    def __init__(self, heap: Heap, size: int, waiter: Waiter) -> None:
        self._rank, self._fence = heap.rank, waiter.fence
        self._bells = [_Futex(heap.bytes("bell", peer, 0, 8)) for peer in range(size)]
        self._farewells = [heap.bytes("farewell", peer, 0, BYTES) for peer in range(size)]
        self._beats = [heap.words("beat", peer) for peer in range(size)]
        self._count, self._rung = 0, False
        own = self._bells[self._rank]
        arguments = (own, self._farewells, weakref.ref(waiter), waiter.fence)
        thread = threading.Thread(target=_listen, args=arguments, name="raymoe bell", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, thread, own, os.getpid())
        """Ends the thread. So does dropping this object, and the end of Python."""

    def ring(self, farewell: Farewell) -> None:
        """Stop all peers. Only the first call does something."""
        if self._rung:
            return
        self._rung = True
        record, own = farewell.pack(_LONGEST), self._farewells[self._rank]
        own[:_LENGTH_BYTES] = len(record).to_bytes(_LENGTH_BYTES, "little")
        own[_LENGTH_BYTES : _LENGTH_BYTES + len(record)] = record
        self._fence()  # orders the farewell before the bells
        for peer, bell in enumerate(self._bells):
            if peer != self._rank:
                bell.store(1 + self._rank)

    def beat(self, peer: int) -> None:
        """Show that this rank waits for a peer."""
        self._count = (self._count + 1) % 2**31
        self._beats[self._rank][0] = self._count << 32 | 1 + peer

    def beat_of(self, rank: int) -> Beat | None:
        word = self._beats[rank][0]
        return (word % 2**32 - 1, word >> 32) if word else None

    def pause(self, awaited: int) -> None:
        """Let every rank that waits beat again, this one too: another may follow its beats now."""
        end = time.monotonic() + _BEATS_S
        while time.monotonic() < end:
            self.beat(awaited)
            time.sleep(_BEATS_S / 10)


class _Futex:
    """A 32-bit word in shared memory, on which a thread of any process can sleep until another stores into it."""

    def __init__(self, view: memoryview) -> None:
        self._word = ctypes.c_uint32.from_buffer(view)
        self._number = _FUTEX_NUMBER[platform.machine()]  # a `Waiter` refuses other machines
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    @property
    def value(self) -> int:
        return self._word.value

    def store(self, value: int) -> None:
        self._word.value = value
        self._call(_FUTEX_WAKE, _ALL)

    def sleep_while(self, value: int) -> None:
        """Sleep until a store. Returns at once if the word has another value; it may also return early."""
        self._call(_FUTEX_WAIT, value)

    def _call(self, operation: int, value: int) -> None:
        arguments = (self._number, ctypes.addressof(self._word), operation, value, 0, 0, 0)
        self._syscall(*(ctypes.c_long(argument) for argument in arguments))


def _listen(bell: _Futex, farewells: list[memoryview], stops: weakref.ref[Waiter], fence: Callable[[], None]) -> None:
    """Sleep until a peer rings, then stop this rank. Holds no world: a dropped one must be collected."""
    while (value := bell.value) == _SILENT:
        bell.sleep_while(_SILENT)
    waiter = stops()
    if waiter is None or not 1 <= value <= len(farewells):
        return
    fence()  # orders the load of the bell before those of the farewell
    farewell = farewells[value - 1]
    end = _LENGTH_BYTES + int.from_bytes(farewell[:_LENGTH_BYTES], "little")
    waiter.stop(Farewell.unpack(bytes(farewell[_LENGTH_BYTES:end])).error_on(waiter.rank))


def _end(thread: threading.Thread, own: _Futex, pid: int) -> None:
    if os.getpid() == pid and thread.is_alive():  # the memory is the parent's in a forked process
        own.store(_END)
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)
