"""`raymoe.join` inside actors of somebody else's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raymoe
from raymoe.gang.join import GRACE_S
from tests.gang.conftest import Head
from tests.python_path import python_path


@ray.remote(num_cpus=0)
class Engine:
    """An actor of a user's own, which knows raymoe only by its public names."""

    def exchange(self, name: str, rank: int, size: int, seed: int) -> tuple[float, list[int]]:
        import torch

        world = raymoe.join(name, rank, size, timeout_s=30)
        spec = raymoe.ExchangeSpec(tokens=8, hidden=32, experts=4, topk=2, dtype="float32")
        draw = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(5 + rank, 32, generator=draw)
        ids = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(5 + rank)])
        weights = torch.rand(5 + rank, 2, generator=draw)
        with raymoe.Exchange(world, spec) as ex:
            got = ex.dispatch(x, ids, weights)
            y = ex.combine(got.x * 2 + 1, got)
        world.close()
        want = (weights[:, :, None] * (x[:, None, :] * 2 + 1)).sum(1)
        return float((y - want).abs().max()), got.expert_counts.tolist()

    def join(self, name: str, rank: int, size: int, timeout_s: float, **options: Any) -> str:
        return joined(name, rank, size, timeout_s=timeout_s, **options)

    def pid(self) -> int:
        return os.getpid()


def joined(name: str, rank: int, size: int, **options: Any) -> str:
    from raymoe.errors import RaymoeError

    try:
        world = raymoe.join(name, rank, size, **options)
        world.close()
    except RaymoeError as error:
        return str(error)
    return f"joined on {world.device}"


@pytest.fixture(scope="module")
def engines(head: Head) -> Iterator[list[ray.actor.ActorHandle]]:
    ray.init(
        address=head.address,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
    )
    actors = [Engine.remote() for _ in range(3)]
    alone = [actor.join.remote(f"alone{i}", 0, 1, 30.0) for i, actor in enumerate(actors)]  # imports torch, for one
    assert ray.get(alone, timeout=60) == ["joined on cpu"] * 3
    yield actors
    ray.shutdown()


def test_three_actors_exchange_and_may_do_so_again_under_the_same_name(engines: list[ray.actor.ActorHandle]) -> None:
    for seed in (1, 2):
        calls = [engine.exchange.remote("twice", rank, 2, seed) for rank, engine in enumerate(engines[:2])]
        results = ray.get(calls, timeout=60)
        assert all(error < 1e-5 for error, _ in results)
        assert sum(count for _, counts in results for count in counts) == 2 * (5 + 6)


def test_whoever_is_missing_is_named(engines: list[ray.actor.ActorHandle]) -> None:
    calls = [engines[rank].join.remote("incomplete", rank, 3, 5.0) for rank in (0, 2)]
    for said in ray.get(calls, timeout=30):
        assert said.endswith("of 3, and rank 1 did not join within 5 s")


def present(name: str) -> set[int]:
    """Ranks whose descriptors are in the meeting of that name."""
    try:
        meeting = ray.get_actor(f"raymoe/join/{name}", namespace="raymoe")
    except ValueError:  # nobody has come yet
        return set()
    return set(ray.get(meeting.look.remote(-1, ""), timeout=10).descriptors)


def meetings() -> list[int]:
    """Processes of meetings, of any name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::Meeting" in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found


def gone(seconds: float) -> bool:
    """Whether every meeting is over within this time."""
    deadline = time.monotonic() + seconds
    while meetings() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not meetings()


def test_a_rank_that_is_taken_and_a_size_that_differs_are_refused(engines: list[ray.actor.ActorHandle]) -> None:
    first = engines[0].join.remote("crowded", 0, 2, 8.0)
    while 0 not in present("crowded"):
        assert not ray.wait([first], timeout=0.05)[0], "it is there, and waits for rank 1"
    assert "rank 0 is taken by pid" in ray.get(engines[1].join.remote("crowded", 0, 2, 10.0), timeout=30)
    said = ray.get(engines[2].join.remote("crowded", 1, 3, 10.0), timeout=30)
    assert "size 3" in said and "gave 2" in said
    assert "rank 1 did not join within 8 s" in ray.get(first, timeout=30)


def test_a_duplicate_rank_is_refused_and_the_innocent_ranks_have_their_world(
    engines: list[ray.actor.ActorHandle],
) -> None:
    first = engines[1].join.remote("twofold", 1, 2, 30.0)
    while 1 not in present("twofold"):
        assert not ray.wait([first], timeout=0.05)[0]
    assert "rank 1 is taken by pid" in ray.get(engines[2].join.remote("twofold", 1, 2, 30.0), timeout=30)
    assert ray.get([engines[0].join.remote("twofold", 0, 2, 30.0), first], timeout=30) == ["joined on cpu"] * 2
    assert gone(5), "nothing stays behind"


def test_the_place_to_meet_outlives_whoever_came_first_and_ends_by_itself(
    engines: list[ray.actor.ActorHandle],
) -> None:
    """The first to come is killed, its place is free after a while, and when all are dead nothing is left."""
    victims = [Engine.remote() for _ in range(2)]
    pids = ray.get([victim.pid.remote() for victim in victims], timeout=60)
    victims[0].join.remote("orphan", 0, 3, 60.0)
    while 0 not in present("orphan"):
        time.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    waiting = engines[1].join.remote("orphan", 1, 3, 60.0)
    while 0 in present("orphan"):
        time.sleep(0.05)
    calls = [engines[0].join.remote("orphan", 0, 3, 30.0), waiting, engines[2].join.remote("orphan", 2, 3, 30.0)]
    assert ray.get(calls, timeout=40) == ["joined on cpu"] * 3
    victims[1].join.remote("alone", 0, 2, 2.0)
    while 0 not in present("alone"):
        time.sleep(0.05)
    os.kill(pids[1], signal.SIGKILL)
    assert len(meetings()) == 1
    assert gone(2.0 + 10.0 + GRACE_S + 5.0)


def test_a_rank_that_cannot_take_part_is_told_to_all_and_the_next_attempt_works(
    engines: list[ray.actor.ActorHandle],
) -> None:
    options = [{}, {"device": "cuda:99"}, {}]
    calls = [engines[rank].join.remote("broken", rank, 3, 60.0, **options[rank]) for rank in range(3)]
    zero, one, two = ray.get(calls, timeout=20)
    assert "GPU ranks were asked for" in one or "GPU 99 asked for" in one
    for rank, said in ((0, zero), (2, two)):
        assert said == f"asked to join 'broken' as rank {rank} of 3, and rank 1 could not take part: {one}"
    calls = [engine.join.remote("broken", rank, 3, 30.0) for rank, engine in enumerate(engines)]
    assert ray.get(calls, timeout=40) == ["joined on cpu"] * 3


def test_tasks_join_too(engines: list[ray.actor.ActorHandle]) -> None:
    task = ray.remote(num_cpus=0)(joined)
    calls = [task.remote("tasks", rank, 2, timeout_s=30.0, device="cpu") for rank in range(2)]
    assert ray.get(calls, timeout=60) == ["joined on cpu"] * 2
