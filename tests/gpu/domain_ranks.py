"""Functions that ranks of several domains run in the tests of rails and of exchanges between domains on GPUs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from raymoe.device.graph import Graph
from raymoe.errors import PeerTimeout
from raymoe.memory.world import World
from raymoe.moe.differentiable import combine, dispatch
from raymoe.net.nccl_rail import NcclRail
from tests.gpu.exchange_ranks import own_stream
from tests.unit.exchange_cases import Case, batches, open_exchange, run_step
from tests.unit.gradient_cases import Gradients, apply, loss_weights, scales_of
from tests.unit.test_world_of import error_of


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


def lose_a_rank(world: World, case: Case, lost: int) -> tuple[int, float, tuple[str, str]] | None:
    """Kill a rank before the second step; return the peer that this rank names, how long it waited, its next error."""
    exchange = open_exchange(world, case)
    run_step(exchange, case, batches(case, 0)[world.rank])
    world.barrier("first step")
    if world.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        run_step(exchange, case, batches(case, 1)[world.rank])
    waited = time.monotonic() - start
    batch = batches(case, 1)[world.rank].on(world.device)
    again = error_of(lambda: exchange.dispatch(batch.x, batch.ids, batch.weights))
    exchange.close(together=False)
    world.abort("the test is over")  # closing waits for no peer
    return caught.value.peer, waited, again


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
