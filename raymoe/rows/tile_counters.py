"""Counters of tiles for launches whose blocks take their tiles from one (kernels/include/raymoe/rows/pipe.cuh)."""

from __future__ import annotations

import threading

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import LAST_DEFAULT_STREAM, Gpu
from raymoe.cuda.graph import relaxed_capture_mode

SPACING = 32
"""Bytes from counter to counter, so that launches that run at once use different sectors of the L2 cache."""
TOGETHER = 16384
"""Counters that are allocated at a time: 512 KiB."""


class _ThreadCounters(threading.local):
    def __init__(self) -> None:
        self.counters: dict[tuple[int, int, int], int] = {}


class TileCounters:
    """Words of a GPU's memory that are 0 between launches. Not safe from several threads at once.

    Launches that may run at the same time must not share one:

    - the eager launches of a stream run one after the other, so they share one;
    - a new stream can have the number of a destroyed one whose launches still run, so its counter goes by the stream's
      id, which the driver gives only once;
    - a captured launch runs whenever its graph is replayed, so it has one of its own, for the life of the process.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: list[int] = []
        self._of_streams: dict[int, tuple[int, int]] = {}
        """The id and the counter of each stream, by the number of the stream."""
        self._of_thread = _ThreadCounters()

    def of_stream(self, stream: int) -> int:
        """Return the address of the counter of a stream's eager launches."""
        stream_id = self._stream_id(stream)
        if stream > LAST_DEFAULT_STREAM:
            known_id, counter = self._of_streams.get(stream, (None, 0))
            if known_id != stream_id:
                counter = self.new()
                self._of_streams[stream] = stream_id, counter
            return counter
        # Every green context has default streams of these numbers, and one of them is another stream in each thread.
        known, key = self._of_thread.counters, (stream, stream_id, self._context_id())
        if key not in known:
            known[key] = self.new()
        return known[key]

    def new(self) -> int:
        """Return the address of a counter that no other launch has. This can be called inside a capture."""
        if not self._free:
            begin = self._allocated(SPACING * TOGETHER)
            self._free = [begin + SPACING * index for index in reversed(range(TOGETHER))]
        return self._free.pop()

    def _stream_id(self, stream: int) -> int:
        if self._gpu.is_current():
            return int(call("cuStreamGetId", stream))
        with self._gpu.current_for(stream):  # a default stream belongs to the current context
            return int(call("cuStreamGetId", stream))

    def _context_id(self) -> int:
        """The id of the calling thread's context if it is another context of this GPU, else 0."""
        green = self._gpu.green_context()
        return int(call("cuCtxGetId", green)) if green else 0

    def _allocated(self, nbytes: int) -> int:
        with self._gpu.current(), relaxed_capture_mode():
            stream = call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                address = int(call("cuMemAlloc", nbytes))
                call("cuMemsetD8Async", address, 0, nbytes, stream)
                call("cuStreamSynchronize", stream)  # launches on other streams do not wait for this one
            finally:
                call("cuStreamDestroy", stream)
        return address
