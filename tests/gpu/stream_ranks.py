"""On a rank: exchanges on several streams, some inside captures."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.workspace import Workspace
from raymoe.memory.world import World
from tests.unit.exchange_cases import (
    Case,
    Result,
    apply_experts,
    batches,
    expert_major,
    open_exchange,
    result_of,
    run_step,
)

SLOW_CYCLES = 20_000_000
"""About 10 ms of a stream: long enough for an operation that does not wait to overtake."""


def new_stream(world: World) -> Any:
    make: Any = torch.cuda.Stream  # has no annotations
    return make(world.device)


class Stepping:
    """One step of an exchange, enqueued on whichever stream is current."""

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
    """The operations of a step on two streams in turn, one of which is slow. The caller orders what it reads itself,
    and the library what its operations read and write."""
    streams, results = [new_stream(world) for _ in range(2)], []
    with open_exchange(world, case) as exchange:
        for step in range(len(case.routing)):
            first, second = streams[step % 2], streams[1 - step % 2]
            stepping, again = Stepping(exchange, case, step), Stepping(exchange, case, step)
            torch.cuda.synchronize(world.device)
            with torch.cuda.stream(first):
                torch.cuda._sleep(SLOW_CYCLES)
                stepping.dispatch()
                stepping.experts()
            with torch.cuda.stream(second):
                again.dispatch()  # of the same rows, into the same memory, behind the first
                again.experts()
                torch.cuda._sleep(SLOW_CYCLES)
            second.wait_stream(first)
            with torch.cuda.stream(second):
                stepping.combine()
            with torch.cuda.stream(first):
                again.combine()
            results.append(stepping.result())
            assert torch.equal(stepping.y, again.y)
    return results


def dropped_on_another_stream(world: World, case: Case) -> list[Any]:
    """A combine waits on a second stream while the first one gives memory away and writes to all that it gets."""
    first, second = (new_stream(world) for _ in range(2))
    with open_exchange(world, case) as exchange:
        ys = []
        for _ in range(2):  # the first time connects and compiles
            stepping = Stepping(exchange, case, 0)
            torch.cuda.synchronize(world.device)
            with torch.cuda.stream(first):
                stepping.dispatch()
                stepping.experts()
            second.wait_stream(first)
            with torch.cuda.stream(second):
                torch.cuda._sleep(SLOW_CYCLES)
                stepping.combine()
            del stepping.got
            with torch.cuda.stream(first):  # of the sizes of what a dispatch allocates, and of others
                taken = [torch.full((512 << size,), 0x7F, dtype=torch.uint8, device=world.device) for size in range(12)]
            exchange.check()
            del taken
            ys.append(stepping.y.float().cpu().numpy())
        return ys


def captured_after_warm_up(world: World, case: Case) -> list[Result]:
    """As torch's documentation says: warm up on a side stream, then `torch.cuda.graph`, two exchanges one by one."""
    results = []
    with ExitStack() as stack:
        exchanges = [stack.enter_context(open_exchange(world, case)) for _ in range(2)]
        graphs = []
        for exchange in exchanges:
            stepping, side = Stepping(exchange, case, 0), new_stream(world)
            side.wait_stream(torch.cuda.current_stream(world.device))
            with torch.cuda.stream(side):
                stepping.dispatch()
                stepping.experts()
                stepping.combine()
            torch.cuda.current_stream(world.device).wait_stream(side)
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stepping.dispatch()
                stepping.experts()
                stepping.combine()
            graphs.append((graph, stepping))
        for graph, stepping in graphs:
            stepping.y.fill_(torch.nan)
            graph.replay()
            results.append(stepping.result())
        del graphs, graph
    return results


def captured_on_two_streams(world: World, case: Case) -> list[Result]:
    """A dispatch and its combine on two streams of one capture, which the caller does not join in between."""
    with open_exchange(world, case) as exchange:
        stepping, side = Stepping(exchange, case, 0), new_stream(world)
        stepping.dispatch()
        stepping.experts()
        rows = stepping.rows
        torch.cuda.synchronize(world.device)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream(world.device))
            torch.cuda._sleep(SLOW_CYCLES)
            stepping.dispatch()
            with torch.cuda.stream(side):  # nothing but the library orders it behind the dispatch
                y = exchange.combine(rows, stepping.got, weighted=case.weighted)
            torch.cuda.current_stream(world.device).wait_stream(side)
        stepping.y = y
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(world.device)
        stepping.rows, stepping.x = rows, expert_major(stepping.got)
        found = stepping.result()
        del graph
    return [found]


