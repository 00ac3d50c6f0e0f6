"""RMSNorm, add + RMSNorm and LayerNorm over rows, with gradients.

Sums are float32 and each result is rounded once. A backward computes the statistics of the rows again, because it reads
the rows in any case. The functions are `torch.library` operators, which torch.compile and others see; `direct.py` says
when they compute without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, overload

import torch
from torch import Tensor

import raymoe.rows.formulas as formulas
import raymoe.rows.norm_kernels as kernels
import raymoe.rows.row_launch as row_launch
from raymoe.errors import ConfigError
from raymoe.rows.direct import Computation, backward_directly, directly, needs_gradient
from raymoe.rows.operator_definitions import operator
from raymoe.rows.pipe_shape import limits_of
from raymoe.rows.row_arguments import (
    NormForm,
    PlainNorm,
    QuantisedNorm,
    ResultForm,
    check_like,
    check_rows,
    check_vector,
    norm_form_of,
    refuse_gradient,
)
from raymoe.rows.row_results import new_like, new_quantised, new_total, quantised

# The functions.


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float = ..., **options: Unpack[PlainNorm]) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., **options: Unpack[QuantisedNorm]
) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Divide each row of x[..., H] by the root of the mean of its squares, and multiply it by weight[H].

    With `output="float8_e4m3"` the result is (values, scales); `Quantised` has the options. Such a call has no
    gradient. With `batch_invariant=True` a row has the same bits among any other rows (docs/rows.md).

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, -4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([[ 0.8485, -2.2627]])
    """
    form = norm_form_of(options)
    _check("rms_norm", x, eps, form, weight=weight)
    if form.quantised:
        refuse_gradient("rms_norm", x, weight)
        compute = _compute_rms_norm_fp8 if directly(x, weight) else _rms_norm_fp8
        values, scales, _ = compute(x, None, weight, eps, form.column, *form.launch)
        return values, scales
    y: Tensor
    if not directly(x, weight):
        y = _rms_norm(x, None, weight, eps, *form.launch)[0]
    elif needs_gradient(x, weight):
        y = _RmsNorm.of(x, weight, eps, *form.launch)
    else:
        y = _plain_rms_norm(x, weight, eps, *form.launch)
    return y


@overload
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = ..., **options: Unpack[PlainNorm]
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = ..., **options: Unpack[QuantisedNorm]
) -> tuple[tuple[Tensor, Tensor], Tensor]: ...
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **options: Any
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """Return `rms_norm(x + residual, weight)` and `x + residual`. The norm is that of the rounded sum.

    With `output="float8_e4m3"` the first of the two is a pair (values, scales).

    >>> import torch
    >>> y, total = add_rms_norm(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), eps=0.0)
    >>> y, total
    (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """
    form = norm_form_of(options)
    _check("add_rms_norm", x, eps, form, weight=weight)
    check_like("add_rms_norm", "residual", residual, x, x.shape)
    if form.quantised:
        refuse_gradient("add_rms_norm", x, residual, weight)
        compute = _compute_rms_norm_fp8 if directly(x, residual, weight) else _rms_norm_fp8
        values, scales, total = compute(x, residual, weight, eps, form.column, *form.launch)
        return (values, scales), total
    if not directly(x, residual, weight):
        y, total = _rms_norm(x, residual, weight, eps, *form.launch)
    elif needs_gradient(x, residual, weight):
        y, total = _AddRmsNorm.of(x, residual, weight, eps, *form.launch)
    else:
        y, total = _compute_rms_norm(x, residual, weight, eps, *form.launch)
    return y, total


