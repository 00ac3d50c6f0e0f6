"""Functions that ranks of several domains run in the tests of rails and of exchanges between domains on GPUs."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from raymoe.cuda.graph import Graph
from raymoe.errors import Aborted, PeerTimeout
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.domains.rail_rows import RailRows
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, quantise
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch, expert_major
from raymoe.net.nccl_rail import NcclRail
from tests.gpu.exchange_ranks import Captures, own_stream, poison
from tests.unit.exchange.domains.test_hierarchical_kernels import awkward_rows
from tests.unit.exchange.exchange_cases import MANY, Case, Result, batches, open_exchange, run_step
from tests.unit.memory.test_world_of import error_of
from tests.unit.moe.gradient_cases import Gradients, apply, loss_weights, scales_of


def use_rail(world: World) -> dict[str, Any]:
    """Gather and swap over the rail, eagerly and in a graph whose input changes from replay to replay."""
    rail, device, N = world.shared(NcclRail), world.device, world.domains
    with own_stream(device):
        mine, gathered = torch.zeros(3, device=device), torch.zeros(N * 3, device=device)
        sent, received = torch.zeros(N, 2, device=device), torch.zeros(N, 2, device=device)

        def both() -> None:
            rail.gather("gather", gathered, mine)()
            rail.swap("swap", received, sent)()

        def load(value: float) -> None:
            mine.copy_(torch.tensor([value, world.rank, -world.rank]))
            sent.copy_(torch.tensor([[world.rank, value * domain] for domain in range(N)]))

        def result() -> list[list[float]]:
            rail.settle("result")
            return [gathered.tolist(), received.flatten().tolist()]

        load(1)
        both()
        found: dict[str, Any] = {"results": [result()]}
        stream = torch.cuda.current_stream().cuda_stream
        with Graph.capture(world.gpu, stream, both) as graph:
            for value in (2, 3, 4):
                load(value)
                graph.replay(stream)
                found["results"].append(result())
    return found | {"host id": os.environ.get("NCCL_HOSTID"), "capturable": rail.capturable, "lagging": rail.lagging()}


Lost = tuple[int | None, float, tuple[str, str], float]


def lose_a_rank(world: World, case: Case, lost: int, replayed: bool, between_chunks: bool = False) -> Lost:
    """Kill a rank before the second step, which may be a replay. Or kill it in that step, when it has sent a chunk.

    Return the peer that this rank names, how long it waited, its next error, and how long it then took to close all.
    """
    exchange, graph = open_exchange(world, case), torch.cuda.CUDAGraph()
    batch = batches(case, 1)[world.rank].on(world.device)

    def step() -> None:
        got = exchange.dispatch(batch.x, batch.ids, batch.weights)
        exchange.combine(expert_major(got).clone(), got)

    with own_stream(world.device):
        stream = torch.cuda.current_stream()
        run_step(exchange, case, batches(case, 0)[world.rank])
        if replayed:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        world.barrier("first step")
        if world.rank == lost and between_chunks:
            with mock.patch.object(RailRows, "_gather", _gather_once):
                step()
        if world.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises((PeerTimeout, Aborted)) as caught:
            for _ in range(2):  # a wait that fails in the combine of another domain shows here in the next step
                graph.replay() if replayed else step()
                exchange.check()
        waited = time.monotonic() - start
        again = error_of(lambda: exchange.dispatch(batch.x, batch.ids, batch.weights))
        start = time.monotonic()
        exchange.close(together=False)
        world.abort("the test is over")  # closing waits for no peer
        world.close(together=False)
        closed = time.monotonic() - start
    return caught.value.peer, waited, again, closed


def _gather_once(self: RailRows, op: str, block: torch.Tensor) -> None:
    """Gather the first chunk, and die after it."""
    self._rail.gather(op, block.flatten(0, 1), block[self._me])()
    torch.cuda.current_stream().synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def close_before_a_graph(world: World, case: Case) -> float:
    """Capture a step, and free the graph only after the world is closed. Return how many seconds closing took."""
    graph, batch = torch.cuda.CUDAGraph(), batches(case, 0)[world.rank].on(world.device)
    with own_stream(world.device):
        stream = torch.cuda.current_stream()
        with open_exchange(world, case) as exchange:
            run_step(exchange, case, batches(case, 0)[world.rank])
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                got = exchange.dispatch(batch.x, batch.ids, batch.weights)
                exchange.combine(expert_major(got).clone(), got)
            graph.replay()
            exchange.check()
        start = time.monotonic()
        world.close()
        closed = time.monotonic() - start
        del graph, got
    return closed


def replay_gradients(world: World, case: Case) -> list[Gradients]:
    """Capture forward and backward once, and replay them with the tokens of each step, which go to other experts."""
    spec, device, local = case.spec, world.device, case.spec.local_experts(world.size)
    side, found = torch.cuda.Stream(device), []
    with open_exchange(world, case) as exchange, torch.cuda.stream(side):
        first = batches(case, 0)[world.rank].on(device)
        x, ids, weights = first.x.requires_grad_(), first.ids, first.weights.requires_grad_()
        scale = scales_of(case)[world.rank * local :][:local].float().to(device).requires_grad_()
        dy = loss_weights(case, world.rank, spec.tokens).to(device, x.dtype)

        def run() -> list[torch.Tensor]:
            got = dispatch(exchange, x, ids, weights)
            y = combine(exchange, apply(got, scale, world.rank * local, case.weighted), got, weighted=case.weighted)
            with torch.autograd.set_multithreading_enabled(False):  # all on this thread, which may be capturing
                return [y.detach(), *torch.autograd.grad(y, [x, weights, scale], dy)]

        run()  # makes what the backward pass needs
        exchange.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            results = run()
        for step in range(len(case.routing)):
            batch = batches(case, step)[world.rank]
            with torch.no_grad():
                for mine, given in ((x, batch.x), (ids, batch.ids), (weights, batch.weights)):
                    mine.copy_(given)
                for each in results:
                    each.fill_(torch.nan)
            graph.replay()
            exchange.check()
            found.append(Gradients(*(each.cpu() for each in results)))
        del graph, results
    return found


def quantise_both_ways(world: World) -> list[bool]:
    """Return whether values and scales by torch equal those of the kernels, in an exchange inside the domain."""
    domain, x = world.domain, awkward_rows(torch.bfloat16).to(world.device)
    spec = ExchangeSpec(*x.shape, experts=domain.size, topk=1, wire=FP8, output="raw", alignment=1)
    with Exchange(domain, spec, backend="fused") as exchange:
        ids = torch.full((len(x), 1), domain.rank, device=world.device)  # every rank sends to itself
        got = exchange.dispatch(x, ids, torch.ones(len(x), 1, device=world.device))
        exchange.check()
        values, scales = quantise(x)
        assert got.scales is not None
        kept = ~values.float().isnan()
        same = [torch.equal(got.scales[: len(x)], scales)]
        bytes_of, wanted = got.x[: len(x)].view(torch.uint8), values.view(torch.uint8)
        return [*same, torch.equal(bytes_of[kept], wanted[kept])]


def replay_quantised(world: World, case: Case) -> list[tuple[Result, Result]]:
    """Return the results of each step by a replay, and those of an eager step."""
    with own_stream(world.device), open_exchange(world, case) as exchange:
        run_step(exchange, case, batches(case, 0)[world.rank])
        captures, found = Captures(world, exchange, case, case.spec.tokens), []
        replay = captures.whole()
        for step in range(len(case.routing)):
            batch = batches(case, step)[world.rank]
            captures.inputs.load(batch)
            poison(captures.got, captures.y)
            replay()
            found.append((captures.result(), run_step(exchange, case, batch)))
        captures.close()
    return found


def compare_chunks(world: World, case: Case) -> dict[str, Any]:
    """Run each step by rows at once, then in chunks, eagerly and replayed. Name the results that differ in a bit."""
    found: dict[str, Any] = {"same": []}
    at_once = replace(case, backend=MANY)
    with own_stream(world.device), open_exchange(world, at_once) as whole, open_exchange(world, case) as chunked:
        assert whole.chunks == 1 and chunked.chunks is not None and chunked.sms is not None
        found |= {"chunks": chunked.chunks, "free": world.gpu.sms - chunked.sms}
        run_raw(chunked, case, 0, world)
        inputs = batches(case, 0)[world.rank].on(world.device)
        got = chunked.dispatch(inputs.x, inputs.ids, inputs.weights)
        y = torch.zeros_like(inputs.x)

        def both() -> None:
            nonlocal got
            got = chunked.dispatch(inputs.x, inputs.ids, inputs.weights)
            chunked.combine(half(got, inputs.x.dtype), got, out=y)

        stream = torch.cuda.current_stream().cuda_stream
        pool: Any = torch.cuda.MemPool()

        def captured() -> None:
            with torch.cuda.use_mem_pool(pool):
                both()

        chunked.check()
        with Graph.capture(world.gpu, stream, captured) as graph:
            for step in range(len(case.routing)):
                wanted = run_raw(whole, at_once, step, world)
                eager = run_raw(chunked, case, step, world)
                batch = batches(case, step)[world.rank]
                for mine, given in ((inputs.x, batch.x), (inputs.ids, batch.ids), (inputs.weights, batch.weights)):
                    mine.copy_(given)
                y.fill_(torch.nan)
                graph.replay(stream)
                chunked.check()
                differ = {"eager": eager, "replayed": raw_results(got, y)}
                found["same"].append(
                    {how: [key for key, value in each.items() if value != wanted[key]] for how, each in differ.items()}
                )
    return found


def run_raw(exchange: Exchange, case: Case, step: int, world: World) -> dict[str, bytes]:
    """Run a step eagerly, and return its results as bytes."""
    batch = batches(case, step)[world.rank].on(world.device)
    got = exchange.dispatch(batch.x, batch.ids, batch.weights)
    y = exchange.combine(half(got, batch.x.dtype), got)
    exchange.check()
    return raw_results(got, y)


def half(got: Dispatched, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that depend on those that came; no number is NaN."""
    rows = got.x.view(torch.uint8)
    rows = (rows if got.index is None else rows.index_select(0, got.index)).view(got.x.dtype)
    return (rows.to(dtype) * 0.5).nan_to_num(nan=0.0)


