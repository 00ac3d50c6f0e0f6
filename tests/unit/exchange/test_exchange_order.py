"""Ranks in different operations or exchanges: all raise, naming both places, and the next operation works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError, DataRefused, PeerTimeout
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from tests.unit.exchange.test_exchange import BACKENDS
from tests.unit.ranks import RankPool
from tests.unit.worlds import inner_world, together

H = 16
SPEC = ExchangeSpec(tokens=6, hidden=H, experts=6, topk=2, dtype="float32", alignment=1)


def step(world: World, exchange: Exchange, value: float = 1.0) -> bool:
    """Run one step in order; return whether its sums are right."""
    x = torch.full((world.rank + 2, H), value)
    ids = torch.arange(2 * len(x)).view(-1, 2) % 6
    got = exchange.dispatch(x, ids, torch.ones(len(x), 2))
    return bool(exchange.combine(got.x, got).eq(2 * value).all())


def message_of_refusal(call: Callable[[], Any]) -> str:
    """Check that the call is refused; return its message."""
    with pytest.raises((ConfigError, DataRefused)) as caught:
        call()
    return str(caught.value)


def dispatch(exchange: Exchange, tokens: int = 3) -> Any:
    ids = torch.arange(2 * tokens).view(-1, 2) % 6
    return exchange.dispatch(torch.ones(tokens, H), ids, torch.ones(tokens, 2))


def one_dispatches_one_combines(world: World, backend: str, odd: int) -> list[Any]:
    with Exchange(world, SPEC, backend) as exchange:
        assert step(world, exchange)
        got = dispatch(exchange)
        rows = got.x.clone()
        wrong = (lambda: exchange.combine(rows, got)) if world.rank == odd else (lambda: dispatch(exchange))
        messages = [message_of_refusal(wrong), message_of_refusal(wrong)]
        y = exchange.combine(rows, got)
        return [*messages, bool(y.eq(2).all()), step(world, exchange, 3.0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0)])
def test_ranks_in_different_operations_all_raise_and_name_both(
    pool: RankPool, backend: str, size: int, odd: int
) -> None:
    for rank, (first, second, right, after) in enumerate(pool.run(size, one_dispatches_one_combines, backend, odd)):
        here, there = ("combine", "dispatch") if rank == odd else ("dispatch", "combine")
        assert first.startswith(f"rank {rank} is in {here} while rank ")
        assert f" is in {there} of the same exchange; call the same operations in one order on all ranks" in first
        assert second == first
        assert right
        assert after


def two_in_turns(world: World, backends: tuple[str, str]) -> list[Any]:
    with Exchange(world, SPEC, backends[0]) as one, Exchange(world, SPEC, backends[1]) as two:
        first, other = (one, two) if world.rank == 0 else (two, one)
        messages = [message_of_refusal(lambda: dispatch(first)), message_of_refusal(lambda: dispatch(other))]
        gots = [dispatch(one, 2), dispatch(two, 5)]
        owner, got = ((one, gots[0]), (two, gots[1]))[world.rank != 0]
        messages.append(message_of_refusal(lambda: owner.combine(got.x, got)))
        ys = [exchange.combine(got.x, got) for exchange, got in zip((two, one), reversed(gots), strict=True)]
        return [messages, [bool(y.eq(2).all()) for y in ys], step(world, one), step(world, two)]


@pytest.mark.parametrize("backends", [*[(each, each) for each in BACKENDS], ("host", "collective")])
def test_ranks_in_different_exchanges_all_raise_and_name_both(pool: RankPool, backends: tuple[str, str]) -> None:
    for rank, (messages, ys, one, two) in enumerate(pool.run(3, two_in_turns, backends)):
        numbers = (1, 2) if rank == 0 else (2, 1)
        for text, op, (here, there) in zip(
            messages, ("dispatch", "dispatch", "combine"), (numbers, numbers[::-1], numbers), strict=True
        ):
            peer = 1 if rank == 0 else 0
            assert text.startswith(
                f"rank {rank} is in {op} of exchange {here} while rank {peer} is in {op} of exchange"
            )
            assert f"of exchange {there};" in text
        assert [*ys, one, two] == [True] * 4


def refused_between_two(world: World) -> list[Any]:
    with Exchange(world, replace(SPEC, depth=2)) as exchange:
        first = dispatch(exchange)
        message_of_refusal(lambda: exchange.combine(first.x, first) if world.rank else dispatch(exchange))
        second = dispatch(exchange)
        return [exchange.combine(got.x, got).tolist() for got in (first, second)]


def test_a_refused_dispatch_takes_no_row_memory(pool: RankPool) -> None:
    for first, second in pool.run(2, refused_between_two):
        assert first == second


def different_dispatches(world: World) -> list[Any]:
    with Exchange(world, SPEC, "collective") as exchange:
        gots = [dispatch(exchange, 1), dispatch(exchange, 6)]
        rows = torch.ones(SPEC.rows(world.size), H)
        own = gots[world.rank == 0]
        messages = [message_of_refusal(lambda: exchange.combine(rows, own))]
        messages.append(message_of_refusal(lambda: exchange.combine(rows, gots[0], weighted=world.rank == 0)))
        return [messages, [bool(exchange.combine(rows, got).eq(2).all()) for got in gots]]


def test_collective_survives_combines_of_different_dispatches(pool: RankPool) -> None:
    """The ranks' row counts differ, and Gloo would end the process on that."""
    for messages, ys in pool.run(2, different_dispatches):
        assert messages == [
            "rank 0 combines its dispatch 2 and rank 1 its dispatch 1; all ranks combine the same dispatch",
            "rank 0 combines dispatch 1 with weighted=True and rank 1 with weighted=False; all ranks give the same "
            "weighted",
        ]
        assert ys == [True, True]


def leave_out_dispatches(outer: World, backend: str) -> Any:
    world = inner_world(outer)
    exchanges = [Exchange(world, SPEC, backend) for _ in range(2)]
    assert step(world, exchanges[0])
    world.waiter.timeout_s = 0.3
    messages = []
    if world.rank != 1:
        for exchange in (exchanges[0], *exchanges):
            with pytest.raises(PeerTimeout) as caught:
                dispatch(exchange)
            messages.append((caught.value.op, caught.value.peer))
    outer.barrier("over")
    for exchange in exchanges:
        exchange.close(together=False)  # rank 1 has seen no error
    world.close(together=False)
    return messages


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_rank_is_named_by_every_exchange_of_the_world(pool: RankPool, backend: str) -> None:
    assert pool.run(3, leave_out_dispatches, backend) == [[("dispatch", 1)] * 3, [], [("dispatch", 1)] * 3]


def threads_in_turns(world: World, backend: str) -> list[Any]:
    """Run steps in two threads of rank 0, which take turns and call check at any time; rank 1 has one thread."""
    with Exchange(world, SPEC, backend) as exchange:
        if world.rank == 1:
            return [step(world, exchange) for _ in range(40)]
        turn, refusals = threading.Lock(), []

        def run() -> list[bool]:
            done: list[bool] = []
            while len(done) < 20:
                with turn:
                    done.append(step(world, exchange))
                try:
                    exchange.check()  # at any time, also while the other thread is in its step
                except ConfigError as error:
                    refusals.append(str(error))
            return done

        outcomes = together([run, run])
        assert all("has not returned" in text for text in refusals)
        return [right for done in outcomes for right in done]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_of_one_rank_may_take_turns(pool: RankPool, backend: str) -> None:
    assert pool.run(2, threads_in_turns, backend) == [[True] * 40] * 2
