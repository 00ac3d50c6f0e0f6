"""A GPT of Megatron-Core on two CPU ranks, by its all-gather dispatcher and by raymoe: loss and all gradients.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.hosts.megatron_model plain 1

The arguments are a kind (`plain`, `dropped`: a capacity factor with which Megatron drops tokens, `refused`) and the
degree of expert tensor parallelism. Rank 0 prints each rank's differences as JSON. A checkpoint of each model is loaded
by the other.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]

# Megatron's attention asks for a GPU where there is none; its MoE layer does not.
import megatron.core  # noqa: E402
import megatron.core.tensor_parallel.random as random_states  # noqa: E402
import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from raymoe.errors import ConfigError  # noqa: E402
from raymoe.integrations.megatron import RaymoeTokenDispatcher, on_raymoe  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 forgets it where Transformer Engine is missing
random_states.initialize_rng_tracker()
random_states._CUDA_RNG_STATE_TRACKER.fork = lambda *_, **__: contextlib.nullcontext()

EXPERTS, LENGTH, VOCABULARY = 8, 16, 128
OWN, RAYMOE = "allgather", "raymoe"


def build(host: str, tp: int, **changes: Any) -> GPTModel:
    ranks = dist.get_world_size() // tp
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=48,
        ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=32,
        moe_token_dispatcher_type="allgather",  # raymoe's layer makes it too; `alltoall` makes CUDA streams
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=tp,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        **changes,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    spec = on_raymoe(spec, tokens=64) if host == RAYMOE else spec
    options = {"position_embedding_type": "learned_absolute", "parallel_output": False}
    model = GPTModel(config, spec, VOCABULARY, 2 * LENGTH, **options)
    for name, parameter in model.named_parameters():
        own = 1000 * dist.get_rank() if "local_experts" in name else 0
        source = torch.Generator().manual_seed(sum(map(ord, name)) + own)
        parameter.data.copy_(torch.randn(parameter.shape, generator=source) * 0.2)
    return model


def step(model: GPTModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients by name."""
    model.zero_grad()
    mask = torch.ones(LENGTH, LENGTH).tril().logical_not()[None, None]
    logits = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask)
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


def compare(kind: str, tp: int) -> dict[str, Any]:
    """Run both on the same tokens, then each with the other's checkpoint of changed weights."""
    dropped = {"moe_expert_capacity_factor": 0.75} if kind == "dropped" else {}
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {host: build(host, tp, **dropped) for host in (OWN, RAYMOE)}
    layers = [layer.mlp.token_dispatcher for layer in models[RAYMOE].decoder.layers]
    assert all(isinstance(each, RaymoeTokenDispatcher) for each in layers)
    for _ in range(2):
        own, ours = (step(model, tokens) for model in models.values())
    assert own.keys() == ours.keys()
    worst = {name: float((ours[name] - own[name]).abs().max()) for name in own}
    return {
        "version": megatron.core.__version__,
        "gradients": len(worst) - 1,
        "loss": worst.pop("loss"),
        "gradient": max(worst.values()),
        "largest gradient": max(float(own[name].abs().max()) for name in worst),
        "dropped": sum(int((each.ids < 0).sum()) for each in layers),
        "loaded": max(loaded(models[one], models[other], tokens) for one, other in ((OWN, RAYMOE), (RAYMOE, OWN))),
    }


def loaded(one: GPTModel, other: GPTModel, tokens: torch.Tensor) -> float:
    """Load a checkpoint of one into the other; return the difference of their losses."""
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(1.1)
    before = step(one, tokens)["loss"]
    assert abs(float(before - step(other, tokens)["loss"])) > 1e-3
    other.load_state_dict(one.state_dict())
    return float((step(other, tokens)["loss"] - before).abs())


def refusals() -> dict[str, str]:
    """Return what the layer says where Megatron's config asks for what raymoe has not."""
    said = {}
    for key in ("overlap_moe_expert_parallel_comm", "moe_pad_expert_input_to_capacity"):
        model = build(RAYMOE, 1)
        layer = model.decoder.layers[0].mlp
        setattr(layer.config, key, True)
        try:
            RaymoeTokenDispatcher(layer, moe_utils.get_default_pg_collection(), layer.token_dispatcher.options)
        except ConfigError as error:
            said[key] = str(error)
    return said


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    kind, tp = sys.argv[1], int(sys.argv[2])
    sizes = {"expert_model_parallel_size": dist.get_world_size() // tp, "expert_tensor_parallel_size": tp}
    parallel_state.initialize_model_parallel(1, 1, **sizes)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, refusals() if kind == "refused" else compare(kind, tp))
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
