"""An error of one rank after the first block that crosses between domains: what it raises, and what the others do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import CaptureError, ConfigError, PeerTimeout, RaymoeError, WiringError
from raymoe.exchange.cpu.cpu_backend import CpuBackend
from raymoe.exchange.domains import hierarchical_gpu
from raymoe.exchange.domains.hierarchical import HierarchicalRows
from raymoe.exchange.domains.hierarchical_gpu import HierarchicalGpu
from raymoe.exchange.domains.rail_operation import publish_failures
from raymoe.exchange.exchange import Exchange
from raymoe.memory.world import World
from tests.unit.exchange.domains.test_hierarchical_gpu import BACKEND, SPEC, opened
from tests.unit.exchange.exchange_cases import Case, apply_experts, batches, expert_major, run_step
from tests.unit.exchange.exchange_judge import judge_combine
from tests.unit.memory.test_world_of import error_of, groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture

MISTAKE = "dispatch takes 9 SMs while an exchange on another stream may hold 130"
TOO_LATE = "rank 0 left {op} after its rows had begun to cross between domains, because of {kind}: {error}"


@contextmanager
def failing(place: object, name: str, error: Exception) -> Iterator[None]:
    with mock.patch.object(place, name, side_effect=error):
        yield


def step_with_a_mistake(rank: int, where: str) -> Any:
    """Let a part of rank 0's second step raise `ConfigError`. Return each step's error, its time, and good results."""
    case = Case(2, SPEC, BACKEND, ("uniform",) * 4, ragged=False)
    reports: list[Any] = []
    with World.of(domain=1, timeout_s=20) as world, opened(world, SPEC) as exchange:
        backend = exchange._backend
        assert isinstance(backend, HierarchicalGpu)
        places = {
            "dispatch": (backend._inside, "dispatch"),
            "combine": (backend._rail_sums, "cross"),
        }
        for step in range(4):
            start = time.monotonic()
            try:
                if rank == 0 and step == 1:
                    with failing(*places[where], ConfigError(MISTAKE)):
                        try:
                            run_step(exchange, case, batches(case, step)[rank])
                        except ConfigError as error:
                            reports.append(str(error))
                reports.append(run_step(exchange, case, batches(case, step)[rank]).y)
            except RaymoeError as error:
                reports.append((type(error), str(error), time.monotonic() - start))
    return reports


@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_mistake_found_too_late_ends_the_exchange_on_all_ranks_with_its_reason(groups: Groups, where: str) -> None:
    case = Case(2, SPEC, BACKEND, ("uniform",) * 4, ragged=False)
    reason = TOO_LATE.format(op=where, kind="ConfigError", error=MISTAKE)
    for rank, (first, *later) in enumerate(groups(2, step_with_a_mistake, where)):
        judge_combine(case, batches(case, 0)[rank], first)
        assert [(kind, said) for kind, said, _ in later] == [(RaymoeError, reason)] * 3
        assert later[0][2] < 5, "no rank waits for the deadline of 20 s"


def combine_after_a_mistake(rank: int) -> Any:
    """Let the combine inside rank 0's domain raise `ConfigError` once, before anything has crossed. Combine again."""
    case = Case(2, SPEC, BACKEND, ("uniform",), ragged=False)
    with World.of(domain=1, timeout_s=20) as world, opened(world, SPEC) as exchange:
        backend = exchange._backend
        assert isinstance(backend, HierarchicalGpu)
        batch = batches(case, 0)[rank]
        got = exchange.dispatch(batch.x, batch.ids, batch.weights)
        rows = apply_experts(exchange, got, expert_major(got))
        said = None
        if rank == 0:
            with failing(backend._inside, "combine", ConfigError(MISTAKE)):
                said = error_of(lambda: exchange.combine(rows, got))
        return said, exchange.combine(rows, got).float().numpy()


def test_a_mistake_that_is_found_before_anything_crosses_is_harmless(groups: Groups) -> None:
    case = Case(2, SPEC, BACKEND, ("uniform",), ragged=False)
    for rank, (said, y) in enumerate(groups(2, combine_after_a_mistake)):
        assert said == (("ConfigError", MISTAKE) if rank == 0 else None)
        judge_combine(case, batches(case, 0)[rank], y)


def step_without_memory(rank: int, backend: str) -> Any:
    """Let rank 0 of two domains of CPU ranks fail inside its domain. Return each rank's two errors and its time."""
    spec = replace(SPEC, dtype="float32")
    case = Case(4, spec, backend, ("uniform",) * 2, ragged=False)
    with World.of(domain=2, timeout_s=20) as world, Exchange(world, spec, backend) as exchange:
        run_step(exchange, case, batches(case, 0)[rank])
        backend = exchange._backend
        assert isinstance(backend, CpuBackend)
        carrier = backend._carrier
        assert isinstance(carrier, HierarchicalRows)
        start, errors = time.monotonic(), []
        with failing(carrier._inside, "dispatch", RuntimeError("no memory")) if rank == 0 else nullcontext():
            for _ in range(2):
                try:
                    run_step(exchange, case, batches(case, 1)[rank])
                except (RaymoeError, RuntimeError) as error:
                    errors.append(error)
        return errors, time.monotonic() - start


@pytest.mark.parametrize("backend", ["host", "collective"])
def test_ranks_of_all_domains_learn_why_a_rank_failed(groups: Groups, backend: str) -> None:
    reason = TOO_LATE.format(op="dispatch", kind="RuntimeError", error="no memory")
    failed, *others = groups(4, step_without_memory, backend)
    assert [(type(error), str(error)) for error in failed[0]] == [
        (RuntimeError, "no memory"),
        (RaymoeError, "this exchange is unusable: RuntimeError ended an operation early"),
    ]
    for errors, took in others:
        assert [(type(error), str(error)) for error in errors] == [(RaymoeError, reason)] * 2
        assert took < 8, "no rank waits for the deadline of 20 s"


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (ConfigError("why"), RaymoeError, True),
        (CaptureError("why"), RaymoeError, True),
        (MemoryError("why"), MemoryError, True),
        (PeerTimeout("dispatch", 1, 2, 1, 0, 1.0, 3), PeerTimeout, False),
        (WiringError("why"), WiringError, False),
        (RaymoeError("the reason of another rank"), RaymoeError, False),
    ],
)
def test_only_errors_of_the_ranks_own_are_told(error: Exception, raised: type[Exception], told: bool) -> None:
    reasons: list[str] = []
    rail: Any = SimpleNamespace(fail=reasons.append)
    with pytest.raises(Exception) as caught, publish_failures(rail, "combine", 3):
        raise error
    reason = f"rank 3 {TOO_LATE[7:]}".format(op="combine", kind=type(error).__name__, error=error)
    assert (type(caught.value), reasons) == (raised, [reason] if told else [])


def test_a_mistake_in_a_capture_is_harmless() -> None:
    """Nothing crosses before the graph is launched."""
    backend: Any = HierarchicalGpu.__new__(HierarchicalGpu)
    backend._world, backend._rail = SimpleNamespace(device=torch.device("cpu"), rank=0), None
    with (
        mock.patch.object(hierarchical_gpu, "capturing", lambda _: True),
        pytest.raises(ConfigError, match="a mistake"),
        backend._publish_failures("dispatch"),
    ):
        raise ConfigError("a mistake")
