"""8-bit models of transformers for tests: checkpoints, experts and their exact results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raymoe.fp8 import quantise_weight
from tests.unit.integrations.test_transformers import FAMILIES, SIZES
from tests.unit.moe.scaled_reference import as_multiplied

WIDE = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128}
EXACT = 1e-2
"""Of the same 8-bit weights and rows: rows between the products round to a neighbour, the others are bfloat16."""
ROUNDING = 2**-4 / 3**0.5 / 1.5
"""The error (rms) of values with three bits of mantissa: even up to half of the last bit, for mantissas from 1 to 2."""
QUANTISED = 2 * ROUNDING
"""Three errors, whose squares add: rows are rounded before gate and up, which multiply, and before down."""


def wide_model(family: str, **sizes: int) -> Any:
    """Make a tiny model with random weights."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **WIDE, **sizes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def write_wide_model(folder: str, family: str) -> None:
    wide_model(family).save_pretrained(folder)


def write_model(folder: str, family: str, ue8m0: bool = False) -> None:
    """Write the checkpoint of a tiny model with 8-bit experts, in the names and format of DeepSeek-V3."""
    from safetensors.torch import save_file

    model = wide_model(family)
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            tensors[name] = tensor.clone()
            continue
        for number, weight in enumerate(tensor):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, own in zip(names, weight.chunk(len(names)), strict=True):
                full = f"{layer}.experts.{number}.{part}.weight"
                values, scales = quantise_weight(own, ue8m0)
                tensors |= {full: values, f"{full}_scale_inv": scales.to(torch.float8_e8m0fnu) if ue8m0 else scales}
    config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0" if ue8m0 else "float",
        "modules_to_not_convert": [".*self_attn", "lm_head", ".*shared_experts"],
    }
    config.architectures = [type(model).__name__]
    Path(folder).mkdir()
    config.save_pretrained(folder)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})


class ExactExperts(nn.Module):
    """The experts of a widened module in float64, for rows that are quantised before each product unless said."""

    def __init__(self, experts: Any, quantises: bool = True) -> None:
        super().__init__()
        self.quantises = quantises
        self.gate_up, self.down = experts.gate_up_proj.double(), experts.down_proj.double()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y, rows = torch.zeros_like(x, dtype=torch.float64), as_multiplied(x, self.quantises)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = (rows[token] @ gate_up.T).chunk(2, dim=-1)
            h = as_multiplied(gate * gate.sigmoid() * up, self.quantises)
            y.index_add_(0, token, weights[token, choice, None].double() * (h @ down.T))
        return y.to(x.dtype)


def fp8_experts(**changed: Any) -> Any:
    """Make two experts as transformers' quantiser leaves them. `changed` are options, `ffn`, and keys of `config`."""
    from transformers import Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import FP8Experts

    seed, sizes = changed.pop("seed", 0), {"hidden_size": 128, "moe_intermediate_size": changed.pop("ffn", 128)}
    config = Qwen3MoeConfig(**sizes, num_experts=2)
    for name, value in changed.pop("config", {}).items():
        setattr(config, name, value)
    experts = FP8Experts(config, **{"block_size": (128, 128), **changed})
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + len(name)))
            parameter.copy_(0.01 if name.endswith("_inv") else drawn)
    return experts