def raw_results(got: Dispatched, y: torch.Tensor) -> dict[str, bytes]:
    """The results of a step as bytes, without the gaps between experts."""
    rows = got.x.view(torch.uint8) if got.index is None else got.x.view(torch.uint8).index_select(0, got.index)
    offsets, counts = got.expert_offsets.tolist(), got.expert_counts.tolist()
    kept = [place for begin, count in zip(offsets, counts, strict=False) for place in range(begin, begin + count)]
    at = torch.tensor(kept, dtype=torch.int64, device=y.device)
    found = {"x": rows.index_select(0, at), "weights": got.weights.index_select(0, at), "y": y.view(torch.uint8)}
    if got.scales is not None:
        scales = got.scales if got.index is None else got.scales.index_select(0, got.index)
        found["scales"] = scales.index_select(0, at)
    numbers = {"offsets": repr(offsets).encode(), "counts": repr(counts).encode()}
    return numbers | {name: each.cpu().numpy().tobytes() for name, each in found.items()}


def delay_chunks(world: World, case: Case) -> list[Result]:
    """Run steps in which the ranks of domain 1 send each chunk late, by a wait on the stream of the rail."""
    with own_stream(world.device), late_chunks(world), open_exchange(world, case) as exchange:
        return [run_step(exchange, case, batches(case, step)[world.rank]) for step in range(len(case.routing))]


