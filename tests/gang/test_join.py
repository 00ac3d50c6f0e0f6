"""`raymoe.join` inside actors that a user has made."""

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
from raymoe.integrations.ray_actors import ANSWER_S, GRACE_S, JoinEntry, MeetingActor
from tests.gang.conftest import Head
from tests.python_path import python_path


@ray.remote(num_cpus=0)
class Engine:
    """A user's actor, which uses only public names of raymoe."""

    def exchange(self, name: str, rank: int, size: int, seed: int, **options: Any) -> tuple[float, list[int]]:
        import torch

        world = raymoe.join(name, rank, size, timeout_s=30, **options)
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
    alone = [actor.join.remote(f"alone{i}", 0, 1, 30.0) for i, actor in enumerate(actors)]  # imports torch
    assert ray.get(alone, timeout=60) == ["joined on cpu"] * 3
    yield actors
    ray.shutdown()


def test_actors_can_join_and_exchange_twice_under_one_name(engines: list[ray.actor.ActorHandle]) -> None:
    for seed in (1, 2):
        calls = [engine.exchange.remote("twice", rank, 2, seed) for rank, engine in enumerate(engines[:2])]
        results = ray.get(calls, timeout=60)
        assert all(error < 1e-5 for error, _ in results)
        assert sum(count for _, counts in results for count in counts) == 2 * (5 + 6)


@pytest.mark.thorough
def test_actors_can_join_and_exchange_in_two_domains(engines: list[ray.actor.ActorHandle]) -> None:
    four = [*engines, Engine.remote()]
    calls = [engine.exchange.remote("apart", rank, 4, 1, domain=2) for rank, engine in enumerate(four)]
    results = ray.get(calls, timeout=60)
    assert all(error < 1e-5 for error, _ in results)
    assert sum(count for _, counts in results for count in counts) == 2 * (5 + 6 + 7 + 8)


@pytest.mark.thorough
def test_all_ranks_learn_that_their_domains_differ(engines: list[ray.actor.ActorHandle]) -> None:
    calls = [engine.join.remote("uneven", rank, 2, 20.0, domain=1 + rank) for rank, engine in enumerate(engines[:2])]
    for message in ray.get(calls, timeout=40):  # a rank that looks late gets the other's message in its own
        assert message.endswith(
            (
                "domain is left out on rank 1 and 1 here; all ranks must agree",
                "domain is 1 on rank 0 and left out here; all ranks must agree",
            )
        )
    calls = [engine.join.remote("uneven", rank, 3, 20.0, domain=2) for rank, engine in enumerate(engines)]
    for message in ray.get(calls, timeout=40):
        assert "domain is 2 in a world of 3 ranks" in message
    calls = [engine.join.remote("uneven", rank, 3, 30.0, domain=1) for rank, engine in enumerate(engines)]
    assert ray.get(calls, timeout=40) == ["joined on cpu"] * 3


def test_a_join_that_times_out_names_the_missing_rank(engines: list[ray.actor.ActorHandle]) -> None:
    """On a busy machine the meeting itself may start too late for 3 s. That is another error, so more time is given."""
    for seconds in (3, 15):
        calls = [engines[rank].join.remote(f"incomplete{seconds}", rank, 3, float(seconds)) for rank in (0, 2)]
        messages = ray.get(calls, timeout=60)
        if not any("no meeting actor answered" in message for message in messages):
            break
    for message in messages:
        assert message.endswith(f"of 3, and rank 1 did not join within {seconds} s")


def present(name: str) -> set[int]:
    """Return the ranks whose descriptors are in the meeting of that name."""
    try:
        meeting = ray.get_actor(f"raymoe/join/{name}", namespace="raymoe")
    except ValueError:  # the meeting does not exist yet
        return set()
    return set(ray.get(meeting.look.remote(-1, ""), timeout=10).descriptors)


