"""The effect of a capture on the rest of the process, with a driver that does nothing.

tests/gpu/test_graph_gpu.py uses a real driver.
"""

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from raymoe.cuda import graph as graphs
from raymoe.cuda.graph import Graph


@pytest.fixture
def gpu(monkeypatch):
    not_capturing = SimpleNamespace(CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0))
    monkeypatch.setattr(graphs, "bindings", lambda: MagicMock(**vars(not_capturing)))
    monkeypatch.setattr(graphs, "call", lambda *_: 0)
    return SimpleNamespace(current=nullcontext)


@pytest.mark.parametrize("collects", [True, False])
def test_a_capture_disables_the_garbage_collector_and_restores_it(gpu, collects):
    inside = []
    try:
        gc.enable() if collects else gc.disable()
        Graph.capture(gpu, 7, lambda: inside.append(gc.isenabled()))
        assert inside == [False]
        assert gc.isenabled() is collects
        with pytest.raises(ZeroDivisionError):
            Graph.capture(gpu, 7, lambda: 1 / 0)
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_no_garbage_is_collected_between_the_calls_that_begin_and_end_a_capture(gpu, monkeypatch):
    """A collection just before the end, of all that the work had deferred, once invalidated captures."""
    log: list[str] = []

    class Destroyed:
        def __init__(self):
            self.itself = self

        def __del__(self):
            log.append("destroyed")

    def call(name, *_):
        list(map(list, [()] * 100))  # a call allocates
        log.append(name)
        return 0

    monkeypatch.setattr(graphs, "call", call)
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        Graph.capture(gpu, 7, Destroyed)
    finally:
        gc.set_threshold(*before)
    inside = log[log.index("cuStreamBeginCapture") : log.index("cuStreamEndCapture")]
    assert "destroyed" not in inside
    gc.collect()
    assert "destroyed" in log
