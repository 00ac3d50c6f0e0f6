"""Misuse of an exchange: each mistake raises one sentence, and the exchange still works afterwards."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from raymoe.errors import ConfigError, PeerTimeout, PlacementError, WiringError
from raymoe.exchange.calls import Calls
from raymoe.exchange.choice import Choice
from raymoe.exchange.cpu.cpu_backend import CpuBackend, OperationOrder
from raymoe.exchange.cpu.host import HostSlots
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.unit.worlds import close, each, together, wired

T, H, E, K = 4, 16, 4, 2
SPEC = ExchangeSpec(tokens=T, hidden=H, experts=E, topk=K, dtype="float32", alignment=1)
BACKENDS = ("host", "collective", "allgather")


def tokens(value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.full((3, H), value), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)


@pytest.fixture
def world() -> Iterator[World]:
    [opened] = wired(1)
    yield opened
    close([opened])


class HeldDispatch:
    """A dispatch that does not return before `may_end` is set."""

    def __init__(self, exchange: Exchange) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self._dispatch = exchange._backend.dispatch

    def dispatch(self, *arguments: Any) -> Any:
        self.began.set()
        assert self.may_end.wait(20)
        return self._dispatch(*arguments)


@contextmanager
def in_dispatch(exchange: Exchange) -> Iterator[None]:
    """Run the block while another thread is in a dispatch of this exchange."""
    held_dispatch, outcome = HeldDispatch(exchange), []
    with mock.patch.object(exchange._backend, "dispatch", held_dispatch.dispatch):
        thread = threading.Thread(target=lambda: outcome.extend(together([lambda: exchange.dispatch(*tokens())])))
        thread.start()
        assert held_dispatch.began.wait(20)
        try:
            yield
        finally:
            held_dispatch.may_end.set()
            thread.join(20)
    assert outcome[0].tokens == 3, outcome


def test_simultaneous_calls_are_refused_and_alternating_threads_are_not(world: World) -> None:
    with Exchange(world, SPEC) as exchange, Exchange(world, SPEC) as other:
        got = other.dispatch(*tokens())
        rows = torch.ones(8, H)
        with in_dispatch(exchange):
            for op, call in {
                "dispatch": lambda: exchange.dispatch(*tokens()),
                "dispatch_send": lambda: exchange.dispatch_send(*tokens()),
                "combine": lambda: exchange.combine(rows, got),
                "check": exchange.check,
                "close": exchange.close,
            }.items():
                with pytest.raises(
                    ConfigError, match=f"^{op} on rank 0 while dispatch of this exchange has not returned"
                ):
                    call()
            with pytest.raises(ConfigError, match=r"^combine on rank 0 while dispatch of an exchange that shares"):
                other.combine(rows, got)
        assert other.combine(rows, got, weighted=False).eq(2).all()
        for _ in range(3):  # each call in a new thread
            [result] = together([lambda: exchange.dispatch(*tokens())])
            [y] = together([lambda got=result: exchange.combine(got.x, got)])
            assert y.eq(2).all()


def test_only_exchanges_that_share_a_workspace_refuse_simultaneous_calls(world: World) -> None:
    """As on GPUs, where two threads may each have their own workspace."""
    shared, own = (SimpleNamespace(calls=Calls(), captured=False) for _ in range(2))
    exchanges = []
    for workspace in (shared, shared, own):
        backend = CpuBackend(world, SPEC, HostSlots(world, SPEC))
        cast(Any, backend).workspace = workspace
        with mock.patch("raymoe.exchange.exchange.make_backend", lambda *_, backend=backend: backend):
            exchanges.append(Exchange(world, SPEC))
    first, second, third = exchanges
    with in_dispatch(first):
        with pytest.raises(ConfigError, match="while dispatch of an exchange that shares its memory"):
            second.dispatch(*tokens())
        assert third.dispatch(*tokens()).tokens == 3
    for exchange in exchanges:
        exchange.close()


def test_racing_threads_get_errors_and_never_wrong_results(world: World) -> None:
    with Exchange(world, replace(SPEC, depth=2)) as exchange:

        def run(value: float) -> int:
            right = 0
            for _ in range(300):
                try:
                    got = exchange.dispatch(*tokens(value))
                    y = exchange.combine(got.x, got)
                except ConfigError:
                    continue  # refused because the other thread is in a call
                assert y.eq(2 * value).all(), y
                right += 1
            return right

        outcomes = together([lambda: run(1.0), lambda: run(3.0)])
        assert all(isinstance(right, int) for right in outcomes), outcomes
        assert sum(outcomes) > 0
        assert exchange.combine((got := exchange.dispatch(*tokens())).x, got).eq(2).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_raise_if_one_has_no_memory_for_rows(backend: str) -> None:
    worlds = wired(2)
    empty = torch.empty

    def refused(*arguments: Any, **options: Any) -> torch.Tensor:
        if threading.current_thread().name == "1" and arguments[0] == (8 * 2, H):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return empty(*arguments, **options)

    before = mapped_regions("test")
    with mock.patch("torch.empty", refused):
        outcomes = each(worlds, lambda world: Exchange(world, SPEC, backend))
    says = f"rank 1 cannot allocate 1 times 16 rows of {H} torch.float32: take a smaller capacity or depth"
    assert [type(outcome) for outcome in outcomes] == [WiringError, PlacementError]
    assert all(str(outcome).startswith(says) for outcome in outcomes)
    assert mapped_regions("test") == before

    def good(world: World) -> bool:
        with Exchange(world, SPEC, backend) as exchange:
            got = exchange.dispatch(*tokens(3.0))
            return bool(exchange.combine(got.x, got).eq(6).all())

    assert each(worlds, good) == [True, True]
    close(worlds)
    del outcomes
    gc.collect()  # their tracebacks refer to the worlds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_device_of_torch_is_ignored(world: World, backend: str, dtype: str) -> None:
    x, ids, weights = tokens(3.0)
    x = x.to(getattr(torch, dtype))
    x[0] = torch.inf
    with torch.device("meta"), Exchange(world, replace(SPEC, dtype=dtype, layout="rank"), backend) as exchange:
        got = exchange.dispatch(x, ids, weights)
        assert got.index is not None
        y = exchange.combine(got.x[got.index], got)
    assert y.equal(2 * x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_after_the_world_is_closed_are_refused(backend: str) -> None:
    [world] = wired(1)
    exchange = Exchange(world, SPEC, backend)
    got = exchange.dispatch(*tokens())
    close([world])
    for op, call in {
        "dispatch": lambda: exchange.dispatch(*tokens()),
        "combine": lambda: exchange.combine(got.x, got),
        "check": exchange.check,
    }.items():
        with pytest.raises(ConfigError, match=f"^{op} on rank 0: its world is closed; make a new world"):
            call()
    with pytest.raises(WiringError, match="its world is closed"):
        Exchange(world, SPEC, backend)
    exchange.close()
    with pytest.raises(ConfigError, match="this exchange is closed"):
        exchange.check()
    assert got.x[0].eq(1).all()  # dispatched rows stay valid


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_overwritten_by_a_later_dispatch_are_refused(world: World, backend: str) -> None:
    with Exchange(world, SPEC, backend) as exchange:
        first, second = exchange.dispatch(*tokens(1.0)), exchange.dispatch(*tokens(5.0))
        assert first.x.data_ptr() == second.x.data_ptr()
        says = "a later dispatch has overwritten; give each dispatch memory by out=, or .* a depth of more than 1"
        for rows in (first.x, first.x.view(-1).view(8, H), first.x.detach()):
            with pytest.raises(ConfigError, match=says):
                exchange.combine(rows, first)
        assert exchange.combine(second.x, second).eq(10).all()
        assert exchange.combine(torch.ones(8, H), first).eq(2).all()  # the caller's own rows
        again = exchange.dispatch(*tokens(2.0), out=second.x)  # the exchange's memory, passed as out
        with pytest.raises(ConfigError, match=says):
            exchange.combine(second.x, second)
        del second
        assert exchange.combine(again.x, again).eq(4).all()
        del again
        with pytest.raises(ConfigError, match=says):  # although the later dispatch is gone
            exchange.combine(first.x, first)


def test_rows_in_separate_memory_outlive_later_dispatches(world: World) -> None:
    with Exchange(world, replace(SPEC, depth=2)) as two, Exchange(world, replace(SPEC, layout="rank")) as slots:
        gots = [two.dispatch(*tokens(value)) for value in (1.0, 5.0)]
        separate = two.dispatch(*tokens(7.0), out=torch.empty(8, H))
        for got, other in (gots, gots[::-1], (separate, gots[0])):
            with pytest.raises(ConfigError, match="rows are in memory that holds the rows of another dispatch"):
                two.combine(other.x, got)
        for got, want in zip((*gots, separate), (2, 10, 14), strict=True):
            assert two.combine(got.x, got).eq(want).all()
        # With layout rank, combine takes the caller's own rows, so a later dispatch overwrites nothing.
        first = slots.dispatch(*tokens(1.0))
        assert first.index is not None
        rows = first.x[first.index]
        slots.dispatch(*tokens(5.0))
        assert slots.combine(rows, first).eq(2).all()


def mapped_regions(name: str) -> int:
    return sum(f"memfd:raymoe-{name}" in line for line in Path("/proc/self/maps").read_text().splitlines())


def make_and_drop(world: World, make: Callable[[World], object]) -> list[str]:
    """Make an object and drop it with the cyclic collector disabled; return the warnings."""
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dropped = make(world)
            del dropped
        return [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    finally:
        gc.enable()


def used_exchange(world: World, backend: str) -> Exchange:
    exchange = Exchange(world, SPEC, backend)
    got = exchange.dispatch(*tokens())
    exchange.combine(got.x, got)
    with pytest.raises(ConfigError):
        exchange.combine(got.x[:1], got)
    return exchange


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_exchange_frees_its_memory_at_once_with_a_warning(world: World, backend: str) -> None:
    world.shared(OperationOrder)  # it stays with the world
    before = mapped_regions("test")
    caught = make_and_drop(world, lambda world: used_exchange(world, backend))
    assert mapped_regions("test") == before
    assert caught == [
        f"an exchange ({backend}) of rank 0 of world 'test' was dropped without close(); close it, or use it in a with "
        "statement"
    ]
    assert make_and_drop(world, lambda world: used_exchange(world, backend).close()) == []


def test_dispatched_rows_outlive_a_dropped_exchange(world: World) -> None:
    dispatches: list[Any] = []
    make_and_drop(world, lambda world: dispatches.append(used_exchange(world, "host").dispatch(*tokens(3.0))))
    before = mapped_regions("test")
    make_and_drop(world, lambda world: dispatches.append(used_exchange(world, "host").dispatch(*tokens(3.0))))
    assert mapped_regions("test") == before  # rows of layout expert are not in slots
    make_and_drop(
        world, lambda world: dispatches.append(Exchange(world, replace(SPEC, layout="rank")).dispatch(*tokens(3.0)))
    )
    assert dispatches[0].x[0].eq(3).all()
    assert dispatches[-1].x[dispatches[-1].index[0]].eq(3).all()


def test_a_failed_exchange_frees_its_memory_when_dropped() -> None:
    worlds = wired(2, timeout_s=0.2)
    each(worlds, lambda world: world.shared(OperationOrder))
    before = mapped_regions("test")

    def fail(world: World) -> None:
        exchange = Exchange(world, SPEC, "host")
        if world.rank == 0:
            for _ in range(2):
                with pytest.raises(PeerTimeout):
                    exchange.dispatch(*tokens())

    def run(world: World) -> None:
        fail(world)

    gc.disable()
    try:
        with pytest.warns(ResourceWarning):
            assert each(worlds, run) == [None, None]
        left = mapped_regions("test") - before
    finally:
        gc.enable()
    assert left == 0
    close(worlds)


def test_a_dropped_gpu_exchange_is_freed_at_the_next_open_or_close(world: World) -> None:
    """The destructor does not touch the device: any thread may be capturing. The next open or close frees it."""
    closed: list[str] = []

    def drop(name: str) -> list[str]:
        backend = mock.Mock(workspace=SimpleNamespace(calls=Calls()))
        backend.close.side_effect = lambda **_: closed.append(name)
        on_gpu = SimpleNamespace(type="cuda")
        with (
            mock.patch("raymoe.exchange.exchange.make_backend", lambda *_: backend),
            mock.patch("raymoe.exchange.exchange.choose", lambda *_: Choice("fused", sms=132)),
            mock.patch("raymoe.exchange.exchange.capturing", lambda _: False),
            mock.patch("raymoe.exchange.exchange.call_marks", lambda _: None),
            mock.patch.object(world, "device", on_gpu),
        ):
            return make_and_drop(world, lambda world: Exchange(world, replace(SPEC, layout="rank"), "fused"))

    assert drop("first") == [
        "an exchange (fused) of rank 0 of world 'test' was dropped without close(); close it, or use it in a with "
        "statement"
    ]
    assert closed == []
    with Exchange(world, SPEC):
        assert closed == ["first"]
    drop("second")
    assert closed == ["first"]
    close([world])
    assert closed == ["first", "second"]
