"""The second product of experts, for a backward pass that computes its rows h again from the products gate and up.

So h, [C, F], is not kept. The gradient of the first product needs gate and up anyway, and h is an elementwise function
of them. No product is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from raymoe.moe.activation import SWIGLU, Activation
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups, gated_activation
from raymoe.moe.product_gradients import rows_gradient
from raymoe.moe.product_operators import Added, add_or_return, multiply, swiglu_of
from raymoe.rows.operator_definitions import define


@dataclass(frozen=True)
class Gated:
    """The rows h of a product, and the numbers that give them again: `activation` of gate_up, times the row weights."""

    h: Tensor  # [C, F], with gradients
    gate_up: Tensor  # [C, 2F]
    activation: Activation
    row_weights: Tensor | None = None
    biased: bool = False
    """Whether gate_up has a bias, so that SwiGLU of a gap is not zero."""
    by_torch: bool = False
    """Whether torch's functions gave h, as on CPUs, and not the operators of `expert_rows`."""


def activate(activation: Activation, gate_up: Tensor, offsets: Tensor, weights: Tensor | None, by_row: bool) -> Tensor:
    """Apply an activation by torch's functions, and keep only its inputs for the backward pass."""
    if torch.compiler.is_compiling():  # the compiler itself decides which of them it computes again
        return activation(gate_up, offsets, weights, by_row=by_row)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "by_row": by_row}
    h: Tensor = checkpoint(activation, gate_up, offsets, weights, **options)
    return h


def multiply_gated(gated: Gated, weight: Tensor, groups: Groups, added: Added) -> Tensor:
    """Multiply the rows h as `multiply_experts` does, and keep gate_up in their place. Gaps must be zero."""
    form = gated.activation.form
    places = weight, groups.offsets, groups.counts, added.bias, gated.row_weights
    numbers = form.interleaved, form.alpha, form.limit, form.up_plus, added.by_row, gated.biased, gated.by_torch
    y: Tensor = _ops.grouped_linear_of_gated(gated.h, gated.gate_up.detach(), *places, *numbers, added.main_grad)
    return y


_GATE = "bool interleaved, float alpha, float limit, float up_plus, bool by_row, bool biased, bool by_torch"
_SCHEMAS = {
    "grouped_linear_of_gated": "(Tensor h, Tensor gate_up, Tensor weight, Tensor offsets, Tensor counts, Tensor? bias, "
    f"Tensor? row_weights, {_GATE}, Tensor? main_grad) -> Tensor",
    # A compiler that finds no gradient among the inputs may compute it in the forward pass, and keep it.
    "activate_again": "(Tensor dy, Tensor gate_up, Tensor offsets, Tensor counts, Tensor? row_weights, "
    f"{_GATE}) -> Tensor",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe
_DEVICES = ("cpu", "cuda")


def _multiply_gated(*arguments: Any) -> Tensor:
    h, _gate_up, weight, offsets, counts, bias, _row_weights, *_form, by_row, _biased, _by_torch, main_grad = arguments
    return multiply(h, weight, offsets, counts, bias, None, by_row, False, True, main_grad)


def _fake_multiply_gated(h: Tensor, _gate_up: Tensor, weight: Tensor, *_: object) -> Tensor:
    return h.new_empty(h.shape[0], weight.shape[1])


def _activate_again(*arguments: Any) -> Tensor:
    _dy, gate_up, offsets, counts, row_weights, *numbers, by_row, biased, by_torch = arguments
    form = ActivationForm(*numbers)
    activation, groups = Activation.of(form), Groups(offsets, counts)
    if by_torch:
        return activation(gate_up, offsets, row_weights, by_row=by_row)
    if activation == SWIGLU and not biased:
        return swiglu_of(gate_up, groups, row_weights)
    return gated_activation(form, gate_up, None, groups, row_weights)


def _fake_activate_again(_dy: Tensor, gate_up: Tensor, *_: object) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    # Backward passes of other micro-batches may write to main_grad before this one, so it is no saved tensor.
    _h, gate_up, weight, offsets, counts, bias, row_weights, *ctx.numbers, ctx.main_grad = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    needs_weight = ctx.needs_input_grad[2]
    ctx.save_for_backward(gate_up if needs_weight else None, weight, offsets, counts, row_weights)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, weight, offsets, counts, row_weights = ctx.saved_tensors
    needs_h, _, needs_weight, _, _, needs_bias, *_ = ctx.needs_input_grad
    groups = Groups(offsets, counts)
    dh = rows_gradient(dy, weight, groups, gaps_are_zero=True) if needs_h else None
    d_weight = None
    if needs_weight:
        h = _ops.activate_again(dy, gate_up, offsets, counts, row_weights, *ctx.numbers)
        d_weight = add_or_return(ctx.main_grad, dy, h, groups, clean=True)
    d_bias = _ops.expert_sums(dy, offsets, counts, None).to(ctx.bias_dtype) if needs_bias else None
    return dh, None, d_weight, None, None, d_bias, *(None,) * 9


torch.library.impl("raymoe::grouped_linear_of_gated", _DEVICES, _multiply_gated)
torch.library.impl("raymoe::activate_again", _DEVICES, _activate_again)
torch.library.register_fake("raymoe::grouped_linear_of_gated", _fake_multiply_gated)
torch.library.register_fake("raymoe::activate_again", _fake_activate_again)
torch.library.register_autograd("raymoe::grouped_linear_of_gated", _backward, setup_context=_save)
