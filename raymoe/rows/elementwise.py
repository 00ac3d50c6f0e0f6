"""Compute an expression element by element: `pointwise("silu(a) * b + c", a=a, b=b, c=c)`, with gradients.

`expression.py` reads the text, `operators.py` gives values, C++ code and derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import raymoe.rows.elementwise_kernels as kernels
import raymoe.rows.row_launch as row_launch
from raymoe.errors import ConfigError, shown
from raymoe.rows.direct import Computation, backward_directly, directly, needs_gradient
from raymoe.rows.expression import Expression, parse
from raymoe.rows.operator_definitions import operator
from raymoe.rows.operators import OUTGOING, code, evaluate, gradients
from raymoe.rows.pipe_shape import NO_LIMITS, limits_of
from raymoe.rows.row_arguments import PLAIN, ResultForm, check_rows


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
    form = PLAIN if sms is None else ResultForm(sms=sms)
    for name, value in inputs.items():
        if not name.isidentifier():
            raise ConfigError(f"pointwise: {shown(name)!r} is not a name that an expression can hold")
        check_rows("pointwise", name, value)
    names = ",".join(inputs)  # an operator takes no list of texts
    values = list(inputs.values())
    result: Tensor
    if not directly(*values):
        result = _pointwise(expression, names, values, form.sms)
    elif needs_gradient(*values):
        result = _Pointwise.of(expression, names, form.sms, *values)
    else:
        result = _compute_pointwise(expression, names, values, form.sms)
    return result


def add(*terms: Tensor) -> Tensor:
    """Add tensors of one shape and dtype. The gradient of each is that of the sum, which nothing copies.

    On Hopper GPUs one kernel adds in float32 and rounds once. Three terms of 4096 rows of 7168 bfloat16 take 62 us
    there and 89 by torch, which stores the sum of two (one H200, torch 2.11, 2026-11-24).

    >>> add(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]))
    tensor([7.])
    """
    if len(terms) < 3 or not terms[0].is_cuda or len({term.dtype for term in terms}) > 1:
        return functools.reduce(torch.add, terms)
    total: Tensor
    if not directly(*terms):
        total = _sum_terms(terms)
    elif needs_gradient(*terms):
        total = _SumTerms.of(*terms)
    else:
        total = _compute_sum(terms)
    return total


def _compute_sum(terms: Sequence[Tensor]) -> Tensor:
    if not kernels.adds(terms):
        return functools.reduce(torch.add, terms).contiguous()
    full = max(terms, key=Tensor.numel)
    return kernels.computed(_code_of_sum(len(terms)), terms, full, NO_LIMITS)


@functools.cache
def _code_of_sum(terms: int) -> str:
    return code(parse(" + ".join(f"x{number}" for number in range(terms))))


_sum_terms = operator("sum_terms", _compute_sum)


@_sum_terms.register_fake
def _(terms: Sequence[Tensor]) -> Tensor:
    return terms[0].new_empty(terms[0].shape)


def _pass_to_each(ctx: Any, dy: Tensor) -> list[Tensor]:
    return [dy] * ctx.terms


def _count_terms(ctx: Any, inputs: tuple[Sequence[Tensor]], output: Tensor) -> None:  # noqa: ARG001
    ctx.terms = len(inputs[0])


_sum_terms.register_autograd(_pass_to_each, setup_context=_count_terms)


class _SumTerms(Computation):
    @staticmethod
    def forward(ctx: Any, *terms: Tensor) -> Tensor:
        ctx.terms = len(terms)
        return _compute_sum(terms)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        terms: int = ctx.terms
        return (dy,) * terms


# Expressions.


def _compute_pointwise(expression: str, names: str, inputs: Sequence[Tensor], sms: int | None) -> Tensor:
    program = _program(expression, names)
    shape = _full_shape(program.names, inputs)
    if row_launch.takes(inputs[0]):
        full = inputs[0] if inputs[0].shape == shape else next(tensor for tensor in inputs if tensor.shape == shape)
        return program.whole.computed(inputs, full, sms)
    values = {name: value.float() for name, value in zip(program.names, inputs, strict=True)}
    return inputs[0].new_empty(shape).copy_(evaluate(program.whole.expression, values))


@dataclass(frozen=True)
class _Formula:
    """An expression, its code in C++, and the place of each of its inputs among those of a call."""

    expression: Expression
    code: str
    places: tuple[int, ...]

    @classmethod
    def of(cls, expression: Expression, names: Sequence[str]) -> _Formula:
        return cls(expression, code(expression), tuple(names.index(name) for name in expression.names))

    def computed(self, inputs: Sequence[Tensor], full: Tensor, sms: int | None) -> Tensor:
        """Compute by the kernel. The result is as large as `full`."""
        return kernels.computed(self.code, [inputs[at] for at in self.places], full, limits_of(sms))


class _Program:
    """An expression with its derivatives, for inputs in the order of a call."""

    def __init__(self, expression: Expression, names: Sequence[str]) -> None:
        self.names = names
        self.whole = _Formula.of(expression, names)

    @functools.cached_property
    def derivatives(self) -> list[_Formula | None]:
        """The derivative by each input. Its own inputs are those of the call and the gradient of the result."""
        by_name, names = gradients(self.whole.expression), [*self.names, OUTGOING]
        return [_Formula.of(by_name[name], names) if name in by_name else None for name in self.names]


@functools.lru_cache(maxsize=256)
def _program(expression: str, names: str) -> _Program:
    """Read an expression. Raise if the names are not those of its inputs."""
    return _Program(parse(expression), _names_for(expression, names))


def _names_for(expression: str, names: str) -> list[str]:
    """Split the names of the inputs. Raise if they are not those that the expression needs."""
    needed, split = parse(expression).names, names.split(",") if names else []
    for name in needed:
        if name not in split:
            known = ", ".join(split) or "none"
            raise ConfigError(f"expression {shown(expression)!r} needs {name}, which is not given; given: {known}")
    for name in split:
        if name not in needed:
            raise ConfigError(f"expression {shown(expression)!r} has no {name}; its inputs are {', '.join(needed)}")
    return split


def _full_shape(names: Sequence[str], inputs: Sequence[Tensor]) -> torch.Size:
    """Return the full shape. Raise if an input has another dtype or device, or is neither full nor a vector."""
    first, some = names[0], inputs[0]
    shape, dtype, device = some.shape, some.dtype, some.device
    for value in inputs:
        if value.shape != shape or value.dtype != dtype or value.device != device:
            break
    else:
        return shape
    full = max((value.shape for value in inputs), key=lambda shape: (len(shape), shape.numel(), shape[-1]))
    for name, value in zip(names, inputs, strict=True):
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


_pointwise = operator("pointwise", _compute_pointwise)


@_pointwise.register_fake
def _(expression: str, names: str, inputs: Sequence[Tensor], *_: object) -> Tensor:
    shape = _full_shape(_names_for(expression, names), inputs)
    return torch.empty(shape, dtype=inputs[0].dtype, device=inputs[0].device)


# Gradients. The derivative of each input is an expression too. Where an input is a vector, its gradient is summed over
# the rows or columns that it was spread over, always in the same order.


def _compute_pointwise_backward(
    dy: Tensor,
    expression: str,
    names: str,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    sms: int | None,
) -> list[Tensor]:
    """Return the gradients of the wanted inputs, in their order."""
    program = _program(expression, names)
    wanted_gradients = []
    for derivative, value, want in zip(program.derivatives, inputs, wanted, strict=True):
        if want and derivative is not None:
            whole = _over_vector(_whole_gradient(derivative, program.names, [*inputs, dy], sms), value.shape)
            wanted_gradients.append(whole if whole.dtype == value.dtype else value.new_empty(value.shape).copy_(whole))
        elif want:
            wanted_gradients.append(torch.zeros_like(value, memory_format=torch.contiguous_format))
    return wanted_gradients


def _whole_gradient(derivative: _Formula, names: Sequence[str], tensors: Sequence[Tensor], sms: int | None) -> Tensor:
    """Return the gradient of an input before it is summed, in new memory: float32, or the inputs' dtype where a kernel
    computes it. The last of `tensors` is the gradient of the result."""
    dy = tensors[-1]
    if row_launch.takes(dy):
        return derivative.computed(tensors, dy, sms)
    values = {name: value.float() for name, value in zip([*names, OUTGOING], tensors, strict=True)}
    whole = evaluate(derivative.expression, values).expand(dy.shape)
    return whole.clone()  # it may be dy itself


def _over_vector(whole: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient of the full shape over what an input of `shape` was spread over."""
    if whole.shape == shape:
        return whole
    if len(shape) == 1 and (whole.dim() > 1 and shape[0] == whole.shape[-1]):
        return whole.reshape(-1, whole.shape[-1]).sum(dim=0, dtype=torch.float32)
    return whole.sum(dim=-1, keepdim=True, dtype=torch.float32)


