"""The step time of a GPT of Megatron-Core by each dispatcher in turns: its all-to-all, its all-gather, and raymoe's.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.perf.megatron_step --out step.jsonl

Four layers with experts in bfloat16, expert parallelism over all ranks: forward, loss and backward pass, without
Transformer Engine, an optimizer, or a sum of gradients over ranks. One model has all dispatchers in turn. Rank 0 prints
a line of JSON for each, as `torchtitan_step.py` says. Without Transformer Engine an expert is computed after the other.

Without a GPU it takes a small model on Gloo; Megatron's all-to-all makes CUDA streams, so its line is the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]

# Megatron's attention asks for a GPU where there is none; its MoE layer does not.
import megatron.core.tensor_parallel.random as random_states  # noqa: E402
import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import (  # noqa: E402
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from raymoe.integrations.megatron import Options, RaymoeTokenDispatcher  # noqa: E402
from tests.perf.host_steps import Comparison, begin_ranks  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 forgets it where Transformer Engine is missing
random_states.initialize_rng_tracker()
random_states._CUDA_RNG_STATE_TRACKER.fork = lambda *_, **__: contextlib.nullcontext()

GATHER, ALL_TO_ALL = "Megatron all-gather", "Megatron all-to-all"
RAYMOE = {"raymoe": Options(), "raymoe, capacity 1.5": Options(capacity=1.5)}
SEQUENCE = 1024 if ON_GPU else 16


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 64, help="tokens of a rank")
    parser.add_argument("--hidden", type=int, default=2048 if ON_GPU else 128)
    parser.add_argument("--ffn", type=int, default=1536 if ON_GPU else 48)
    parser.add_argument("--experts", type=int, default=32 if ON_GPU else 8)
    parser.add_argument("--topk", type=int, default=4 if ON_GPU else 2)
    parser.add_argument("--layers", type=int, default=4 if ON_GPU else 2)
    parser.add_argument("--vocabulary", type=int, default=16384 if ON_GPU else 128)
    parser.add_argument("--rounds", type=int, default=15 if ON_GPU else 3)
    parser.add_argument("--without", nargs="*", default=[], help="dispatchers that are left out, by their names")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    return parser.parse_args()


def build(chosen: argparse.Namespace, device: torch.device) -> GPTModel:
    """Build the model with Megatron's all-gather; the same weights on all ranks, but for experts."""
    config = TransformerConfig(
        num_layers=chosen.layers,
        hidden_size=chosen.hidden,
        num_attention_heads=chosen.hidden // 32,
        num_moe_experts=chosen.experts,
        moe_router_topk=chosen.topk,
        moe_ffn_hidden_size=chosen.ffn,
        ffn_hidden_size=chosen.ffn,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        perform_initialization=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(num_experts=chosen.experts, moe_grouped_gemm=False)
    model = GPTModel(
        config,
        spec,
        chosen.vocabulary,
        SEQUENCE,
        position_embedding_type="learned_absolute",
        parallel_output=False,
    ).to(device, torch.bfloat16)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        own = 1000 * (dist.get_rank() + 1) if "local_experts" in name else 0
        source = torch.Generator(device).manual_seed(index + own)
        if "norm" in name:
            parameter.data.fill_(0 if name.endswith("bias") else 1)
        else:
            parameter.data.normal_(std=0.02, generator=source)
    return model


class Hosts:
    """One model whose layers take one dispatcher after another."""

    def __init__(self, model: GPTModel) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        assert self._layers
        self._made = {GATHER: [layer.token_dispatcher for layer in self._layers]}
        assert all(type(each) is MoEAllGatherTokenDispatcher for each in self._made[GATHER])

    def take(self, host: str) -> None:
        """Let the model take a dispatcher. Raise an error if it cannot be made."""
        if host not in self._made:
            self._made[host] = [self._dispatcher(host, layer) for layer in self._layers]
        for layer, dispatcher in zip(self._layers, self._made[host], strict=True):
            layer.token_dispatcher = dispatcher

    def _dispatcher(self, host: str, layer: MoELayer) -> Any:
        groups = moe_utils.get_default_pg_collection()
        if host in RAYMOE:
            return RaymoeTokenDispatcher(layer, groups, RAYMOE[host])
        experts = layer.num_local_experts, layer.local_expert_indices
        return MoEAlltoAllTokenDispatcher(*experts, config=layer.config, pg_collection=groups)


def stepper(model: GPTModel, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the function that runs forward, loss and backward pass, and returns the loss."""
    mask = torch.ones(SEQUENCE, SEQUENCE, device=tokens.device).tril().logical_not()[None, None]
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    labels = tokens.roll(-1, 1).flatten()

    def step() -> torch.Tensor:
        logits = model(tokens, positions, mask)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels)
        loss.backward()
        return loss.detach()

    return step


def main() -> None:
    warnings.filterwarnings("ignore")
    chosen, device = options(), begin_ranks()
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())
    model = build(chosen, device)
    source = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, chosen.vocabulary, (chosen.tokens // SEQUENCE, SEQUENCE), generator=source).to(device)
    experts = f"{chosen.experts} experts, top-{chosen.topk}, hidden {chosen.hidden}, ffn {chosen.ffn}"
    shared = {"model": f"GPT of Megatron-Core, {chosen.layers} layers, {experts}", "tokens": chosen.tokens}
    hosts = Hosts(model)
    comparison = Comparison(model, stepper(model, tokens), hosts.take, shared, chosen.out)
    names = [name for name in (GATHER, ALL_TO_ALL, *RAYMOE) if name not in chosen.without]
    comparison.eager(names, chosen.rounds)
    dist.barrier()
    os._exit(0)  # destructors of other libraries may wait for one another


if __name__ == "__main__":
    main()
