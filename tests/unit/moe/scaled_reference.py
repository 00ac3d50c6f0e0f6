"""A layer with 8-bit experts in float64, from the same 8-bit weights and rows, on a CPU or a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from raymoe.fp8 import dequantise, dequantise_weight, quantise
from raymoe.moe import MoELayer
from raymoe.moe.experts import GPT_OSS

EPS = 1e-6
"""Of the norm."""
SCALED = ["gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"]
"""The names of the weights, values before scales."""


def wanted(layer: MoELayer, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of a layer with norm, shared expert and residual. `weights` has the experts of all ranks.

    Rows between the products are quantised too. The layer itself chooses experts, and
    its shared expert has the weights of its own.
    """
    rows, x = x.dtype, x.double()
    h = x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
    h = h.to(rows).double()  # as the router, the shared expert and the exchange get it
    routed = layer.gate(layer.norm(x.to(rows)))
    biased, scaled = layer.experts.activation == GPT_OSS, dequantise(*quantise(h.to(rows))).double()
    shared = [getattr(layer.shared_experts, name) for name in SCALED]
    gate_up, down = (dequantise_weight(*shared[at : at + 2]).double() for at in (0, 2))
    gate, up = (scaled @ gate_up.T).chunk(2, dim=-1)
    y = x + dequantise(*quantise((gate * gate.sigmoid() * up).float())).double() @ down.T
    for expert in range(len(layer.gate.weight)):
        token, choice = (routed.topk_idx == expert).nonzero(as_tuple=True)
        up_proj, down = (dequantise_weight(*(weights[name][expert] for name in SCALED[at : at + 2])) for at in (0, 2))
        products = scaled[token] @ up_proj.double().T
        if biased:
            products += weights["gate_up_proj_bias"][expert].double()
        inner = layer.experts.activation._by_row(products)
        row = dequantise(*quantise(inner.float())).double() @ down.double().T
        if biased:
            row += weights["down_proj_bias"][expert].double()
        y.index_add_(0, token, routed.topk_weights[token, choice, None].double() * row)
    return y


def error_of(y: Tensor, want: Tensor) -> float:
    """Return the largest error, relative to the largest element of its row; infinite for NaN."""
    error = (y.double() - want).abs() / want.abs().amax(dim=-1, keepdim=True)
    return float(error.nan_to_num(nan=torch.inf).max())


def rms_error_of(y: Tensor, want: Tensor) -> float:
    """Return the root of the mean squared error, relative to that of the right output."""
    return float((y.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
