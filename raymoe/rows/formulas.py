"""The norms and activations by torch, forward and backward. Rows have any dtype, results are float32.

CPUs and older GPUs compute by these formulas. torch.compile makes one kernel of each, so they serve as baselines too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalised(x, eps)[0] * weight.float()


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the rows divided by their root mean square, and one over that root."""
    rows = x.float()
    rstd = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)
    return rows * rstd, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    rows, rstd = _normalised(x, eps)
    by_weight = dy.float() * weight.float()
    along = (by_weight * rows).mean(dim=-1, keepdim=True)
    return (by_weight - rows * along) * rstd, _over_rows(dy.float() * rows)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _standardised(x, eps)[0] * weight.float() + bias.float()


def _standardised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the rows less their mean, divided by their deviation, and one over that deviation."""
    rows = x.float()
    centred = rows - rows.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return centred * rstd, rstd


def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    rows, rstd = _standardised(x, eps)
    by_weight = dy.float() * weight.float()
    along = (by_weight * rows).mean(dim=-1, keepdim=True)
    dx = (by_weight - by_weight.mean(dim=-1, keepdim=True) - rows * along) * rstd
    return dx, _over_rows(dy.float() * rows), _over_rows(dy.float())


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    d, share = wide(dy), torch.sigmoid(gate)
    return torch.cat((d * up * share * (1 + gate * (1 - share)), d * gate * share), dim=-1)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    return swiglu(gate_up) * wide(weights)[..., None]


def weighted_swiglu_backward(dy: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate_up and weights."""
    d_gate_up = swiglu_backward(wide(dy) * wide(weights)[..., None], gate_up)
    return d_gate_up, (wide(dy) * swiglu(gate_up)).sum(dim=-1)


def wide(x: Tensor) -> Tensor:
    """Rows in float32; in float64 if they are, for tests of gradients by differences."""
    return x if x.dtype == torch.float64 else x.float()


def _over_rows(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1]).sum(dim=0)
