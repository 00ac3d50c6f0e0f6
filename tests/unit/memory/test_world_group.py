"""Groups of a world: worlds of some of its ranks, which are closed with it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from raymoe.errors import Aborted, ConfigError, PeerTimeout, PlacementError, RaymoeError, WiringError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory import host_shm
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import World
from tests.unit.exchange.exchange_cases import Case, Result, batches, run_step
from tests.unit.exchange.test_exchange import BACKENDS, judge
from tests.unit.ranks import RankPool
from tests.unit.worlds import close, each, together, wired

WORDS = Layout.of([Region.words("from", 4)])


def group_of(world: World, ranks: list[int]) -> World:
    group = world.group(ranks)
    assert group is not None
    return group


def write_within(world: World, ranks: list[int]) -> Any:
    group = world.group(ranks)
    if group is None:
        return None
    heap = group.allocate(WORDS, "words")
    for peer in range(group.size):
        heap.words("from", peer)[group.rank] = 10 * world.rank + peer
    group.barrier("written")
    return group.rank, group.swap(world.rank, "who"), [heap.word("from", peer) for peer in range(group.size)]


def test_a_group_has_its_own_rank_numbers_swaps_and_memory(pool: RankPool) -> None:
    zero, one, two, three = pool.run(4, write_within, [3, 1, 2])
    assert zero is None
    assert three == (0, [3, 1, 2], [30, 10, 20])
    assert one == (1, [3, 1, 2], [31, 11, 21])
    assert two == (2, [3, 1, 2], [32, 12, 22])


def exchange_within(world: World, groups: list[list[int]], case: Case) -> tuple[int, list[Result]]:
    """Run an exchange over the whole world and one over this rank's group in turns; return the group's results."""
    own = next(ranks for ranks in groups if world.rank in ranks)
    parts = [world.group(ranks) for ranks in groups]
    group = parts[groups.index(own)]
    assert group is not None
    assert [part is None for part in parts] == [ranks is not own for ranks in groups]
    whole_world_case, results = Case(world.size, case.spec, case.backend, case.routing, case.seed), []
    with Exchange(world, case.spec, case.backend) as all_ranks, Exchange(group, case.spec, case.backend) as ours:
        for step in range(len(case.routing)):
            run_step(all_ranks, whole_world_case, batches(whole_world_case, step)[world.rank])
            results.append(run_step(ours, case, batches(case, step)[group.rank]))
    return group.rank, results


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exchange_over_a_group_uses_only_its_ranks(pool: RankPool, backend: str) -> None:
    case = Case(2, ExchangeSpec(tokens=9, hidden=16, experts=4, topk=2), backend, ("uniform", "one", "masked"), seed=2)
    groups = [[2, 0], [1, 3]]
    found = pool.run(4, exchange_within, groups, case)
    for ranks in groups:
        assert [found[rank][0] for rank in ranks] == [0, 1]
        judge(case, [found[rank][1] for rank in ranks])


def test_a_group_can_have_groups() -> None:
    worlds = wired(4)

    def nested(world: World) -> object:
        outer = world.group([0, 2, 3])
        inner = outer.group([2, 1]) if outer is not None else None
        return None if inner is None else (inner.rank, inner.swap(world.rank, "who"), inner.name)

    name = f"{worlds[0].name}-group1-group1"
    assert each(worlds, nested) == [None, None, (1, [3, 2], name), (0, [3, 2], name)]
    close(worlds)


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 3], [-1], [True]])
def test_impossible_groups_are_refused(ranks: list[int]) -> None:
    worlds = wired(3)
    for outcome in each(worlds, lambda world: world.group(ranks)):
        assert isinstance(outcome, ConfigError)
        assert "in a world of 3" in str(outcome)
    assert each(worlds, lambda world: world.swap(1, "after")) == [[1, 1, 1]] * 3
    close(worlds)


def test_all_ranks_raise_if_they_ask_for_different_groups() -> None:
    worlds = wired(3)
    asked = [[0, 1], [0, 1], [0, 2]]
    for outcome in each(worlds, lambda world: world.group(asked[world.rank])):
        assert isinstance(outcome, RaymoeError)
        assert "a group of [0, " in str(outcome)
    assert each(worlds, lambda world: world.group([0, 2]) is not None) == [True, False, True]
    close(worlds)


def test_all_ranks_raise_if_a_group_gets_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = wired(3)
    real = host_shm.own

    def scarce(name: str, nbytes: int) -> host_shm.Segment:
        if "group" in name:
            raise PlacementError("4096 asked, 0 available")
        return real(name, nbytes)

    monkeypatch.setattr(host_shm, "own", scarce)
    first, second, third = each(worlds, lambda world: world.group([0, 1]))
    assert isinstance(first, PlacementError)
    assert isinstance(second, PlacementError)
    assert isinstance(third, WiringError)
    assert "0 available" in str(third)
    assert each(worlds, lambda world: world.swap(1, "after")) == [[1, 1, 1]] * 3
    close(worlds)


def test_a_timeout_in_a_group_names_its_ranks_and_the_world_lives() -> None:
    worlds = wired(3, timeout_s=0.3)
    groups = each(worlds, lambda world: world.group([2, 0]))
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 1 waited .* for rank 0 in sync"):
        groups[0].barrier("sync")
    assert 0.3 <= time.monotonic() - start < 5
    assert each(worlds, lambda world: world.swap(1, "the world lives")) == [[1, 1, 1]] * 3
    for world in worlds:
        world.close()


def test_an_abort_of_the_world_ends_a_wait_in_its_group() -> None:
    worlds = wired(3, timeout_s=20)
    groups = each(worlds, lambda world: world.group([2, 0]))
    seen = []

    def stop() -> None:
        while worlds[0].waiting is None:
            time.sleep(0.001)
        seen.append(worlds[0].waiting)
        worlds[0].abort("rank 2 died")

    error, _ = together([lambda: groups[0].barrier("sync"), stop])
    assert isinstance(error, Aborted)
    assert "rank 2 died" in str(error)
    assert seen == [("sync", 2)]  # the peer's rank in the world
    for world in worlds:
        world.close(together=False)


def test_a_group_is_closed_with_its_world() -> None:
    worlds = wired(2)
    groups = each(worlds, lambda world: group_of(world, [1, 0]))
    close(worlds)
    with pytest.raises(WiringError, match="its world is closed"):
        groups[0].barrier("late")