def late_chunks(world: World) -> AbstractContextManager[object]:
    """Let the ranks of domain 1 send each chunk late, by a wait on the stream of the rail."""
    real = RailRows._gather

    def gather(self: RailRows, op: str, block: torch.Tensor) -> None:
        if world.rank >= world.domain.size:
            torch.cuda._sleep(20_000_000)  # about 10 ms
        real(self, op, block)

    return mock.patch.object(RailRows, "_gather", gather)


def leave_no_sms(world: World, case: Case) -> tuple[int, str, str]:
    """Let a dispatch that waits for chunks take all SMs. Return how many it left, and what it raised."""
    with (
        own_stream(world.device),
        mock.patch("raymoe.exchange.choice.sms_beside", lambda limit, most: most),  # noqa: ARG005
        late_chunks(world),
        open_exchange(world, case) as exchange,
    ):
        assert exchange.sms is not None
        kind, says = error_of(lambda: run_step(exchange, case, batches(case, 0)[world.rank]))
        return world.gpu.sms - exchange.sms, kind, says


def gradients_of(exchange: Exchange, case: Case) -> list[torch.Tensor]:
    """Return y and the gradients of x and of the weights."""
    batch = batches(case, 0)[exchange.world.rank].on(exchange.world.device)
    x, weights = batch.x.requires_grad_(), batch.weights.requires_grad_()
    got = dispatch(exchange, x, batch.ids, weights)
    y = combine(exchange, 0.5 * got.x, got)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, weights))]


def backward_without_sms(world: World, case: Case) -> tuple[int, list[bool]]:
    """Leave no SM to NCCL in a backward pass whose rows come late.

    Return how many are left, and whether the results are those of rows at once. The forward pass has rows at once.
    """
    with own_stream(world.device):
        with Exchange(world, case.spec, "fused", chunk=case.spec.tokens) as at_once:
            assert at_once.chunks == 1
            wanted = gradients_of(at_once, case)
            at_once.check()
        with (
            mock.patch("raymoe.exchange.choice.sms_beside", lambda limit, most: most),  # noqa: ARG005
            mock.patch("raymoe.exchange.domains.hierarchical_gpu._in_backward_pass", lambda: True),
            late_chunks(world),
            open_exchange(world, case) as exchange,
        ):
            assert exchange.chunks is not None and exchange.chunks > 1 and exchange.sms is not None
            found = gradients_of(exchange, case)
            exchange.check()
            left = world.gpu.sms - exchange.sms
    return left, [torch.equal(mine, want) for mine, want in zip(found, wanted, strict=True)]


def crossings_of_a_checkpointed_step(world: World, case: Case) -> list[bool]:
    """Return of each crossing of rows, in their order, whether a dispatch runs beside it."""
    real, beside = RailRows.crossing, []

    def crossing(self: RailRows, op: str, **options: bool) -> Any:
        beside.append(options["beside"])
        return real(self, op, **options)

    with own_stream(world.device), open_exchange(world, case) as exchange:
        batch = batches(case, 0)[world.rank].on(world.device)
        x, weights = batch.x.requires_grad_(), batch.weights.requires_grad_()

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            got = dispatch(exchange, x, batch.ids, weights)
            return combine(exchange, torch.tanh(got.x), got)

        with mock.patch.object(RailRows, "crossing", crossing):
            checkpoint(layer, x, weights, use_reentrant=False).sum().backward()
        exchange.check()
        return beside
