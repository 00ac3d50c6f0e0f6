"""The operators of pointwise expressions: their value by torch, their code in C++, and their derivatives.

All three are read from one table, OPERATORS. Values are float32 everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.rows.expression import COMPARISONS, Expression, Instruction, Tape

Rule = Callable[[Tape, int, int, tuple[int, ...]], tuple[int | None, ...]]
"""Appends the derivatives of an instruction to a tape: from the gradient of its result, its place and its operands to
the gradient of each operand. None is zero."""


@dataclass(frozen=True)
class Operator:
    """`code` has a place for each operand, which is the name of a variable. Without a `rule` there is no derivative."""

    value: Callable[..., Any]
    code: str
    rule: Rule | None = None


# Derivatives. `g` is the gradient of the result `y`.


def _product(tape: Tape, g: int, _: int, operands: tuple[int, ...]) -> tuple[int, ...]:
    a, b = operands
    return tape.add("mul", g, b), tape.add("mul", g, a)


def _quotient(tape: Tape, g: int, y: int, operands: tuple[int, ...]) -> tuple[int, ...]:
    of_a = tape.add("div", g, operands[1])
    return of_a, tape.add("neg", tape.add("mul", of_a, y))


def _difference(tape: Tape, g: int, _y: int, _operands: tuple[int, ...]) -> tuple[int, ...]:
    return g, tape.add("neg", g)


def _negation(tape: Tape, g: int, _y: int, _operands: tuple[int, ...]) -> tuple[int, ...]:
    return (tape.add("neg", g),)


def _chosen(tape: Tape, g: int, _: int, operands: tuple[int, ...]) -> tuple[int | None, ...]:
    condition, zero = operands[0], tape.number(0.0)
    return None, tape.add("where", condition, g, zero), tape.add("where", condition, zero, g)


def _extreme(comparison: str) -> Rule:
    """The larger or smaller of two gets the gradient; equal ones get half each, as with torch."""

    def rule(tape: Tape, g: int, _: int, operands: tuple[int, ...]) -> tuple[int, ...]:
        a, b = operands
        half, zero = tape.add("mul", g, tape.number(0.5)), tape.number(0.0)
        equal = tape.add("eq", a, b)

        def of(operand: int, other: int) -> int:
            alone = tape.add("where", tape.add(comparison, operand, other), g, zero)
            return tape.add("where", equal, half, alone)

        return of(a, b), of(b, a)

    return rule


def _times(slope: Callable[[Tape, int, int], int]) -> Rule:
    """The rule of a function of one value: g times its slope, which follows from its operand and its result."""

    def rule(tape: Tape, g: int, y: int, operands: tuple[int, ...]) -> tuple[int, ...]:
        return (tape.add("mul", g, slope(tape, operands[0], y)),)

    return rule


def _complement(tape: Tape, x: int) -> int:
    return tape.add("sub", tape.number(1.0), x)


def _silu_slope(tape: Tape, x: int, _: int) -> int:
    s = tape.add("sigmoid", x)
    return tape.add("mul", s, tape.add("add", tape.number(1.0), tape.add("mul", x, _complement(tape, s))))


def _gelu_slope(tape: Tape, x: int, _: int) -> int:
    """Phi(x) + x phi(x), of the normal distribution."""
    below = tape.add("erf", tape.add("mul", x, tape.number(math.sqrt(0.5))))
    share = tape.add("mul", tape.number(0.5), tape.add("add", tape.number(1.0), below))
    return tape.add("add", share, tape.add("mul", x, _bell(tape, x, -0.5, 1 / math.sqrt(2 * math.pi))))


def _bell(tape: Tape, x: int, exponent: float, height: float) -> int:
    """height * exp(exponent * x * x)."""
    power = tape.add("mul", tape.number(exponent), tape.add("mul", x, x))
    return tape.add("mul", tape.number(height), tape.add("exp", power))


def _sign(tape: Tape, x: int, _: int) -> int:
    zero, one = tape.number(0.0), tape.number(1.0)
    negative = tape.add("where", tape.add("lt", x, zero), tape.number(-1.0), zero)
    return tape.add("where", tape.add("gt", x, zero), one, negative)


def _relu_rule(tape: Tape, g: int, _: int, operands: tuple[int, ...]) -> tuple[int, ...]:
    zero = tape.number(0.0)
    return (tape.add("where", tape.add("gt", operands[0], zero), g, zero),)


def _cube(tape: Tape, y: int) -> int:
    return tape.add("mul", y, tape.add("mul", y, y))


# The table. `min`, `max` and `relu` give NaN for NaN, in C++ as in torch. pointwise.cu has silu, logistic and
# exponential: fast forms where rows have 16 bits.

OPERATORS = {
    "neg": Operator(torch.neg, "-{0}", _negation),
    "add": Operator(torch.add, "{0} + {1}", lambda _t, g, _y, _o: (g, g)),
    "sub": Operator(torch.sub, "{0} - {1}", _difference),
    "mul": Operator(torch.mul, "{0} * {1}", _product),
    "div": Operator(torch.div, "{0} / {1}", _quotient),
    "where": Operator(torch.where, "{0} ? {1} : {2}", _chosen),
    "min": Operator(torch.minimum, "{0} < {1} || {0} != {0} ? {0} : {1}", _extreme("lt")),
    "max": Operator(torch.maximum, "{0} > {1} || {0} != {0} ? {0} : {1}", _extreme("gt")),
    "silu": Operator(torch.nn.functional.silu, "silu({0})", _times(_silu_slope)),
    "sigmoid": Operator(torch.sigmoid, "logistic({0})", _times(lambda t, _x, y: t.add("mul", y, _complement(t, y)))),
    "relu": Operator(torch.relu, "{0} < 0.0f ? 0.0f : {0}", _relu_rule),
    "gelu": Operator(
        torch.nn.functional.gelu, "0.5f * {0} * (1.0f + erff({0} * 0.70710678118654752f))", _times(_gelu_slope)
    ),
    "tanh": Operator(torch.tanh, "tanhf({0})", _times(lambda t, _x, y: _complement(t, t.add("mul", y, y)))),
    "exp": Operator(torch.exp, "exponential({0})", _times(lambda _t, _x, y: y)),
    "log": Operator(torch.log, "logf({0})", _times(lambda t, x, _y: t.add("div", t.number(1.0), x))),
    "sqrt": Operator(torch.sqrt, "sqrtf({0})", _times(lambda t, _x, y: t.add("div", t.number(0.5), y))),
    "rsqrt": Operator(
        torch.rsqrt, "1.0f / sqrtf({0})", _times(lambda t, _x, y: t.add("mul", t.number(-0.5), _cube(t, y)))
    ),
    "erf": Operator(
        torch.erf, "erff({0})", _times(lambda t, x, _y: _bell(t, x, exponent=-1.0, height=2 / math.sqrt(math.pi)))
    ),
    "abs": Operator(torch.abs, "fabsf({0})", _times(_sign)),
    **{name: Operator(getattr(torch, name), f"{{0}} {sign} {{1}}") for sign, name in COMPARISONS.items()},
}


# Values by torch.


def evaluate(expression: Expression, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the expression from tensors of one dtype, which broadcast.

    >>> from raymoe.rows.expression import parse
    >>> evaluate(parse("2 * a + b"), {"a": torch.ones(2, 3), "b": torch.arange(3.0)})[0].tolist()
    [2.0, 3.0, 4.0]
    """
    some = next(iter(inputs.values()))
    results: list[torch.Tensor] = []
    for step in expression.instructions:
        if step.op == "input":
            results.append(inputs[step.name])
        elif step.op == "number":
            results.append(torch.full((), step.number, dtype=some.dtype, device=some.device))
        else:
            results.append(OPERATORS[step.op].value(*(results[operand] for operand in step.operands)))
    return results[-1]


