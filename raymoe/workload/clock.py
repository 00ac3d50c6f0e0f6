"""How long an operation of all ranks takes on a stream, on a warm L2 cache and on a cold one.

A sample begins behind a barrier of all ranks in their streams, so that skew at the start is outside and waiting for one
another inside, and ends on each rank when its part is done; the slowest rank's time counts. Cold: between the last
thing that the stream did and the barrier, every line of the L2 cache is replaced by writing a buffer several times its
size. Warm: the operation ran just before, with the same tokens.

One run is timed by two events around it. That is too coarse for a short operation, whose event records and launches are
a part of what is measured, so a sample of `calls` runs is the time of a CUDA graph of all of them divided by `calls`:

- warm    the runs one behind the other
- cold    each run behind a flush and a barrier of its own, less the time of a graph that has the flushes and barriers
          alone. Behind a barrier the ranks begin together and at the next one they wait for the slowest, so what the
          difference leaves is the slowest rank's time from barrier to barrier, launch included. The flush does not
          always take the same time: the median of the last few is taken off.

Where the host takes part in the operation there is no graph and the clock runs while the host works: warm `calls` runs
in a row, cold one alone, behind a wait for the device. Then the host's time for a call is taken too (`host_us`): how
long the caller is kept, whatever the GPU does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from raymoe.device.copy import LANES, CopyLane, copy_launch
from raymoe.device.driver import bindings, call
from raymoe.device.error_word import ErrorWord
from raymoe.device.gpu import Gpu, HostWords
from raymoe.device.graph import Graph
from raymoe.device.kernels import Kernels, Launch
from raymoe.memory.layout import WORD_STRIDE, Layout, Region
from raymoe.memory.watchdog import Watchdog
from raymoe.memory.world import World
from raymoe.workload.memory_needed import FLUSH_BYTES

# Holds a stream while the host enqueues, so that a clock never runs while the GPU waits for the host.
#
# A wait by a stream memory operation on a word in host memory: no kernel, no SM.

GATE_S = 5.0
"""A stream holds about a thousand operations: enqueuing more blocks the host until the gate opens, which only another
thread can do then."""


class Gate:
    """For one stream at a time."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._word = HostWords(gpu, 1)

    @contextmanager
    def held(self, stream: int) -> Iterator[threading.Event]:
        """What is enqueued on the stream inside begins when this ends, or after GATE_S: then the event is set, and
        whatever was timed has waits of the host in it."""
        late = threading.Event()
        net = threading.Timer(GATE_S, self._open, [late])
        net.daemon = True
        equal = int(bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        self._word.words[0] = 0
        with self._gpu.current():
            call("cuStreamWaitValue32", stream, self._word.device_address(), 1, equal)
        net.start()
        try:
            yield late
        finally:
            net.cancel()
            self._word.words[0] = 1

    def _open(self, late: threading.Event) -> None:
        late.set()
        self._word.words[0] = 1

    def close(self) -> None:
        """Not before the stream is done."""
        self._word.close()


# A barrier of all ranks in their streams, for the start of a clock: no host takes part in it.
#
# Word r of `arrived` is written by rank r and read by the owner: how often rank r has come, a 64-bit count that only
# grows. It is signalled and waited for by the copy kernel with 0 bytes, whose runs count themselves; so a barrier can
# be captured. A rank that is one barrier ahead is as good, because comparisons are >=.

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


FLUSHES_KEPT = 9

CALLS, SMALL_TOKENS = 20, 128

Work = Callable[[], None]
"""Enqueues something on the current stream."""


def calls_of(tokens: int) -> int:
    """How many runs one sample is the mean of.

    >>> calls_of(128), calls_of(4096)
    (20, 1)
    """
    return CALLS if tokens <= SMALL_TOKENS else 1


@dataclass(frozen=True)
class TimedOp:
    """An operation as it is timed: `calls` runs of it, warm and cold."""

    warm: Work
    cold: Work


class OpClock:
    """All ranks make one, use it for the same operations in one order, and close it.

    `settle` waits until the stream is done and raises where a wait in it has failed. With `captured` operations are
    replayed from graphs, and the stream is held by a gate while the host enqueues, so that the clock never runs while
    the GPU waits for the host.
    """

    def __init__(self, world: World, stream: Any, settle: Work, *, captured: bool, calls: int = 1) -> None:
        self.captured, self.calls = captured, calls
        self._world, self._stream, self._settle = world, stream, settle
        self._barrier = StreamBarrier(world)
        self._gate = Gate(world.gpu)
        event: Any = torch.cuda.Event  # has no annotations
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)
        self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=world.device)
        self._graphs: list[Graph] = []
        self._flushes: Work | None = None
        self._flush_us: deque[float] = deque(maxlen=FLUSHES_KEPT)
        self.host_us: tuple[float, ...] = ()
        """Of the last `us` without graphs: the microseconds that a call took on the host, cold and warm."""
        self._work_us = 0.0

    def timed(self, op: Work) -> TimedOp:
        """Make an operation ready to be timed. With graphs it is captured here: for the cold runs first, then warm."""
        if not self.captured:
            return TimedOp(op, op)
        if self.calls == 1:
            graph = self._graph_of(op)
            return TimedOp(graph, graph)

        def cold() -> None:
            self._start_cold()
            op()

        if self._flushes is None:
            self._flushes = self._graph_of(self._start_cold)
        captured_first = self._graph_of(cold)
        return TimedOp(self._graph_of(op), captured_first)

    def us(self, op: TimedOp) -> tuple[float, float]:
        """Microseconds of one run, cold and warm, measured in this order: what is left is the last warm run's."""
        if not self.captured:
            return self._eager_us(op.warm)
        if self.calls == 1:
            return self._us(op.cold, before=self._flush), self._us(op.warm, before=op.warm)
        assert self._flushes is not None
        self._flush_us.append(self._us(self._flushes))
        cold = self._us(op.cold) - median(self._flush_us)
        return cold / self.calls, self._us(op.warm) / self.calls

    def cold_us(self, work: Work) -> float:
        """Microseconds of something that is enqueued eagerly while the stream is held, on a cold L2 cache."""
        return self._us(work, before=self._flush, held=True)

    def since_begin(self, event: Any) -> float:
        """Microseconds from the start of the last sample's clock to an event that its work recorded."""
        return float(self._begin.elapsed_time(event)) * 1e3

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        self._barrier.close()
        self._gate.close()

    def _us(self, work: Work, *, before: Work | None = None, held: bool = False) -> float:
        """Microseconds of `work`; `before` runs ahead of the barrier, off the clock."""
        stream = self._stream.cuda_stream
        with self._gate.held(stream) if self.captured or held else nullcontext():
            if before is not None:
                before()
            self._barrier(stream)
            self._begin.record(self._stream)
            started = perf_counter_ns()
            work()
            self._work_us = (perf_counter_ns() - started) / 1e3
            self._end.record(self._stream)
        try:
            self._settle()
        finally:
            self._barrier.check()
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def _eager_us(self, op: Work) -> tuple[float, float]:
        cold, host_cold = self._us(op, before=self._flush), self._work_us
        warm = self._us(lambda: self._repeat(op), before=op)
        self.host_us = host_cold, self._work_us / self.calls
        return cold, warm / self.calls

    def _repeat(self, op: Work) -> None:
        for _ in range(self.calls):
            op()

    def _graph_of(self, op: Work) -> Work:
        graph = Graph.capture(self._world.gpu, self._stream.cuda_stream, lambda: self._repeat(op), op)
        self._graphs.append(graph)
        return lambda: graph.replay(self._stream.cuda_stream)

    def _start_cold(self) -> None:
        self._flush()
        self._barrier(self._stream.cuda_stream)

    def _flush(self) -> None:
        self._buffer.fill_(1.0)
