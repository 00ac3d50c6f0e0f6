"""A barrier of all ranks in their streams, for the start of a clock: no host takes part in it.

Word r of `arrived` is written by rank r and read by the owner: how often rank r has come, a 64-bit count that only
grows. It is signalled and waited for by the copy kernel with 0 bytes, whose runs count themselves; so a barrier can be
captured. A rank that is one barrier ahead is as good, because comparisons are >=.
"""

from __future__ import annotations

from raymoe.device.copy import LANES, CopyLane, copy_launch
from raymoe.device.error_word import ErrorWord
from raymoe.device.kernels import Kernels
from raymoe.device.launch import Launch
from raymoe.memory.heap import WORD_STRIDE, Layout, Region
from raymoe.memory.world import World
from raymoe.transport.watchdog import Watchdog

_WORD_BYTES = WORD_STRIDE * 8


class StreamBarrier:
    """Made and closed by all ranks; each call is enqueued by all ranks."""

    def __init__(self, world: World) -> None:
        names = ("arrived", "signals", "waits")
        self._heap = world.allocate(Layout.of([Region.words(name, world.size) for name in names]), "barrier", "device")
        self._gpu = world.gpu
        self._kernels = Kernels(world.gpu)
        self._error = ErrorWord(world.gpu, world.rank)
        self._watchdog = Watchdog(world, on_abort=self._error.abort)
        watch, op = self._error.watch(world.timeout_s), self._error.number("barrier in the stream")

        def word(name: str, index: int, rank: int | None = None) -> int:
            return self._heap.address(name, rank) + index * _WORD_BYTES

        signals, waits = [], []
        for step in range(1, world.size):
            to, of = (world.rank + step) % world.size, (world.rank - step) % world.size
            arrival = word("arrived", world.rank, to)
            signals.append(CopyLane(0, 0, 0, word("signals", to), signal=arrival, op=op, peer=to))
            waits.append(CopyLane(0, 0, 0, word("waits", of), credit=word("arrived", of), op=op, peer=of))
        lanes = [*signals, *waits]  # whoever waited first would be waited for in vain
        parts = [lanes[start : start + LANES] for start in range(0, len(lanes), LANES)]
        self._launches: list[Launch] = [copy_launch(self._kernels, part, watch=watch) for part in parts]

    def __call__(self, stream: int) -> None:
        for launch in self._launches:
            launch(stream)

    def check(self) -> None:
        """Raise where a rank did not come."""
        self._error.check()

    def close(self) -> None:
        self._gpu.synchronise()
        self._watchdog.close()
        self._error.close()
        self._kernels.close()
        self._heap.close()
