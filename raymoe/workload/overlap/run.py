"""Dispatch and combine beside a matrix product on the same GPU, and what each costs the other.

A sample of a pair begins behind a barrier of all ranks, as every sample does; from there the exchange runs in a stream
of high priority and `torch.mm` in one of low priority, and the clock notes when each is done and when both are. Alone,
each is timed in the same way with nothing beside it. All of it on a cold L2 cache, enqueued while the stream is held.

In halves, sending alone runs beside the product, and what receives follows when both are done: no multiprocessor waits
for a peer while the product could use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from raymoe.config import Case
from raymoe.config.sections import OverlapSection
from raymoe.errors import ConfigError
from raymoe.exchange.exchange import Exchange
from raymoe.memory.world import World
from raymoe.moe.weights import generator
from raymoe.workload.clock import OpClock
from raymoe.workload.exchange.gpu import GpuExchangeStep
from raymoe.workload.inputs import Inputs, Routing
from raymoe.workload.measure import Line, Step, Steps, measure, result_line, shape_keys
from raymoe.workload.memory_needed import spec_of
from raymoe.workload.oracle import BOUNDS, bound_of, error_of
from raymoe.workload.progress import Progress, step_listener
from raymoe.workload.traffic import Traffic, traffic_of

PRODUCT = "product"
ALONE: tuple[tuple[str, str | None], ...] = (("dispatch", None), ("combine", None), (PRODUCT, None))
OPS = ALONE + tuple(
    each for op in ("dispatch", "combine") for each in ((op, PRODUCT), (PRODUCT, op), (f"{op}+{PRODUCT}", None))
)
"""What a step times, and what runs beside it: each alone; then each beside the other, and both until the last ends."""

WARM_UPS = 2
LEAST_LEFT = 8
"""Multiprocessors that a product is left with at least."""


class Product:
    """`a @ b` into `out`, in a stream of its own, kept off the multiprocessors of an exchange."""

    def __init__(
        self, world: World, hidden: int, dtype: torch.dtype, asked: OverlapSection, exchange_sms: int | None
    ) -> None:
        device, source = world.device, generator(PRODUCT, world.rank, device=world.device)
        self.a = torch.empty(asked.rows, hidden, device=device).uniform_(-1, 1, generator=source).to(dtype)
        self.b = torch.empty(hidden, asked.columns, device=device).uniform_(-1, 1, generator=source).to(dtype)
        self.out = torch.empty(asked.rows, asked.columns, dtype=dtype, device=device)
        self._carved: int | None = None
        new_stream: Any = torch.cuda.Stream  # has no annotations
        self.plain: torch.cuda.Stream = new_stream(device, priority=0)
        self.kept_off = self.plain
        if asked.keep_off == "carveout":
            self._carved = _left_to(exchange_sms, world, asked.keep_off)
        elif asked.keep_off == "green_context":
            self._green, self.kept_off = _green_stream(world, _left_to(exchange_sms, world, asked.keep_off))
        with torch.cuda.stream(self.plain):
            self()
        world.gpu.synchronise()
        self.want = self.out.clone()

    def __call__(self, *, carved: bool = False) -> None:
        """Enqueue on the current stream. The library that can be told to leave multiprocessors is taken in any case, so
        that what is compared is the same kernel."""
        library = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        _torch_c()._set_sm_carveout_experimental(self._carved if carved else None)
        try:
            torch.mm(self.a, self.b, out=self.out)
        finally:
            _torch_c()._set_sm_carveout_experimental(None)
            torch.backends.cuda.preferred_blas_library(library)

    def error(self) -> float:
        """Of the last product, relative to its largest element: another split of the sums rounds otherwise."""
        return float((self.out.float() - self.want.float()).abs().max() / self.want.float().abs().max())


class OverlapStep(GpuExchangeStep):
    """One of each of OPS, with the tokens of a step."""

    ops = tuple((op, "cold") for op, _ in OPS)
    priority = -1

    def __init__(self, world: World, exchange: Exchange, inputs: Inputs, asked: OverlapSection) -> None:
        self._halves = asked.form == "halves"
        self._product = Product(world, exchange.spec.hidden, inputs.dtype, asked, exchange.sms)
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
            dispatch = self._pair(self._dispatch_send, self._dispatch_receive)
            if verify:
                self._run_experts()
            combine = self._pair(self._combine_send, self._combine_receive)
            if verify:
                error = max(error_of(self.y, self.batch, self.experts), self._product_error())
                self._fill_rows()
            alone = [self.clock.cold_us(work) for work in (self._dispatch, self._combine, self._product_alone)]
        return Step((*alone, *dispatch, *combine), error)

    def _make_ready(self, captured: bool) -> None:
        assert not captured, "an overlap is timed eagerly"
        self.clock = OpClock(self.world, self.stream, self.exchange.check, captured=True)
        for _ in range(WARM_UPS):  # memory and kernels are there before the stream is held for the first time
            for send, receive in (
                (self._dispatch_send, self._dispatch_receive),
                (self._combine_send, self._combine_receive),
            ):
                self._enqueue_pair(send, receive)
            self._product_alone()
            self.exchange.check()

    @property
    def keys(self) -> Line:
        return super().keys | {"graph": False}

    def _pair(self, send: Callable[[], None], receive: Callable[[], None]) -> tuple[float, float, float]:
        """Microseconds until the exchange is done, until the product is, and until both are."""
        both = self.clock.cold_us(lambda: self._enqueue_pair(send, receive))
        return self.clock.since_begin(self._exchanged), self.clock.since_begin(self._multiplied), both

    def _enqueue_pair(self, send: Callable[[], None], receive: Callable[[], None]) -> None:
        """The exchange first: what was enqueued first and has priority takes its multiprocessors first."""
        beside = self._product.kept_off
        self._forked.record(self.stream)
        send()
        if not self._halves:
            receive()
            self._exchanged.record(self.stream)
        with torch.cuda.stream(beside):
            beside.wait_event(self._forked)
            self._product(carved=True)
            self._multiplied.record(beside)
        self.stream.wait_event(self._multiplied)
        if self._halves:
            receive()
            self._exchanged.record(self.stream)

    def _dispatch_send(self) -> None:
        if not self._halves:
            self._dispatch()
            return
        self.got = self.exchange.dispatch_send(self.batch.x, self.batch.ids, self.batch.weights)

    def _dispatch_receive(self) -> None:
        if self._halves:
            self.exchange.dispatch_receive(self.got)

    def _combine_send(self) -> None:
        if not self._halves:
            self._combine()
            return
        self._sent = self.exchange.combine_send(self.rows, self.got, out=self.y)

    def _combine_receive(self) -> None:
        if self._halves:
            self.exchange.combine_receive(self._sent)

    def _product_alone(self) -> None:
        """In the clock's own stream, on all multiprocessors."""
        self._product()

    def _product_error(self) -> float:
        error = self._product.error()
        bound = BOUNDS[self.inputs.dtype]
        return 0.0 if error <= bound else math.inf


