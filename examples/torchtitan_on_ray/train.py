"""Train a Mixture-of-Experts model by torchtitan on the workers of Ray Train, with its experts on raymoe.

    PYTHONPATH=.:examples python -m torchtitan_on_ray.train --ranks 2 --out /tmp/run
    raymoe submit train --address http://HOST:8265

Words after `--` are options of torchtitan. If a worker dies, all start again from the last checkpoint. A second job
with the same `--out` goes on from there too.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

from torchtitan_on_ray.record import Recorder, draw, read
from torchtitan_on_ray.text import prepare
from torchtitan_on_ray.worker import train

KEPT = ".train"
"""The folder of checkpoints and data in `--out`. Its name begins with a dot, so `raymoe submit` does not copy it."""


def parsed(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="Train by torchtitan on Ray, with experts on raymoe.")
    parser.add_argument("--ranks", type=int, default=2, help="workers, one GPU or CPU each")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--restarts", type=int, default=2, help="how often dead workers are replaced")
    parser.add_argument("--kept", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(Path("docs").glob("*.md")), help="text files")
    parser.add_argument("--out", type=Path, default=os.environ.get("RAYMOE_OUT"), help="default: $RAYMOE_OUT")
    settings = parser.parse_args(words[:end])
    if settings.out is None or not settings.text:
        parser.error("give --out, the directory of the run" if settings.out is None else "give --text: docs/ has none")
    settings.torchtitan = words[end + 1 :]
    return settings


def main() -> int:
    """Train, and draw what was recorded. Return the exit code."""
    settings = parsed(sys.argv[1:])
    out = settings.out.expanduser().absolute()
    kept = out / KEPT
    text = prepare(settings.text, kept)
    arguments = ["--module", "torchtitan_on_ray", "--config", "small", "--training.steps", str(settings.steps)]
    arguments += ["--hf_assets_path", str(text.tokenizer), "--dataloader.dataset_path", str(text.data)]
    ray.init(os.environ.get("RAY_ADDRESS", "local"))  # never one that is only left in an address file
    gpus = ray.cluster_resources().get("GPU", 0) >= settings.ranks
    trainer = TorchTrainer(
        train,
        train_loop_config={"arguments": [*arguments, *settings.torchtitan]},
        scaling_config=ScalingConfig(num_workers=settings.ranks, use_gpu=gpus, placement_strategy="STRICT_PACK"),
        run_config=RunConfig(
            name="run",
            storage_path=str(kept),
            failure_config=FailureConfig(max_failures=settings.restarts),
            checkpoint_config=CheckpointConfig(num_to_keep=settings.kept),
            callbacks=[Recorder(out, settings.steps)],
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        last = str(error).strip().splitlines()[-1]
        print(f"the training failed after {settings.restarts} restarts: {last}", file=sys.stderr)
        return 1
    lines = read(out)
    draw(out, lines)
    print(f"{lines[-1]['step']} steps, loss {lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}; {out} has the curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
