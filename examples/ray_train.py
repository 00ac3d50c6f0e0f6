"""Dispatch and combine inside Ray Train: one line makes a world from the workers of a `TorchTrainer`.

    python examples/ray_train.py

It exchanges rows and trains no model. If the cluster has enough GPUs, each worker has its own; otherwise all are CPU
ranks. STRICT_PACK places them on one host.
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
    """Run on every worker, with the process group that Ray Train made. Ray Train returns the value of rank 0."""
    with raymoe.World.of() as world, raymoe.Exchange(world, SPEC) as exchange:
        torch.manual_seed(world.rank)
        for _ in range(STEPS):
            x = torch.randn(SPEC.tokens, SPEC.hidden, dtype=torch.bfloat16, device=world.device)
            topk_weights, topk_idx = torch.rand(SPEC.tokens, SPEC.experts, device=world.device).topk(SPEC.topk)
            got = exchange.dispatch(x, topk_idx, topk_weights)
            # Expert e multiplies its rows by e + 1. A model has a grouped GEMM here, which takes the same offsets.
            rows = torch.arange(len(got.x), dtype=torch.int32, device=world.device)
            local_expert = torch.bucketize(rows, got.expert_offsets[1:], right=True)
            first_expert = world.rank * len(got.expert_counts)
            y = exchange.combine(got.x * (first_expert + local_expert + 1)[:, None], got)
            exchange.check()
            expected = x.float() * (topk_weights * (topk_idx + 1)).sum(1, keepdim=True)
            torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
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
