"""`raymoe.join` in an actor to which Ray has assigned a GPU, on a machine where torch sees none."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.gang.conftest import UNSET, ray_head
from tests.gang.test_join import Engine
from tests.python_path import python_path


@pytest.mark.thorough
def test_an_actor_with_a_gpu_gets_a_cpu_world_only_on_request(tmp_path: Path) -> None:
    """Ray counts a GPU that torch does not see, as with a torch that was installed without CUDA."""
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("torch sees GPUs here; tests/gpu/test_worlds_gpu.py joins worlds on them")
    with ray_head(tmp_path, cpus=2, gpus=1, env={"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": UNSET}) as head:
        try:
            environment = {"env_vars": {"PYTHONPATH": python_path()}}
            ray.init(address=head.address, log_to_driver=False, logging_level="error", runtime_env=environment)
            engine = Engine.options(num_gpus=1).remote()
            assert "Ray assigned GPU 0; torch" in ray.get(engine.join.remote("gpu", 0, 1, 30.0), timeout=60)
            message = ray.get(engine.join.remote("gpu", 0, 1, 30.0, device="cpu"), timeout=60)
            assert message == "joined on cpu"
        finally:
            ray.shutdown()