@overload
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = ..., **options: Unpack[PlainNorm]) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = ..., **options: Unpack[QuantisedNorm]
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Subtract the mean of each row of x[..., H], divide by its deviation, multiply by weight[H] and add bias[H].

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0]), eps=0.0)
    tensor([[-1.,  7.]])
    """
    form = norm_form_of(options)
    _check("layer_norm", x, eps, form, weight=weight, bias=bias)
    if bias.dtype != weight.dtype:
        raise ConfigError(f"layer_norm: bias is {bias.dtype} and weight is {weight.dtype}; they have one dtype")
    if form.quantised:
        refuse_gradient("layer_norm", x, weight, bias)
        compute = _compute_layer_norm_fp8 if directly(x, weight, bias) else _layer_norm_fp8
        pair: tuple[Tensor, Tensor] = compute(x, weight, bias, eps, form.column, *form.launch)
        return pair
    y: Tensor
    if not directly(x, weight, bias):
        y = _layer_norm(x, weight, bias, eps, *form.launch)
    elif needs_gradient(x, weight, bias):
        y = _LayerNorm.of(x, weight, bias, eps, *form.launch)
    else:
        y = _compute_layer_norm(x, weight, bias, eps, *form.launch)
    return y


def _check(op: str, x: Tensor, eps: float, form: NormForm, **vectors: Tensor) -> None:
    check_rows(op, "x", x)
    for name, vector in vectors.items():
        check_vector(op, name, vector, x)
    if not eps >= 0:
        raise ConfigError(f"{op}: eps is {eps}; it is 0 or more")
    if form.column:
        check_columns(op, x, form)


def check_columns(op: str, x: Tensor, form: ResultForm) -> None:
    """Raise if rows of several dimensions shall have scales by column."""
    if form.column and x.dim() != 2:
        raise ConfigError(f"{op}: x has shape {list(x.shape)}; scales by column need [T, H]: call .flatten(0, -2)")


def _by_formula(formula: Callable[[Tensor], Tensor], x: Tensor, *, batch_invariant: bool) -> Tensor:
    """Compute by torch. On a CPU it sums rows alike, but shares one long row alone among threads: that goes as two.

    >>> _by_formula(lambda rows: rows * rows.numel(), torch.ones(3), batch_invariant=True).tolist()
    [6.0, 6.0, 6.0]
    """
    if not batch_invariant:
        return formula(x)
    if x.device.type != "cpu":
        raise ConfigError(
            f"a norm with batch_invariant on {x.device}, where torch computes it and sums a row in another order for "
            f"other numbers of rows; a GPU of compute capability {row_launch.LEAST_CAPABILITY} or newer is needed"
        )
    return formula(torch.stack((x, x)))[0] if x.numel() == x.shape[-1] else formula(x)


# RMSNorm. Without a residual, `total` is empty: an operator may not return its input.


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float, sms: int | None, batch_invariant: bool = False) -> Tensor:
    """Return y alone, without the empty total."""
    if row_launch.takes(x):
        return kernels.plain_rms_norm(x, weight, eps, limits_of(sms, batch_invariant))
    return new_like(x).copy_(_rms_by_formula(x, weight, eps, batch_invariant))


def _rms_by_formula(x: Tensor, weight: Tensor, eps: float, batch_invariant: bool) -> Tensor:
    return _by_formula(lambda rows: formulas.rms_norm(rows, weight, eps), x, batch_invariant=batch_invariant)


def _compute_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, sms: int | None, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return y and total."""
    if row_launch.takes(x):
        return kernels.rms_norm(x, residual, weight, eps, limits_of(sms, batch_invariant))
    rows, total = _summed(x, residual)
    return new_like(x).copy_(_rms_by_formula(rows, weight, eps, batch_invariant)), total


