"""One step of workload exchange between GPU ranks: replayed from CUDA graphs where the backend can be captured."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from raymoe.cuda.nvtx import nvtx_range
from raymoe.errors import ConfigError, RaymoeError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.workspace import Workspace
from raymoe.exchange.spec import COPY_ENGINE
from raymoe.fp8 import quantise
from raymoe.memory.world import World
from raymoe.moe.weights import generator
from raymoe.workload.clock import OpClock, TimedOp, Work, calls_of
from raymoe.workload.exchange.placed import ExpertsOfSlots
from raymoe.workload.exchange.received import received, sum_experts
from raymoe.workload.inputs import Batch, Inputs
from raymoe.workload.measure import TIMELINE_RUNS, Line, Step, Timeline, Times, median_times, timeline_of_slowest
from raymoe.workload.oracle import AffineExperts, error_of

OPS = tuple((op, l2) for op in ("dispatch", "combine", "exchange") for l2 in ("cold", "warm"))
"""The operations that a step times, in this order, each with the state of the L2 cache."""


class GpuExchangeStep:
    """Times dispatch alone, combine of the last dispatch, and both, each cold and warm.

    Tokens, ids and weights change from step to step, in the same memory, because graphs hold its addresses. A verified
    step poisons all that dispatch and combine write. It applies experts to the rows of the timed dispatch and verifies
    the result of the timed combine. The timed pair must then give the same bits.
    """

    ops = OPS
    priority = 0
    """Priority of the stream; a lower number goes first."""

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        inputs: Inputs,
        graph: Literal["auto"] | bool,
        traced: Workspace | None = None,
        quantised: bool = False,
    ) -> None:
        """`traced` is the workspace of the exchange, if its kernels record their times.

        `quantised`: rows are 8-bit floats with scales before the clock starts.
        """
        self.world, self.exchange, self.inputs, self._traced = world, exchange, inputs, traced
        spec = exchange.spec
        self.experts = AffineExperts(spec.hidden, inputs.dtype, inputs.routing.seed)
        self.slots = ExpertsOfSlots(self.experts, exchange)
        first = inputs.at(0)
        self.batch = Batch(first.x.clone(), first.ids.clone(), first.weights.clone())
        self._x = quantise(first.x) if quantised else self.batch.x
        self.y = torch.empty_like(first.x)
        # Combine sends these on steps that are not verified.
        self.rows = torch.empty(spec.rows(world.size), spec.hidden, dtype=inputs.dtype, device=world.device)
        self._fill_rows()
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.stream: torch.cuda.Stream = new_stream(world.device, priority=self.priority)
        self.stream.wait_stream(torch.cuda.current_stream(world.device))
        captured = self._may_capture(graph)
        with torch.cuda.stream(self.stream):
            self._dispatch()  # builds plans, makes late connections, and touches every page once
            self._combine()
            exchange.check()
            self._make_ready(captured)

    @property
    def keys(self) -> Line:
        """The keys of a result line about the exchange as it ran."""
        return {
            "backend": self.exchange.backend,
            "transport": COPY_ENGINE if self.exchange.spec.by_copy_engine else None,
            "graph": self.clock.captured,
            "sms": self.exchange.sms,
            "chunks": self.exchange.chunks,
            "device": torch.cuda.get_device_name(self.world.device),
        }

    def __call__(self, index: int, *, verify: bool) -> Step:
        dispatch, combine, both = self._timed
        with torch.cuda.stream(self.stream):
            self._take(self.inputs.at(index, fresh=verify))
            us: list[float] = []
            host_us: list[float] = []
            error = None
            if verify:
                self._poison()
            self._time("dispatch", dispatch, us, host_us)
            if verify:
                with self._range("experts"):
                    self._run_experts()
            self._time("combine", combine, us, host_us)
            if verify:
                y = self.y.clone()
                self.y.fill_(torch.nan)
            self._time("exchange", both, us, host_us)
            if verify:
                with self._range("verify"):
                    error = error_of(y, self.batch, self.experts) if torch.equal(y, self.y) else torch.inf
                    self._fill_rows()
            return Step(tuple(us), error, tuple(host_us))

    def _time(self, name: str, op: TimedOp, us: list[float], host_us: list[float]) -> None:
        with self._range(name):  # around the clock, so that no range lies inside a sample
            us += self.clock.us(op)
            host_us += self.clock.host_us

    def _range(self, name: str) -> AbstractContextManager[None]:
        return nvtx_range(self.world.device, name)

    def timelines(self) -> dict[str, Timeline]:
        """Return the timelines of dispatch and combine, each alone on a cold L2 cache.

        Runs are eager: in a graph of many runs some points would keep the time of the first run.
        """
        if self._traced is None or self.exchange.backend != "fused":
            return {}
        timelines = {}
        with torch.cuda.stream(self.stream):
            for op, work in (("dispatch", self._dispatch), ("combine", self._combine)):
                self._times(op, work, self._traced)  # discards the times that the steps have left
                times = median_times([self._times(op, work, self._traced) for _ in range(TIMELINE_RUNS)])
                ranks: list[Times] = self.world.swap(times, f"{op}: timeline")  # type: ignore[assignment]
                timelines[op] = timeline_of_slowest(ranks)
        return timelines

    def _times(self, op: str, work: Work, traced: Workspace) -> Times:
        self.clock.cold_us(work)
        return traced.timeline(op)

    def close(self) -> None:
        """Close the graphs. Call this before the exchange is closed."""
        self.clock.close()

    def _dispatch(self) -> None:
        self.dispatched = self.exchange.dispatch(self._x, self.batch.ids, self.batch.weights)

    def _combine(self) -> None:
        self._combine_of(self.dispatched)

    def _both(self) -> None:
        self._combine_of(self.exchange.dispatch(self._x, self.batch.ids, self.batch.weights))

    def _combine_of(self, dispatched: Dispatched) -> None:
        self.exchange.combine(self.rows, dispatched, weighted=not self.exchange.spec.by_token, out=self.y)

    def _may_capture(self, graph: Literal["auto"] | bool) -> bool:
        """Return whether steps are replayed; the answer is the same on all ranks."""
        if graph is True and not self.exchange.capturable:
            raise ConfigError(
                f"steps.graph is true and backend {self.exchange.backend} cannot be captured in a CUDA graph, because "
                "its dispatch waits on the host for counts; set steps.graph to auto or false"
            )
        return graph is not False and self.exchange.capturable

    def _make_ready(self, captured: bool) -> None:
        """Capture on all ranks, or raise on all. The captured combine is that of the warm runs of dispatch."""
        calls = calls_of(self.inputs.routing.tokens)
        self.clock = OpClock(self.world, self.stream, self.exchange.check, captured=captured, calls=calls)
        problem: RaymoeError | None = None
        timed: list[TimedOp] = []
        try:
            with self._range("capture"):
                timed = [self.clock.timed(op) for op in (self._dispatch, self._combine, self._both)]
        except (RaymoeError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            problem = ConfigError(f"backend {self.exchange.backend} could not be captured: {error}")
        self.world.agree(problem, "exchange: captured")
        self._timed = timed

    def _take(self, batch: Batch) -> None:
        """Copy tokens and routing to the memory that graphs read."""
        self.batch.x.copy_(batch.x)
        if isinstance(self._x, tuple):
            for memory, values in zip(self._x, quantise(batch.x), strict=True):
                memory.copy_(values)
        self.batch.ids.copy_(batch.ids)
        self.batch.weights.copy_(batch.weights)

    def _poison(self) -> None:
        """Poison the results of the last step, so that they cannot pass for those of the next one.

        Not the slots: with layout `rank` they hold rows and scales, and a peer that is ahead may have written new ones.
        """
        dispatched = self.dispatched
        ours = (dispatched.x, dispatched.scales) if dispatched.index is None else ()
        for tensor in (self.y, dispatched.weights, *ours):
            if tensor is not None:
                _fill_with_nan(tensor)
        indices = dispatched.index, dispatched.topk_idx
        for tensor in (dispatched.expert_offsets, dispatched.expert_counts, *indices):
            if tensor is not None:
                tensor.fill_(-1)

    def _run_experts(self) -> None:
        """Apply this rank's experts to the rows that came; a row that belongs to no expert becomes NaN."""
        self.rows.fill_(torch.nan)
        first = self.world.rank * len(self.dispatched.expert_counts)
        if self.exchange.spec.by_token:
            sums = sum_experts(self.dispatched, self.slots, first)
            self.rows[: len(sums)] = sums.to(self.rows.dtype)
            return
        starts, counts = self.dispatched.expert_offsets.tolist(), self.dispatched.expert_counts.tolist()
        for local, (start, count) in enumerate(zip(starts, counts, strict=False)):  # offsets also hold the end
            row = slice(start, start + count)
            self.rows[row] = self.slots(first + local, received(self.dispatched, row)).to(self.rows.dtype)

    def _fill_rows(self) -> None:
        self.rows.uniform_(-1, 1, generator=generator("rows", self.world.rank, device=self.world.device))


def _fill_with_nan(tensor: torch.Tensor) -> None:
    """Fill with NaN. torch has no fill for 8-bit floats; their NaN is all ones."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(torch.nan)
