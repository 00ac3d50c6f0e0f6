"""A rank stops while a world of several domains, or the first exchange of one, is made: the others end and name it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from raymoe.errors import PeerTimeout, WiringError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory import world as world_module
from raymoe.memory.across import StoreBoard
from raymoe.memory.world import World
from raymoe.net import gloo, gloo_rail
from tests.unit.memory.test_world_of import error_of, groups, with_group
from tests.unit.ranks import RankPool

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture

SPEC = ExchangeSpec(tokens=4, hidden=8, experts=6, topk=1, dtype="float32")
TIMEOUT_S = 2.0
GLOO_CONNECTS = "while Gloo connects"
RANKS = 3


def stop_here(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_round(name: str) -> AbstractContextManager[object]:
    """Stop this rank when it is about to post in the round `name`."""
    meet = StoreBoard.meet

    def stopping(self: StoreBoard, what: str, *rest: Any, **named: Any) -> list[bytes]:
        if what == name:
            stop_here()
        return meet(self, what, *rest, **named)

    return mock.patch.object(StoreBoard, "meet", stopping)


MOMENTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "before it serves the store": lambda: mock.patch.object(world_module, "serve", stop_here),
    "when it serves the store": lambda: stop_in_round("domains: connected"),
    "before it connects its rail": lambda: mock.patch.object(gloo_rail, "connected", stop_here),
    GLOO_CONNECTS: lambda: mock.patch.object(gloo._Addresses, "get", stop_here),
    "when Gloo is connected": lambda: stop_in_round("rail: connected"),
}


def make_an_exchange(outer: World, store: str, stopped: int, moment: str) -> Any:
    """Return the rank that this rank's error names, and its time. When all have one, the stopped rank is killed."""
    pids = outer.swap(os.getpid(), "pids")
    outcome = with_group(outer, store, _make_an_exchange, stopped, moment)
    Path(f"{store} {outer.rank}").touch()
    if outer.rank == (stopped + 1) % RANKS:
        others, end = [rank for rank in range(RANKS) if rank != stopped], time.monotonic() + 20
        while not all(Path(f"{store} {rank}").exists() for rank in others) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(int(str(pids[stopped])), signal.SIGKILL)
    return outcome


def _make_an_exchange(rank: int, stopped: int, moment: str) -> tuple[int, str, float]:
    start = time.monotonic()
    if rank == stopped:
        MOMENTS[moment]().__enter__()
    with pytest.raises(PeerTimeout) as caught:
        Exchange(World.of(domain=1, timeout_s=limit_of(moment)), SPEC)
    return caught.value.peer, str(caught.value), time.monotonic() - start


def limit_of(moment: str) -> float:
    return 2 * TIMEOUT_S if moment == GLOO_CONNECTS else TIMEOUT_S  # Gloo waits for half of it


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stopped", "moment"),
    [*((0, moment) for moment in MOMENTS), (2, GLOO_CONNECTS)],
)
def test_a_rank_that_stops_is_named_by_the_others_in_time(tmp_path: Path, stopped: int, moment: str) -> None:
    with RankPool(RANKS) as own:
        outcomes = own.outcomes(RANKS, make_an_exchange, str(tmp_path / "store"), stopped, moment)
    for rank, outcome in enumerate(outcomes):
        if rank != stopped:
            assert isinstance(outcome, tuple), outcome
            peer, said, took = outcome
            assert peer == stopped, said
            assert took < 2 * limit_of(moment) + 2


def connect_without_an_interface(rank: int) -> Any:
    """Let Gloo fail on rank 1 before it has an address. Return the error, and what a round gives afterwards."""
    with World.of(domain=1, timeout_s=20) as world:
        failing = mock.patch.object(gloo.gloo.ProcessGroupGloo, "create_device", side_effect=RuntimeError("no device"))
        if rank == 1:
            failing.__enter__()
        try:
            said = error_of(lambda: world.shared(gloo_rail.GlooRail))
        finally:
            if rank == 1:
                failing.__exit__(None, None, None)
        return said, world.swap(rank, "after")


def test_a_rank_on_which_gloo_fails_fails_all(groups: Groups) -> None:
    (_, first), (_, second), (_, third) = errors = [said for said, _ in groups(3, connect_without_an_interface)]
    assert {kind for kind, _ in errors} == {WiringError.__name__}
    assert second == "rail did not connect at 127.0.0.1: no device"
    assert first == third
    assert first.startswith("rail did not connect at 127.0.0.1: ")
    assert "a rank has given no address (0/1)" in first
