"""Counters of tiles for launches whose blocks take their tiles from one (kernels/include/raymoe/pipe/pipe.cuh)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu

SPACING = 32
"""Bytes from counter to counter: launches that run at once use a sector of the L2 cache each."""
TOGETHER = 2048
"""Counters that are allocated at a time."""


class TileCounters:
    """Words of a GPU's memory that are 0 between launches. Not safe from several threads at once.

    Launches that may run at the same time must not share one:

    - the eager launches of a stream run one after the other, so they share one;
    - a captured launch runs whenever its graph is replayed, so it has one of its own, for the life of the process.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: list[int] = []
        self._of_streams: dict[tuple[int, int], int] = {}

    def of_stream(self, stream: int) -> int:
        """Return the address of the counter of a stream's eager launches.

        The per-thread default stream has one handle for all threads, so there are counters for each thread too.
        """
        per_thread = int(bindings().CU_STREAM_PER_THREAD)
        key = stream, threading.get_ident() if stream == per_thread else 0
        if key not in self._of_streams:
            self._of_streams[key] = self.new()
        return self._of_streams[key]

    def new(self) -> int:
        """Return the address of a counter that no other launch has. This can be called inside a capture."""
        if not self._free:
            begin = self._allocated(SPACING * TOGETHER)
            self._free = [begin + SPACING * index for index in reversed(range(TOGETHER))]
        return self._free.pop()

    def _allocated(self, nbytes: int) -> int:
        with self._gpu.current(), _outside_captures():
            stream = call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                address = int(call("cuMemAlloc", nbytes))
                call("cuMemsetD8Async", address, 0, nbytes, stream)
                call("cuStreamSynchronize", stream)  # launches on other streams do not wait for this one
            finally:
                call("cuStreamDestroy", stream)
        return address


@contextmanager
def _outside_captures() -> Iterator[None]:
    """Allow calls here that would else invalidate the capture of a stream. Nothing here must use such a stream."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
