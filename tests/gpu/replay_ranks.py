"""What ranks run to replay captured steps of a layer many times, with delays and other kernels beside them.

Each step has a reference of each batch: the bits of its first replay, which are near those of an eager call of the
layer. A counter on the device takes every replay whose bits differ. Batches change from replay to replay and y is NaN
before each, so late rows of an earlier replay are seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from raymoe.exchange.peer import column_pieces
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe import in_microbatches
from raymoe.moe.layer import LayerForm, MoELayer
from raymoe.moe.router_formulas import RouterForm
from raymoe.rows.elementwise import add

FFN, TOPK = 256, 3
SMS, PARTS, BATCHES, CAPTURES, COMPARED_EVERY, ASKED_EVERY = 16, 2, 4, 3, 100, 1000
"""SMs of the exchange; parts of `microbatches`; different rows; captures of each step, with other delays inside;
replays between comparisons by the host; replays between looks at the clock."""
MICROSECOND = 2_000
"""Clock cycles of a GPU, about."""
STEPS = ("layer", "microbatches", "halves")


@dataclass(frozen=True)
class Replays:
    """How often each step is replayed, and of which layer. No replay begins after `seconds`."""

    of_each: int
    tokens: int
    experts_dtype: str | None = None
    hidden: int = 512
    piece_tiles: int = 1
    """Tiles side by side in a piece, where a combine runs beside its product."""
    few: bool = True
    seconds: float = 60.0
    seed: int = 7
    steps: tuple[str, ...] = STEPS


class LayerSteps:
    """A layer, and steps that read the same x and write the same y. Each enqueues all on the current stream."""

    def __init__(self, world: World, asked: Replays) -> None:
        experts = 4 * world.size
        form = LayerForm(
            FFN,
            RouterForm(experts, TOPK, score="sigmoid"),
            shared=128,
            norm=1e-6,
            residual=True,
            experts_dtype=asked.experts_dtype,
        )
        spec = ExchangeSpec(asked.tokens, asked.hidden, experts, topk=TOPK, depth=0)
        many = mock.patch("raymoe.exchange.peer.workspace.FEW_TOKENS", 0)
        pieces = mock.patch.object(column_pieces, "LEAST_TILES", asked.piece_tiles)
        with nullcontext() if asked.few else many, pieces:
            sms = SMS if world.device.type == "cuda" else "auto"
            self.layer = MoELayer(world, spec, form, sms=sms, seed=asked.seed).eval()
        rows, dtype = asked.tokens - 7 * world.rank, torch.bfloat16
        generator = torch.Generator().manual_seed(10 * asked.seed + world.rank)
        self.batches = torch.randn(BATCHES, rows, asked.hidden, generator=generator).to(world.device, dtype)
        self.x, self.y = (torch.zeros(rows, asked.hidden, dtype=dtype, device=world.device) for _ in range(2))
        self.rng = np.random.default_rng((asked.seed, world.rank, 1))

    def run(self, step: str) -> None:
        if step in ("layer", "overlap"):
            self.layer.overlap = "combine" if step == "overlap" else "none"
            self.y.copy_(self.layer(self.x))
        elif step == "microbatches":
            self.y.copy_(in_microbatches(self.layer, self.x, PARTS))
        else:
            self.y.copy_(self.in_halves())

    def in_halves(self) -> torch.Tensor:
        """Run the layer with the shared expert between the halves of a dispatch, and a delay between all halves."""
        layer, exchange = self.layer, self.layer.exchange
        spec, device = exchange.spec, self.x.device
        h, routing = layer.route(self.x)
        dtype: torch.dtype = getattr(torch, spec.output_dtype)
        rows = torch.empty(spec.rows(exchange.world.size), spec.hidden, dtype=dtype, device=device)
        sent = exchange.dispatch_send(h, routing.topk_idx, routing.topk_weights, out=rows)
        delay(self.rng, device, 0.5)
        shared = layer.apply_shared(h)
        got = exchange.dispatch_receive(sent)
        pending = exchange.combine_send(layer.multiply_rows(got).to(h.dtype), got)
        delay(self.rng, device, 0.5)
        return add(exchange.combine_receive(pending), shared, self.x)

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Let a delay come before half of the layer's dispatches, products and combines, on the stream of each."""
        with ExitStack() as stack:
            for owner, name in (
                (self.layer, "dispatch_rows"),
                (self.layer, "multiply_rows"),
                (self.layer.exchange, "combine_unkept"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._after_delay(getattr(owner, name))))
            yield

    def _after_delay(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def later(*arguments: Any, **options: Any) -> Any:
            delay(self.rng, self.x.device, 0.5)
            return function(*arguments, **options)

        return later


def delay(rng: np.random.Generator, device: torch.device, share: float, us: float = 60.0) -> bool:
    """Enqueue a delay on the current stream in a share of the calls; return whether one was."""
    if rng.random() >= share:
        return False
    if device.type == "cuda":
        torch.cuda._sleep(int(rng.exponential(us * MICROSECOND)))
    return True


class Beside:
    """Another stream, with delays and other kernels, each of which may take all SMs. CPU ranks have none."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.device, self.kernels = device, 0
        if self.stream is not None:
            self._square = torch.randn(2048, 2048, device=device).bfloat16()
            self._product, self._bytes = torch.empty_like(self._square), torch.zeros(16 << 20, device=device)

    def enqueue(self, rng: np.random.Generator) -> None:
        """Before half of the replays let a kernel run beside what the current stream gets next."""
        kind = rng.integers(0, 4)
        if self.stream is None or kind > 1:
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            delay(rng, self.device, 0.5)
            if kind == 0:
                torch.mm(self._square, self._square, out=self._product)
            else:
                self._bytes.add_(1)
        self.kernels += 1


def captured(function: Callable[[], None], device: torch.device, stack: ExitStack) -> Callable[[], None]:
    """Return what replays a capture of the function; on CPU ranks the function."""
    if device.type == "cpu":
        return function
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        function()
    stack.callback(graph.reset)
    replay: Callable[[], None] = graph.replay
    return replay


class Judge:
    """Compares y with the first replay of its step and batch, on the device; without a wait."""

    def __init__(self, steps: tuple[str, ...], plain: torch.Tensor) -> None:
        """`plain` has the result of an eager call for each batch."""
        self._plain, self._wanted = plain, {}
        self._wrong = {step: torch.zeros((), dtype=torch.int64, device=plain.device) for step in steps}
        self._distance = torch.zeros((), device=plain.device)
        self.replays, self.compared, self.differing = dict.fromkeys(steps, 0), 0, 0

    def judge(self, step: str, batch: int, y: torch.Tensor) -> None:
        bits = y.view(torch.int16)
        if (step, batch) not in self._wanted:
            self._wanted[step, batch] = bits.clone()
            far = (y - self._plain[batch]).abs().max().float().nan_to_num(nan=torch.inf)
            self._distance = torch.maximum(self._distance, far)
        self._wrong[step] += (bits != self._wanted[step, batch]).any()
        self.replays[step] += 1

    def compare_on_host(self, step: str, batch: int, y: torch.Tensor) -> None:
        self.compared += 1
        self.differing += not torch.equal(y.view(torch.int16), self._wanted[step, batch])

    def result(self) -> dict[str, Any]:
        return {
            "replays": self.replays,
            "wrong": {step: int(count) for step, count in self._wrong.items()},
            "compared_by_host": self.compared,
            "wrong_by_host": self.differing,
            "distance": round(float(self._distance), 4),
        }


def replay_many(world: World, asked: Replays) -> dict[str, Any]:
    """Replay each step so often, in an order that is drawn. Return what differed, and what was done."""
    device, replays = world.device, {}
    with ExitStack() as stack, torch.no_grad():
        if device.type == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        steps, plain = LayerSteps(world, asked), []
        for batch in steps.batches:
            steps.x.copy_(batch)
            plain.append(steps.layer(steps.x).clone())
        for step in asked.steps:
            steps.run(step)  # kernels are compiled and loaded
            settle(device)
            with steps.delayed():
                replays[step] = [captured(lambda step=step: steps.run(step), device, stack) for _ in range(CAPTURES)]
        settle(device)
        return replay_judged(asked, steps, replays, Judge(asked.steps, torch.stack(plain)))


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replay_judged(
    asked: Replays, steps: LayerSteps, replays: dict[str, list[Callable[[], None]]], judge: Judge
) -> dict[str, Any]:
    """Replay one of the captures of a step that is drawn for all ranks, on a batch, until all replays are done.

    Each rank draws its own delays, kernels beside and capture.
    """
    exchange, device, began, late = steps.layer.exchange, steps.x.device, time.monotonic(), 0
    world, beside = exchange.world, Beside(device)
    turns, rng = np.random.default_rng(asked.seed), np.random.default_rng((asked.seed, world.rank, 2))
    order = turns.permutation(np.repeat(asked.steps, asked.of_each)).tolist()
    for number, step in enumerate(order, start=1):
        batch = int(turns.integers(BATCHES))
        steps.x.copy_(steps.batches[batch])
        steps.y.fill_(torch.nan)
        beside.enqueue(rng)
        late += delay(rng, device, 0.3) + delay(rng, device, 0.004, us=5000)
        replays[step][int(rng.integers(CAPTURES))]()
        judge.judge(step, batch, steps.y)
        if number % COMPARED_EVERY == 0:
            exchange.check()
            judge.compare_on_host(step, batch, steps.y)
        if number % ASKED_EVERY == 0:
            spent: list[Any] = world.swap(time.monotonic() - began, f"replays: {number}")
            if max(spent) > asked.seconds:
                break
    exchange.check()
    seconds = round(time.monotonic() - began, 1)
    return judge.result() | {"delays_before": late, "kernels_beside": beside.kernels, "seconds": seconds}