def captured_while_busy(world: World, case: Case) -> str:
    """What is said of a capture while an eager operation may still run on another stream; then it works."""
    with open_exchange(world, case) as exchange:
        stepping, busy = Stepping(exchange, case, 0), new_stream(world)
        torch.cuda.synchronize(world.device)
        with torch.cuda.stream(busy):
            torch.cuda._sleep(20 * SLOW_CYCLES)
            stepping.dispatch()
        capturing, graph = new_stream(world), torch.cuda.CUDAGraph()
        with torch.cuda.stream(capturing):
            graph.capture_begin(capture_error_mode="thread_local")
            with pytest.raises(ConfigError) as refused:
                stepping.dispatch()
            torch.zeros(1, device=world.device)
            graph.capture_end()
        del graph
        torch.cuda.synchronize(world.device)
        run_step(exchange, case, batches(case, 0)[world.rank])
        return str(refused.value)


def too_large_together(world: World, case: Case) -> tuple[str, int]:
    """What is said where two exchanges with all SMs each are used on two streams. One rank, which waits for nobody."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_exchange(world, case)) for _ in range(2))
        stepping, other = Stepping(first, case, 0), Stepping(second, case, 0)
        torch.cuda.synchronize(world.device)
        streams = [new_stream(world) for _ in range(2)]
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(20 * SLOW_CYCLES)
            stepping.dispatch()
        with torch.cuda.stream(streams[1]), pytest.raises(ConfigError) as refused:
            other.dispatch()
        torch.cuda.synchronize(world.device)
        with torch.cuda.stream(streams[1]):  # nothing runs any more
            other.dispatch()
        torch.cuda.synchronize(world.device)
        for exchange in (first, second):
            exchange.check()
        return str(refused.value), world.gpu.sms


def side_by_side(world: World, case: Case, rounds: int) -> list[list[Result]]:
    """Two exchanges that fit on the GPU together, on two streams, enqueued in different orders on different ranks."""
    sms = world.gpu.sms // 2
    found = []
    with ExitStack() as stack:
        exchanges = [stack.enter_context(open_exchange(world, case, sms=sms)) for _ in range(2)]
        streams = [new_stream(world) for _ in range(2)]
        for index in range(rounds):
            step = index % len(case.routing)
            steps = [Stepping(exchange, case, step) for exchange in exchanges]
            torch.cuda.synchronize(world.device)
            order = (0, 1) if (world.rank + index) % 2 else (1, 0)
            for act in ("dispatch", "experts", "combine"):
                for which in order:
                    with torch.cuda.stream(streams[which]):
                        getattr(steps[which], act)()
            found.append([stepping.result() for stepping in steps])
    return found


def in_a_green_context(world: World, case: Case) -> tuple[str, list[Result]]:
    """What is said of an exchange of all SMs on a stream that has some of them; then one that fits works there."""
    results = []
    with ExitStack() as stack:
        large = stack.enter_context(open_exchange(world, case))
        small = stack.enter_context(open_exchange(world, case, sms=16))
        stepping = Stepping(large, case, 0)
        run_step(large, case, batches(case, 0)[world.rank])
        green: Any = torch.cuda.green_contexts.GreenContext.create(16, device_id=world.device.index)
        green.set_context()
        try:
            with pytest.raises(ConfigError) as refused:
                stepping.dispatch()
            for step in range(len(case.routing)):
                fitting = Stepping(small, case, step)
                torch.cuda._sleep(SLOW_CYCLES)
                fitting.batch.x.mul_(1)  # an operation of torch's on the same stream before, and one behind
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
    """Two exchanges of one workspace on two streams: in order, whatever they take."""
    results = []
    with Workspace(world, case.spec) as space, ExitStack() as stack:
        exchanges = [stack.enter_context(Exchange(world, case.spec, workspace=space)) for _ in range(2)]
        streams = [new_stream(world) for _ in range(2)]
        for step in range(len(case.routing)):
            steps = [Stepping(exchange, case, step) for exchange in exchanges]
            torch.cuda.synchronize(world.device)
            for stream, stepping in zip(streams, steps, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLOW_CYCLES)
                    stepping.dispatch()
                    stepping.experts()
            for stream, stepping in zip(streams, steps, strict=True):
                with torch.cuda.stream(stream):
                    stepping.combine()
            results.append(steps[step % 2].result())
    return results
