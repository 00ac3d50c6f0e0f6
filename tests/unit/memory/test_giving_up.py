"""A rank gives up: the others stop within a second, whatever they do, and name the same culprit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import Aborted, ConfigError, DataRefused, PeerTimeout, RaymoeError
from raymoe.exchange.cpu.cpu_backend import CpuBackend
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory import world as world_module
from raymoe.memory.world import World
from raymoe.transport.channel import Channel
from tests.unit.memory.test_world_of import groups
from tests.unit.ranks import RankPool
from tests.unit.worlds import close, each, inner_world, together, wired

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture

SPEC = ExchangeSpec(tokens=4, hidden=8, experts=12, topk=1, dtype="float32")
FIRST_S, OTHERS_S = 0.6, 30.0
"""The limit of the rank that gives up first, and that of the others."""
SOON_S = FIRST_S + 1.5  # until all have stopped: a second, and half of one for a busy machine


def dispatch(exchange: Exchange, expert: int = 0) -> Any:
    x = torch.ones(SPEC.tokens, SPEC.hidden)
    return exchange.dispatch(x, torch.full((SPEC.tokens, 1), expert), torch.ones(SPEC.tokens, 1))


def timeout_of(call: Callable[[], object]) -> PeerTimeout:
    with pytest.raises(PeerTimeout) as caught:
        call()
    return caught.value


def step_beside_a_stopped_rank(outer: World, backend: str, late_s: float) -> Any:
    """Rank 1 is stopped. Rank 0 gives up soon, rank 2 comes late. Return culprit, message and time of each."""
    pids = outer.swap(os.getpid(), "pids")
    world = inner_world(outer)
    exchange = Exchange(world, SPEC, backend)
    dispatch(exchange)
    outer.barrier("one step")
    start = time.monotonic()
    if outer.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    world.waiter.timeout_s = FIRST_S if outer.rank == 0 else OTHERS_S
    time.sleep(late_s * (outer.rank == 2))
    try:
        error = timeout_of(lambda: dispatch(exchange))
        took = time.monotonic() - start
        again = timeout_of(lambda: world.barrier("after"))
        exchange.close(together=False)
        world.close(together=False)
        return error.peer, str(error), took, str(again)
    finally:
        if outer.rank == 2:
            os.kill(int(str(pids[1])), signal.SIGKILL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("backend", "late_s"), [("host", 0.2), ("collective", 0.2), ("allgather", 0.2), ("host", FIRST_S + 0.3)]
)
def test_a_rank_that_comes_late_stops_with_the_rank_that_gave_up(backend: str, late_s: float) -> None:
    with RankPool(3) as own:
        first, _, late = own.outcomes(3, step_beside_a_stopped_rank, backend, late_s)
    for culprit, _, took, _ in (first, late):
        assert culprit == 1
        assert took < SOON_S
    assert first[1].startswith(f"rank 0 waited {FIRST_S} s for rank 1 in dispatch")
    assert late[1] == f"{first[1]}; rank 2 was told"
    assert (first[3], late[3]) == (first[1], late[1]), "the world has ended on both"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["a round", "a group", "no wait"])
def test_a_rank_in_another_wait_or_in_none_stops_too(where: str) -> None:
    worlds = wired(3, timeout_s=OTHERS_S)
    pairs = each(worlds, lambda world: world.group([0, 2]))
    worlds[0].waiter.timeout_s, said = FIRST_S, []
    worlds[2].waiter.on_abort(said.append)  # as for kernels that wait

    def wait() -> object:
        if where == "no wait":
            end = time.monotonic() + OTHERS_S
            while not said and time.monotonic() < end:
                time.sleep(0.01)
            return worlds[2].waiter.check()
        return (worlds[2] if where == "a round" else pairs[2]).barrier("another")

    start = time.monotonic()
    first, other = together([lambda: worlds[0].barrier("all"), wait])
    assert time.monotonic() - start < SOON_S
    assert isinstance(first, PeerTimeout) and first.peer == 1
    assert said == [f"{first}; rank 2 was told"]
    assert said[0] in str(other)
    # A kernel that an abort has ended names the peer that it waited for.
    followed = worlds[2].give_up(Aborted("rank 2 was told to stop in dispatch", peer=0))
    assert isinstance(followed, PeerTimeout) and followed.peer == 1
    close(worlds)


def pass_on(outer: World) -> Any:
    """Rank 1 receives from rank 2, which sends nothing, and rank 0 from rank 1. Rank 0 gives up first."""
    world = inner_world(outer)
    first, second = Channel(world, [1, 0, None][world.rank], 64), Channel(world, [None, 2, 1][world.rank], 64)
    world.waiter.timeout_s = FIRST_S if world.rank == 0 else OTHERS_S
    start, said = time.monotonic(), ""
    if world.rank < 2:
        error = timeout_of((first, second)[world.rank].receive)
        assert error.peer == 2
        said = str(error)
    took = time.monotonic() - start
    outer.barrier("over")
    world.close(together=False)
    return said, took


def test_a_chain_of_waits_is_followed_to_the_rank_that_waits_for_none(pool: RankPool) -> None:
    (first, _), (second, took), _ = pool.run(3, pass_on)
    assert first.startswith(f"rank 0 waited {FIRST_S} s for rank 1 in ")
    assert first.endswith("; rank 1 was waiting because of rank 2")
    assert second == f"{first}; rank 1 was told"
    assert took < SOON_S


def step_between_domains(rank: int, where: str) -> Any:
    """Rank 3 of two domains is missing, and rank 0 gives up first. Rank 2 waits for rank 3, unless it is late."""
    world = World.of(domain=2, timeout_s=20)
    exchange = Exchange(world, SPEC)
    dispatch(exchange)
    world.barrier("one step")
    limit_s = FIRST_S if rank == 0 else OTHERS_S
    world.waiter.timeout_s = world.domain.waiter.timeout_s = limit_s
    start = time.monotonic()
    try:
        if rank == 3:
            time.sleep(SOON_S + 1)
            return None
        time.sleep((FIRST_S + 0.3) * (rank == 2 and where == "late"))
        if rank == 1 and where == "in a round":
            error = timeout_of(lambda: world.barrier("another"))
        elif rank == 1 and where == "in its domain":
            with pytest.raises(RaymoeError) as caught:
                world.domain.barrier("another")
            error = timeout_of(world.waiter.check)
            assert str(error) in str(caught.value)
        else:
            error = timeout_of(lambda: dispatch(exchange))
        return error.peer, str(error), time.monotonic() - start
    finally:
        exchange.close(together=False)
        world.close(together=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("where", "culprit"),
    [
        ("in the step", 3),  # rank 0 waits for rank 2, which waits for rank 3
        ("late", 2),
        ("in a round", 1),  # rank 0 waits for rank 1: the ranks of its domain are in different operations
        ("in its domain", 1),
    ],
)
def test_ranks_of_all_domains_stop_and_name_the_same_culprit(groups: Groups, where: str, culprit: int) -> None:
    outcomes = groups(4, step_between_domains, where)[:3]
    assert [named for named, _, _ in outcomes] == [culprit] * 3
    assert max(took for _, _, took in outcomes) < SOON_S + 0.5  # beats between domains take half a second
    assert sum("was told" in said for _, said, _ in outcomes) == 2


def leave_by_another_error(outer: World) -> Any:
    world = inner_world(outer)
    exchange = Exchange(world, SPEC)
    dispatch(exchange)
    start, backend = time.monotonic(), exchange._backend
    assert isinstance(backend, CpuBackend)
    if world.rank == 1:
        failing = mock.patch.object(backend._carrier, "dispatch", side_effect=MemoryError("no room"))
        with failing, pytest.raises(MemoryError):
            dispatch(exchange)
        said = ""
    else:
        with pytest.raises(RaymoeError) as caught:
            dispatch(exchange)
        said = str(caught.value)
    took = time.monotonic() - start
    outer.barrier("over")
    exchange.close(together=False)
    world.close(together=False)
    return said, took


def test_any_error_that_ends_an_operation_early_is_told(pool: RankPool) -> None:
    outcomes = pool.run(3, leave_by_another_error)
    reason = "rank 1 left an operation because of MemoryError: no room"
    assert [said for said, _ in outcomes] == [reason, "", reason]
    assert max(took for _, took in outcomes) < SOON_S


def make_mistakes(world: World) -> Any:
    """Rank 1 names an expert that there is not, then gives rows of a wrong shape. Return what works afterwards."""
    with Exchange(world, SPEC) as exchange:
        got = dispatch(exchange, 12 if world.rank == 1 else 0)
        with pytest.raises(DataRefused):
            exchange.combine(got.x, got)
        if world.rank == 1:
            with pytest.raises(ConfigError):
                exchange.dispatch(torch.ones(4, 3), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
        got = dispatch(exchange)
        y = exchange.combine(got.x, got)
        return y.eq(1).all().item(), world.waiter.reason, world.swap(world.rank, "after")


def test_errors_after_which_the_next_step_works_are_told_to_nobody(pool: RankPool) -> None:
    assert pool.run(3, make_mistakes) == [(True, None, [0, 1, 2])] * 3


def test_a_rank_that_closes_its_world_in_vain_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "CLOSING_S", 0.2)
    worlds = wired(2)
    worlds[0].close()
    time.sleep(0.2)
    assert worlds[1].waiter.reason is None
    worlds[1].close()


def bells() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raymoe bell"]


def test_the_thread_of_a_bell_ends_with_its_world_and_costs_nothing_before() -> None:
    before = bells()
    alone, worlds = wired(1), wired(2)
    own = [thread for thread in bells() if thread not in before]
    assert len(own) == 2, "a world of one rank has no thread"
    deadline = time.monotonic() + 10
    while not all(_state(thread) == "S" for thread in own):  # each thread goes to sleep once it has begun
        assert time.monotonic() < deadline, "the threads sleep in the kernel"
        time.sleep(0.01)
    used = [_cpu_ticks(thread) for thread in own]
    time.sleep(0.5)
    assert [_cpu_ticks(thread) for thread in own] == used
    assert [_state(thread) for thread in own] == ["S", "S"]
    close(alone)
    close(worlds)
    assert not [thread for thread in own if thread.is_alive()]
    dropped = wired(2)
    own = [thread for thread in bells() if thread not in before]
    del dropped
    assert not [thread for thread in own if thread.is_alive()]


def _fields(thread: threading.Thread) -> list[str]:
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()


def _state(thread: threading.Thread) -> str:
    return _fields(thread)[0]


def _cpu_ticks(thread: threading.Thread) -> tuple[str, str]:
    switches = Path(f"/proc/self/task/{thread.native_id}/status").read_text().partition("voluntary_ctxt_switches:")[2]
    return _fields(thread)[11], switches.split()[0]
