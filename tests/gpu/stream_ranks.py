"""Functions that ranks run in tests of streams: exchanges on several streams, some inside captures."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.workspace import Workspace
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch
from tests.unit.exchange.exchange_cases import (
    Case,
    Result,
    apply_experts,
    batches,
    expert_major,
    open_exchange,
    result_of,
    run_step,
    standing,
)

SLOW_CYCLES = 20_000_000
"""About 10 ms on a stream: long enough for an operation that does not wait to overtake."""


def new_stream(world: World) -> Any:
    make: Any = torch.cuda.Stream  # has no annotations
    return make(world.device)


class ExchangeStep:
    """One step of an exchange; its methods enqueue on the current stream."""

    def __init__(self, exchange: Exchange, case: Case, step: int) -> None:
        self.exchange, self.case = exchange, case
        self.batch = batches(case, step)[exchange.world.rank].on(exchange.world.device)
        self.count = torch.tensor([self.batch.num_tokens], dtype=torch.int32, device=exchange.world.device)
        self.got: Dispatched
        self.x: torch.Tensor
        self.rows: torch.Tensor
        self.y: torch.Tensor

    def dispatch(self) -> None:
        batch = self.batch
        self.got = self.exchange.dispatch(batch.x, batch.ids, batch.weights, self.count)

    def experts(self) -> None:
        self.x = expert_major(self.got).clone()
        self.rows = apply_experts(self.exchange, self.got, self.x)

    def combine(self) -> None:
        self.y = self.exchange.combine(self.rows, self.got, weighted=self.case.weighted)

    def result(self) -> Result:
        self.exchange.check()
        return result_of(self.got, self.x, self.y)


def alternating(world: World, case: Case) -> list[Result]:
    """Run the operations of a step on two streams in turn, one of them slow.

    The caller orders its own reads; the library must order the reads and writes of its operations.
    """
    streams, results = [new_stream(world) for _ in range(2)], []
    with open_exchange(world, case) as exchange:
        for step in range(len(case.routing)):
            first, second = streams[step % 2], streams[1 - step % 2]
            exchange_step, again = ExchangeStep(exchange, case, step), ExchangeStep(exchange, case, step)
            torch.cuda.synchronize(world.device)
            with torch.cuda.stream(first):
                torch.cuda._sleep(SLOW_CYCLES)
                exchange_step.dispatch()
                exchange_step.experts()
            with torch.cuda.stream(second):
                again.dispatch()  # of the same rows, into the same memory, after the first
                again.experts()
                torch.cuda._sleep(SLOW_CYCLES)
            second.wait_stream(first)
            with torch.cuda.stream(second):
                exchange_step.combine()
            with torch.cuda.stream(first):
                again.combine()
            results.append(exchange_step.result())
            assert torch.equal(exchange_step.y, again.y)
    return results


def free_on_another_stream(world: World, case: Case) -> list[Any]:
    """Free memory on the first stream, and write to all that it gets, while a combine waits on a second stream."""
    first, second = (new_stream(world) for _ in range(2))
    with open_exchange(world, case) as exchange:
        ys = []
        for _ in range(2):  # the first pass connects and compiles
            exchange_step = ExchangeStep(exchange, case, 0)
            torch.cuda.synchronize(world.device)
            with torch.cuda.stream(first):
                exchange_step.dispatch()
                exchange_step.experts()
            second.wait_stream(first)
            with torch.cuda.stream(second):
                torch.cuda._sleep(SLOW_CYCLES)
                exchange_step.combine()
            del exchange_step.got
            with torch.cuda.stream(first):  # of the sizes that a dispatch allocates, and of others
                taken = [torch.full((512 << size,), 0x7F, dtype=torch.uint8, device=world.device) for size in range(12)]
            exchange.check()
            del taken
            ys.append(exchange_step.y.float().cpu().numpy())
        return ys


def drop_between_two_streams(world: World, case: Case, grad: bool, turns: int = 3) -> list[bool]:
    """Drop what a dispatch has made, and its ids, while its combine or that one's backward waits on a second stream.

    The first stream then writes to all memory that it gets. Returns whether each turn's result is that of one stream.
    """
    batch, device = batches(case, 0)[world.rank].on(world.device), world.device
    first, second = (new_stream(world) for _ in range(2))
    same, wanted, there = [], torch.empty(0), torch.empty(0)
    with open_exchange(world, case) as exchange, torch.set_grad_enabled(grad):
        for turn in range(1 + turns):
            reader = second if turn else first
            x, ids, weights = batch.x.clone(), batch.ids.clone(), batch.weights.clone()
            torch.cuda.synchronize(device)
            with torch.cuda.stream(first):
                ids = ids + 0  # memory of the first stream
                count = torch.full((1,), batch.num_tokens, dtype=torch.int32, device=device)
                got = dispatch(exchange, x, ids, weights, count)
            if not turn:
                torch.cuda.synchronize(device)
                there = standing(got)[1]  # type: ignore[arg-type]  # it has the attributes
            reader.wait_stream(first)
            with torch.cuda.stream(reader):
                rows = (0.5 * got.x).detach().requires_grad_(grad)
                torch.cuda._sleep(0 if grad else SLOW_CYCLES)
                found = combine(exchange, rows, got, weighted=case.weighted)
                if grad:
                    ones = torch.ones_like(found)
                    torch.cuda._sleep(SLOW_CYCLES)
                    (found,) = torch.autograd.grad(found, rows, ones)
                    found = torch.where(there[:, None], found, 0)
            for each in (got.x, got.weights, got.expert_offsets, got.expert_counts):  # as torch asks of the caller
                each.record_stream(reader)
            sizes = [each.nbytes for each in (*got.routing, ids, count)]
            del got, ids, count, x, weights, rows
            with torch.cuda.stream(first):
                sizes += [512 << size for size in range(12)]
                taken = [torch.full((size,), 0x7F, dtype=torch.uint8, device=device) for size in sizes * 3]
            torch.cuda.synchronize(device)
            exchange.check()
            del taken
            if turn:
                same.append(torch.equal(found, wanted))
            else:
                wanted = found
    return same


def capture_after_warm_up(world: World, case: Case) -> list[Result]:
    """Warm up two exchanges on a side stream, then capture each with `torch.cuda.graph`, as torch documents it."""
    results = []
    with ExitStack() as stack:
        exchanges = [stack.enter_context(open_exchange(world, case)) for _ in range(2)]
        graphs = []
        for exchange in exchanges:
            exchange_step, side = ExchangeStep(exchange, case, 0), new_stream(world)
            side.wait_stream(torch.cuda.current_stream(world.device))
            with torch.cuda.stream(side):
                exchange_step.dispatch()
                exchange_step.experts()
                exchange_step.combine()
            torch.cuda.current_stream(world.device).wait_stream(side)
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                exchange_step.dispatch()
                exchange_step.experts()
                exchange_step.combine()
            graphs.append((graph, exchange_step))
        for graph, exchange_step in graphs:
            exchange_step.y.fill_(torch.nan)
            graph.replay()
            results.append(exchange_step.result())
        del graphs, graph
    return results


def capture_on_two_streams(world: World, case: Case) -> list[Result]:
    """Capture a dispatch and its combine on two streams that the caller does not join in between."""
    with open_exchange(world, case) as exchange:
        exchange_step, side = ExchangeStep(exchange, case, 0), new_stream(world)
        exchange_step.dispatch()
        exchange_step.experts()
        rows = exchange_step.rows
        torch.cuda.synchronize(world.device)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream(world.device))
            torch.cuda._sleep(SLOW_CYCLES)
            exchange_step.dispatch()
            with torch.cuda.stream(side):  # only the library orders it after the dispatch
                y = exchange.combine(rows, exchange_step.got, weighted=case.weighted)
            torch.cuda.current_stream(world.device).wait_stream(side)
        exchange_step.y = y
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(world.device)
        exchange_step.rows, exchange_step.x = rows, expert_major(exchange_step.got)
        found = exchange_step.result()
        del graph
    return [found]


def capture_while_busy(world: World, case: Case) -> str:
    """Return the error of a capture while an eager operation may still run on another stream; then run a good step."""
    with open_exchange(world, case) as exchange:
        exchange_step, busy = ExchangeStep(exchange, case, 0), new_stream(world)
        torch.cuda.synchronize(world.device)
        with torch.cuda.stream(busy):
            torch.cuda._sleep(20 * SLOW_CYCLES)
            exchange_step.dispatch()
        capturing, graph = new_stream(world), torch.cuda.CUDAGraph()
        with torch.cuda.stream(capturing):
            graph.capture_begin(capture_error_mode="thread_local")
            with pytest.raises(ConfigError) as refused:
                exchange_step.dispatch()
            torch.zeros(1, device=world.device)
            graph.capture_end()
        del graph
        torch.cuda.synchronize(world.device)
        run_step(exchange, case, batches(case, 0)[world.rank])
        return str(refused.value)


def use_all_sms_twice(world: World, case: Case) -> tuple[str, int]:
    """Return the error of two exchanges with all SMs each on two streams. There is one rank, so no peer to wait for."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_exchange(world, case)) for _ in range(2))
        exchange_step, other = ExchangeStep(first, case, 0), ExchangeStep(second, case, 0)
        torch.cuda.synchronize(world.device)
        streams = [new_stream(world) for _ in range(2)]
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(20 * SLOW_CYCLES)
            exchange_step.dispatch()
        with torch.cuda.stream(streams[1]), pytest.raises(ConfigError) as refused:
            other.dispatch()
        torch.cuda.synchronize(world.device)
        with torch.cuda.stream(streams[1]):  # no other operation runs now
            other.dispatch()
        torch.cuda.synchronize(world.device)
        for exchange in (first, second):
            exchange.check()
        return str(refused.value), world.gpu.sms


