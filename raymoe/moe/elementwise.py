"""Compute an expression element by element: `pointwise("silu(a) * b + c", a=a, b=b, c=c)`, with gradients.

`expression.py` reads the text, `operators.py` gives values, C++ code and derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import raymoe.moe.kernels as kernels
from raymoe.device.pipe_shape import Limits
from raymoe.errors import ConfigError, shown
from raymoe.moe.arguments import ResultForm, check_rows
from raymoe.moe.expression import Expression, parse
from raymoe.moe.operators import OUTGOING, evaluate, gradients


def pointwise(expression: str, /, *, sms: int | None = None, **inputs: Tensor) -> Tensor:
    """Compute `expression` from the inputs, whose names are the keywords. Arithmetic is float32, rounded once.

    All inputs have one dtype. At least one has the full shape [..., H]; the others are as large, or a row vector [H],
    or a column vector [..., 1]. The expression has numbers, names, + - * /, brackets, and silu, sigmoid, relu, gelu,
    tanh, exp, log, sqrt, rsqrt, erf, abs, min, max and where(a < b, c, d). It is parsed and never evaluated as Python.

    >>> a, b = torch.tensor([[1.0, -2.0], [0.5, 4.0]]), torch.tensor([10.0, 20.0])
    >>> pointwise("max(a, 0) * 2 + b", a=a, b=b)
    tensor([[12., 20.],
            [11., 28.]])
    >>> pointwise("a + c", a=a)
    Traceback (most recent call last):
        ...
    raymoe.errors.ConfigError: expression 'a + c' needs c, which is not given; given: a
    """
    if not isinstance(expression, str):
        raise ConfigError(f"pointwise: the expression is a {type(expression).__name__}; a text is needed")
    form = ResultForm(sms=sms)
    for name, value in inputs.items():
        if not name.isidentifier():
            raise ConfigError(f"pointwise: {shown(name)!r} is not a name that an expression can hold")
        check_rows("pointwise", name, value)
    names = ",".join(inputs)  # an operator takes no list of texts
    result: Tensor = _pointwise(expression, names, list(inputs.values()), form.sms)
    return result


def add(*terms: Tensor) -> Tensor:
    """Add tensors of one shape and dtype. The gradient of each is that of the sum, which nothing copies.

    On Hopper GPUs one kernel adds in float32 and rounds once. Three terms of 4096 rows of 7168 bfloat16 take 62 us
    there and 89 by torch, which stores the sum of two (one H200, torch 2.11, 2026-11-24).

    >>> add(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]))
    tensor([7.])
    """
    alike = len({each.dtype for each in terms}) == 1
    if len(terms) > 2 and alike and terms[0].device.type == "cuda":  # the operator asks for its capability
        total: Tensor = _sum_terms(terms)
        return total
    return functools.reduce(torch.add, terms)


@torch.library.custom_op("raymoe::sum_terms", mutates_args=())
def _sum_terms(terms: Sequence[Tensor]) -> Tensor:
    if not kernels.adds(terms):
        return functools.reduce(torch.add, terms).contiguous()
    names = [f"x{number}" for number in range(len(terms))]
    return kernels.pointwise(" + ".join(names), ",".join(names), terms, Limits())


@_sum_terms.register_fake
def _(terms: Sequence[Tensor]) -> Tensor:
    return terms[0].new_empty(terms[0].shape)


def _pass_to_each(ctx: Any, dy: Tensor) -> list[Tensor]:
    return [dy] * ctx.terms


def _count_terms(ctx: Any, inputs: tuple[Sequence[Tensor]], output: Tensor) -> None:  # noqa: ARG001
    ctx.terms = len(inputs[0])


_sum_terms.register_autograd(_pass_to_each, setup_context=_count_terms)


@torch.library.custom_op("raymoe::pointwise", mutates_args=())
def _pointwise(expression: str, names: str, inputs: Sequence[Tensor], sms: int | None) -> Tensor:
    given = _given(expression, names, inputs)
    shape = _shape(given)
    if kernels.takes(inputs[0]):
        return kernels.pointwise(expression, names, inputs, Limits(sms))
    values = {name: value.float() for name, value in given.items()}
    return inputs[0].new_empty(shape).copy_(evaluate(parse(expression), values))


def _given(expression: str, names: str, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the inputs by name. Raises if they are not those of the expression."""
    needed, given = parse(expression).names, names.split(",") if names else []
    told = ", ".join(given) or "none"
    for name in needed:
        if name not in given:
            raise ConfigError(f"expression {shown(expression)!r} needs {name}, which is not given; given: {told}")
    for name in given:
        if name not in needed:
            raise ConfigError(f"expression {shown(expression)!r} has no {name}; its inputs are {', '.join(needed)}")
    return dict(zip(given, inputs, strict=True))