def meetings() -> list[int]:
    """Return the processes of all meetings."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::Meeting" in entry.read_bytes():
                pids.append(int(entry.parent.name))
        except OSError:
            continue  # it has just ended
    return pids


def meetings_end(seconds: float) -> bool:
    """Return whether every meeting ends within this time."""
    deadline = time.monotonic() + seconds
    while meetings() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not meetings()


@pytest.mark.thorough
def test_a_taken_rank_and_a_different_size_are_refused(engines: list[ray.actor.ActorHandle]) -> None:
    first = engines[0].join.remote("crowded", 0, 2, 6.0)
    while 0 not in present("crowded"):
        assert not ray.wait([first], timeout=0.05)[0], "it should wait for rank 1"
    assert "rank 0 is taken by pid" in ray.get(engines[1].join.remote("crowded", 0, 2, 10.0), timeout=30)
    message = ray.get(engines[2].join.remote("crowded", 1, 3, 10.0), timeout=30)
    assert "size 3" in message and "gave 2" in message
    assert "rank 1 did not join within 6 s" in ray.get(first, timeout=30)


@pytest.mark.thorough
def test_a_duplicate_rank_is_refused_and_the_other_ranks_join(
    engines: list[ray.actor.ActorHandle],
) -> None:
    first = engines[1].join.remote("twofold", 1, 2, 30.0)
    while 1 not in present("twofold"):
        assert not ray.wait([first], timeout=0.05)[0]
    assert "rank 1 is taken by pid" in ray.get(engines[2].join.remote("twofold", 1, 2, 30.0), timeout=30)
    assert ray.get([engines[0].join.remote("twofold", 0, 2, 30.0), first], timeout=30) == ["joined on cpu"] * 2
    assert meetings_end(20), "the meeting has not ended"


@pytest.mark.thorough
def test_a_meeting_outlives_its_first_rank_and_ends_by_itself(
    engines: list[ray.actor.ActorHandle],
) -> None:
    """The first rank is killed, and its place becomes free. A meeting whose ranks are all dead ends."""
    alone = ray.remote(MeetingActor).options(name="raymoe/join/alone", namespace="raymoe", num_cpus=0).remote(2)
    entry = JoinEntry("a rank that looks no more", {"pid": 0}, None)
    assert ray.get(alone.enter.remote(0, 2, entry, 2.0), timeout=30) is None and meetings()
    victim = Engine.remote()
    pid = ray.get(victim.pid.remote(), timeout=60)
    victim.join.remote("orphan", 0, 3, 60.0)
    while 0 not in present("orphan"):
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    waiting = engines[1].join.remote("orphan", 1, 3, 60.0)
    while 0 in present("orphan"):
        time.sleep(0.05)
    calls = [engines[0].join.remote("orphan", 0, 3, 30.0), waiting, engines[2].join.remote("orphan", 2, 3, 30.0)]
    assert ray.get(calls, timeout=40) == ["joined on cpu"] * 3
    assert meetings_end(ANSWER_S + GRACE_S + 5.0)


def test_all_ranks_learn_which_rank_cannot_join_and_a_second_join_works(
    engines: list[ray.actor.ActorHandle],
) -> None:
    options = [{}, {"device": "cuda:99"}, {}]
    calls = [engines[rank].join.remote("broken", rank, 3, 60.0, **options[rank]) for rank in range(3)]
    zero, one, two = ray.get(calls, timeout=20)
    assert "GPU ranks were asked for" in one or "GPU 99 asked for" in one
    for rank, message in ((0, zero), (2, two)):
        assert message == f"asked to join 'broken' as rank {rank} of 3, and rank 1 could not take part: {one}"
    calls = [engine.join.remote("broken", rank, 3, 30.0) for rank, engine in enumerate(engines)]
    assert ray.get(calls, timeout=40) == ["joined on cpu"] * 3


def test_ray_tasks_can_join(engines: list[ray.actor.ActorHandle]) -> None:
    task = ray.remote(num_cpus=0)(joined)
    calls = [task.remote("tasks", rank, 2, timeout_s=30.0, device="cpu") for rank in range(2)]
    assert ray.get(calls, timeout=60) == ["joined on cpu"] * 2