def side_by_side(world: World, case: Case, rounds: int) -> list[list[Result]]:
    """Run two exchanges that fit on the GPU together, on two streams, enqueued in an order that differs by rank."""
    sms = world.gpu.sms // 2
    found = []
    with ExitStack() as stack:
        exchanges = [stack.enter_context(open_exchange(world, case, sms=sms)) for _ in range(2)]
        streams = [new_stream(world) for _ in range(2)]
        for index in range(rounds):
            step = index % len(case.routing)
            steps = [ExchangeStep(exchange, case, step) for exchange in exchanges]
            torch.cuda.synchronize(world.device)
            order = (0, 1) if (world.rank + index) % 2 else (1, 0)
            for operation in ("dispatch", "experts", "combine"):
                for exchange_index in order:
                    with torch.cuda.stream(streams[exchange_index]):
                        getattr(steps[exchange_index], operation)()
            found.append([exchange_step.result() for exchange_step in steps])
    return found


def in_a_green_context(world: World, case: Case) -> tuple[str, list[Result]]:
    """Return the error of an exchange of all SMs on a stream with fewer SMs, and the results of one that fits there."""
    results = []
    with ExitStack() as stack:
        large = stack.enter_context(open_exchange(world, case))
        small = stack.enter_context(open_exchange(world, case, sms=16))
        exchange_step = ExchangeStep(large, case, 0)
        run_step(large, case, batches(case, 0)[world.rank])
        green: Any = torch.cuda.green_contexts.GreenContext.create(16, device_id=world.device.index)
        green.set_context()
        try:
            with pytest.raises(ConfigError) as refused:
                exchange_step.dispatch()
            for step in range(len(case.routing)):
                fitting = ExchangeStep(small, case, step)
                torch.cuda._sleep(SLOW_CYCLES)
                fitting.batch.x.mul_(1)  # an operation of torch on the same stream before, and one after
                fitting.dispatch()
                fitting.experts()
                fitting.combine()
                fitting.y = fitting.y.clone()
                torch.cuda.current_stream(world.device).synchronize()
                results.append(fitting.result())
        finally:
            green.pop_context()
        torch.cuda.synchronize(world.device)
        run_step(large, case, batches(case, 0)[world.rank])
        return str(refused.value), results


def one_workspace(world: World, case: Case) -> list[Result]:
    """Run two exchanges of one workspace on two streams: in order, no matter how many SMs they take."""
    results = []
    with Workspace(world, case.spec) as space, ExitStack() as stack:
        exchanges = [stack.enter_context(Exchange(world, case.spec, workspace=space)) for _ in range(2)]
        streams = [new_stream(world) for _ in range(2)]
        for step in range(len(case.routing)):
            steps = [ExchangeStep(exchange, case, step) for exchange in exchanges]
            torch.cuda.synchronize(world.device)
            for stream, exchange_step in zip(streams, steps, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLOW_CYCLES)
                    exchange_step.dispatch()
                    exchange_step.experts()
            for stream, exchange_step in zip(streams, steps, strict=True):
                with torch.cuda.stream(stream):
                    exchange_step.combine()
            results.append(steps[step % 2].result())
    return results
