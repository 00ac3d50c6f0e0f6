"""Work on the rows of experts between and after their products: biases, gated activations, and their gradients.

Only rows before the last offset are read or written. That matters on GPUs, which have memory for the rows of all ranks'
tokens and get about one in R of them. The host reads no offset of a GPU's, so everything can be captured.

Sums over the rows of an expert are float32, in an order that depends on its number of rows alone. Rows in gaps and from
the last offset on may be NaN. These are operators of torch, so that torch.compile takes them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import raymoe.moe.expert_kernels as expert_kernels
import raymoe.rows.formulas as formulas
import raymoe.rows.row_launch as row_launch
from raymoe.moe.expert_kernels import (
    ActivationForm,
    AddExpertBias,
    ExpertSums,
    GatedActivation,
    GatedActivationBackward,
    Places,
    WeighGradients,
)
from raymoe.rows.operator_definitions import define
from raymoe.rows.pipe_tensors import as_dense
from raymoe.rows.row_results import new_halved, new_like


@dataclass(frozen=True)
class Groups:
    """Where each local expert's rows are: `counts[e]` rows from `offsets[e]` on."""

    offsets: Tensor  # int32[L + 1]
    counts: Tensor  # int32[L]

    @classmethod
    def one(cls, rows: int, device: torch.device) -> Groups:
        """Return the group of one expert that has all rows. Nothing is copied from the host.

        >>> groups = Groups.one(5, torch.device("cpu"))
        >>> groups.offsets.tolist(), groups.counts.tolist()
        ([0, 5], [5])
        """
        offsets = torch.arange(0, 2, dtype=torch.int32, device=device) * rows
        return cls(offsets, offsets[1:])

    def expert_of_row(self, rows: int) -> Tensor:
        """Return the expert of each row, without a wait; L for a row of no expert.

        >>> Groups(torch.tensor([0, 4, 8]), torch.tensor([1, 2])).expert_of_row(9).tolist()
        [0, 2, 2, 2, 1, 1, 2, 2, 2]
        """
        places, last = torch.arange(rows, dtype=self.offsets.dtype, device=self.offsets.device), len(self.counts)
        expert = torch.searchsorted(self.offsets[1:], places, right=True)
        ends = torch.cat((self.offsets[:-1] + self.counts, self.offsets.new_zeros(1)))
        return torch.where(places < ends[expert], expert, last)


def add_expert_bias(rows: Tensor, bias: Tensor, groups: Groups, weights: Tensor | None = None) -> Tensor:
    """Add to rows[C, N] the `bias[e]`, [N], of their expert, times their weight if there are `weights`, float32[C].

    Rows in gaps become zero, those from the last offset on are unspecified.

    >>> groups = Groups(torch.tensor([0, 1, 3]), torch.tensor([1, 2]))
    >>> add_expert_bias(torch.zeros(3, 1), torch.tensor([[1.0], [2.0]]), groups).tolist()
    [[1.0], [2.0], [2.0]]
    """
    y: Tensor = _ops.add_expert_bias(rows, bias.to(rows.dtype), groups.offsets, groups.counts, weights)
    return y


def zero_gaps(rows: Tensor, groups: Groups) -> Tensor:
    """Return rows[C, N] with zeros in the rows of no expert.

    >>> zero_gaps(torch.ones(4, 1), Groups(torch.tensor([0, 2, 3]), torch.tensor([1, 1])))[:, 0].tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    there = groups.expert_of_row(len(rows)) < len(groups.counts)
    return torch.where(there[:, None], rows, 0)


def bias_of_rows(rows: Tensor, bias: Tensor, offsets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias of each row's expert, zero without one, and a column: whether the row has an expert."""
    expert = Groups(offsets, counts).expert_of_row(len(rows))
    padded = torch.cat((bias, bias.new_zeros(1, bias.shape[1])))
    return formulas.wide(padded.index_select(0, expert)), (expert < len(counts))[:, None]


def gated_activation(
    form: ActivationForm, gate_up: Tensor, bias: Tensor | None, groups: Groups, weights: Tensor | None = None
) -> Tensor:
    """Map gate_up[C, 2F], plus the `bias[e]`, [2F], of each row's expert, to [C, F], times the weights of the rows.

    All of it is float32 and rounded once. Rows in gaps are zero, those from the last offset on are unspecified.
    """
    bias = None if bias is None else bias.to(gate_up.dtype)
    numbers = form.interleaved, form.alpha, form.limit, form.up_plus
    y: Tensor = _ops.gated_activation(gate_up, bias, groups.offsets, groups.counts, weights, *numbers)
    return y


