"""Test graphs and gates: captured work can be replayed, other work is refused, and streams stay usable."""

import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from raymoe.cuda.driver import call  # noqa: E402
from raymoe.cuda.graph import Graph, refuse_in_capture  # noqa: E402
from raymoe.cuda.launch import Kernels  # noqa: E402
from raymoe.errors import (  # noqa: E402
    CaptureError,
    CudaError,
)
from raymoe.workload import clock  # noqa: E402
from tests.gpu.copies import Copies, Words  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def source():
    return torch.randint(0, 256, (100_000,), dtype=torch.uint8, device="cuda")


@pytest.fixture
def into(source):
    return torch.zeros_like(source)


def usable(copies, into, source) -> bool:
    """Return whether the stream still takes work."""
    copies.run(copies.of(into, source))
    return torch.equal(into, source)


def test_a_replay_reads_the_current_memory(gpu, copies, source, into):
    stream, launch = copies.stream.cuda_stream, copies.of(into, source)
    torch.cuda.synchronize()
    with Graph.capture(gpu, stream, lambda: launch(stream), launch) as graph:
        assert graph.nodes == 1
        assert not torch.equal(into, source)  # a capture runs nothing
        for _ in range(3):
            source.random_(0, 256)
            torch.cuda.synchronize()
            graph.replay(stream)
            copies.stream.synchronize()
            assert torch.equal(into, source)


def test_eager_calls_and_replays_share_a_count(gpu, copies, source, into):
    words, stream = Words(2), copies.stream.cuda_stream
    launch = copies.signalling(words, 0, 1, copies.of(into, source, blocks=8))
    with Graph.capture(gpu, stream, lambda: [launch(stream) for _ in range(5)]) as graph:
        assert graph.nodes == 5
        for _ in range(4):
            launch(stream)
            graph.replay(stream)
    assert (words[0], words[1], words.ticket(0)) == (24, 24, 0)


def test_close_waits_for_replays_and_ends_the_graph(gpu, copies, source, into):
    stream, launch = copies.stream.cuda_stream, copies.of(into, source, blocks=1)
    graph = Graph.capture(gpu, stream, lambda: [launch(stream) for _ in range(50)])
    torch.cuda.synchronize()
    graph.replay(stream)
    graph.close()
    assert copies.stream.query()
    graph.close()
    with pytest.raises(CudaError, match="closed graph"):
        graph.replay(stream)


def test_an_error_inside_a_capture_leaves_the_stream_usable(gpu, copies, source, into):
    stream, launch = copies.stream.cuda_stream, copies.of(into, source)

    def fails():
        launch(stream)
        raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="broken on purpose"):
        Graph.capture(gpu, stream, fails)
    assert usable(copies, into, source)


class PoolInCycle:
    """A memory pool of torch in a reference cycle: freeing it inside a capture ends the process."""

    def __init__(self):
        self.pool, self.itself = torch.cuda.MemPool(), self


def test_garbage_is_not_collected_during_a_capture(gpu, copies, source, into):
    stream, launch, finalized = copies.stream.cuda_stream, copies.of(into, source), []
    thresholds = gc.get_threshold()

    def enqueue():
        weakref.finalize(PoolInCycle(), finalized.append, True)
        kept = [[] for _ in range(1000)]  # each of them may start a garbage collection
        assert kept and not finalized
        launch(stream)

    gc.set_threshold(1)
    try:
        Graph.capture(gpu, stream, enqueue).close()
        assert gc.isenabled()
        gc.collect()
        assert finalized
    finally:
        gc.set_threshold(*thresholds)


FORBIDDEN = {
    "synchronise": lambda _gpu, stream: call("cuStreamSynchronize", stream),
    "allocate": lambda _gpu, _stream: call("cuMemAlloc", 4096),
    "make a plan": lambda gpu, stream: refuse_in_capture("an exchange", gpu, stream),
    "capture": lambda gpu, stream: Graph.capture(gpu, stream, lambda: None),
}


@pytest.mark.parametrize("forbidden", FORBIDDEN.values(), ids=FORBIDDEN)
def test_work_that_cannot_be_captured_is_refused(gpu, copies, source, into, forbidden):
    stream = copies.stream.cuda_stream
    with pytest.raises(CaptureError, match="before the capture begins"):
        Graph.capture(gpu, stream, lambda: forbidden(gpu, stream))
    assert usable(copies, into, source)
    refuse_in_capture("an exchange", gpu, stream)


def test_kernels_loaded_inside_a_capture_are_right_or_refused(gpu, copies, source, into):
    """Plans load kernels before a capture. Some drivers allow it inside one; then the graph must be right."""
    stream, unloaded = copies.stream.cuda_stream, Kernels(gpu, copies.kernels.compiler)
    inside = Copies(unloaded)

    def enqueue():
        inside.of(into, source)(stream)

    torch.cuda.synchronize()
    try:
        with Graph.capture(gpu, stream, enqueue, unloaded) as graph:
            graph.replay(stream)
            copies.stream.synchronize()
            assert torch.equal(into, source)
    except CaptureError as error:
        assert "before the capture begins" in str(error)
    assert usable(copies, into, source)
    unloaded.close()


def test_the_default_stream_is_refused(gpu):
    with pytest.raises(CaptureError, match="default stream"):
        Graph.capture(gpu, 0, lambda: None)


def test_other_threads_may_call_cuda_during_a_capture(gpu, copies, source, into):
    stream, launch, problems = copies.stream.cuda_stream, copies.of(into, source), []

    def busy():
        try:
            with gpu.current():
                call("cuMemFree", call("cuMemAlloc", 1 << 20))
                call("cuCtxGetDevice")
        except CudaError as error:
            problems.append(error)

    def enqueue():
        launch(stream)
        thread = threading.Thread(target=busy)
        thread.start()
        thread.join(30)
        launch(stream)

    torch.cuda.synchronize()
    with Graph.capture(gpu, stream, enqueue) as graph:
        assert problems == []
        assert graph.nodes == 2
        graph.replay(stream)
        copies.stream.synchronize()
    assert torch.equal(into, source)


def test_a_gate_tells_that_it_opened_by_itself(gpu, copies, source, into, monkeypatch):
    """A stream holds about a thousand operations. Enqueuing more waits for the gate, which opens by itself."""
    monkeypatch.setattr(clock, "GATE_S", 0.5)
    stream, launch = copies.stream.cuda_stream, copies.of(into, source)
    gate = clock.Gate(gpu)
    with gate.held(stream) as opened_late:
        for _ in range(100_000):
            launch(stream)
    copies.stream.synchronize()
    assert opened_late.is_set()
    with gate.held(stream) as opened_late:
        launch(stream)
    copies.stream.synchronize()
    assert not opened_late.is_set()
    gate.close()
