"""Time an operation of all ranks on a stream, with a warm L2 cache and with a cold one.

A sample begins after a barrier of all ranks in their streams, and ends on each rank when its part is done. So it
leaves out skew at the start, and includes waiting for one another. The slowest rank's time counts.

- warm    the operation ran just before, with the same tokens
- cold    just before the barrier, a write to a buffer several times the size of the L2 cache replaces every line of it

Two events around one run time it. They are too coarse for a short operation: event records and launches are a part of
its time. So a sample of `calls` runs is the time of a CUDA graph of all of them, divided by `calls`:

- warm    the runs one after the other
- cold    each run after a flush and a barrier of its own, less the time of a graph of the flushes and barriers alone.
          Ranks begin together after a barrier, and wait for the slowest at the next one. So the difference is the
          slowest rank's time from barrier to barrier, launch included. Flushes do not all take the same time: the
          median of the last few is subtracted.

If the host takes part in the operation there is no graph, and the clock runs while the host works. A warm sample is
`calls` runs in a row; a cold one is a single run after a wait for the device. Then the host's time for a call is
measured too (`host_us`): how long the call keeps its caller, whatever the GPU does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.error_word import ErrorWord
from raymoe.cuda.gpu import Gpu, HostWords
from raymoe.cuda.graph import Graph
from raymoe.cuda.launch import Kernels, Launch
from raymoe.memory.layout import WORD_STRIDE, Layout, Region
from raymoe.memory.wait import named_by_world
from raymoe.memory.world import World
from raymoe.transport.copy_kernel import MOST_TRANSFERS, Transfer, copy_launch
from raymoe.workload.memory_needed import FLUSH_BYTES, MANY_RUNS, SMALL_TOKENS

GATE_S = 5.0
"""Seconds until a gate opens by itself. A stream holds about a thousand operations: enqueuing more blocks the host
until the gate opens, which only another thread can do then."""


class Gate:
    """Hold a stream while the host enqueues, so that a clock never runs while the GPU waits for the host.

    It holds one stream at a time. The wait is a stream memory operation on a word in host memory: no kernel, no SM.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._word = HostWords(gpu, 1)

    @contextmanager
    def held(self, stream: int) -> Iterator[threading.Event]:
        """Hold back the work that is enqueued on the stream inside this context until the context ends.

        After GATE_S the stream goes on by itself and the event is set: the time then includes waits for the host.
        """
        opened_late = threading.Event()
        timer = threading.Timer(GATE_S, self._open, [opened_late])
        timer.daemon = True
        equal = int(bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        self._word.words[0] = 0
        with self._gpu.current():
            call("cuStreamWaitValue32", stream, self._word.device_address(), 1, equal)
        timer.start()
        try:
            yield opened_late
        finally:
            timer.cancel()
            self._word.words[0] = 1

    def _open(self, opened_late: threading.Event) -> None:
        opened_late.set()
        self._word.words[0] = 1

    def close(self) -> None:
        """Free the word. The stream must be done."""
        self._word.close()


_WORD_BYTES = WORD_STRIDE * 8


class StreamBarrier:
    """A barrier of all ranks in their streams, for the start of a clock. No host takes part in it.

    All ranks make it, close it and enqueue each call. Rank r writes word r of `arrived` and the owner reads it: a
    64-bit count of the barriers that rank r has come to, which only grows. Copy kernels of 0 bytes signal it and wait
    for it. Their runs count themselves, so a barrier can be captured. Comparisons are >=, so a rank may be one ahead.
    """

    def __init__(self, world: World) -> None:
        names = ("arrived", "signals", "waits")
        self._heap = world.allocate(Layout.of([Region.words(name, world.size) for name in names]), "barrier", "device")
        self._gpu = world.gpu
        self._kernels = Kernels(world.gpu)
        self._error = ErrorWord(world.gpu, world.rank)
        self._forget_aborts = world.waiter.on_abort(self._error.abort)
        watch, op = self._error.watch(world.timeout_s), self._error.number("barrier in the stream")

        def word(name: str, index: int, rank: int | None = None) -> int:
            return self._heap.address(name, rank) + index * _WORD_BYTES

        signals, waits = [], []
        for step in range(1, world.size):
            receiver, sender = (world.rank + step) % world.size, (world.rank - step) % world.size
            arrival, credit = word("arrived", world.rank, receiver), word("arrived", sender)
            signals.append(Transfer(0, 0, 0, word("signals", receiver), signal=arrival, op=op, peer=receiver))
            waits.append(Transfer(0, 0, 0, word("waits", sender), credit=credit, op=op, peer=sender))
        transfers = [*signals, *waits]  # signals first: ranks that all wait first wait for ever
        parts = [transfers[start : start + MOST_TRANSFERS] for start in range(0, len(transfers), MOST_TRANSFERS)]
        self._launches: list[Launch] = [copy_launch(self._kernels, part, watch=watch) for part in parts]

    def __call__(self, stream: int) -> None:
        for launch in self._launches:
            launch.enqueue(stream)

    def check(self) -> None:
        """Raise an error if a rank did not come."""
        self._error.check()

    def close(self) -> None:
        self._gpu.synchronise()
        self._forget_aborts()
        self._error.close()
        self._kernels.close()
        self._heap.close()


class DomainsBarrier:
    """A barrier as above of the ranks of several domains: in each domain, then between the ranks of each rail.

    A rank that its rail has released knows that all ranks of all domains have come.
    """

    def __init__(self, world: World) -> None:
        from raymoe.net.nccl_rail import NcclRail

        self._inside, self._rail = StreamBarrier(world.domain), world.shared(NcclRail)
        self._named_by_world = partial(
            named_by_world, world.waiter, world.rank // world.domain.size * world.domain.size
        )
        self._words = torch.zeros(world.domains, dtype=torch.int64, device=world.device)
        self._mine = self._words[world.rank // world.domain.size :][:1]

    def __call__(self, stream: int) -> None:
        """Enqueue it on a stream, which is the current one."""
        self._inside(stream)
        self._rail.gather("barrier in the stream", self._words, self._mine)()

    def check(self) -> None:
        with self._named_by_world():
            self._inside.check()

    def close(self) -> None:
        self._inside.close()


FLUSHES_KEPT = 9

Work = Callable[[], None]
"""Enqueues something on the current stream."""


def calls_of(tokens: int) -> int:
    """Return how many runs one sample is the mean of.

    >>> calls_of(128), calls_of(4096)
    (20, 1)
    """
    return MANY_RUNS if tokens <= SMALL_TOKENS else 1


@dataclass(frozen=True)
class TimedOp:
    """An operation that is ready to be timed: `calls` runs of it, warm and cold."""

    warm: Work
    cold: Work


class OpClock:
    """Times operations on a stream. All ranks make one, use it for the same operations in one order, and close it.

    `settle` waits until the stream is done, and raises an error if a wait in it has failed. With `captured`, operations
    are replayed from graphs, and a gate holds the stream while the host enqueues: the clock never runs while the GPU
    waits for the host.
    """

    def __init__(self, world: World, stream: Any, settle: Work, *, captured: bool, calls: int = 1) -> None:
        self.captured, self.calls = captured, calls
        self._world, self.stream, self._settle = world, stream, settle
        self._barrier = StreamBarrier(world) if world.domains == 1 else DomainsBarrier(world)
        self._gate = Gate(world.gpu)
        event: Any = torch.cuda.Event  # has no annotations
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)
        self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=world.device)
        self._graphs: list[Graph] = []
        self._flushes: Work | None = None
        self._flush_us: deque[float] = deque(maxlen=FLUSHES_KEPT)
        self.host_us: tuple[float, ...] = ()
        """Microseconds that a call took on the host in the last `us` without graphs, cold and warm."""
        self._last_host_us = 0.0

    def timed(self, op: Work) -> TimedOp:
        """Make an operation ready to be timed. With graphs it is captured here: for the cold runs first, then warm."""
        if not self.captured:
            return TimedOp(op, op)
        if self.calls == 1:
            graph = self.graph_of(op)
            return TimedOp(graph, graph)

        def cold() -> None:
            self._start_cold()
            op()

        if self._flushes is None:
            self._flushes = self.graph_of(self._start_cold)
        cold_graph = self.graph_of(cold)
        return TimedOp(self.graph_of(op), cold_graph)

    def us(self, op: TimedOp) -> tuple[float, float]:
        """Return microseconds of one run, first cold, then warm. Memory then holds the results of the last warm run."""
        if not self.captured:
            return self._eager_us(op.warm)
        cold = self.us_cold(op)
        if self.calls == 1:
            return cold, self._us(op.warm, before=op.warm)
        return cold, self._us(op.warm) / self.calls

    def us_cold(self, op: TimedOp) -> float:
        """Return microseconds of one run on a cold L2 cache.

        With several `calls` it does not replay the warm runs, which were captured last: nothing writes their results.
        """
        if not self.captured or self.calls == 1:
            return self._us(op.cold, before=self._flush)
        assert self._flushes is not None
        self._flush_us.append(self._us(self._flushes))
        return (self._us(op.cold) - median(self._flush_us)) / self.calls

    def cold_us(self, work: Work) -> float:
        """Return microseconds of `work` on a cold L2 cache, enqueued eagerly while the stream is held."""
        return self._us(work, before=self._flush, held=True)

    def since_begin(self, event: Any) -> float:
        """Return microseconds from the start of the last sample's clock to an event that its work recorded."""
        return float(self._begin.elapsed_time(event)) * 1e3

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        self._barrier.close()
        self._gate.close()

    def _us(self, work: Work, *, before: Work | None = None, held: bool = False) -> float:
        """Return microseconds of `work`. `before` runs ahead of the barrier, off the clock."""
        stream = self.stream.cuda_stream
        with self._gate.held(stream) if self.captured or held else nullcontext():
            if before is not None:
                before()
            self._barrier(stream)
            self._begin.record(self.stream)
            started = perf_counter_ns()
            work()
            self._last_host_us = (perf_counter_ns() - started) / 1e3
            self._end.record(self.stream)
        try:
            self._settle()
        finally:
            self._barrier.check()
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def _eager_us(self, op: Work) -> tuple[float, float]:
        cold, host_cold = self._us(op, before=self._flush), self._last_host_us
        warm = self._us(lambda: self.repeat(op), before=op)
        self.host_us = host_cold, self._last_host_us / self.calls
        return cold, warm / self.calls

    def repeat(self, op: Work) -> None:
        for _ in range(self.calls):
            op()

    def graph_of(self, op: Work) -> Work:
        """Capture `calls` runs, and return their replay."""
        graph = Graph.capture(self._world.gpu, self.stream.cuda_stream, lambda: self.repeat(op), op)
        self._graphs.append(graph)
        return lambda: graph.replay(self.stream.cuda_stream)

    def _start_cold(self) -> None:
        self._flush()
        self._barrier(self.stream.cuda_stream)

    def _flush(self) -> None:
        self._buffer.fill_(1.0)