_pointwise_backward = operator("pointwise_backward", _compute_pointwise_backward)


@_pointwise_backward.register_fake
def _(
    _dy: Tensor, _expression: str, _names: str, inputs: Sequence[Tensor], wanted: Sequence[bool], *_: object
) -> list[Tensor]:
    return [
        torch.empty(v.shape, dtype=v.dtype, device=v.device) for v, want in zip(inputs, wanted, strict=True) if want
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (torch gives it by name)
    ctx.expression, ctx.names, values, ctx.sms = inputs
    ctx.save_for_backward(*values)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[2])
    results = iter(_pointwise_backward(dy, ctx.expression, ctx.names, list(ctx.saved_tensors), wanted, ctx.sms))
    return None, None, [next(results) if want else None for want in wanted], None


_pointwise.register_autograd(_differentiate, setup_context=_save)


class _Pointwise(Computation):
    @staticmethod
    def forward(ctx: Any, expression: str, names: str, sms: int | None, *inputs: Tensor) -> Tensor:
        ctx.expression, ctx.names, ctx.sms = expression, names, sms
        ctx.save_for_backward(*inputs)
        return _compute_pointwise(expression, names, inputs, sms)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        inputs, wanted = list(ctx.saved_tensors), list(ctx.needs_input_grad[3:])
        direct = backward_directly(dy, *inputs)
        compute = _compute_pointwise_backward if direct else _pointwise_backward
        results = iter(compute(dy, ctx.expression, ctx.names, inputs, wanted, ctx.sms))
        return None, None, None, *(next(results) if want else None for want in wanted)