def weigh_gradients(dy: Tensor, weights: Tensor, offsets: Tensor, rows: Tensor | None) -> Tensor:
    """Multiply the rows of dy[C, N] by their weights, in their place. They are the gradients of `weights * rows`.

    Return the gradients of the weights, float32[C]: the sum of dy * rows over each row; empty without `rows`.

    >>> dy = torch.tensor([[1.0, 2.0]])
    >>> weigh_gradients(dy, torch.tensor([0.5]), torch.tensor([0, 1]), torch.tensor([[3.0, 4.0]])).item(), dy.tolist()
    (11.0, [[0.5, 1.0]])
    """
    d_weights: Tensor = _ops.weigh_gradients(dy, weights, offsets, rows)
    return d_weights


# The operators.

_GATE = "bool interleaved, float alpha, float limit, float up_plus"
_ROWS = "Tensor offsets, Tensor counts"
_SCHEMAS = {
    "add_expert_bias": f"(Tensor rows, Tensor bias, {_ROWS}, Tensor? weights) -> Tensor",
    "bias_dots": f"(Tensor dy, Tensor bias, {_ROWS}) -> Tensor",
    "expert_sums": f"(Tensor rows, {_ROWS}, Tensor? weights) -> Tensor",
    "gated_activation": f"(Tensor gate_up, Tensor? bias, {_ROWS}, Tensor? weights, {_GATE}) -> Tensor",
    "gated_activation_backward": f"(Tensor dh, Tensor gate_up, Tensor? bias, {_ROWS}, Tensor? weights, {_GATE})"
    " -> (Tensor d_gate_up, Tensor d_weights)",
    "weigh_gradients": "(Tensor(a!) dy, Tensor weights, Tensor offsets, Tensor? rows) -> Tensor",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe
_DEVICES = ("cpu", "cuda")


def _in_kernels(rows: Tensor) -> bool:
    """Whether kernels do the work on these rows."""
    return row_launch.takes(rows) and expert_kernels.takes(rows)


def _places(offsets: Tensor, counts: Tensor | None = None) -> Places:
    return Places(offsets.to(torch.int32).contiguous(), None if counts is None else counts.to(torch.int32).contiguous())


def _dense_if(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else as_dense(tensor)


def _column(weights: Tensor | None, like: Tensor) -> Tensor | float:
    """Weights as a factor of rows, in the dtype of a computation."""
    return 1.0 if weights is None else weights[:, None].to(like.dtype)


# Biases.


@torch.library.impl("raymoe::add_expert_bias", _DEVICES)
def _add_expert_bias(rows: Tensor, bias: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
    y = new_like(rows)
    if _in_kernels(rows):
        AddExpertBias(as_dense(rows), as_dense(bias), _dense_if(weights), y, _places(offsets, counts)).launch()
        return y
    added, there = bias_of_rows(rows, bias, offsets, counts)
    return y.copy_(torch.where(there, formulas.wide(rows) + added * _column(weights, added), 0))


def _fake_add_expert_bias(rows: Tensor, *_: object) -> Tensor:
    return new_like(rows)


@torch.library.impl("raymoe::expert_sums", _DEVICES)
def _expert_sums(rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
    """Sum each expert's rows, times their weights if there are some: float32[L, N]; float64 of float64."""
    if _in_kernels(rows):
        sums = expert_kernels.new_sums(rows, len(counts))
        ExpertSums(as_dense(rows), _dense_if(weights), sums, _places(offsets, counts)).launch()
        return sums.sum(dim=1)
    if rows.device.type == "cpu":
        sums = _new_sums(rows, counts).zero_()
        for place, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
            part = slice(start, start + count)
            own = formulas.wide(rows[part])
            sums[place] = (own * _column(None if weights is None else weights[part], own)).sum(dim=0)
        return sums
    # One product sums in one order; `index_add` would add by atomics, in another order each time.
    expert = Groups(offsets, counts).expert_of_row(len(rows))
    own = formulas.wide(rows)
    own = torch.where((expert < len(counts))[:, None], own * _column(weights, own), 0)
    return torch.eq(expert, torch.arange(len(counts), device=rows.device)[:, None]).to(own.dtype) @ own


def _new_sums(rows: Tensor, counts: Tensor) -> Tensor:
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return rows.new_empty(counts.shape[0], rows.shape[1], dtype=dtype)


def _fake_expert_sums(rows: Tensor, _offsets: Tensor, counts: Tensor, _weights: Tensor | None) -> Tensor:
    return _new_sums(rows, counts)


@torch.library.impl("raymoe::bias_dots", _DEVICES)
def _bias_dots(dy: Tensor, bias: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    """Sum dy times the bias of its expert over each row, float32[C]: the gradient of the bias's weight."""
    dots = dy.new_empty(len(dy), dtype=torch.float32)
    if _in_kernels(dy):
        WeighGradients(as_dense(dy), as_dense(bias), None, dots, _places(offsets, counts)).launch()
        return dots
    own, there = bias_of_rows(dy, bias, offsets, counts)
    return dots.copy_(torch.where(there, formulas.wide(dy) * own, 0).sum(dim=1))


def _fake_bias_dots(dy: Tensor, *_: object) -> Tensor:
    return dy.new_empty(dy.shape[0], dtype=torch.float32)


def _save_for_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    _, *others = inputs
    ctx.save_for_backward(*others)


def _bias_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    bias, offsets, counts, weights = ctx.saved_tensors
    _, needs_bias, _, _, needs_weights = ctx.needs_input_grad
    d_bias = _ops.expert_sums(dy, offsets, counts, weights).to(bias.dtype) if needs_bias else None
    d_weights = _ops.bias_dots(dy, bias, offsets, counts) if needs_weights else None
    return dy, d_bias, None, None, d_weights


torch.library.register_autograd("raymoe::add_expert_bias", _bias_backward, setup_context=_save_for_bias)


# Gated activations.


def _gated(form: ActivationForm, gate_up: Tensor) -> Tensor:
    """Compute what kernels/moe/gated_activation.cu does, without weights, from rows that have their bias."""
    clamped_gate, clamped_up, share = _clamped(form, gate_up)
    return clamped_gate * share * (clamped_up + form.up_plus)


def _gated_gradient(form: ActivationForm, dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up."""
    (left, up), d = _halves(form, gate_up), formulas.wide(dy)
    clamped_gate, clamped_up, share = _clamped(form, gate_up)
    d_gate = d * (clamped_up + form.up_plus) * share * (1 + form.alpha * clamped_gate * (1 - share))
    d_gate = torch.where(left > form.limit, 0, d_gate)
    d_up = torch.where(up.abs() > form.limit, 0, d * clamped_gate * share)
    return torch.stack((d_gate, d_up), dim=-1).flatten(-2) if form.interleaved else torch.cat((d_gate, d_up), dim=-1)


def _halves(form: ActivationForm, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows = formulas.wide(gate_up)
    left, up = (rows[..., ::2], rows[..., 1::2]) if form.interleaved else rows.chunk(2, dim=-1)
    return left, up


def _clamped(form: ActivationForm, gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate and up within the limit, and the sigmoid of gate."""
    left, up = _halves(form, gate_up)
    left, up = left.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return left, up, torch.sigmoid(form.alpha * left)


@torch.library.impl("raymoe::gated_activation", _DEVICES)
def _gated_activation(
    gate_up: Tensor, bias: Tensor | None, offsets: Tensor, counts: Tensor, weights: Tensor | None, *numbers: Any
) -> Tensor:
    h, form = new_halved(gate_up), ActivationForm(*numbers)
    if _in_kernels(h):
        inputs = as_dense(gate_up), _dense_if(bias), _dense_if(weights)
        GatedActivation(form, *inputs, h, _places(offsets, counts)).launch()
        return h
    biased, there = _biased(gate_up, bias, offsets, counts)
    return h.copy_(torch.where(there, _gated(form, biased) * _column(weights, biased), 0))


def _biased(gate_up: Tensor, bias: Tensor | None, offsets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows plus their biases, and a column: whether the row has an expert."""
    added, there = bias_of_rows(
        gate_up, gate_up.new_zeros(len(counts), gate_up.shape[1]) if bias is None else bias, offsets, counts
    )
    return formulas.wide(gate_up) + added, there


def _fake_gated_activation(gate_up: Tensor, *_: object) -> Tensor:
    return new_halved(gate_up)


@torch.library.impl("raymoe::gated_activation_backward", _DEVICES)
def _gated_activation_backward(
    dh: Tensor,
    gate_up: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counts: Tensor,
    weights: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate_up, which are those of the biased rows, and of the weights if there are some."""
    d_gate_up, form = new_like(gate_up), ActivationForm(*numbers)
    d_weights = dh.new_empty(0 if weights is None else len(dh), dtype=torch.float32)
    if _in_kernels(dh):
        inputs = as_dense(dh), as_dense(gate_up), _dense_if(bias), _dense_if(weights)
        results = d_gate_up, None if weights is None else d_weights
        GatedActivationBackward(form, *inputs, *results, _places(offsets, counts)).launch()
        return d_gate_up, d_weights
    biased, there = _biased(gate_up, bias, offsets, counts)
    by_weight = formulas.wide(dh) * _column(weights, biased)
    d_gate_up.copy_(torch.where(there, _gated_gradient(form, by_weight, biased), 0))
    if weights is not None:
        d_weights.copy_(torch.where(there, formulas.wide(dh) * _gated(form, biased), 0).sum(dim=1))
    return d_gate_up, d_weights


def _fake_gated_activation_backward(
    dh: Tensor, gate_up: Tensor, _bias: Tensor | None, _o: Tensor, _c: Tensor, weights: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    return new_like(gate_up), dh.new_empty(0 if weights is None else dh.shape[0], dtype=torch.float32)


def _save_for_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    gate_up, bias, offsets, counts, weights, *ctx.numbers = inputs
    ctx.save_for_backward(gate_up, bias, offsets, counts, weights)


def _gated_backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, bias, offsets, counts, weights = ctx.saved_tensors
    _, needs_bias, _, _, needs_weights, *_ = ctx.needs_input_grad
    tensors = dh, gate_up, bias, offsets, counts, weights
    d_gate_up, d_weights = _ops.gated_activation_backward(*tensors, *ctx.numbers)
    d_bias = _ops.expert_sums(d_gate_up, offsets, counts, None).to(gate_up.dtype) if needs_bias else None
    return d_gate_up, d_bias, None, None, d_weights if needs_weights else None, None, None, None, None


torch.library.register_autograd("raymoe::gated_activation", _gated_backward, setup_context=_save_for_gated)


# Weights that a combine applied.


@torch.library.impl("raymoe::weigh_gradients", _DEVICES)
def _weigh_gradients(dy: Tensor, weights: Tensor, offsets: Tensor, rows: Tensor | None) -> Tensor:
    d_weights = weights.new_empty(0 if rows is None else len(dy))
    if not len(dy):  # an exact dispatch brought no rows, and no grid has no blocks
        return d_weights
    if row_launch.takes(dy) and expert_kernels.weighs(dy):
        factors = _dense_if(rows), as_dense(weights), None if rows is None else d_weights
        WeighGradients(dy, *factors, _places(offsets)).launch()
        return d_weights
    there = slice(int(offsets[-1]) if dy.device.type == "cpu" else None)
    own = formulas.wide(dy[there])
    if rows is not None:
        d_weights.zero_()[there] = (own * formulas.wide(rows[there])).sum(dim=1)
    dy[there] = own * weights[there, None]
    return d_weights


def _fake_weigh_gradients(dy: Tensor, weights: Tensor, _offsets: Tensor, rows: Tensor | None) -> Tensor:
    return weights.new_empty(0 if rows is None else dy.shape[0])


torch.library.register_fake("raymoe::add_expert_bias", _fake_add_expert_bias)
torch.library.register_fake("raymoe::expert_sums", _fake_expert_sums)
torch.library.register_fake("raymoe::bias_dots", _fake_bias_dots)
torch.library.register_fake("raymoe::gated_activation", _fake_gated_activation)
torch.library.register_fake("raymoe::gated_activation_backward", _fake_gated_activation_backward)
torch.library.register_fake("raymoe::weigh_gradients", _fake_weigh_gradients)
