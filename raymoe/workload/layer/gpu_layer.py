"""One step of workload layer on GPU ranks: replayed from CUDA graphs where the backend can be captured.

Three kinds of graphs time a layer. One of the passes as they are times the step. One with an event at each mark times
its parts. One for each part of the forward pass, by itself, times the part alone. With a backward pass that of dispatch
and of combine is timed alone too: in the step it holds the wait for ranks whose experts take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory.world import World
from raymoe.moe.differentiable import return_gradients, send_gradients
from raymoe.moe.scaled_layer import rows_for_experts
from raymoe.workload.clock import TimedOp, Work, calls_of
from raymoe.workload.inputs import Batch, Inputs
from raymoe.workload.layer.passes import LayerPasses, Results
from raymoe.workload.measure import Line, Step
from raymoe.workload.pointwise.gpu_clock import TorchGraphClock

COLD, WARM = "cold", "warm"


class GpuLayerStep:
    """Times the passes, cold and warm; their parts and the parts alone, cold.

    Tokens change from step to step, in the same memory, because graphs hold its addresses. A verified step poisons the
    results before the replay that writes them.
    """

    def __init__(self, world: World, passes: LayerPasses, inputs: Inputs, graph: Literal["auto"] | bool) -> None:
        self.world, self.passes, self.inputs = world, passes, inputs
        self.exchange = passes.layer.exchange
        first = inputs.at(0)
        self.batch = Batch(first.x.clone(), first.ids.clone(), first.weights.clone())
        self.dy = inputs.fresh_of(inputs.rank, -1)[: len(first.x)]
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.stream: torch.cuda.Stream = new_stream(world.device)
        self.stream.wait_stream(torch.cuda.current_stream(world.device))
        captured = self._may_capture(graph)
        with torch.cuda.stream(self.stream):
            bytes_peak, bytes_kept = self._first_run()
            self.clock = TorchGraphClock(
                world, self.stream, self._settle, captured=captured, calls=calls_of(inputs.routing.tokens)
            )
            self._make_ready(captured)
        self.ops = (("step", COLD), ("step", WARM), *((part, COLD) for part in (*self._parts, *self._alone)))
        self.keys: Line = {
            "graph": captured,
            "sms": self.exchange.sms,
            "chunks": self.exchange.chunks,
            "device": torch.cuda.get_device_name(world.device),
            "bytes_peak": bytes_peak,
            "bytes_kept": bytes_kept,
        }

    def __call__(self, index: int, *, verify: bool) -> Step:
        with torch.cuda.stream(self.stream):
            batch = self.inputs.at(index, fresh=verify)
            self.batch.x.copy_(batch.x)
            self.batch.ids.copy_(batch.ids)
            self.batch.weights.copy_(batch.weights)
            if verify:
                for tensor in (self.results.y, *self.results.gradients):
                    tensor.fill_(torch.nan)
            us = [*self.clock.us(self._step)]
            error = self.passes.error_of(self.results, self.batch, self.dy) if verify else None
            us += self._part_us()
            us += [self.clock.us_cold(part) for part in self._alone.values()]
        return Step(tuple(us), error)

    def close(self) -> None:
        self.clock.close()

    def _settle(self) -> None:
        self.exchange.check()

    def _run(self) -> None:
        self.results: Results = self.passes.run(self.batch, self.dy)

    def _first_run(self) -> tuple[int, int | None]:
        """Load and build everything once. Return the most memory that a step holds beside weights and tokens, and what
        it holds between its forward and its backward pass."""
        self._run()
        self._settle()
        self.results = Results(self.dy, ())
        self.passes.marks.begin()
        held = torch.cuda.memory_allocated(self.world.device)
        saved: list[int] = []
        before = self.passes.after_forward
        self.passes.after_forward = lambda: saved.append(torch.cuda.memory_allocated(self.world.device) - held)
        torch.cuda.reset_peak_memory_stats(self.world.device)
        self._run()
        self._settle()
        self.passes.after_forward = before
        return int(torch.cuda.max_memory_allocated(self.world.device) - held), saved[0] if saved else None

    def _may_capture(self, graph: Literal["auto"] | bool) -> bool:
        if graph is True and not self.exchange.capturable:
            raise ConfigError(
                f"steps.graph is true and backend {self.exchange.backend} cannot be captured in a CUDA graph; set "
                "steps.graph to auto or false"
            )
        return graph is not False and bool(self.exchange.capturable)

    def _make_ready(self, captured: bool) -> None:
        """Capture on all ranks, or raise on all. Without graphs only the step is timed."""
        self._parts: dict[str, list[tuple[Any, Any]]] = {}
        self._alone: dict[str, TimedOp] = {}
        problem: RaymoeError | None = None
        try:
            in_parts = self.passes.microbatches > 1  # whose operations overlap, so none has a time of its own
            if captured and self.passes.own_router and not in_parts:
                self._alone = {f"{part}_alone": self.clock.timed(work) for part, work in self._works().items()}
            if captured and not in_parts:
                self._marked = self.clock.graph_of_one(self._run_marked)
                for part, begin, end in self.passes.marks.spans():
                    self._parts.setdefault(part, []).append((begin, end))
                self._graph_results = self.results  # the memory that the graph writes
            self.passes.marks.note = None
            self._step = self.clock.timed(self._run)
        except (RaymoeError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            problem = ConfigError(f"a layer by {self.exchange.backend} could not be captured: {error}")
        self.world.agree(problem, "layer: captured")

    def _run_marked(self) -> None:
        """Run the parts one after the other: beside another part, the shared expert has no time of its own."""
        self.passes.marks.note, self.passes.layer.beside = self._event, False
        try:
            self._run()
        finally:
            self.passes.layer.beside = True

    def _event(self) -> Any:
        """Record an event that each replay of the graph records again."""
        new_event: Any = torch.cuda.Event  # has no annotations
        event = new_event(enable_timing=True, external=True)
        event.record(self.stream)
        return event

    def _part_us(self) -> list[float]:
        if not self._parts:
            return []
        self.clock.cold_us(self._marked)
        return [sum(float(begin.elapsed_time(end)) * 1e3 for begin, end in spans) for spans in self._parts.values()]

    def _works(self) -> dict[str, Work]:
        """Return the parts to time alone, each on tensors from an eager pass. They record no gradients."""
        layer, exchange, spec = self.passes.layer, self.exchange, self.exchange.spec
        x = self.batch.x
        with torch.no_grad():
            h = layer.norm(x)
            ids, weights, _ = layer.gate(h)
            out = None
            if spec.layout == "expert":
                dtype: torch.dtype = getattr(torch, spec.output_dtype)
                out = torch.empty(spec.rows(self.world.size), spec.hidden, dtype=dtype, device=x.device)
            dispatched = exchange.dispatch(h, ids, weights, None, out, zero_gaps=False)
            came = rows_for_experts(dispatched)
            rows = tuple(part.clone() for part in came) if isinstance(came, tuple) else came.clone()
            groups = dispatched.expert_offsets, dispatched.expert_counts
            results = layer.experts(rows, *groups).to(x.dtype)
            exchange.combine(results, dispatched)
            self._settle()
        works: dict[str, Callable[[], object]] = {
            "norm": lambda: layer.norm(x),
            "router": lambda: layer.gate(h),
            "dispatch": lambda: exchange.dispatch(h, ids, weights, None, out, zero_gaps=self.passes.backward),
            "experts": lambda: layer.experts(rows, *groups),
            "combine": lambda: exchange.combine(results, dispatched),
        }
        if self.passes.shared:
            works["shared"] = lambda: layer.shared_experts(h)
        if self.passes.backward:
            numbers, site, dweights = exchange.numbers, dispatched.site, dispatched.weights
            routing = [ids, exchange.pack(dispatched), dispatched.expert_offsets]
            works["combine_backward"] = lambda: send_gradients(numbers, site, self.dy, routing)
            works["dispatch_backward"] = lambda: return_gradients(numbers, site, results, dweights, routing)
        return {part: _without_gradients(work) for part, work in works.items()}


def _without_gradients(work: Callable[[], object]) -> Work:
    def run() -> None:
        with torch.no_grad():
            work()

    return run
