"""The order of operations that share memory, whichever streams they are enqueued on, and room for those of others.

Kernels of one workspace must run one after another; kernels of two workspaces may run together if all their blocks fit
on the GPU at once, because blocks wait for blocks of other ranks.

- **Ordered by events.** An operation on another stream waits for the last one by an event: eagerly, or where both are
  captured into one graph.
- **Refused where no event can order it.** An operation that is captured cannot wait for one that was enqueued eagerly
  on another stream. If that one may still be running, the capture is refused. A synchronisation before the capture is
  enough; `torch.cuda.graph` makes one.
- **Replays are not seen.** The driver tells nobody of a graph launch. Replays of two graphs are ordered by whoever
  launches them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from raymoe.device.driver import bindings, call, failure
from raymoe.device.gpu import LAST_DEFAULT_STREAM, Gpu
from raymoe.errors import ConfigError

# Of every context of this process: who orders operations there. Two worlds on one GPU share its multiprocessors without
# knowing of each other, so this is the process's own, and locked.
_ORDERS: dict[int, dict[int, weakref.ref[StreamOrder]]] = {}
_LOCK = threading.RLock()  # a weak reference may die, and ask for it, while this thread holds it


class StreamOrder:
    """Of one workspace. Calls come from one thread at a time."""

    def __init__(self, gpu: Gpu) -> None:
        import torch

        self._gpu = gpu
        # As torch's own compiled code asks: the driver's number of the current stream, without an object for it.
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, gpu.ordinal)
        self._is_capturing = bindings().cuStreamIsCapturing
        self._record = bindings().cuEventRecord
        with gpu.current():
            no_timing = bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done: Any = call("cuEventCreate", no_timing)  # after the last eager operation
            self._captured: Any = call("cuEventCreate", no_timing)  # after the last captured one, inside its graph
        self._stream: int | None = None
        self._capture: tuple[int, int] | None = None
        """Which capture the last captured operation is in, and on which stream."""
        self._name = 0  # of the stream of the operation that is being enqueued
        self._here = True
        """Whether its number means that stream now: a default stream is that of the current context."""
        self._sms = 0
        self._known = 0
        """Multiprocessors that have been found to be there for the last eager operation, or for one before it."""
        self._stream_sms: dict[int, int] = {}
        with _LOCK:
            self._all = _ORDERS.setdefault(gpu.context_id, {})
            self._all[id(self)] = weakref.ref(self, partial(_forget, self._all, id(self)))

    def enter(self, what: str, sms: int) -> tuple[int, int]:
        """Order what is enqueued next on the current stream behind the last operation.

        `sms` is how many multiprocessors it will occupy. Gives the stream, and the number of the capture that it is in
        or 0: `leave` wants both.
        """
        stream = self.current()
        self._here = stream > LAST_DEFAULT_STREAM or self._gpu.is_current()
        name = stream if self._here else self._name_of(stream)
        code, status = self._is_capturing(stream)
        capture = self._capture_of(stream) if status and not code else 0
        if capture or name != self._stream or sms > self._known or len(self._all) > 1:
            self._arrange(what, stream, name, capture, sms)
        self._name = name
        return stream, capture

    def leave(self, stream: int, capture: int) -> None:
        """The operation is enqueued."""
        if capture:
            call("cuEventRecord", self._captured, stream)
            self._capture = capture, self._name
        else:
            if self._here:
                (code,) = self._record(self._done, stream)
            else:
                with self._gpu.current_for(stream):
                    (code,) = self._record(self._done, stream)
            if code:
                raise failure("cuEventRecord", code)
            self._stream = self._name

    def close(self) -> None:
        """After the device is done."""
        done, self._done = self._done, None
        if done is None:
            return
        _forget(self._all, id(self))
        with self._gpu.current():
            call("cuEventDestroy", done)
            call("cuEventDestroy", self._captured)

    def _arrange(self, what: str, stream: int, name: int, capture: int, sms: int) -> None:
        """All that is left out where the last operation was on this stream too, eager, and nobody else has the GPU."""
        self._order(what, stream, name, capture)
        room = self._stream_sms.get(name)
        if room is None:
            room = self._stream_sms[name] = self._sms_of(stream)
        if sms > room:
            raise ConfigError(
                f"{what} takes {sms} SMs and its stream has {room} (a green context): make the exchange with sms={room}"
            )
        if len(self._all) > 1:
            self._refuse_too_many_sms(what, name, capture, sms)
        self._sms = max(self._sms, sms)  # the operations before the last one may still run too
        self._known = 0 if capture else min(room, self._sms)

    def _order(self, what: str, stream: int, name: int, capture: int) -> None:
        if not capture:
            if self._stream not in (None, name):
                with self._gpu.current_for(stream):  # a default stream is that of the current context
                    call("cuStreamWaitEvent", stream, self._done, 0)
        elif self._capture is not None and self._capture[0] == capture:
            if self._capture[1] != name:
                call("cuStreamWaitEvent", stream, self._captured, 0)
        elif self._stream not in (None, name) and self._runs():
            raise ConfigError(
                f"{what} is captured while an operation on the same workspace may still run on another stream, which a "
                "graph cannot wait for; synchronise before the capture, or give the exchange a workspace of its own"
            )

    def _runs(self) -> bool:
        """Whether the last eager operation may still be running."""
        with _asking():
            code, *_ = bindings().cuEventQuery(self._done)
        return bool(code)

    def _refuse_too_many_sms(self, what: str, stream: int, capture: int, sms: int) -> None:
        """Refuse an operation that could run beside one of another workspace and find too few multiprocessors."""
        mine, most = self._stream_sms[stream], self._gpu.sms
        total = sms
        for reference in list(self._all.values()):
            other = reference()
            if other is None or other is self or not other._may_run_beside(stream, capture):
                continue
            theirs = other._stream_sms[other._last_stream(capture)]
            if mine + theirs <= most:
                continue  # two green contexts that share none
            total += other._sms
            if total > max(mine, theirs):
                each = max(2, max(mine, theirs) // 2)
                raise ConfigError(
                    f"{what} takes {sms} SMs while an exchange on another stream may hold {total - sms} of the "
                    f"{max(mine, theirs)} that there are: each could wait for ever for the other; make both with "
                    f"sms={each}, or share one workspace, which puts them in order"
                )

    def _may_run_beside(self, stream: int, capture: int) -> bool:
        if capture:
            return self._capture is not None and self._capture[0] == capture and self._capture[1] != stream
        return self._stream not in (None, stream) and self._runs()

    def _last_stream(self, capture: int) -> int:
        stream = self._capture[1] if capture and self._capture is not None else self._stream
        assert stream is not None
        return stream

    def _name_of(self, stream: int) -> int:
        """A number that no other stream has: each context has a default stream 0 of its own."""
        if stream > LAST_DEFAULT_STREAM or self._gpu.is_current():
            return stream
        return self._gpu.green_context() or stream

    def _sms_of(self, stream: int) -> int:
        """Multiprocessors that kernels on this stream may use: fewer than the GPU has in a green context."""
        with self._gpu.current_for(stream):
            green = call("cuStreamGetGreenCtx", stream)
            if not int(green):
                return self._gpu.sms
            kind = bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            return int(call("cuGreenCtxGetDevResource", green, kind).sm.smCount)

    def _capture_of(self, stream: int) -> int:
        with self._gpu.current_for(stream):
            _, number, *_ = call("cuStreamGetCaptureInfo", stream)
        return int(number)


def _forget(orders: dict[int, weakref.ref[StreamOrder]], key: int, gone: object = None) -> None:
    del gone  # what a weak reference calls this with
    with _LOCK:
        orders.pop(key, None)


@contextmanager
def _asking() -> Iterator[None]:
    """Ask of an event while this thread captures: a capture in the global mode would be broken by the question."""
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
