"""CUDA graphs: capture the work that a function enqueues, replay it, destroy it in the right order.

- The capture mode is `thread_local`: Ray's other threads call CUDA too. They must not break a capture, and a capture
  must not break them.
- Plans, memory and kernels are made before. A call that allocates, loads or synchronises inside a capture is an error.
- No garbage is collected from the beginning of a capture to its end. Its destructors may call CUDA, which invalidates
  the capture, and torch ends the process if an old capture's memory pool is freed in a new capture.

`close` waits for the replays, then destroys the executable graph and the graph, then drops `keeps` (plans, buffers,
functions). The caller closes these afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import Gpu
from raymoe.errors import CaptureError, CudaError


def refuse_in_capture(what: str, gpu: Gpu, stream: int) -> None:
    """Raise if `stream` is being captured: `what` must be made before a capture."""
    with gpu.current():
        status = call("cuStreamIsCapturing", stream)
    if status != bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        raise CaptureError(f"{what} cannot be made while its stream is captured; make it before the capture begins")


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Allow this thread calls that would else break the capture of a stream. They must not touch such a stream."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Graph:
    """The captured work of a function."""

    def __init__(self, gpu: Gpu, graph: Any, executable: Any, keeps: tuple[object, ...]) -> None:
        self._gpu = gpu
        self._graph = graph
        self._executable = executable
        self._keeps = keeps
        self._streams: set[int] = set()

    @classmethod
    def capture(cls, gpu: Gpu, stream: int, enqueue: Callable[[], None], *keeps: object) -> Self:
        """Capture the work that `enqueue` puts on `stream`, which must not be a default stream.

        If `enqueue` raises, the capture is ended. `keeps` are the objects that must live as long as the graph.
        """
        if stream in (0, 1, 2):  # the numbers of default streams
            raise CaptureError(f"stream {stream} is a default stream, which CUDA cannot capture; make one of your own")
        refuse_in_capture("a graph", gpu, stream)
        with gpu.current():
            mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            with _keeping_garbage():
                call("cuStreamBeginCapture", stream, mode)
                try:
                    enqueue()
                except BaseException:
                    _abandon(stream)
                    raise
                graph = call("cuStreamEndCapture", stream)
            try:
                executable = call("cuGraphInstantiate", graph, 0)
            except BaseException:
                call("cuGraphDestroy", graph)
                raise
        return cls(gpu, graph, executable, keeps)

    @property
    def nodes(self) -> int:
        """The number of nodes, which are the operations of a replay."""
        with self._gpu.current():
            _, count = call("cuGraphGetNodes", self._open(self._graph), 0)
        return int(count)

    def replay(self, stream: int) -> None:
        executable = self._open(self._executable)
        with self._gpu.current():
            call("cuGraphLaunch", executable, stream)
        self._streams.add(stream)

    def close(self) -> None:
        """Wait for the replays, then destroy the graph."""
        executable, graph = self._executable, self._graph
        self._executable = self._graph = None
        if executable is None:
            return
        with self._gpu.current():
            try:
                for stream in self._streams:
                    call("cuStreamSynchronize", stream)
            finally:
                call("cuGraphExecDestroy", executable)
                call("cuGraphDestroy", graph)
        self._keeps = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, resource: Any) -> Any:
        if resource is None:
            raise CudaError("this is a closed graph; capture a new one")
        return resource


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Defer garbage collection to the end. An allocation after it may collect at once all that was deferred."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _abandon(stream: int) -> None:
    """End a capture that failed, so that the stream is usable again."""
    try:
        graph = call("cuStreamEndCapture", stream)
    except CaptureError:
        return  # the failure had ended the capture already, without a graph; the caller raises the cause
    if int(graph) != 0:
        call("cuGraphDestroy", graph)
