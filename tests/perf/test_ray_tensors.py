"""Time tensors between two actors: raymoe's transport, Ray's object store, NCCL or Gloo; GPUs where there are two.

`python -m tests.perf.test_ray_tensors` prints a line of JSON for each size and way.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import ray
import torch
from ray.experimental.collective import create_collective_group

from raymoe.report.environment import environment
from tests.gpu.ranks import GPUS
from tests.perf.tensor_paths import TensorPath
from tests.python_path import python_path

pytestmark = [pytest.mark.perf, pytest.mark.timeout(600)]

DEVICE = "cuda" if GPUS >= 2 else "cpu"
KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB, MIB, 16 * MIB, 64 * MIB, *([256 * MIB, 1024 * MIB] if DEVICE == "cuda" else [])]
ROUNDS, ROUNDS_OF_LARGE = 9, 5
STORE_BYTES = 8 * 2**30 if DEVICE == "cuda" else 2**30
LEAST_GAIN = 1.5  # over the object store at the largest size

Made: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)(TensorPath)


@contextmanager
def two_actors(home: str) -> Iterator[list[Any]]:
    """Start a Ray of its own, with a source and a receiver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)  # Ray leaves files there
        for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=2 if DEVICE == "cuda" else 0,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        )
        try:
            yield [Made.options(num_gpus=int(DEVICE == "cuda")).remote(DEVICE) for _ in range(2)]
        finally:
            ray.shutdown()


def ways(source: Any, receiver: Any) -> dict[str, Callable[[int], int]]:
    """Return, by its name, each way to bring a tensor of some bytes from the source to the receiver."""

    def by(method: str, nbytes: int) -> int:
        return int(ray.get(receiver.take.remote(getattr(source, method).remote(nbytes))))

    def by_torch(nbytes: int) -> int:
        return int(ray.get([source.send.remote(nbytes), receiver.receive.remote(nbytes)])[1])

    group = "nccl" if DEVICE == "cuda" else "gloo"
    found: dict[str, Callable[[int], int]] = {
        name: partial(by, name) for name in ("no_tensor", "raymoe", "raymoe_in_pool", "object_store")
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    met = [actor.meet.remote(rank, f"tcp://127.0.0.1:{port}") for rank, actor in enumerate((source, receiver))]
    ray.get(met, timeout=120)
    found[f"torch_{group}"] = by_torch
    if group == "nccl":  # Ray's own needs cupy; its gloo would be the group that the actors are in already
        try:
            create_collective_group([source, receiver], backend=group)
            found["ray_nccl"] = partial(by, "ray_nccl")
        except Exception as error:  # noqa: BLE001
            print(json.dumps({"way": "ray_nccl", "left_out": str(error).strip().splitlines()[-1][:200]}), flush=True)
    return found


def measure(home: str) -> list[dict[str, Any]]:
    """Time every way at every size. The rounds of the ways alternate, so that a slow moment meets all of them."""
    machine = environment()
    lines = []
    with two_actors(home) as (source, receiver):
        paths = ways(source, receiver)
        for nbytes in SIZES:
            wanted = ray.get([source.prepare.remote(nbytes), receiver.prepare.remote(4 * KIB)], timeout=120)[0]
            times: dict[str, list[float]] = {name: [] for name in paths}
            for _ in range(2 + (ROUNDS if nbytes < 256 * MIB else ROUNDS_OF_LARGE)):
                for name, bring in paths.items():
                    began = time.perf_counter()
                    assert bring(nbytes) == wanted, name
                    times[name].append(time.perf_counter() - began)
            for name, seconds in times.items():
                middle = statistics.median(seconds[2:])  # the first ones map memory, or meet
                lines.append(
                    {
                        "way": name,
                        "device": DEVICE,
                        "bytes": nbytes,
                        "us_p50": round(middle * 1e6, 1),
                        "us_min": round(min(seconds) * 1e6, 1),
                        "us_first": round(seconds[0] * 1e6, 1),
                        "gbps": None if name == "no_tensor" else round(nbytes / middle / 1e9, 3),
                        "commit": machine["commit"],
                        "ray": ray.__version__,
                        "cpus": os.cpu_count(),
                        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
                    }
                )
                print(json.dumps(lines[-1]), flush=True)
    return lines


def test_a_large_tensor_takes_less_than_by_the_object_store(tmp_path: Any) -> None:
    times = {line["way"]: line["us_p50"] for line in measure(str(tmp_path)) if line["bytes"] == SIZES[-1]}
    assert times["raymoe"] * LEAST_GAIN <= times["object_store"], times
    assert times["raymoe_in_pool"] <= times["raymoe"] * 1.25, times


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(folder)
