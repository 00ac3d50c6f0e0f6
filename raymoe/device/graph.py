"""CUDA graphs: capture what a function enqueues, replay it, let go of it in the right order.

Capture is `thread_local`: Ray's other threads call CUDA too, and must neither break a capture nor be broken by it. What
is captured was made before: a call that would allocate, load or synchronise inside a capture is an error. Nor is
garbage collected inside: torch ends the process where a pool of memory, an old capture's, goes in the middle of a new
one.

The order at the end: the replays are awaited, then the executable graph goes, then the graph, then what `keeps` holds
(plans, buffers, functions), which the caller closes afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu
from raymoe.errors import CaptureError, CudaError


def refuse_in_capture(what: str, gpu: Gpu, stream: int) -> None:
    """Raise where `stream` is being captured: `what` is made before, once, and used inside."""
    with gpu.current():
        status = call("cuStreamIsCapturing", stream)
    if status != bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        raise CaptureError(f"{what} was to be made while its stream is captured; make it before the capture begins")


class Graph:
    """What a function enqueued on a stream, as one thing to replay."""

    def __init__(self, gpu: Gpu, graph: Any, executable: Any, keeps: tuple[object, ...]) -> None:
        self._gpu = gpu
        self._graph = graph
        self._executable = executable
        self._keeps = keeps
        self._streams: set[int] = set()

    @classmethod
    def capture(cls, gpu: Gpu, stream: int, enqueue: Callable[[], None], *keeps: object) -> Self:
        """Capture what `enqueue` puts on `stream`, which is not the default one. If it raises, nothing is left.

        `keeps` is whatever must live as long as the graph.
        """
        if stream in (0, 1, 2):  # the legacy default stream, and the two names of default streams
            raise CaptureError(f"stream {stream} is a default stream, which CUDA cannot capture; make one of your own")
        refuse_in_capture("a graph", gpu, stream)
        with gpu.current():
            mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            call("cuStreamBeginCapture", stream, mode)
            try:
                with _keeping_garbage():
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
        """How many operations a replay carries out."""
        with self._gpu.current():
            _, count = call("cuGraphGetNodes", self._open(self._graph), 0)
        return int(count)

    def replay(self, stream: int) -> None:
        executable = self._open(self._executable)
        with self._gpu.current():
            call("cuGraphLaunch", executable, stream)
        self._streams.add(stream)

    def close(self) -> None:
        """Wait for the replays, then destroy."""
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
            raise CudaError("a closed graph was to be used; capture a new one")
        return resource


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Cycles that nobody refers to stay until the end, with whatever their destructors would do to the device."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _abandon(stream: int) -> None:
    """End a capture whose making failed, so that the stream is usable again."""
    try:
        graph = call("cuStreamEndCapture", stream)
    except CaptureError:
        return  # the failure had broken the capture already, which leaves no graph; the caller raises what caused it
    if int(graph) != 0:
        call("cuGraphDestroy", graph)
