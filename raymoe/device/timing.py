"""How long work on a stream takes: gate, events, release, verify, median.

The stream is held by a gate while the host enqueues (gate.py). A multi-rank barrier goes between the gate and the first
event (`before`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from raymoe.device.driver import call
from raymoe.device.gpu import Gpu
from raymoe.errors import ConfigError, CudaError
from raymoe.workload.clock import Gate


@dataclass(frozen=True)
class Repeats:
    """`samples` times `calls` calls, after `warmup` calls whose time nobody takes."""

    samples: int = 20
    calls: int = 1
    warmup: int = 3

    def __post_init__(self) -> None:
        if self.samples < 1 or self.calls < 1 or self.warmup < 0:
            raise ConfigError(
                f"{self.samples} samples of {self.calls} calls after {self.warmup}; at least one of each is needed"
            )


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, one figure a sample."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.us)


class Stopwatch:
    """Times work on one stream. One thread at a time."""

    def __init__(self, gpu: Gpu, stream: int) -> None:
        self._gpu = gpu
        self._stream = stream
        self._gate = Gate(gpu)
        self._events: list[Any] = []
        try:
            with gpu.current():
                self._events += [call("cuEventCreate", 0), call("cuEventCreate", 0)]
        except BaseException:
            self.close()
            raise

    def time(
        self,
        work: Callable[[], None],
        repeats: Repeats,
        *,
        before: Callable[[], None] | None = None,
        verify: Callable[[], None] | None = None,
    ) -> Timing:
        """Time `work`, which enqueues on the stream. `before` is enqueued ahead of each sample's clock; `verify` looks
        at what the last sample left and raises where it is wrong."""
        for _ in range(repeats.warmup):
            work()
        us = tuple(self._sample(work, repeats.calls, before) for _ in range(repeats.samples))
        if verify is not None:
            verify()
        return Timing(us)

    def _sample(self, work: Callable[[], None], calls: int, before: Callable[[], None] | None) -> float:
        begin, end = self._events
        with self._gpu.current():
            call("cuStreamSynchronize", self._stream)
            with self._gate.held(self._stream) as late:
                if before is not None:
                    before()
                call("cuEventRecord", begin, self._stream)
                for _ in range(calls):
                    work()
                call("cuEventRecord", end, self._stream)
            call("cuEventSynchronize", end)
            if late.is_set():
                raise CudaError(
                    f"enqueuing {calls} calls took too long for the stream to wait; a stream holds about a thousand "
                    "operations, so time fewer calls at once, or a graph of them"
                )
            return float(call("cuEventElapsedTime", begin, end)) * 1e3 / calls

    def close(self) -> None:
        with self._gpu.current():
            call("cuStreamSynchronize", self._stream)
            while self._events:
                call("cuEventDestroy", self._events.pop())
        self._gate.close()
