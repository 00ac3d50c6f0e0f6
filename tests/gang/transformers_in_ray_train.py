"""Run the model of examples/transformers_moe.py in Ray Train: `python -m tests.gang.transformers_in_ray_train`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ray
import ray.train
import torch.distributed as dist
from ray.train.torch import TorchTrainer

RANKS = 2


def train_loop(config: dict[str, str]) -> str:
    """Generate and train on every worker, with the process group that Ray Train made."""
    from examples import transformers_moe

    transformers_moe.main(Path(config["folder"]))
    dist.barrier()
    return f"{dist.get_world_size()} workers: as the unsharded model"


def main() -> None:
    from examples import transformers_moe

    ray.init()
    with tempfile.TemporaryDirectory() as own:
        transformers_moe.write_model(Path(own) / "model")
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"folder": str(Path(own) / "model")},
            scaling_config=ray.train.ScalingConfig(num_workers=RANKS, placement_strategy="STRICT_PACK"),
            run_config=ray.train.RunConfig(storage_path=own),
        )
        print(trainer.fit().return_value)


if __name__ == "__main__":
    main()
