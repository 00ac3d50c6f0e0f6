"""Time dispatch and combine beside a matrix product on the same GPU, and how much each slows the other down.

A sample of a pair begins after a barrier of all ranks, as every sample does. From there the exchange runs in a stream
of high priority and `torch.mm` in one of low priority. The clock records when each is done and when both are. Each is
timed alone in the same way. All samples are on a cold L2 cache, and are enqueued while the stream is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from raymoe.config import Case
from raymoe.config.sections import OverlapSection
from raymoe.exchange.exchange import Exchange
from raymoe.memory.world import World
from raymoe.moe.weights import generator
from raymoe.workload.clock import OpClock, Work
from raymoe.workload.exchange.gpu_exchange import GpuExchangeStep
from raymoe.workload.inputs import Inputs, Routing
from raymoe.workload.measure import Line, Step, Steps, load_keys, measure, result_line, shape_keys
from raymoe.workload.memory_needed import spec_of
from raymoe.workload.oracle import BOUNDS, bound_of, error_of
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import Traffic, expert_load, traffic_of, work_of

PRODUCT = "product"
ALONE: tuple[tuple[str, str | None], ...] = (("dispatch", None), ("combine", None), (PRODUCT, None))
OPS = ALONE + tuple(
    pair for op in ("dispatch", "combine") for pair in ((op, PRODUCT), (PRODUCT, op), (f"{op}+{PRODUCT}", None))
)
"""The operations that a step times, and the operation beside each. First each alone; then each beside the other, and
both until the last ends."""

WARM_UPS = 2


class Product:
    """The matrix product `a @ b` into `out`, and a stream for it."""

    def __init__(self, world: World, hidden: int, dtype: torch.dtype, size: OverlapSection) -> None:
        device, source = world.device, generator(PRODUCT, world.rank, device=world.device)
        self.a = torch.empty(size.rows, hidden, device=device).uniform_(-1, 1, generator=source).to(dtype)
        self.b = torch.empty(hidden, size.columns, device=device).uniform_(-1, 1, generator=source).to(dtype)
        self.out = torch.empty(size.rows, size.columns, dtype=dtype, device=device)
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.stream: torch.cuda.Stream = new_stream(device, priority=0)
        with torch.cuda.stream(self.stream):
            self()
        world.gpu.synchronise()
        self.want = self.out.clone()

    def __call__(self) -> None:
        """Enqueue on the current stream."""
        torch.mm(self.a, self.b, out=self.out)

    def error(self) -> float:
        """Return the error of the last product, relative to its largest element.

        It may differ from 0: while several streams work, cuBLAS may split the sums differently, which changes rounding.
        """
        return float((self.out.float() - self.want.float()).abs().max() / self.want.float().abs().max())


class OverlapStep(GpuExchangeStep):
    """Time each of OPS once, with the tokens of a step."""

    ops = tuple((op, "cold") for op, _ in OPS)
    priority = -1

    def __init__(self, world: World, exchange: Exchange, inputs: Inputs, size: OverlapSection) -> None:
        self._product = Product(world, exchange.spec.hidden, inputs.dtype, size)
        event: Any = torch.cuda.Event  # has no annotations
        self._forked = event()
        self._exchanged, self._multiplied = event(enable_timing=True), event(enable_timing=True)
        super().__init__(world, exchange, inputs, graph=False)

    def __call__(self, index: int, *, verify: bool) -> Step:
        error = None
        with torch.cuda.stream(self.stream):
            self._take(self.inputs.at(index, fresh=verify))
            if verify:
                self._poison()
                self._product.out.fill_(torch.nan)
            dispatch = self._pair(self._dispatch)
            if verify:
                self._run_experts()
            combine = self._pair(self._combine)
            if verify:
                error = max(error_of(self.y, self.batch, self.experts), self._product_error())
                self._fill_rows()
            alone = [self.clock.cold_us(work) for work in (self._dispatch, self._combine, self._product)]
        return Step((*alone, *dispatch, *combine), error)

    def _make_ready(self, captured: bool) -> None:
        assert not captured, "an overlap is timed eagerly"
        self.clock = OpClock(self.world, self.stream, self.exchange.check, captured=True)
        for _ in range(WARM_UPS):  # allocates memory and loads kernels before the stream is first held
            for exchange in (self._dispatch, self._combine):
                self._enqueue_pair(exchange)
            self._product()
            self.exchange.check()

    @property
    def keys(self) -> Line:
        return super().keys | {"graph": False}

    def _pair(self, exchange: Work) -> tuple[float, float, float]:
        """Return microseconds until the exchange is done, until the product is done, and until both are."""
        both = self.clock.cold_us(lambda: self._enqueue_pair(exchange))
        return self.clock.since_begin(self._exchanged), self.clock.since_begin(self._multiplied), both

    def _enqueue_pair(self, exchange: Work) -> None:
        """Enqueue the exchange and then the product. The exchange, first and of high priority, takes its SMs first."""
        beside = self._product.stream
        self._forked.record(self.stream)
        exchange()
        self._exchanged.record(self.stream)
        with torch.cuda.stream(beside):
            beside.wait_event(self._forked)
            self._product()
            self._multiplied.record(beside)
        self.stream.wait_event(self._multiplied)

    def _product_error(self) -> float:
        error = self._product.error()
        bound = BOUNDS[self.inputs.dtype]
        return 0.0 if error <= bound else math.inf


def run_overlap(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Return lines for dispatch, combine and the product: each alone, each beside the other, and both together."""
    job = case.job
    dtype: torch.dtype = getattr(torch, job.shape.dtype)
    inputs = Inputs(Routing.of(job), world.rank, job.shape.hidden, dtype, world.device)
    spec = spec_of(job)
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, bound_of(spec))
    with _opening(case, world, inputs) as step:
        keys = step.keys
        label = f"{case.name}: {keys['backend']} beside a product"
        traffic = traffic_of(world, inputs.draws, spec)
        ops = [(op, {"backend": str(keys["backend"]), "l2": "cold", "beside": beside}) for op, beside in OPS]
        load = expert_load(world, inputs.draws, spec)
        work = work_of(world, inputs.draws, load, traffic, ops)
        samples = measure(world, steps, step, step_listener(progress, steps.total, work=work), label)
    by_op = traffic.by_op
    nothing = Traffic(0, 0)
    return [
        result_line(case, op, by_op.get(op, nothing), samples, index)
        | shape_keys(case, str(keys["backend"]))
        | load_keys(load, index)
        | keys
        | {"l2": "cold", "beside": beside}
        for index, (op, beside) in enumerate(OPS)
    ]


@contextmanager
def _opening(case: Case, world: World, inputs: Inputs) -> Iterator[OverlapStep]:
    section = case.job.exchange
    with ExitStack() as stack:
        exchange = stack.enter_context(Exchange(world, spec_of(case.job), section.backend, sms=section.sms))
        yield stack.enter_context(closing(OverlapStep(world, exchange, inputs, case.job.overlap)))
