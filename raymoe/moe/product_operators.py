"""The products of experts as operators of torch, with fakes and gradients.

`multiply_experts` is one product, `gate_experts` one with a gated activation after it. On Hopper product.cu computes
them. Elsewhere, and for sizes that it does not take, they are torch's products and the functions of `expert_rows`.
`product_gradients` has the products of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import raymoe.moe.product_launch as product_launch
import raymoe.rows.activation  # noqa: F401  (registers the gradients of SwiGLU)
import raymoe.rows.formulas as formulas
from raymoe.exchange.peer.column_pieces import pieces_to_tell
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.expert_rows import Groups, bias_of_rows, gated_activation, weigh_gradients, zero_gaps
from raymoe.moe.kept_rows import KeptRows, rows_again
from raymoe.moe.product_gradients import add_weight_gradient, rows_gradient, weight_gradient
from raymoe.moe.products import Gate, Product
from raymoe.moe.torch_products import check_dtype, multiply_by_torch
from raymoe.rows.direct import directly, needs_gradient
from raymoe.rows.operator_definitions import define
from raymoe.rows.pipe_tensors import as_dense

PLAIN = ActivationForm()
"""SwiGLU."""


@dataclass(frozen=True)
class Added:
    """The terms that a product adds to rows times weights, and what the caller knows about the rows."""

    bias: Tensor | None = None
    """[L, N], of each expert."""
    row_weights: Tensor | None = None
    """float32[C]: each result is multiplied by its weight."""
    by_row: bool = False
    """Whether only kernels compute whose results have the same bits for any number of rows."""
    zero_gaps: bool = True
    """Whether results become zero in gaps where gradients are needed: another product of them needs that."""
    gaps_are_zero: bool = False
    """Whether x, the row weights and the gradients of results are zero in gaps, for the gradients of weights. Otherwise
    a backward pass makes them so where it needs that."""
    main_grad: Tensor | None = None
    """float32[L, N, K]: a backward pass adds the gradient of the weight to it, and the weight itself gets none."""
    kept: KeptRows | None = None
    """Rows from which a backward pass makes x again, which is not kept then."""

    @property
    def source(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, list[int]]:
        """Return `kept` as the last five arguments of operators."""
        if self.kept is None:
            return None, None, None, None, []
        return self.kept.own, self.kept.others, self.kept.metadata, self.kept.topk_idx, self.kept.numbers


def multiply_experts(x: Tensor, weight: Tensor, groups: Groups, added: Added) -> Tensor:
    """Multiply each expert's rows of x[C, K] by its `weight[e]`, [N, K]: [C, N]. See `grouped_linear`."""
    check_dtype(x)
    tensors = x, weight, groups.offsets, groups.counts, added.bias, added.row_weights
    gradients = _needs_gradient(tensors)
    arguments = *tensors, added.by_row, gradients and added.zero_gaps, added.gaps_are_zero, added.main_grad
    direct = not gradients and _directly(tensors)
    y: Tensor = multiply(*arguments) if direct else _ops.grouped_linear(*arguments, *added.source)
    return y


def gate_experts(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    added: Added,
    form: ActivationForm = PLAIN,
    keep_gate_up: bool = False,
) -> tuple[Tensor, Tensor]:
    """Multiply each expert's rows of x[C, K] by its `weight[e]`, [2F, K], and return the gated activation, [C, F].

    Return the products too, with their biases, if `keep_gate_up`, or where gradients need them; else an empty tensor.
    They have no gradient.
    """
    check_dtype(x)
    tensors = x, weight, groups.offsets, groups.counts, added.bias, added.row_weights
    gradients = _needs_gradient(tensors)
    numbers = form.interleaved, form.alpha, form.limit, form.up_plus, added.by_row
    kept, zeroed = gradients or keep_gate_up, gradients and added.zero_gaps
    arguments = *tensors, *numbers, kept, zeroed, added.gaps_are_zero, added.main_grad
    direct = not gradients and _directly(tensors)
    results: tuple[Tensor, Tensor] = _gate(*arguments) if direct else _ops.grouped_gated(*arguments, *added.source)
    return results


def _needs_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    return needs_gradient(*(tensor for tensor in tensors if tensor is not None))


