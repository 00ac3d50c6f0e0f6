"""A layer with 8-bit experts in float64, from the same 8-bit weights and rows, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raymoe.fp8 import dequantise, dequantise_weight, quantise
from raymoe.moe import MoELayer
from raymoe.moe.experts import GPT_OSS

EPS = 1e-6
"""Of the norm."""
SCALED = ["gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"]
"""The names of the weights, values before scales."""


def wanted(layer: MoELayer, weights: dict[str, Tensor], x: Tensor, quantises: bool = True) -> Tensor:
    """Return the output of a layer with norm and shared expert, and x. `weights` has the experts of all ranks.

    With `quantises` rows become 8-bit values, and those between the products too. The layer itself chooses experts,
    and its shared expert has the weights of its own.
    """
    rows, x = x.dtype, x.double()
    h = x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
    h = h.to(rows)  # as the router, the shared expert and the exchange get it
    routed = layer.gate(layer.norm(x.to(rows)))
    biased, scaled = layer.experts.activation == GPT_OSS, as_multiplied(h, quantises)
    gate_up, down = in_float64(dict(layer.shared_experts.named_parameters()))
    gate, up = (scaled @ gate_up.T).chunk(2, dim=-1)
    y = x + as_multiplied(gate * gate.sigmoid() * up, quantises) @ down.T
    for expert in range(len(layer.gate.weight)):
        token, choice = (routed.topk_idx == expert).nonzero(as_tuple=True)
        gate_up, down = in_float64({name: each[expert] for name, each in weights.items()})
        products = scaled[token] @ gate_up.T
        if biased:
            products += weights["gate_up_proj_bias"][expert].double()
        row = as_multiplied(layer.experts.activation._by_row(products), quantises) @ down.T
        if biased:
            row += weights["down_proj_bias"][expert].double()
        y.index_add_(0, token, routed.topk_weights[token, choice, None].double() * row)
    return y


def as_multiplied(rows: Tensor, quantises: bool) -> Tensor:
    """Return rows in float64, as they are or as 8-bit values have them."""
    return dequantise(*quantise(rows.float())).double() if quantises else rows.double()


def in_float64(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return gate_up_proj and down_proj of an expert, whose weights are wide or 8-bit values."""
    pairs = [(weights[name], weights.get(f"{name}_scale_inv")) for name in ("gate_up_proj", "down_proj")]
    return [(each if scales is None else dequantise_weight(each, scales)).double() for each, scales in pairs]


def error_of(y: Tensor, want: Tensor) -> float:
    """Return the largest error, relative to the largest element of its row; infinite for NaN."""
    error = (y.double() - want).abs() / want.abs().amax(dim=-1, keepdim=True)
    return float(error.nan_to_num(nan=torch.inf).max())


def rms_error_of(y: Tensor, want: Tensor) -> float:
    """Return the root of the mean squared error, relative to that of the right output."""
    return float((y.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
