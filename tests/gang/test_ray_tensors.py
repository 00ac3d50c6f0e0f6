"""raymoe's tensor transport of Ray between actors on CPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from raymoe.errors import ConfigError, WiringError
from raymoe.integrations import ray_tensors
from tests.gang.conftest import REPO, Head
from tests.gang.processes import runs, shared_memory
from tests.gang.tensor_actors import SMALL, SMALL_BYTES, TensorActor, digest, eventually, random_object, register
from tests.python_path import python_path

Actor = ray.actor.ActorHandle
MIB = 2**20
WAIT_S = 60.0

Made: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)(TensorActor)


@pytest.fixture(scope="module")
def connected(head: Head) -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}}
    before = shared_memory()
    ray.init(address=head.address, log_to_driver=False, logging_level="error", runtime_env=environment)
    yield
    ray.shutdown()
    assert eventually(30, lambda: not shared_memory() - before)


@pytest.fixture(scope="module")
def actors(connected: None) -> list[Actor]:
    """A source and two receivers."""
    three = [Made.remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in three], timeout=WAIT_S)
    return three


def got(*refs: Any) -> Any:
    return ray.get(list(refs), timeout=WAIT_S)


def test_two_hundred_random_objects_come_as_they_were(actors: list[Actor]) -> None:
    source, *receivers = actors
    for first in range(0, 200, 50):
        seeds = range(first, first + 50)
        refs = [source.random.remote(seed) for seed in seeds]
        wanted = [digest(random_object(seed, "cpu")) for seed in seeds]
        for receiver in receivers if first == 0 else receivers[:1]:
            answers = got(*(receiver.digest.remote(ref) for ref in refs))
            assert [found for found, _ in answers] == wanted
            assert set().union(*(devices for _, devices in answers)) == {"cpu"}
        assert [digest(value) for value in ray.get(refs[:10], timeout=WAIT_S)] == wanted[:10]
        del refs
    assert eventually(WAIT_S, lambda: got(source.usage.remote())[0]["objects"] == 0)
    assert got(source.usage.remote())[0]["used_bytes"] == got(source.stored.remote())[0] == 0


def test_objects_that_were_put_are_read_by_actors_and_by_their_owner(actors: list[Actor]) -> None:
    """Sources: the driver, an actor for another one, an actor for itself."""
    source, receiver, _ = actors
    wanted = digest(random_object(5, "cpu"))
    own = ray.put(random_object(5, "cpu"), _tensor_transport="raymoe")
    refs = got(source.put.remote(5))[0]
    assert digest(ray.get(own, timeout=WAIT_S)) == wanted
    assert got(receiver.get.remote([own]), receiver.get.remote(refs), source.get.remote(refs)) == [[wanted]] * 3
    assert got(receiver.digest.remote(own), source.digest.remote(source.random.remote(5))) == [(wanted, {"cpu"})] * 2


def test_tensors_come_without_gradients_and_parameters_as_such(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    forms = got(receiver.forms.remote(source.with_gradients.remote()))[0]
    assert forms == [("Parameter", True, 1000.0), ("Tensor", False, 2000.0)]


def test_memory_is_used_again_when_ray_has_freed_an_object(actors: list[Actor]) -> None:
    """Five times as many bytes as the pool has go through it."""
    source, receiver, _ = actors
    count = SMALL_BYTES // 4 // 4
    for number in range(20):
        ref = source.small.remote(float(number), count)
        assert got(receiver.sums.remote(ref)) == [[number * float(count)]]
        del ref
    usage = got(source.usage.remote(SMALL))[0]
    assert usage["total_bytes"] <= SMALL_BYTES and usage["segments"] <= 4


def test_a_full_pool_is_an_error_and_the_next_object_works(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    count = SMALL_BYTES // 4 // 4
    refs = [source.small.remote(float(number), count) for number in range(4)]
    assert got(receiver.sums.remote(*refs)) == [[number * float(count) for number in range(4)]]
    with pytest.raises(RayTaskError, match=r"of the pool of tensors of Actor\(TensorActor, .* with 4 objects in it"):
        got(source.small.remote(5.0, count))
    with pytest.raises(RayTaskError, match="sparse_coo form cannot be exported"):
        got(source.sparse.remote())
    assert got(receiver.sums.remote(*refs)) == [[number * float(count) for number in range(4)]]
    assert got(source.stored.remote()) == [4]  # Ray keeps no tensor of what failed
    del refs
    assert eventually(WAIT_S, lambda: got(source.usage.remote(SMALL))[0]["objects"] == 0)
    assert got(receiver.sums.remote(source.small.remote(5.0, count))) == [[5.0 * count]]


def test_ray_frees_an_object_whose_put_was_refused(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    refusal, freed = got(source.put_sparse.remote())[0]
    assert "sparse_coo form cannot be exported" in refusal and freed == {"None"}
    assert got(receiver.sums.remote(source.value.remote(2.0, 100)), source.stored.remote())[0] == [200.0]


def test_a_dead_source_is_named_at_once_and_receivers_live_on(actors: list[Actor]) -> None:
    """One receiver has read from it, one has not; both are asked as an actor gets an argument, and the driver gets."""
    source, (_, knows, other) = Made.remote(), actors
    ref, pid = source.value.remote(1.0, 4 * MIB), got(source.pid.remote())[0]
    assert got(knows.sums.remote(ref)) == [[4.0 * MIB]]
    assert str(pid) in got(knows.pools_mapped.remote())[0]
    os.kill(pid, signal.SIGKILL)
    assert eventually(WAIT_S, lambda: not runs(pid))
    began = time.monotonic()
    named = rf"Actor\(TensorActor, {source._actor_id.hex()}\) \(pid {pid} on .*\) has ended"
    for read in (knows.sums.remote(ref), other.sums.remote(ref), ref):
        with pytest.raises((RayTaskError, WiringError), match=named):
            got(read)
    assert time.monotonic() - began < 30
    assert str(pid) not in got(knows.pools_mapped.remote())[0]  # its memory is not kept
    alive = actors[0].value.remote(2.0, 100)
    assert got(knows.sums.remote(alive), other.sums.remote(alive)) == [[200.0]] * 2


def test_tensors_of_the_pool_are_not_copied_at_the_source(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    assert eventually(WAIT_S, lambda: got(source.usage.remote())[0]["used_bytes"] == 0)
    refs = [source.in_pool.remote(float(number), MIB) for number in range(3)]
    assert got(receiver.sums.remote(*refs)) == [[0.0, 1.0 * MIB, 2.0 * MIB]]
    assert got(source.usage.remote())[0]["used_bytes"] == 3 * 4 * MIB
    del refs
    assert eventually(WAIT_S, lambda: got(source.usage.remote())[0]["used_bytes"] == 0)


@pytest.mark.thorough
def test_a_receiver_can_name_its_own_memory(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    owned = got(source.put.remote(5))[0]
    ref = ray.put(torch.full((1000,), 3.0), _tensor_transport="raymoe")
    assert got(receiver.into.remote([ref], 1000, "cpu")) == [(True, 3000.0)]
    with pytest.raises(RayTaskError, match="does not match"):
        got(receiver.into.remote([ref], 999, "cpu"))
    assert got(receiver.get.remote(owned)) == [[digest(random_object(5, "cpu"))]]


@pytest.mark.thorough
def test_a_dead_receiver_leaves_the_source_usable(actors: list[Actor]) -> None:
    """It is killed while it may be reading, some times."""
    source, _, receiver = actors
    for number in range(5):
        victim = Made.remote()
        pid, ref = got(victim.pid.remote())[0], source.value.remote(float(number), 16 * MIB)
        reads = [victim.sums.remote(ref) for _ in range(3)]
        time.sleep(0.02 * number)
        os.kill(pid, signal.SIGKILL)
        assert got(receiver.sums.remote(ref)) == [[number * 16.0 * MIB]]
        del ref, reads
    assert eventually(WAIT_S, lambda: got(source.usage.remote())[0]["used_bytes"] == 0)


@pytest.mark.thorough
def test_a_borrower_keeps_an_object_alive(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    refs = got(source.put.remote(7))[0]
    got(receiver.hold.remote(refs))
    del refs
    time.sleep(1.0)
    assert got(source.usage.remote())[0]["objects"] == 1
    got(receiver.hold.remote(None))
    assert eventually(WAIT_S, lambda: got(source.usage.remote())[0]["objects"] == 0)


@pytest.mark.thorough
def test_the_program_of_the_page_runs(connected: None, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPO / "docs" / "ray.md").read_text()
    program = page[page.index("import ray, torch") :].partition("```")[0]
    exec(program.replace("num_gpus=1", "num_cpus=0").replace('"cuda"', '"cpu"'), {"__name__": "page"})
    assert capsys.readouterr().out.endswith("(7, 1048576.0)\n")


def test_a_name_is_registered_once_with_its_values(connected: None) -> None:
    register()
    with pytest.raises(ConfigError, match="registered with other values"):
        ray_tensors.register_ray_tensors(pool_bytes=2**30)
    with pytest.raises(ConfigError, match="no tensor transport 'nobody' is registered here"):
        ray_tensors.usage("nobody")
    with pytest.raises(ConfigError, match="'gloo' is GLOOTensorTransport, not one of raymoe"):
        ray_tensors.empty(3, transport="gloo")
