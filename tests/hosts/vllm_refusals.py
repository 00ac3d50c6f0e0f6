"""Ask the vLLM adapter which layers it takes: `python -m tests.hosts.vllm_refusals` prints a line of JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from raymoe.integrations.vllm import _why_not


class Experts:
    """Experts of the standard format; a kernel asks them for nothing here."""

    def __init__(self, quant_config: FusedMoEQuantConfig, quantise: bool) -> None:
        self.quant_config, self.expects_unquantized_inputs = quant_config, quantise

    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard


def why_not(
    kernel: str = "modular",
    placed: str = "linear",
    quant: dict[str, Any] | None = None,
    quantise: bool = False,
    own: type | None = None,
    **changed: Any,
) -> str | None:
    """Ask about a layer that raymoe takes, but for what the arguments change.

    `own` asks for the experts of raymoe, with weights of this method.
    """
    experts = Experts(FusedMoEQuantConfig.make(**(quant or {})), quantise)
    kinds: dict[str, Any] = {"modular": mk.FusedMoEKernelModularImpl, "monolithic": mk.FusedMoEKernelMonolithicImpl}
    made = None
    if kernel in kinds:
        made = SimpleNamespace(impl=object.__new__(kinds[kernel]), fused_experts=experts)
    moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(all2all_backend=changed.get("backend", "allgather_reducescatter")),
        is_lora_enabled=changed.get("lora", False),
        in_dtype=torch.bfloat16,
        activation=changed.get("activation", MoEActivation.SILU),
        is_act_and_mul=True,
        has_bias=changed.get("bias", False),
        intermediate_size_per_partition=changed.get("padded", 64),
        intermediate_size_per_partition_unpadded=64,
    )
    layer = SimpleNamespace(
        quant_method=SimpleNamespace(moe_kernel=made), moe_config=moe, expert_placement_strategy=placed
    )
    if own is not None:
        layer.quant_method = object.__new__(own)
        layer.quant_method.weight_block_size = changed.get("blocks", [128, 128])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_elastic_ep=changed.get("elastic", False)),
        model_config=SimpleNamespace(enforce_eager=changed.get("eager", True)),
    )
    return _why_not(layer, config, own is not None)


if __name__ == "__main__":
    per_token = {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": True}
    blocks = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}
    said = {
        "nothing": why_not(),
        "compiled": why_not(eager=False),
        "other backend": why_not(backend="deepep_v2"),
        "elastic": why_not(elastic=True),
        "lora": why_not(lora=True),
        "round robin": why_not(placed="round_robin"),
        "monolithic": why_not(kernel="monolithic"),
        "no kernel": why_not(kernel="none"),
        "per token": why_not(quant=per_token),
        "blocks": why_not(quant=blocks),
        "quantised by the experts": why_not(quant=per_token, quantise=True),
        "own": why_not(own=UnquantizedFusedMoEMethod),
        "own, fp8": why_not(own=Fp8MoEMethod),
        "own, other blocks": why_not(own=Fp8MoEMethod, blocks=None),
        "own, another activation": why_not(own=UnquantizedFusedMoEMethod, activation=MoEActivation.GELU),
        "own, biases": why_not(own=UnquantizedFusedMoEMethod, bias=True),
        "own, padded": why_not(own=UnquantizedFusedMoEMethod, padded=128),
        "own, round robin": why_not(own=UnquantizedFusedMoEMethod, placed="round_robin"),
    }
    print(json.dumps({"result": said}))
