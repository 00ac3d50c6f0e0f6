"""Order operations that share memory across streams, and refuse operations that may not fit on the GPU together.

The kernels of one workspace must run one after another. The kernels of two workspaces may run at the same time if all
their blocks fit on the GPU at once. Otherwise blocks that run would wait for blocks of other ranks, which wait for
blocks that cannot start.

- **Ordered by events.** An operation on another stream waits for the last one by an event. Both must be eager, or
  captured into one graph.
- **Refused if no event can order it.** A captured operation cannot wait for an eager one on another stream. If that may
  still run, the capture is refused. Synchronise before the capture; `torch.cuda.graph` does.
- **Replays are not seen.** The driver reports no graph launches. The caller must order replays of two graphs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from raymoe.cuda.driver import bindings, call, failure
from raymoe.cuda.gpu import LAST_DEFAULT_STREAM, Gpu
from raymoe.cuda.graph import relaxed_capture_mode
from raymoe.errors import ConfigError

# The stream orders of each context in this process. It is global, because two worlds on one GPU share its SMs without
# knowing of each other.
_ORDERS: dict[int, dict[int, weakref.ref[StreamOrder]]] = {}
_LOCK = threading.RLock()  # reentrant: the callback of a dying weak reference takes it, in a thread that may hold it


class StreamOrder:
    """The order of operations of one workspace. Calls come from one thread at a time."""

    def __init__(self, gpu: Gpu) -> None:
        import torch

        self._gpu = gpu
        # The driver's number of the current stream, without a stream object; torch's compiled code uses this too.
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, gpu.ordinal)
        self._is_capturing = bindings().cuStreamIsCapturing
        self._record = bindings().cuEventRecord
        with gpu.current():
            no_timing = bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done: Any = call("cuEventCreate", no_timing)  # after the last eager operation
            self._captured: Any = call("cuEventCreate", no_timing)  # after the last captured one, inside its graph
        self._stream: int | None = None
        self._capture: tuple[int, int] | None = None
        """The capture and the stream of the last captured operation."""
        self._stream_id = 0  # the stream of the operation that is being enqueued
        self._number_is_unique = True
        """Whether the stream's number alone identifies it: a default stream belongs to the current context."""
        self._most_sms = 0
        self._checked_sms = 0
        """SMs that are known to be available on the stream of the last eager operation."""
        self._stream_sms: dict[int, int] = {}
        with _LOCK:
            self._orders = _ORDERS.setdefault(gpu.context_id, {})
            self._orders[id(self)] = weakref.ref(self, partial(_forget, self._orders, id(self)))

    def enter(self, op: str, sms: int) -> tuple[int, int]:
        """Order the next operation on the current stream after the last one.

        `sms` is the number of SMs that it will occupy. Returns the stream, and the number of its capture or 0; give
        both to `leave`.
        """
        stream = self.current()
        self._number_is_unique = stream > LAST_DEFAULT_STREAM or self._gpu.is_current()
        stream_id = stream if self._number_is_unique else self._stream_id_of(stream)
        code, status = self._is_capturing(stream)
        capture = self._capture_of(stream) if status and not code else 0
        if capture or stream_id != self._stream or sms > self._checked_sms or len(self._orders) > 1:
            self._order_and_check(op, stream, stream_id, capture, sms)
        self._stream_id = stream_id
        return stream, capture

    def leave(self, stream: int, capture: int) -> None:
        """Record that the operation is enqueued."""
        if capture:
            call("cuEventRecord", self._captured, stream)
            self._capture = capture, self._stream_id
        else:
            if self._number_is_unique:
                (code,) = self._record(self._done, stream)
            else:
                with self._gpu.current_for(stream):
                    (code,) = self._record(self._done, stream)
            if code:
                raise failure("cuEventRecord", code)
            self._stream = self._stream_id

    def close(self) -> None:
        """Destroy the events. The device must be done."""
        done, self._done = self._done, None
        if done is None:
            return
        _forget(self._orders, id(self))
        with self._gpu.current():
            call("cuEventDestroy", done)
            call("cuEventDestroy", self._captured)

    def _order_and_check(self, op: str, stream: int, stream_id: int, capture: int, sms: int) -> None:
        """Order the operation and check its SMs.

        `enter` skips this where the last operation was eager, on the same stream, and no other workspace is on the GPU.
        """
        self._order(op, stream, stream_id, capture)
        available = self._stream_sms.get(stream_id)
        if available is None:
            available = self._stream_sms[stream_id] = self._sms_of(stream)
        if sms > available:
            raise ConfigError(
                f"{op} takes {sms} SMs and its stream has {available} (a green context): make the exchange with "
                f"sms={available}"
            )
        if len(self._orders) > 1:
            self._refuse_too_many_sms(op, stream_id, capture, sms)
        self._most_sms = max(self._most_sms, sms)  # earlier operations than the last may still run too
        self._checked_sms = 0 if capture else min(available, self._most_sms)

    def _order(self, op: str, stream: int, stream_id: int, capture: int) -> None:
        if not capture:
            if self._stream not in (None, stream_id):
                with self._gpu.current_for(stream):  # a default stream belongs to the current context
                    call("cuStreamWaitEvent", stream, self._done, 0)
        elif self._capture is not None and self._capture[0] == capture:
            if self._capture[1] != stream_id:
                call("cuStreamWaitEvent", stream, self._captured, 0)
        elif self._stream not in (None, stream_id) and self._may_still_run():
            raise ConfigError(
                f"{op} is captured while an operation on the same workspace may still run on another stream, which a "
                "graph cannot wait for; synchronise before the capture, or give the exchange a workspace of its own"
            )

    def _may_still_run(self) -> bool:
        """Return whether the last eager operation may still run."""
        with relaxed_capture_mode():  # a query of an event would break a capture in the global mode
            code, *_ = bindings().cuEventQuery(self._done)
        return bool(code)

    def _refuse_too_many_sms(self, op: str, stream: int, capture: int, sms: int) -> None:
        """Refuse an operation that may run at the same time as one of another workspace, and find too few SMs."""
        own_sms, gpu_sms = self._stream_sms[stream], self._gpu.sms
        total = sms
        for reference in list(self._orders.values()):
            other = reference()
            if other is None or other is self or not other._may_run_beside(stream, capture):
                continue
            other_sms = other._stream_sms[other._last_stream(capture)]
            if own_sms + other_sms <= gpu_sms:
                continue  # two green contexts that share no SM
            total += other._most_sms
            if total > max(own_sms, other_sms):
                half = max(2, max(own_sms, other_sms) // 2)
                raise ConfigError(
                    f"{op} takes {sms} SMs while an exchange on another stream may hold {total - sms} of the "
                    f"{max(own_sms, other_sms)} SMs: each could wait for ever for the other; make both with "
                    f"sms={half}, or share one workspace, which puts them in order"
                )

    def _may_run_beside(self, stream: int, capture: int) -> bool:
        if capture:
            return self._capture is not None and self._capture[0] == capture and self._capture[1] != stream
        return self._stream not in (None, stream) and self._may_still_run()

    def _last_stream(self, capture: int) -> int:
        stream = self._capture[1] if capture and self._capture is not None else self._stream
        assert stream is not None
        return stream

    def _stream_id_of(self, stream: int) -> int:
        """Return a unique number for a stream: each context has a default stream 0 of its own."""
        if stream > LAST_DEFAULT_STREAM or self._gpu.is_current():
            return stream
        return self._gpu.green_context() or stream

    def _sms_of(self, stream: int) -> int:
        """Return the SMs that kernels on this stream may use: fewer than the GPU has if it is in a green context."""
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


def _forget(orders: dict[int, weakref.ref[StreamOrder]], key: int, reference: object = None) -> None:
    del reference  # the dead weak reference, which calls this
    with _LOCK:
        orders.pop(key, None)
