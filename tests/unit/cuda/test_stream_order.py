"""Events of a default stream belong to its GPU, also if another GPU's context or none is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.cuda import stream_order
from raymoe.cuda.stream_order import StreamOrder


class Gpu:
    """A GPU that is not current. `inside` is above 0 while it has been made current."""

    ordinal, context_id, sms = 1, -7, 132

    def __init__(self) -> None:
        self.inside = 0

    def is_current(self) -> bool:
        return self.inside > 0

    def green_context(self) -> int:
        return 0

    @contextmanager
    def current(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def current_for(self, _: int) -> Any:
        return self.current()


@pytest.mark.parametrize("current", [False, True])
def test_events_of_a_default_stream_are_recorded_in_the_context_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch, current: bool
) -> None:
    gpu, calls = Gpu(), []

    def record(*what: object) -> tuple[int]:
        calls.append(("cuEventRecord", what[-1], gpu.inside > 0))
        return (0,)

    def call(name: str, *what: object) -> Any:
        if name == "cuStreamWaitEvent":
            calls.append((name, what[0], gpu.inside > 0))
        return 0

    driver = SimpleNamespace(
        cuStreamIsCapturing=lambda _: (0, 0),
        cuEventRecord=record,
        CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=2),
    )
    monkeypatch.setattr(stream_order, "bindings", lambda: driver)
    monkeypatch.setattr(stream_order, "call", call)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: stream, raising=False)
    stream, order = 4096, StreamOrder(gpu)
    order.leave(*order.enter("dispatch", 16))
    gpu.inside, stream = int(current), 0
    for _ in range(2):
        order.leave(*order.enter("combine", 16))
    gpu.inside = 0
    order.close()
    assert calls[0][:2] == ("cuEventRecord", 4096)
    assert calls[1:] == [
        ("cuStreamWaitEvent", 0, True),
        ("cuEventRecord", 0, True),
        ("cuEventRecord", 0, True),
    ]
