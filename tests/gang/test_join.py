"""`raymoe.join` inside actors of somebody else's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.gang.conftest import REPO, Head


@ray.remote(num_cpus=0)
class Engine:
    """An actor of a user's own, which knows raymoe only by its public names."""

    def exchange(self, name: str, rank: int, size: int, seed: int) -> tuple[float, list[int]]:
        import torch

        import raymoe

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

    def join(self, name: str, rank: int, size: int, timeout_s: float) -> str:
        import raymoe
        from raymoe.job.errors import RaymoeError

        try:
            raymoe.join(name, rank, size, timeout_s=timeout_s).close()
        except RaymoeError as error:
            return str(error)
        return "joined"


@pytest.fixture(scope="module")
def engines(head: Head) -> Iterator[list[ray.actor.ActorHandle]]:
    ray.init(
        address=head.address,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": str(REPO)}},
    )
    actors = [Engine.remote() for _ in range(3)]
    alone = [actor.join.remote(f"alone{i}", 0, 1, 30.0) for i, actor in enumerate(actors)]  # imports torch, for one
    assert ray.get(alone, timeout=60) == ["joined"] * 3
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
        assert "waited in vain for rank 1" in said or "has died" in said


def present(name: str) -> set[int]:
    """Ranks whose descriptors are in the meeting of that name."""
    try:
        meeting = ray.get_actor(f"raymoe/join/{name}", namespace="raymoe")
    except ValueError:  # nobody has come yet
        return set()
    return set(ray.get(meeting.present.remote(), timeout=10)[0])


def test_a_rank_that_is_taken_and_a_size_that_differs_are_refused(engines: list[ray.actor.ActorHandle]) -> None:
    first = engines[0].join.remote("crowded", 0, 2, 8.0)
    while 0 not in present("crowded"):
        assert not ray.wait([first], timeout=0.05)[0], "it is there, and waits for rank 1"
    assert "rank 0 is taken by pid" in ray.get(engines[1].join.remote("crowded", 0, 2, 10.0), timeout=30)
    said = ray.get(engines[2].join.remote("crowded", 1, 3, 10.0), timeout=30)
    assert "size 3" in said and "said 2" in said
    assert "waited in vain for rank 1" in ray.get(first, timeout=30)


def test_a_rank_outside_the_world_is_refused(engines: list[ray.actor.ActorHandle]) -> None:
    assert "ranks go from 0 to 1" in ray.get(engines[0].join.remote("x", 2, 2, 1.0), timeout=30)
