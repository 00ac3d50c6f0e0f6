"""Logits of tiny models with 8-bit experts on a CPU rank: `python -m tests.unit.integrations.fp8_logits`.

Each block of a model becomes a layer of raymoe. Float64 has the model as it is, and one with the experts' weights as
8-bit values have them. Torch quantises the rows of the latter too, and has the errors of the format alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from raymoe.fp8 import dequantise_weight, quantise_weight
from raymoe.memory.world import World
from raymoe.moe import MoELayer
from tests.unit.integrations.fp8_models import ExactExperts, wide_model
from tests.unit.moe.fp8_accuracy import Norms

FAMILIES = ("Qwen3Moe", "DeepseekV3")
LAYERS, TOKENS = 2, (4, 16)
HEAD = ("logits of a model", "layers, same weights", "rows by torch", "layers, wide weights", "rows by torch")


class ExactShared(nn.Module):
    """A shared expert whose rows are quantised before each product, in float64."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))[None]
        self.down_proj = mlp.down_proj.weight[None]
        self.expert = ExactExperts(self)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        ids = torch.zeros(len(rows), 1, dtype=torch.int64)
        y: Tensor = self.expert(rows, ids, torch.ones(len(rows), 1, dtype=rows.dtype))
        return y.view(x.shape)


def blocks_of(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def round_weights(block: Any) -> None:
    """Give the experts the weights that their 8-bit values have."""
    linears = block.shared_experts.parameters() if hasattr(block, "shared_experts") else ()
    for weight in (*block.experts.gate_up_proj, *block.experts.down_proj, *linears):
        weight.copy_(dequantise_weight(*quantise_weight(weight)))


def in_float64(model: Any, quantises: bool = False) -> Any:
    """Return a copy of a model whose experts compute in float64, and quantise their rows if that is said."""
    copied = copy.deepcopy(model).double()
    for block in blocks_of(copied):
        block.experts = ExactExperts(block.experts, quantises)
        if quantises and hasattr(block, "shared_experts"):
            block.shared_experts = ExactShared(block.shared_experts)
    return copied


@torch.no_grad()
def numbers(family: str) -> list[Norms]:
    """Return the errors of raymoe's layers and of torch in relation to the same weights, and to wide ones."""
    model = wide_model(family, num_hidden_layers=LAYERS).eval()
    tokens = torch.randint(1, 64, TOKENS, generator=torch.Generator().manual_seed(0))
    rounded = copy.deepcopy(model)
    for block in blocks_of(rounded):
        round_weights(block)
    by_torch, same, wide = in_float64(rounded, quantises=True), in_float64(rounded), in_float64(model)
    with World.open(0, 1, name="alone") as world:
        world.wire([world.descriptor()])
        for layer in model.model.layers:
            layer.mlp = MoELayer.from_block(layer.mlp, world, tokens=tokens.numel(), experts_dtype="float8_e4m3")
        ours, torchs, *wanted = (each(tokens).logits.double().flatten(0, 1) for each in (model, by_torch, same, wide))
    return [Norms.of(each - want, want) for want in wanted for each in (ours, torchs)]


def table() -> list[str]:
    """Return the lines of the table in docs/products.md: percentages, of all tokens and of the worst one."""
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [
        (family, *(f"{100 * rms:.2f} / {100 * worst:.2f}" for rms, worst in numbers(family))) for family in FAMILIES
    ]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print("\n".join(table()))
