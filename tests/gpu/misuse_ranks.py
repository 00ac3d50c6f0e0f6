"""Functions that ranks run in the tests of misuse on GPUs. Most of them run on CPU ranks too."""

from __future__ import annotations

import gc
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import ConfigError, WiringError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.peer.workspace import Links, Workspace
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World
from tests.unit.exchange.exchange_cases import Case, Result, run_case

MIB = 1 << 20
WORDS = Layout.of([Region.words("any", 1)])


def ll_with_and_without_nvlink(world: World, case: Case) -> tuple[bool, str, str, list[Result]]:
    """Return whether rows may travel in lines, the backend, the backend if a pair has no NVLink, and its results."""
    with Exchange(world, case.spec, "fused") as exchange:
        backend_name, lines = exchange._backend.kind.name, world.shared(Links).lines
    group = world.group(list(range(world.size)))  # a new world, which has not asked NVML yet
    assert group is not None
    with mock.patch("raymoe.exchange.peer.workspace.nvlinked", lambda *_: group.rank != 0):
        with Exchange(group, case.spec, "fused") as exchange:
            backend_without_nvlink = exchange._backend.kind.name
            assert not exchange._backend.workspace.bounds.ll_lines
        return lines, backend_name, backend_without_nvlink, run_case(group, case)


def step(exchange: Exchange, value: float = 1.0) -> torch.Tensor:
    """Run a step; every element of the result must be 2 * value."""
    spec, device = exchange.spec, exchange.world.device
    x = torch.full((3, spec.hidden), value, dtype=getattr(torch, spec.dtype), device=device)
    ids = torch.arange(6, device=device).view(3, 2) % spec.experts
    got = exchange.dispatch(x, ids, torch.ones(3, 2, device=device))
    return exchange.combine(got.x, got)


def error_of(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def misuse_errors(world: World, spec: ExchangeSpec, backend: str) -> dict[str, str]:
    """Return the error of each mistake. The exchange works after each; after its world is closed, it refuses calls."""
    device, errors = world.device, {}
    exchange, other = Exchange(world, spec, backend), Exchange(world, spec, backend)
    x = torch.ones(3, spec.hidden, dtype=getattr(torch, spec.dtype), device=device)
    ids, weights = torch.zeros(3, 2, dtype=torch.int64, device=device), torch.ones(3, 2, device=device)
    with exchange._calls.lock:  # as if another thread were in a call
        errors["at once"] = error_of(lambda: exchange.dispatch(x, ids, weights))
    assert step(other).eq(2).all()
    first, second = exchange.dispatch(x, ids, weights), exchange.dispatch(3 * x, ids, weights)
    errors["taken"] = error_of(lambda: exchange.combine(first.x, first))
    assert exchange.combine(second.x, second).eq(6).all()
    errors["negative"] = error_of(lambda: exchange.dispatch(torch._neg_view(x), ids, weights))
    errors["weights"] = error_of(lambda: exchange.dispatch(x, ids, torch._neg_view(weights)))
    errors["vmap"] = error_of(lambda: torch.vmap(lambda x: exchange.dispatch(x, ids, weights).x)(x[None]))
    assert step(exchange, 2.0).eq(4).all()
    exchange.check()
    world.close()
    errors["closed"] = error_of(lambda: step(exchange))
    with pytest.raises(WiringError, match="its world is closed"):
        Exchange(world, spec, backend)
    exchange.close()
    other.close()
    return errors


def free_mib(world: World) -> int:
    """Return the free MiB of this rank's GPU, when no rank has work in progress."""
    world.gpu.synchronise()
    world.barrier("before")
    free = torch.cuda.mem_get_info(world.device)[0]
    world.barrier("after")
    return int(free // MIB)


def drop_without_close(world: World, spec: ExchangeSpec, backend: str) -> tuple[list[int], list[str]]:
    """Drop an exchange and a workspace without close().

    Return the free memory before, with both, after both were dropped, and after another allocation; and the warnings.
    """
    gc.collect()
    with Exchange(world, spec, backend) as exchange:
        step(exchange)  # loads libraries and kernels; torch allocates its memory
    del exchange  # torch reuses its rows for the next one
    free = [free_mib(world)]
    exchange, space = Exchange(world, spec, backend), Workspace(world, spec)
    step(exchange)
    free.append(free_mib(world))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del exchange, space
    free.append(free_mib(world))
    for _ in range(2):  # the second frees memory that a peer still mapped at the first
        world.allocate(WORDS, "any", where="device").close()
    free.append(free_mib(world))
    return free, [str(each.message) for each in caught if each.category is ResourceWarning]


def dropped_during_a_capture(world: World, spec: ExchangeSpec, backend: str) -> bool:
    """Drop an exchange during a capture. Its destructor touches no device, so the capture is complete."""
    dropped_exchange = Exchange(world, spec, backend)
    with Exchange(world, spec, backend) as exchange, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        step(exchange)
        torch.cuda.synchronize(world.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x = torch.ones(3, spec.hidden, dtype=getattr(torch, spec.dtype), device=world.device)
            ids = torch.zeros(3, 2, dtype=torch.int64, device=world.device)
            got = exchange.dispatch(x, ids, torch.ones(3, 2, device=world.device))
            del dropped_exchange
            gc.collect()
            y = exchange.combine(got.x, got)
        for _ in range(3):
            graph.replay()
        exchange.check()
        right = bool(y.eq(2).all())
        del graph
    return right
