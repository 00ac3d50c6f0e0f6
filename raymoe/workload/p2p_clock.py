"""How long work on this rank's stream takes, from a barrier of all ranks in their streams on.

The stream is held by a gate while the host enqueues, so the clock never runs while the GPU waits for the host; behind
the gate come the barrier, the first event, the work, the second event. The host waits by polling, because it must hear
of a peer that has died whatever the transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from raymoe.device.driver import bindings, call
from raymoe.device.host_words import HostWords
from raymoe.memory.world import World
from raymoe.transport.barrier import StreamBarrier
from raymoe.transport.channel import Channels

GATE_S = 5.0
"""A stream holds about a thousand operations: enqueuing more blocks the host until the gate opens, which only another
thread can do then. That sample has waits of the host in it."""


class StreamClock:
    """All ranks make one, use it for the same samples, and close it."""

    def __init__(self, world: World, stream: torch.cuda.Stream) -> None:
        self._world, self._stream = world, stream
        self._barrier = StreamBarrier(world)
        self._gate = HostWords(world.gpu, 1)
        event: Any = torch.cuda.Event  # has no annotations
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)

    def us(self, work: Callable[[], None], channels: Channels) -> float:
        """Microseconds that `work`, which enqueues on the stream, takes there."""
        stream = self._stream.cuda_stream
        equal = int(bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        net = threading.Timer(GATE_S, self._open_gate)
        net.daemon = True
        self._gate.words[0] = 0
        with self._world.gpu.current():
            call("cuStreamWaitValue32", stream, self._gate.device_address(), 1, equal)
        net.start()
        try:
            self._barrier(stream)
            self._begin.record(self._stream)
            work()
            self._end.record(self._stream)
        finally:
            net.cancel()
            self._open_gate()
        try:
            channels.synchronise()
        finally:
            self._barrier.check()
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def close(self) -> None:
        self._barrier.close()
        self._gate.close()

    def _open_gate(self) -> None:
        self._gate.words[0] = 1
