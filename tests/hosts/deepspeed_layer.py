"""An AutoEP layer of DeepSpeed on CPU ranks, by its own all-to-all and by its DeepEP backend over raymoe.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.hosts.deepspeed_layer

Rank 0 prints a line of JSON with the largest differences of all ranks, for each kind of activation checkpointing.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import tests.hosts.deep_ep_installed as installed

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported

# isort: split
import deepspeed
from deepspeed.module_inject import auto_ep_comm
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig, MoELayerSpec

E, K, H, F, TOKENS, STEPS = 8, 2, 32, 48, 12, 2
SPEC = MoELayerSpec(
    moe_module_name="block",
    model_family="mixtral",
    router_name="gate",
    experts_name="experts",
    expert_storage="module_list",
    expert_w1_name="w1",
    expert_w2_name="w2",
    expert_w3_name="w3",
    num_experts=E,
    top_k=K,
    hidden_size=H,
    ffn_hidden_size=F,
    score_func="softmax",
    score_apply="post",
    route_norm=True,
    gate_bias=False,
    return_router_logits=False,
    router_logits_capture_target="none",
    router_logits_capture_index=None,
    router_logits_capture_layer_name=None,
    has_shared_experts=False,
    shared_experts_name="",
)


class Expert(nn.Module):
    """A SwiGLU expert with the names of Mixtral's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(H, F, bias=False) for _ in range(2))
        self.w2 = nn.Linear(F, H, bias=False)


class Block(nn.Module):
    """The block that AutoEP replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(Expert() for _ in range(E))


def layer_of(backend: str, score_apply: str) -> AutoEPMoELayer:
    """Make the layer of a backend. All have the same weights."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = AutoEPConfig(
        enabled=True, autoep_size=ranks, use_grouped_mm=False, comm_backend=backend, comm_max_tokens_per_rank=2 * TOKENS
    )
    layer = AutoEPMoELayer(replace(SPEC, score_apply=score_apply), Block(), ranks, rank, config)
    layer.ep_group = dist.group.WORLD
    return layer


def steps(layer: AutoEPMoELayer, checkpointing: str) -> list[torch.Tensor]:
    """Return output, the gradient of x and those of all parameters, step after step."""
    results = []
    for step in range(STEPS):
        source = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, TOKENS // 2 + step - dist.get_rank(), H, generator=source).requires_grad_()
        layer.zero_grad()
        y = layer(x) if checkpointing == "none" else checkpoint(layer, x, use_reentrant=checkpointing == "reentrant")
        y.square().sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        results += [y.detach(), *(each.clone() for each in (x.grad, *gradients) if each is not None)]
    return results


def main() -> None:
    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):  # it compiles an extension
        deepspeed.init_distributed("gloo", verbose=False)
    # The checks for bfloat16 and NCCL are DeepSpeed's own. Differences of float32 say more.
    float32 = mock.patch.object(auto_ep_comm, "SUPPORTED_DTYPES", (torch.float32,))
    barrier = mock.patch("deepspeed.comm.barrier", lambda group=None, device_ids=None: dist.barrier(group))  # noqa: ARG005
    differences: dict[str, Any] = {}
    with float32, barrier:
        for kind in ("none", "reentrant", "non-reentrant"):
            for score_apply in ("post", "pre"):
                own = steps(layer_of("comm", score_apply), kind)
                layer = layer_of("deepep", score_apply)
                ours = steps(layer, kind)
                buffer = layer._deepep_exchange.buffer
                assert isinstance(buffer, installed.ElasticBuffer)
                buffer.check()
                layer._deepep_exchange.destroy()
                assert len(own) == len(ours) == STEPS * 6
                errors = [float((a - b).abs().max()) for a, b in zip(own, ours, strict=True)]
                largest = max(float(each.abs().max()) for each in own)
                differences[f"{kind}, {score_apply}"] = {"difference": max(errors), "largest": largest}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, differences)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
