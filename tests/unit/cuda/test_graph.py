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
