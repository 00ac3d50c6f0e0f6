"""Holds a stream while the host enqueues, so that a clock never runs while the GPU waits for the host.

A wait by a stream memory operation on a word in host memory: no kernel, no SM.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu
from raymoe.device.host_words import HostWords

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
