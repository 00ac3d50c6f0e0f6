"""The clock of workload pointwise on GPUs: the clock of the exchanges, with graphs that torch captures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal

import torch

from raymoe.memory.world import World
from raymoe.workload.clock import OpClock, TimedOp, Work, calls_of
from raymoe.workload.pointwise.operations import poison
from raymoe.workload.pointwise.row_systems import Compute, Results


class TorchGraphClock(OpClock):
    """Captures by torch, whose allocator then keeps the memory of results for the graph. OpClock's own graphs are for
    work that allocates nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._captured: list[tuple[Any, Work]] = []
        """The graphs, and their work: replays read the tensors that the work holds."""

    def graph_of(self, op: Work) -> Work:
        return self.graph_of_one(lambda: self.repeat(op))

    def graph_of_one(self, op: Work) -> Work:
        """Capture a single run, and return its replay."""
        graph: Any = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # the graph of an earlier case, freed now, would invalidate the capture
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                op()
        finally:
            gc.enable()
        self._captured.append((graph, op))
        replay: Work = graph.replay
        return replay

    def close(self) -> None:
        for graph, _ in self._captured:
            graph.reset()  # replays may still be referred to: NCCL must not wait for the graph
        self._captured.clear()
        super().close()


class GpuClock:
    """Times a function on a stream of its own."""

    def __init__(self, world: World, tokens: int, graph: Literal["auto"] | bool) -> None:
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self._stream = new_stream(world.device)
        self._stream.wait_stream(torch.cuda.current_stream(world.device))
        self.captured = graph is not False
        self._clock = TorchGraphClock(world, self._stream, self._settle, captured=self.captured, calls=calls_of(tokens))
        self._results: Results = ()
        self._compute: Compute | None = None  # replays use its tensors
        self._timed: TimedOp | None = None

    def ready(self, make: Callable[[], Compute]) -> Callable[[], float]:
        with torch.cuda.stream(self._stream):
            self._compute = compute = make()

            def work() -> None:
                self._results = compute()

            work()  # compiles, loads and allocates before the capture
            self._settle()
            timed = self._clock.timed(work)
        self._timed = timed

        def sample() -> float:
            with torch.cuda.stream(self._stream):
                return self._clock.us_cold(timed)

        return sample

    def results(self) -> Results:
        """Replay the graph that was captured last; it writes into the same memory each time."""
        assert self._timed is not None
        with torch.cuda.stream(self._stream):
            for tensor in self._results:
                poison(tensor)
            self._timed.warm()
            self._settle()
        return self._results

    def close(self) -> None:
        self._timed = self._compute = None
        self._results = ()
        self._clock.close()

    def _settle(self) -> None:
        self._stream.synchronize()
