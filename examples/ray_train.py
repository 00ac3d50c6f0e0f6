"""Dispatch and combine inside Ray Train: one line makes a world of the workers of a `TorchTrainer`.

    python examples/ray_train.py

Workers have a GPU each where the cluster has enough, else they are CPU ranks. STRICT_PACK places them on one host.
"""

import tempfile

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raymoe

RANKS, STEPS = 2, 5
SPEC = raymoe.ExchangeSpec(tokens=128, hidden=256, experts=8, topk=2)


def train_loop() -> list[object]:
    """Run on every worker, whose process group Ray Train has made; it hands on what rank 0 returns."""
    with raymoe.World.of() as world, raymoe.Exchange(world, SPEC) as exchange:
        torch.manual_seed(world.rank)
        for _ in range(STEPS):
            x = torch.randn(SPEC.tokens, SPEC.hidden, dtype=torch.bfloat16, device=world.device)
            topk_weights, topk_idx = torch.rand(SPEC.tokens, SPEC.experts, device=world.device).topk(SPEC.topk)
            got = exchange.dispatch(x, topk_idx, topk_weights)
            # Expert e multiplies its rows by e + 1. A model has a grouped product here, which takes the same offsets.
            places = torch.arange(len(got.x), dtype=torch.int32, device=world.device)
            expert = torch.bucketize(places, got.expert_offsets[1:], right=True)
            first = world.rank * len(got.expert_counts)
            y = exchange.combine(got.x * (first + expert + 1)[:, None], got)
            exchange.check()
            want = x.float() * (topk_weights * (topk_idx + 1)).sum(1, keepdim=True)
            torch.testing.assert_close(y.float(), want, rtol=0.02, atol=0.02)
        return world.swap(f"rank {world.rank} on {world.device}: {STEPS} steps by {exchange.backend}, verified", "done")


def main() -> None:
    ray.init()
    gpus = ray.cluster_resources().get("GPU", 0) >= RANKS
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train_loop,
            scaling_config=ray.train.ScalingConfig(num_workers=RANKS, use_gpu=gpus, placement_strategy="STRICT_PACK"),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        print(*trainer.fit().return_value, sep="\n")


if __name__ == "__main__":
    main()