def _shape(given: Mapping[str, Tensor]) -> torch.Size:
    """Return the full shape. Raises if an input has another dtype, device, or a shape that is neither full nor a
    vector."""
    first, some = next(iter(given.items()))
    full = max((value.shape for value in given.values()), key=lambda shape: (len(shape), shape.numel(), shape[-1]))
    for name, value in given.items():
        if value.dtype != some.dtype or value.device != some.device:
            raise ConfigError(
                f"pointwise: {name} is {value.dtype} on {value.device} and {first} is {some.dtype} on {some.device}; "
                "all inputs have one dtype and device"
            )
        if tuple(value.shape) not in (tuple(full), tuple(full[-1:]), (*full[:-1], 1)):
            raise ConfigError(
                f"pointwise: {name} has shape {list(value.shape)}; with {list(full)} it is that, {list(full[-1:])} or "
                f"{[*full[:-1], 1]}"
            )
    return full


@_pointwise.register_fake
def _(expression: str, names: str, inputs: Sequence[Tensor], *_: object) -> Tensor:
    shape = _shape(_given(expression, names, inputs))
    return torch.empty(shape, dtype=inputs[0].dtype, device=inputs[0].device)


# Gradients. The derivative of each input is an expression too. Where an input is a vector, its gradient is summed over
# the rows or columns that it was spread over, always in the same order.


@torch.library.custom_op("raymoe::pointwise_backward", mutates_args=())
def _pointwise_backward(
    dy: Tensor,
    expression: str,
    names: str,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    sms: int | None,
) -> list[Tensor]:
    """Return the gradients of the wanted inputs, in their order."""
    given = _given(expression, names, inputs)
    derivatives = gradients(parse(expression))
    found = []
    for (name, value), want in zip(given.items(), wanted, strict=True):
        if want and name in derivatives:
            whole = _whole_gradient(derivatives[name], given | {OUTGOING: dy}, sms)
            found.append(value.new_empty(value.shape).copy_(_over_vector(whole, value.shape)))
        elif want:
            found.append(torch.zeros_like(value, memory_format=torch.contiguous_format))
    return found


def _whole_gradient(derivative: Expression, given: dict[str, Tensor], sms: int | None) -> Tensor:
    """Return the gradient of an input before it is summed: float32, or the inputs' dtype where a kernel computes it."""
    dy = given[OUTGOING]
    if kernels.takes(dy):
        return kernels.evaluated(derivative, given, dy, Limits(sms))
    whole = evaluate(derivative, {name: value.float() for name, value in given.items()}).expand(dy.shape)
    return whole.clone()  # it may be dy itself


def _over_vector(whole: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient of the full shape over what an input of `shape` was spread over."""
    if whole.shape == shape:
        return whole
    if len(shape) == 1 and (whole.dim() > 1 and shape[0] == whole.shape[-1]):
        return whole.reshape(-1, whole.shape[-1]).sum(dim=0, dtype=torch.float32)
    return whole.sum(dim=-1, keepdim=True, dtype=torch.float32)


@_pointwise_backward.register_fake
def _(
    _dy: Tensor, _expression: str, _names: str, inputs: Sequence[Tensor], wanted: Sequence[bool], *_: object
) -> list[Tensor]:
    return [
        torch.empty(v.shape, dtype=v.dtype, device=v.device) for v, want in zip(inputs, wanted, strict=True) if want
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    ctx.expression, ctx.names, values, ctx.sms = inputs
    ctx.save_for_backward(*values)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[2])
    found = iter(_pointwise_backward(dy, ctx.expression, ctx.names, list(ctx.saved_tensors), wanted, ctx.sms))
    return None, None, [next(found) if want else None for want in wanted], None


_pointwise.register_autograd(_differentiate, setup_context=_keep)
