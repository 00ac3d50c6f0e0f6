"""raymoe's tensor transport of Ray between actors on two GPUs: bytes, order of streams, reuse, a dead source."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ray = pytest.importorskip("ray")

from ray.exceptions import RayTaskError  # noqa: E402

from tests.gang.processes import runs  # noqa: E402
from tests.gang.tensor_actors import (  # noqa: E402
    SMALL,
    SMALL_BYTES,
    TensorActor,
    digest,
    eventually,
    random_object,
)
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.python_path import python_path  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(GPUS < 2, reason=f"a source and a receiver need a GPU each: {GPUS} here"),
    pytest.mark.timeout(300),
]

MIB = 2**20
WAIT_S = 90.0

Actor = Any
Made: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)(TensorActor)


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Actor]]:
    """A source and a receiver on GPUs of their own, and a third actor that shares one of the two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # Ray leaves files there
        for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        ray.init(
            address="local",
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        )
        try:
            three = [Made.options(num_gpus=share).remote("cuda") for share in (0.6, 0.6, 0.3)]
            source, receiver, _ = ray.get([actor.gpu.remote() for actor in three], timeout=WAIT_S)
            assert {source, receiver} == {0, 1}
            yield three
        finally:
            print(*crashes(), sep="\n")
            ray.shutdown()


def crashes() -> list[str]:
    """Return what processes of this Ray wrote that a signal ended: Ray's faulthandler names the place."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = (path.read_text(errors="replace") for path in sorted(logs.glob("worker-*.err")))
    return [text[-8000:] for text in texts if "Fatal Python error" in text or "*** SIG" in text]


def got(*refs: Any) -> Any:
    return ray.get(list(refs), timeout=WAIT_S)


def is_free(source: Actor, transport: str = "raymoe") -> bool:
    return bool(got(source.usage.remote(transport))[0]["objects"] == 0)


def test_a_hundred_random_objects_come_as_they_were(actors: list[Actor]) -> None:
    source, *receivers = actors
    for first in range(0, 100, 25):
        refs = [source.random.remote(seed) for seed in range(first, first + 25)]
        wanted = [(digest(random_object(seed, "cpu")), {"cuda"}) for seed in range(first, first + 25)]
        for receiver in receivers:
            assert got(*(receiver.digest.remote(ref) for ref in refs)) == wanted
        del refs
    assert eventually(WAIT_S, lambda: is_free(source))


def test_objects_that_were_put_are_got(actors: list[Actor]) -> None:
    source, *receivers = actors
    refs = got(source.put.remote(5))[0]
    wanted = [[digest(random_object(5, "cpu"))]]
    assert got(*(receiver.get.remote(refs) for receiver in receivers), source.get.remote(refs)) == wanted * 3


@pytest.mark.parametrize("method", ["sums", "sums_beside"])
def test_a_receiver_sees_what_the_source_writes_later(actors: list[Actor], method: str) -> None:
    """The source's task returns before its GPU has written. The receiver adds up on any stream."""
    source, *receivers = actors
    for number in range(1, 6):
        ref = source.late.remote(float(number), MIB, 0.2)
        for receiver in receivers:
            assert got(getattr(receiver, method).remote(ref)) == [[number * float(MIB)]]


def test_memory_is_used_again_after_writes_and_reads(actors: list[Actor]) -> None:
    """Of each three objects one is read, and the others are freed while their writes may be under way."""
    source, receiver, _ = actors
    count = SMALL_BYTES // 4 // 4
    for number in range(30):
        ref = source.late_and_small.remote(float(number), count, 0.02)
        if number % 3 == 0:
            assert got(receiver.sums.remote(ref)) == [[number * float(count)]]
        del ref
    usage = got(source.usage.remote(SMALL))[0]
    assert usage["total_bytes"] <= SMALL_BYTES
    assert eventually(WAIT_S, lambda: is_free(source, SMALL))


def test_tensors_of_the_pool_and_of_the_cpu(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    assert eventually(WAIT_S, lambda: is_free(source))
    before = got(source.usage.remote())[0]
    for number in range(8):
        ref = source.in_pool.remote(float(number), 8 * MIB)
        assert got(receiver.sums.remote(ref, source.on_cpu.remote(2.0, 10))) == [[number * 8.0 * MIB, 20.0]]
        del ref
    assert got(source.usage.remote())[0]["segments"] <= before["segments"] + 4
    with pytest.raises(RayTaskError, match="on cpu was given with one on cuda:0: one object has one device"):
        got(source.on_both.remote())


def test_a_receiver_can_name_its_own_memory(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    refs = [ray.put(torch.full((1000,), 3.0), _tensor_transport="raymoe")]
    for device in ("cpu", "cuda"):
        assert got(receiver.into.remote(refs, 1000, device)) == [(True, 3000.0)]
    made = got(source.put_value.remote(4.0, 1000))[0]
    for device in ("cpu", "cuda"):
        assert got(receiver.into.remote(made, 1000, device)) == [(True, 4000.0)]


def test_a_process_without_a_gpu_is_refused(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    blind = Made.options(num_gpus=0, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}).remote("cpu")
    ref = source.value.remote(1.0, 100)
    with pytest.raises(RayTaskError, match=r"of Actor\(TensorActor, .*\) are on a GPU, and this process sees none"):
        got(blind.sums.remote(ref))
    assert got(receiver.sums.remote(ref)) == [[100.0]]
    ray.kill(blind)


def test_a_source_that_dies_before_it_has_written_is_named(actors: list[Actor]) -> None:
    _, receiver, third = actors
    ray.kill(third)
    source = Made.options(num_gpus=0.3).remote("cuda")
    pid = got(source.pid.remote())[0]
    assert got(receiver.sums.remote(source.value.remote(1.0, 100))) == [[100.0]]
    ref = source.late.remote(1.0, MIB, 60.0)
    reads = receiver.sums.remote(ref)
    time.sleep(2.0)
    os.kill(pid, signal.SIGKILL)
    assert eventually(WAIT_S, lambda: not runs(pid))
    began = time.monotonic()
    with pytest.raises(RayTaskError, match=rf"Actor\(TensorActor, .*\) \(pid {pid} on .*\) has ended"):
        got(reads)
    assert time.monotonic() - began < 30
    assert got(receiver.sums.remote(actors[0].value.remote(2.0, 100))) == [[200.0]]
    actors[2] = Made.options(num_gpus=0.3).remote("cuda")


def test_a_capture_is_refused_at_the_source_and_not_disturbed_at_a_receiver(actors: list[Actor]) -> None:
    source, receiver, _ = actors
    with pytest.raises(RayTaskError, match="cannot be given to Ray while their stream is captured"):
        got(source.put_in_capture.remote())
    assert got(source.put_sparse.remote())[0][1] == {"None"}  # Ray frees what was refused
    capture = receiver.capture.remote(2.0)
    sums = [receiver.sums.remote(source.value.remote(float(number), MIB)) for number in range(3)]
    assert got(capture) == [8.0]
    assert got(*sums) == [[0.0], [1.0 * MIB], [2.0 * MIB]]