def _summed(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows to normalise, and total."""
    if residual is None:
        return x, x.new_empty(0)
    total = new_like(x).copy_(x.float() + residual.float())
    return total, total


_rms_norm = operator("rms_norm", _compute_rms_norm)


@_rms_norm.register_fake
def _(x: Tensor, residual: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return new_like(x), new_total(x, residual)


def _compute_rms_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    rows: Tensor,
    weight: Tensor,
    eps: float,
    sms: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the normalised rows and of the weight. `dtotal` is added to the first."""
    if row_launch.takes(rows):
        return kernels.rms_norm_backward(dy, dtotal, rows, weight, eps, limits_of(sms))
    drows, dweight = formulas.rms_norm_backward(dy, rows, weight, eps)
    if dtotal is not None:
        drows = drows + dtotal.float()
    return new_like(rows).copy_(drows), dweight.to(weight.dtype)


_rms_norm_backward = operator("rms_norm_backward", _compute_rms_norm_backward)


@_rms_norm_backward.register_fake
def _(_dy: Tensor, _dtotal: Tensor | None, rows: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return new_like(rows), new_like(weight)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, ctx.eps, ctx.sms, _ = inputs
    ctx.added = residual is not None
    ctx.save_for_backward(output[1] if ctx.added else x, weight)
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
    dtotal = dtotal if ctx.added else None
    if dy is None:
        return dtotal, dtotal, None, None, None, None
    rows, weight = ctx.saved_tensors
    drows, dweight = _rms_norm_gradients(dy, dtotal, rows, weight, ctx.eps, ctx.sms)
    return drows, drows if ctx.added else None, dweight, None, None, None


def _rms_norm_gradients(
    dy: Tensor, dtotal: Tensor | None, rows: Tensor, weight: Tensor, eps: float, sms: int | None
) -> tuple[Tensor, Tensor]:
    outgoing = (dy,) if dtotal is None else (dy, dtotal)
    direct = backward_directly(*outgoing, rows, weight)
    compute = _compute_rms_norm_backward if direct else _rms_norm_backward
    gradients: tuple[Tensor, Tensor] = compute(dy, dtotal, rows, weight, eps, sms)
    return gradients


_rms_norm.register_autograd(_differentiate_rms_norm, setup_context=_save_rms_norm)


class _RmsNorm(Computation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sms: int | None, batch_invariant: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.sms = eps, sms
        return _plain_rms_norm(x, weight, eps, sms, batch_invariant)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return *_rms_norm_gradients(dy, None, x, weight, ctx.eps, ctx.sms), None, None, None


class _AddRmsNorm(Computation):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *launch: Any
    ) -> tuple[Tensor, Tensor]:
        results = _compute_rms_norm(x, residual, weight, eps, *launch)
        _save_rms_norm(ctx, (x, residual, weight, eps, *launch), results)
        return results

    backward = staticmethod(_differentiate_rms_norm)


def _compute_rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, column: bool, *launch: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, scales and total."""
    limits = limits_of(*launch)
    if row_launch.takes(x):
        return kernels.rms_norm_fp8(x, residual, weight, eps, column, limits)
    rows, total = _summed(x, residual)
    return *quantised(_rms_by_formula(rows, weight, eps, limits.batch_invariant), column), total


_LAUNCH = "SymInt? sms, bool batch_invariant=False"
_rms_norm_fp8 = operator(
    "rms_norm_fp8",
    _compute_rms_norm_fp8,
    f"(Tensor x, Tensor? residual, Tensor weight, float eps, bool column, {_LAUNCH}) -> (Tensor, Tensor, Tensor)",
)


@_rms_norm_fp8.register_fake
def _(
    x: Tensor, residual: Tensor | None, _weight: Tensor, _eps: float, column: bool, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return *new_quantised(x.shape, x.device, column), new_total(x, residual)


# LayerNorm.


def _compute_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, sms: int | None, batch_invariant: bool = False
) -> Tensor:
    if row_launch.takes(x):
        return kernels.layer_norm(x, weight, bias, eps, limits_of(sms, batch_invariant))
    return new_like(x).copy_(_layer_by_formula(x, weight, bias, eps, batch_invariant))


def _layer_by_formula(x: Tensor, weight: Tensor, bias: Tensor, eps: float, batch_invariant: bool) -> Tensor:
    return _by_formula(lambda rows: formulas.layer_norm(rows, weight, bias, eps), x, batch_invariant=batch_invariant)


_layer_norm = operator("layer_norm", _compute_layer_norm)


@_layer_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return new_like(x)


def _compute_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    sms: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    if row_launch.takes(x):
        return kernels.layer_norm_backward(dy, x, weight, eps, limits_of(sms))
    dx, dweight, dbias = formulas.layer_norm_backward(dy, x, weight, eps)
    return new_like(x).copy_(dx), dweight.to(weight.dtype), dbias.to(weight.dtype)


_layer_norm_backward = operator("layer_norm_backward", _compute_layer_norm_backward)


@_layer_norm_backward.register_fake
def _(_dy: Tensor, x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return new_like(x), new_like(weight), new_like(weight)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    x, weight, _, ctx.eps, ctx.sms, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_layer_norm(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    direct = backward_directly(dy, x, weight)
    compute = _compute_layer_norm_backward if direct else _layer_norm_backward
    return *compute(dy, x, weight, ctx.eps, ctx.sms), None, None, None


_layer_norm.register_autograd(_differentiate_layer_norm, setup_context=_save_layer_norm)


class _LayerNorm(Computation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, *launch: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, (ctx.sms, _) = eps, launch
        return _compute_layer_norm(x, weight, bias, eps, *launch)

    backward = staticmethod(_differentiate_layer_norm)


def _compute_layer_norm_fp8(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, column: bool, *launch: Any
) -> tuple[Tensor, Tensor]:
    """Return values and scales."""
    limits = limits_of(*launch)
    if row_launch.takes(x):
        return kernels.layer_norm_fp8(x, weight, bias, eps, column, limits)
    return quantised(_layer_by_formula(x, weight, bias, eps, limits.batch_invariant), column)


_layer_norm_fp8 = operator(
    "layer_norm_fp8",
    _compute_layer_norm_fp8,
    f"(Tensor x, Tensor weight, Tensor bias, float eps, bool column, {_LAUNCH}) -> (Tensor, Tensor)",
)


@_layer_norm_fp8.register_fake
def _(x: Tensor, _weight: Tensor, _bias: Tensor, _eps: float, column: bool, *_: object) -> tuple[Tensor, Tensor]:
    return new_quantised(x.shape, x.device, column)
