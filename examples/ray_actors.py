"""Dispatch and combine inside your own Ray actors: captured in a CUDA graph on GPUs, eager on CPU ranks.

    python examples/ray_actors.py

If the cluster has enough GPUs, each actor takes its own; otherwise all are CPU ranks. Ray places the actors on one host
and lets them meet. No step uses Ray.
"""

from collections.abc import Callable

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raymoe

RANKS, STEPS = 2, 5
SPEC = raymoe.ExchangeSpec(tokens=128, hidden=256, experts=8, topk=2)


@ray.remote
class Engine:
    """One rank. A model would run its layers here."""

    def run(self, rank: int) -> str:
        with raymoe.join("ray_actors", rank, RANKS) as world, raymoe.Exchange(world, SPEC) as exchange:
            batch = Batch(world.device, seed=rank)
            step = batch.captured(exchange) if world.device.type == "cuda" else lambda: batch.step(exchange)
            for number in range(STEPS):
                batch.fill(seed=rank + RANKS * number)  # a replay reads the captured tensors' values of this moment
                step()
                exchange.check()
                batch.verify()
            return f"rank {rank} on {world.device}: {STEPS} steps by {exchange.backend}, verified"


class Batch:
    """The tokens of one rank, the experts of each token, and the result."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.x = torch.empty(SPEC.tokens, SPEC.hidden, dtype=torch.bfloat16, device=device)
        self.topk_idx = torch.empty(SPEC.tokens, SPEC.topk, dtype=torch.int64, device=device)
        self.topk_weights = torch.empty(SPEC.tokens, SPEC.topk, device=device)
        self.y = torch.empty_like(self.x)
        self.fill(seed)

    def fill(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=draw))
        weights, ids = torch.rand(SPEC.tokens, SPEC.experts, generator=draw).topk(SPEC.topk)
        self.topk_weights.copy_(weights)
        self.topk_idx.copy_(ids)

    def step(self, exchange: raymoe.Exchange) -> None:
        got = exchange.dispatch(self.x, self.topk_idx, self.topk_weights)
        # Expert e multiplies its rows by e + 1. A model has a grouped GEMM here, which takes the same offsets.
        rows = torch.arange(len(got.x), dtype=torch.int32, device=got.x.device)
        local_expert = torch.bucketize(rows, got.expert_offsets[1:], right=True)
        first_expert = exchange.world.rank * len(got.expert_counts)
        exchange.combine(got.x * (first_expert + local_expert + 1)[:, None], got, out=self.y)

    def captured(self, exchange: raymoe.Exchange) -> Callable[[], None]:
        self.step(exchange)  # warm-up: torch loads its kernels at the first call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # Ray's threads may call CUDA too
            self.step(exchange)
        return graph.replay

    def verify(self) -> None:
        factor = (self.topk_weights * (self.topk_idx + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(self.y.float(), self.x.float() * factor, rtol=0.02, atol=0.02)


def main() -> None:
    ray.init()
    bundle = {"CPU": 0.5, "GPU": 1 if ray.cluster_resources().get("GPU", 0) >= RANKS else 0}
    # On one host, since ranks map one another's memory.
    group = placement_group([bundle] * RANKS, strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=60)
    engines = [
        Engine.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(RANKS)
    ]
    print(*ray.get([engine.run.remote(rank) for rank, engine in enumerate(engines)], timeout=120), sep="\n")


if __name__ == "__main__":
    main()
