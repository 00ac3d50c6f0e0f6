"""Dispatch and combine between the processes of `torchrun`, without Ray.

    torchrun --nproc-per-node 2 examples/torchrun.py

If the machine has enough GPUs, each process takes its own; otherwise all are CPU ranks.
"""

import os

import torch
import torch.distributed as dist

import raymoe

STEPS = 5
SPEC = raymoe.ExchangeSpec(tokens=128, hidden=256, experts=8, topk=2)


def experts(exchange: raymoe.Exchange, got: raymoe.Dispatched) -> torch.Tensor:
    """Multiply the rows of expert e by e + 1. A model has a grouped GEMM here, which takes the same offsets."""
    rows = torch.arange(len(got.x), dtype=torch.int32, device=got.x.device)
    local_expert = torch.bucketize(rows, got.expert_offsets[1:], right=True)
    first_expert = exchange.world.rank * len(got.expert_counts)
    return got.x * (first_expert + local_expert + 1)[:, None]


def main() -> None:
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    with raymoe.World.of() as world, raymoe.Exchange(world, SPEC) as exchange:
        torch.manual_seed(world.rank)
        for step in range(STEPS):
            tokens = SPEC.tokens - 10 * world.rank - step  # ranks may have different numbers of tokens
            x = torch.randn(tokens, SPEC.hidden, dtype=torch.bfloat16, device=world.device)
            topk_weights, topk_idx = torch.rand(tokens, SPEC.experts, device=world.device).topk(SPEC.topk)
            got = exchange.dispatch(x, topk_idx, topk_weights)
            y = exchange.combine(experts(exchange, got), got)
            exchange.check()
            expected = x.float() * (topk_weights * (topk_idx + 1)).sum(1, keepdim=True)
            torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
        print(f"rank {world.rank} on {world.device}: {STEPS} steps by {exchange.backend}, verified\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
