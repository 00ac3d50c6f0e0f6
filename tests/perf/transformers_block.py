"""The MoE block of transformers with its own expert parallelism, beside a layer of raymoe made from the same block.

Both have the same weights, tokens and ranks. The layer is replayed from a CUDA graph; the block reads its counts on the
host in each step, so it cannot be captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raymoe.memory.world import World
from raymoe.moe.layer import MoELayer


@dataclass(frozen=True)
class Sizes:
    """Of one rank's tokens, and of the block."""

    tokens: int
    hidden: int = 7168
    ffn: int = 2048
    experts: int = 256
    topk: int = 8
    groups: int = 8
    topk_groups: int = 4


Work = Callable[[], object]
Us = Callable[[Work, bool], float]
"""Microseconds of one run of some work, which may be captured or not."""


def measure(world: World, store: str, sizes: Sizes, steps: int) -> dict[str, float]:
    """Return microseconds of the layer, the block and the matrix products of each, and how far their outputs differ.

    Times are medians of steps, and those of the slowest rank. All ranks call this with a new file `store`.
    """
    device, ranks = world.device, world.size
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=world.rank, world_size=ranks)
    try:
        with torch.no_grad():
            return _measured(world, sizes, steps)
    finally:
        dist.destroy_process_group()


def _measured(world: World, sizes: Sizes, steps: int) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    kind = world.device.type
    together: Any = init_device_mesh(kind, (world.size,), mesh_dim_names=("ep",))
    alone: Any = init_device_mesh(kind, (world.size, 1), mesh_dim_names=("dp", "tp"))["tp"]
    block = block_of(sizes, world.device)
    theirs = OwnParallelism.put_into(block, together, alone)
    layer = MoELayer.from_block(block, world, tokens=sizes.tokens)
    source = torch.Generator(world.device).manual_seed(world.rank)
    x = torch.randn(1, sizes.tokens, sizes.hidden, generator=source, device=world.device).to(layer.gate.weight.dtype)
    wanted, found = theirs.block(x), layer(x)
    error = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    works: dict[str, tuple[Work, bool]] = {
        "layer": (lambda: layer(x), True),
        "layer_products": (_products_of(layer, x), True),
        "block": (lambda: theirs.block(x), False),
        "block_products": (theirs.products(x), False),
    }
    us = {name: _us_of(world, layer, work, captured, steps) for name, (work, captured) in works.items()}
    slowest = [max(each[name] for each in world.swap(us, "times")) for name in works]
    worst = max(world.swap(error, "errors"))
    layer.exchange.close()
    return dict(zip(works, slowest, strict=True)) | {"error": worst}


def block_of(sizes: Sizes, device: torch.device) -> Any:
    """Make DeepSeek-V3's block with random weights, the same on all ranks."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.ffn,
        n_routed_experts=sizes.experts,
        n_group=sizes.groups,
        topk_group=sizes.topk_groups,
        num_experts_per_tok=sizes.topk,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        block = DeepseekV3MoE(config)
    block.to(dtype).to_empty(device=device)
    source = torch.Generator(device).manual_seed(7)
    for parameter in block.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5, generator=source)
    block.gate.e_score_correction_bias.zero_()
    block.experts.config._experts_implementation = "grouped_mm" if device.type == "cuda" else "eager"
    return block.eval()


class OwnParallelism(nn.Module):
    """The experts of this rank behind `AllToAllEP`, in the place of a block's experts."""

    def __init__(self, experts: Any, together: Any, alone: Any) -> None:
        from transformers.distributed.expert_parallel import AllToAllEP

        super().__init__()
        rank, ranks = together.get_local_rank(), together.size()
        mine = copy.copy(experts)  # its parameters become views of this rank's share
        mine._parameters = {
            name: nn.Parameter(whole.chunk(ranks)[rank], requires_grad=False)
            for name, whole in experts.named_parameters()
        }
        mine.num_experts, mine._is_expert_parallel = experts.num_experts // ranks, True
        self._parallel = AllToAllEP(mine, together, alone)
        self.block: Any = None

    @classmethod
    def put_into(cls, block: Any, together: Any, alone: Any) -> OwnParallelism:
        """Make a block like `block` whose experts are spread over the ranks."""
        made = cls(block.experts, together, alone)
        spread = copy.copy(block)
        spread._modules = {**block._modules, "experts": made}
        object.__setattr__(made, "block", spread)  # not a module of it, which would be a circle
        return made

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        return self._parallel(x, ids, weights)

    def products(self, x: torch.Tensor) -> Work:
        """Return the experts' work alone, on the rows that this rank gets."""
        _, weights, ids = self.block.gate(x)
        rows, row_ids, row_weights, _ = self._parallel._dispatch_tokens(x.view(-1, x.shape[-1]), ids, weights)
        return lambda: self._parallel.experts_forward(rows, row_ids, row_weights)


def _products_of(layer: Any, x: torch.Tensor) -> Work:
    """Return the experts' work alone, on the rows that this rank gets."""
    flat, spec = x.view(-1, x.shape[-1]), layer.exchange.spec
    ids, weights, _ = layer.gate(flat)
    rows = torch.empty(spec.rows(layer.world.size), spec.hidden, dtype=x.dtype, device=x.device)
    got = layer.exchange.dispatch(flat, ids, weights, None, rows)
    kept = rows.clone()
    layer.exchange.combine(rows, got)
    layer.exchange.check()
    return lambda: layer.experts(kept, got.expert_offsets, got.expert_counts)


def _us_of(world: World, layer: MoELayer, work: Work, captured: bool, steps: int) -> float:
    """Return the median of some steps, after three to warm up."""
    if world.device.type == "cpu":

        def sample() -> float:
            world.barrier("start")
            started = perf_counter_ns()
            work()
            return (perf_counter_ns() - started) / 1e3

        return median([sample() for _ in range(steps + 3)][3:])
    from raymoe.workload.pointwise.gpu_clock import TorchGraphClock

    def run() -> None:
        work()

    new_stream: Any = torch.cuda.Stream  # has no annotations
    stream = new_stream(world.device)
    stream.wait_stream(torch.cuda.current_stream(world.device))
    with torch.cuda.stream(stream), torch.no_grad():
        run()  # compiles, loads and allocates before the capture
        layer.exchange.check()
        with closing(TorchGraphClock(world, stream, layer.exchange.check, captured=captured)) as clock:
            timed = clock.timed(run)
            return median([clock.us_cold(timed) for _ in range(steps + 3)][3:])
