"""Tiny checkpoints of experts, with tensors as published ones have them."""

from __future__ import annotations

import torch
from torch import Tensor

from raymoe.fp8 import quantise_weight
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights
from tests.unit.moe.grouped_cases import RowsCase

PREFIX = "model.layers.3.mlp.experts"
HIDDEN = 160
COUNTS = (5, 0, 16, 1)
"""The rows of the experts."""
Tensors = dict[str, Tensor]


def model(inner: int, activation: Activation = SWIGLU) -> Experts:
    """Draw experts with wide weights, and with biases for gpt-oss."""
    case, experts = RowsCase(COUNTS), len(COUNTS)
    gate_up = case.drawn(experts, 2 * inner, HIDDEN, seed=1, scale=HIDDEN**-0.5)
    weights = ModelWeights(gate_up, case.drawn(experts, HIDDEN, inner, seed=2, scale=inner**-0.5))
    if activation == GPT_OSS:
        weights.gate_up_proj_bias = case.drawn(experts, 2 * inner, seed=3)
        weights.down_proj_bias = case.drawn(experts, HIDDEN, seed=4)
    return Experts(weights, activation)


def separate(experts: Experts, power_of_two: bool = False) -> Tensors:
    """Quantise each weight of each expert, as DeepSeek-V3's checkpoint has them."""
    tensors = {}
    for number, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        gate, up = gate_up.detach().chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down.detach())):
            full = f"{PREFIX}.{number}.{name}.weight"
            tensors[full], tensors[f"{full}_scale_inv"] = quantise_weight(weight, power_of_two)
    return tensors


def fused(experts: Experts) -> Tensors:
    """Quantise the weights of all experts, gate and up together, as transformers has them."""
    tensors = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).detach()
        tensors[f"{PREFIX}.{name}"], tensors[f"{PREFIX}.{name}_scale_inv"] = quantise_weight(weight)
        bias = getattr(experts, f"{name}_bias")
        if bias is not None:
            tensors[f"{PREFIX}.{name}_bias"] = bias.detach()
    return tensors


def mxfp4(inner: int, experts: int = len(COUNTS), hidden: int = HIDDEN) -> Tensors:
    """Draw weights of 4-bit floats with biases, as gpt-oss has them."""
    generator, case = torch.Generator().manual_seed(7), RowsCase(COUNTS)
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        size = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{PREFIX}.{name}_blocks"] = blocks
        tensors[f"{PREFIX}.{name}_scales"] = torch.randint(118, 124, size, generator=generator, dtype=torch.uint8)
        tensors[f"{PREFIX}.{name}_bias"] = case.drawn(experts, rows, seed=columns)
    return tensors


def by_definition(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of MXFP4 in float64: sign, two bits of exponent, a bit of mantissa.

    The low half of a byte is the first element.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).double()
    sign, magnitude = 1 - 2 * (codes >= 8).double(), codes % 8
    exponent, mantissa = (magnitude / 2).floor(), magnitude % 2
    normal = (1 + mantissa / 2) * 2 ** (exponent - 1)
    numbers = sign * torch.where(exponent == 0, mantissa / 2, normal)
    return numbers * (2 ** (scales.double() - 127)).repeat_interleave(32, dim=-1)
