"""How long work on this rank's stream takes, from a barrier of all ranks in their streams on.

The stream is held by a gate while the host enqueues (raymoe/device/gate.py); behind the gate come the barrier, the
first event, the work, the second event. The host waits by polling, because it must hear of a peer that has died
whatever the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raymoe.device.gate import Gate
from raymoe.memory.world import World
from raymoe.transport.barrier import StreamBarrier
from raymoe.transport.channel import Channels


class StreamClock:
    """All ranks make one, use it for the same samples, and close it."""

    def __init__(self, world: World, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._barrier = StreamBarrier(world)
        self._gate = Gate(world.gpu)
        event: Any = torch.cuda.Event  # has no annotations
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)

    def us(self, work: Callable[[], None], channels: Channels) -> float:
        """Microseconds that `work`, which enqueues on the stream, takes there."""
        stream = self._stream.cuda_stream
        with self._gate.held(stream):
            self._barrier(stream)
            self._begin.record(self._stream)
            work()
            self._end.record(self._stream)
        try:
            channels.synchronise()
        finally:
            self._barrier.check()
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def close(self) -> None:
        self._barrier.close()
        self._gate.close()