def _directly(tensors: tuple[Tensor | None, ...]) -> bool:
    return directly(*(tensor for tensor in tensors if tensor is not None))


# The operators.

_OPERANDS = "Tensor x, Tensor weight, Tensor offsets, Tensor counts, Tensor? bias, Tensor? row_weights"
_GATE = "bool interleaved, float alpha, float limit, float up_plus"
_KEPT = "Tensor? own, Tensor? others, Tensor? metadata, Tensor? topk_idx, SymInt[] exchange"
_SCHEMAS = {
    "grouped_linear": f"({_OPERANDS}, bool by_row, bool zero_gaps, bool gaps_are_zero, Tensor? main_grad, {_KEPT})"
    " -> Tensor",
    "grouped_gated": f"({_OPERANDS}, {_GATE}, bool by_row, bool keep_gate_up, bool zero_gaps, "
    f"bool gaps_are_zero, Tensor? main_grad, {_KEPT}) -> (Tensor y, Tensor gate_up)",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class _Operands:
    x: Tensor
    weight: Tensor
    offsets: Tensor
    counts: Tensor
    bias: Tensor | None
    row_weights: Tensor | None

    @property
    def groups(self) -> Groups:
        return Groups(self.offsets, self.counts)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self.offsets, self.counts

    def product(self, gate: Gate | None, keep_gate_up: bool, zero_gaps: bool) -> Product:
        """Allocate the results, and return the product."""
        x, weight = as_dense(self.x), self.weight
        rows, products = len(x), weight.shape[1]
        bias, row_weights = self.bias, self.row_weights
        offsets, counts = (numbers.to(torch.int32).contiguous() for numbers in self.places)
        return Product(
            x,
            weight,
            offsets,
            counts,
            y=x.new_empty(rows, products if gate is None else products // 2),
            gate=gate,
            gate_up=x.new_empty(rows, products) if keep_gate_up else None,
            bias=None if bias is None else as_dense(bias.to(x.dtype)),
            row_weights=None if row_weights is None else as_dense(row_weights.to(torch.float32)),
            zero_gaps=zero_gaps,
        )


# One product.


def multiply(*arguments: Any) -> Tensor:
    """Compute `raymoe::grouped_linear`, whose schema has the arguments. Those of kept rows may be left out."""
    *tensors, by_row, zeroes_gaps, gaps_are_zero, _main_grad = arguments[:10]
    operands = _Operands(*tensors)
    if not product_launch.takes(operands.x, operands.weight, None):
        return _multiply_by_torch(operands, zeroes_gaps and not gaps_are_zero, by_row=by_row)
    product = operands.product(None, False, zeroes_gaps)
    product.pieces = None if zeroes_gaps else pieces_to_tell(product.y, product.reads)
    product_launch.launch(product)
    return product.y


def _multiply_by_torch(operands: _Operands, zeroes_gaps: bool, *, by_row: bool) -> Tensor:
    groups, bias, row_weights = operands.groups, operands.bias, operands.row_weights
    y = multiply_by_torch(operands.x, operands.weight, groups, by_row)
    if row_weights is not None:
        none = y.new_zeros(len(groups.counts), y.shape[1]) if bias is None else bias
        added, there = bias_of_rows(y, none, *operands.places)
        return y.copy_(torch.where(there, (formulas.wide(y) + added) * row_weights[:, None].to(added.dtype), 0))
    if bias is not None:
        biased: Tensor = _ops.add_expert_bias(y, bias.to(y.dtype), *operands.places, None)
        return biased
    return zero_gaps(y, groups) if zeroes_gaps else y


def _fake_multiply(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _save_for_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    # Backward passes of other micro-batches may write to main_grad before this one, so it is no saved tensor.
    x, *tensors, _by_row, _zeroes_gaps, ctx.gaps_are_zero, ctx.main_grad = inputs[:10]
    _, needs_weight, _, _, _, needs_row_weights, *_ = ctx.needs_input_grad
    ctx.save_for_backward(*_saved_rows(ctx, x, inputs[10:], needed=needs_weight or needs_row_weights), *tensors)


def _product_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    *saved, weight, offsets, counts, bias, row_weights = ctx.saved_tensors
    needs_x, needs_weight, _, _, needs_bias, needs_row_weights, *_ = ctx.needs_input_grad
    groups, clean = Groups(offsets, counts), ctx.gaps_are_zero
    x = _rows_of(ctx, dy, saved, groups)
    if not clean and (row_weights is not None or not product_launch.has_kernel(dy)):
        dy, x, clean = zero_gaps(dy, groups), None if x is None else zero_gaps(x, groups), True
        row_weights = None if row_weights is None else zero_gaps(row_weights[:, None], groups)[:, 0]
    dx = d_weights = None
    if needs_x or needs_row_weights:
        dx = rows_gradient(dy, weight, groups, gaps_are_zero=clean)
    if row_weights is not None and dx is not None:
        # The gradient of a weight is the sum of dy times its product, which is that of dx times x.
        d_weights = weigh_gradients(dx, row_weights, offsets, x.contiguous() if needs_row_weights else None)
        if bias is not None and needs_row_weights:
            d_weights = d_weights + _ops.bias_dots(dy, bias, offsets, counts)
    d_weight = None
    if needs_weight:
        weighted = x if row_weights is None else (formulas.wide(x) * row_weights[:, None]).to(x.dtype)
        d_weight = add_or_return(ctx.main_grad, dy, weighted, groups, clean=clean)
    d_bias = _ops.expert_sums(dy, offsets, counts, row_weights).to(bias.dtype) if needs_bias else None
    return dx if needs_x else None, d_weight, None, None, d_bias, d_weights if needs_row_weights else None, *_NONE[:9]


def _saved_rows(ctx: Any, x: Tensor, source: Sequence[Any], *, needed: bool) -> tuple[Tensor | None, ...]:
    """Choose what to save for a backward pass that needs x: x, or what gives it again."""
    *kept, ctx.exchange = source
    return (None if ctx.exchange or not needed else x), *(kept if needed else (None,) * len(kept))


def _rows_of(ctx: Any, dy: Tensor, saved: list[Any], groups: Groups) -> Any:
    """Return x from what `_saved_rows` chose; None if it is not needed."""
    x, own, others, metadata, topk_idx = saved
    return x if own is None else rows_again(dy, KeptRows(own, others, metadata, topk_idx, ctx.exchange), groups)


def add_or_return(main_grad: Tensor | None, dy: Tensor, x: Tensor, groups: Groups, *, clean: bool) -> Tensor | None:
    """Return the gradient of a weight; None if it was added to `main_grad`. `clean`: gaps are zero."""
    if main_grad is None:
        return weight_gradient(dy, x, groups, gaps_are_zero=clean)
    add_weight_gradient(main_grad, dy, x, groups, gaps_are_zero=clean)
    return None


_NONE = (None,) * 14


# A product and a gated activation.


def _gate(*arguments: Any) -> tuple[Tensor, Tensor]:
    *operands_and_form, by_row, keep_gate_up, zeroes_gaps, gaps_are_zero, _main_grad = arguments[:15]
    operands, form = _Operands(*operands_and_form[:6]), ActivationForm(*operands_and_form[6:])
    x, weight = operands.x, operands.weight
    gate = Gate(form.interleaved, form.alpha, form.limit, form.up_plus)
    if not product_launch.takes(x, weight, gate):
        zeroed = zeroes_gaps and not gaps_are_zero
        return _gate_by_torch(operands, form, keep_gate_up, zeroed, by_row=by_row)
    product = operands.product(gate, keep_gate_up, zeroes_gaps)
    product_launch.launch(product)
    return product.y, x.new_empty(0) if product.gate_up is None else product.gate_up


def _gate_by_torch(
    operands: _Operands, form: ActivationForm, keep_gate_up: bool, zeroes_gaps: bool, *, by_row: bool
) -> tuple[Tensor, Tensor]:
    groups, bias = operands.groups, operands.bias
    gate_up = multiply_by_torch(operands.x, operands.weight, groups, by_row)
    if form == PLAIN and bias is None and not zeroes_gaps:
        return swiglu_of(gate_up, groups, operands.row_weights), gate_up if keep_gate_up else gate_up.new_empty(0)
    if not keep_gate_up:
        return gated_activation(form, gate_up, bias, groups, operands.row_weights), gate_up.new_empty(0)
    if bias is not None:
        gate_up = _ops.add_expert_bias(gate_up, bias.to(gate_up.dtype), *operands.places, None)
    elif zeroes_gaps:
        gate_up = zero_gaps(gate_up, groups)
    return gated_activation(form, gate_up, None, groups, operands.row_weights), gate_up


def swiglu_of(gate_up: Tensor, groups: Groups, row_weights: Tensor | None) -> Tensor:
    """Apply SwiGLU to the rows of experts, times their weights if there are some."""
    y: Tensor
    if row_weights is None:
        y = _ops.swiglu(gate_up, groups.offsets, None)
    else:
        y = _ops.weighted_swiglu(gate_up, row_weights, groups.offsets, None)
    return y


def _fake_gate(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    keep_gate_up = others[9]
    rows, products = x.shape[0], weight.shape[1]
    return x.new_empty(rows, products // 2), x.new_empty(rows, products) if keep_gate_up else x.new_empty(0)


def _save_for_gate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, offsets, counts, bias, row_weights, *numbers = inputs
    *ctx.numbers, _by_row, _keep_gate_up, _zeroes_gaps, ctx.gaps_are_zero, ctx.main_grad = numbers[:9]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    rows = _saved_rows(ctx, x, numbers[9:], needed=ctx.needs_input_grad[1])
    ctx.save_for_backward(*rows, weight, offsets, counts, row_weights, output[1])


def _gate_backward(ctx: Any, dy: Tensor | None, _gate_up: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 20
    *saved, weight, offsets, counts, row_weights, gate_up = ctx.saved_tensors
    needs_x, needs_weight, _, _, needs_bias, needs_row_weights, *_ = ctx.needs_input_grad
    groups, form = Groups(offsets, counts), ActivationForm(*ctx.numbers)
    plain = form == PLAIN and ctx.gaps_are_zero and ctx.bias_dtype is None
    clean = ctx.gaps_are_zero or not product_launch.has_kernel(dy)
    d_gate_up, d_weights = _activation_gradients(dy, gate_up, groups, form, row_weights, plain)
    dx = rows_gradient(d_gate_up, weight, groups, gaps_are_zero=True) if needs_x else None
    x = _rows_of(ctx, dy, saved, groups)
    if clean and not ctx.gaps_are_zero and x is not None:
        x = zero_gaps(x, groups)
    d_weight = add_or_return(ctx.main_grad, d_gate_up, x, groups, clean=clean) if needs_weight else None
    d_bias = _ops.expert_sums(d_gate_up, offsets, counts, None).to(ctx.bias_dtype) if needs_bias else None
    return dx, d_weight, None, None, d_bias, d_weights if needs_row_weights else None, *_NONE


def _activation_gradients(
    dy: Tensor, gate_up: Tensor, groups: Groups, form: ActivationForm, row_weights: Tensor | None, plain: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the biased products, zero in gaps, and of the row weights if there are some.

    `plain`: it is SwiGLU of products without biases, and dy and the row weights are zero in gaps.
    """
    gradients: tuple[Tensor, Tensor]
    if plain:  # the products are zero in gaps, and so are their gradients
        if row_weights is not None:
            gradients = _ops.weighted_swiglu_backward(dy, gate_up, row_weights, groups.offsets, None)
            return gradients
        return _ops.swiglu_backward(dy, gate_up, groups.offsets, None), dy
    numbers = form.interleaved, form.alpha, form.limit, form.up_plus
    places = groups.offsets, groups.counts
    gradients = _ops.gated_activation_backward(dy, gate_up, None, *places, row_weights, *numbers)
    return gradients


torch.library.impl("raymoe::grouped_linear", _DEVICES, multiply)
torch.library.impl("raymoe::grouped_gated", _DEVICES, _gate)
torch.library.register_fake("raymoe::grouped_linear", _fake_multiply)
torch.library.register_fake("raymoe::grouped_gated", _fake_gate)
torch.library.register_autograd("raymoe::grouped_linear", _product_backward, setup_context=_save_for_product)
torch.library.register_autograd("raymoe::grouped_gated", _gate_backward, setup_context=_save_for_gate)