def run_overlap(case: Case, world: World, progress: Callable[[Progress], None]) -> list[Line]:
    """Lines for dispatch, combine and the product, each alone and each beside the other, and for pairs of them."""
    job = case.job
    dtype: torch.dtype = getattr(torch, job.shape.dtype)
    inputs = Inputs(Routing.of(job), world.rank, job.shape.hidden, dtype, world.device)
    spec = spec_of(job)
    steps = Steps(job.steps.warmup, job.steps.count, job.steps.verify, bound_of(spec))
    with _opening(case, world, inputs) as step:
        keys = step.keys
        what = f"{case.name}: {keys['backend']} beside a product"
        measured = measure(world, steps, step, step_listener(progress, steps.total), what)
    by_op = traffic_of(world, inputs.draws, spec).by_op
    nothing = Traffic(0, 0)
    return [
        result_line(case, op, by_op.get(op, nothing), measured, place)
        | shape_keys(case, str(keys["backend"]))
        | keys
        | {"l2": "cold", "beside": beside}
        for place, (op, beside) in enumerate(OPS)
    ]


@contextmanager
def _opening(case: Case, world: World, inputs: Inputs) -> Iterator[OverlapStep]:
    asked = case.job.exchange
    with ExitStack() as stack:
        exchange = stack.enter_context(Exchange(world, spec_of(case.job), asked.backend, sms=asked.sms))
        yield stack.enter_context(closing(OverlapStep(world, exchange, inputs, case.job.overlap)))


def _left_to(exchange_sms: int | None, world: World, how: str) -> int:
    """How many multiprocessors the product leaves to the exchange."""
    if exchange_sms is None or world.gpu.sms - exchange_sms < LEAST_LEFT:
        taken = "an unknown number" if exchange_sms is None else str(exchange_sms)
        raise ConfigError(
            f"overlap.keep_off {how} asked for and the exchange takes {taken} of {world.gpu.sms} multiprocessors; at "
            f"least {LEAST_LEFT} are left to a product: lower exchange.sms, or take priority"
        )
    return exchange_sms


def _green_stream(world: World, left: int) -> tuple[Any, torch.cuda.Stream]:
    """A green context of all multiprocessors but these, and its stream."""
    green: Any = getattr(torch.cuda, "green_contexts", None)
    if green is None or not green.SUPPORTED:
        raise ConfigError(
            f"overlap.keep_off green_context asked for and torch {torch.__version__} makes none: carveout"
        )
    context = green.GreenContext.create(world.gpu.sms - left, 0)
    stream = context.Stream()
    new_stream: Any = torch.cuda.Stream
    return context, new_stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _torch_c() -> Any:
    """Has no annotations for what is experimental."""
    return torch._C