# Code in C++.


@functools.lru_cache(maxsize=256)
def code(expression: Expression) -> str:
    """Write the expression as one C++ expression. Input i, in the order of `names`, is the float variable `v<i>`.

    The expression calls a lambda in its place, because a result that is used twice needs a variable.

    >>> from raymoe.rows.expression import parse
    >>> code(parse("silu(a) * b"))
    '([&] { const float t1 = silu(v0); return t1 * v1; }())'
    >>> code(parse("where(a < 0.1, a, 2)"))
    '([&] { const bool t2 = v0 < 0x1.99999a0000000p-4f; return t2 ? v0 : 0x1.0000000000000p+1f; }())'
    """
    places = {name: index for index, name in enumerate(expression.names)}
    last = len(expression.instructions) - 1
    variables: list[str] = []
    statements: list[str] = []
    for place, step in enumerate(expression.instructions):
        text, simple = _text(step, places, variables)
        if place == last:
            statements.append(f"return {text};")
        elif not simple:
            kind = "bool" if step.op in COMPARISONS.values() else "float"
            statements.append(f"const {kind} t{place} = {text};")
            text = f"t{place}"
        variables.append(text)
    return f"([&] {{ {' '.join(statements)} }}())"


def _text(instruction: Instruction, places: Mapping[str, int], variables: list[str]) -> tuple[str, bool]:
    """The text of an instruction, and whether it needs no variable of its own, as a number or a variable."""
    if instruction.op == "input":
        return f"v{places[instruction.name]}", True
    if instruction.op == "number":
        # Base 16 has all digits of the float32: the compiler refuses a number that it would round to a denormal one. A
        # negative number is in brackets, so that no `--` arises.
        text = f"{ctypes.c_float(instruction.number).value.hex()}f"
        return (f"({text})" if instruction.number < 0 else text), True
    return OPERATORS[instruction.op].code.format(*(variables[operand] for operand in instruction.operands)), False


# Derivatives.

OUTGOING = "the gradient of the result"
"""The name of that input of a derivative. It has spaces, so no input of an expression has it."""


@functools.lru_cache(maxsize=256)
def gradients(expression: Expression) -> Mapping[str, Expression]:
    """Derive the expression by each of its inputs. An input without a derivative is left out: its gradient is zero.

    >>> from raymoe.rows.expression import parse
    >>> gradients(parse("a * b"))["a"].names
    ('b', 'the gradient of the result')
    >>> list(gradients(parse("where(a > 0, b, 1)")))
    ['b']
    """
    tape = Tape(expression.instructions)
    result = len(expression.instructions) - 1
    gradient_of: dict[int, int] = {result: tape.input(OUTGOING)}
    for place in range(result, -1, -1):
        instruction = expression.instructions[place]
        operator = OPERATORS.get(instruction.op)
        if place not in gradient_of or operator is None or operator.rule is None:
            continue
        of_operands = operator.rule(tape, gradient_of[place], place, instruction.operands)
        for operand, gradient in zip(instruction.operands, of_operands, strict=True):
            if gradient is not None:
                known = gradient_of.get(operand)
                gradient_of[operand] = gradient if known is None else tape.add("add", known, gradient)
    return {
        step.name: Expression.of(tape, gradient_of[place])
        for place, step in enumerate(expression.instructions)
        if step.op == "input" and place in gradient_of
    }
