"""Read a pointwise expression such as `silu(a) * b + c`. It is parsed here and never evaluated as Python.

    expression = term (("+" | "-") term)*
    term       = factor (("*" | "/") factor)*
    factor     = "-" factor | number | name | function "(" expression ("," expression)* ")" | "(" expression ")"
               | "where" "(" comparison "," expression "," expression ")"
    comparison = expression ("<" | "<=" | ">" | ">=" | "==" | "!=") expression

The result is a list of instructions, each on the results of earlier ones. Equal instructions are on it once, so neither
an expression nor its derivatives grow beyond the text's own size times a constant.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.errors import ConfigError, shown

MOST_CHARACTERS = 1000
MOST_DEPTH = 40
MOST_INPUTS = 8
LARGEST_NUMBER = 3.4028234663852886e38  # of float32

FUNCTIONS = {
    "silu": 1,
    "sigmoid": 1,
    "relu": 1,
    "gelu": 1,
    "tanh": 1,
    "exp": 1,
    "log": 1,
    "sqrt": 1,
    "rsqrt": 1,
    "erf": 1,
    "abs": 1,
    "min": 2,
    "max": 2,
    "where": 3,
}
"""The functions, and how many values each takes. The first value of `where` is a comparison."""

COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}


@dataclass(frozen=True)
class Instruction:
    """An operation on the results of earlier instructions, which `operands` names by their places.

    `op` is `input`, `number`, `neg`, `add`, `sub`, `mul`, `div`, a name in COMPARISONS or a function.
    """

    op: str
    operands: tuple[int, ...] = ()
    number: float = 0.0
    name: str = ""


class Tape:
    """A list of instructions that grows. Each instruction is on it once."""

    def __init__(self, instructions: Sequence[Instruction] = ()) -> None:
        self.instructions = list(instructions)
        self._places = {instruction: place for place, instruction in enumerate(self.instructions)}

    def add(self, op: str, *operands: int) -> int:
        """Append an instruction, unless an equal one is there. Return its place."""
        return self._place_of(Instruction(op, operands))

    def number(self, value: float) -> int:
        return self._place_of(Instruction("number", number=value))

    def input(self, name: str) -> int:
        return self._place_of(Instruction("input", name=name))

    def _place_of(self, instruction: Instruction) -> int:
        if instruction not in self._places:
            self._places[instruction] = len(self.instructions)
            self.instructions.append(instruction)
        return self._places[instruction]


@dataclass(frozen=True)
class Expression:
    """Instructions, of which the last gives the result. All of them are needed for it."""

    instructions: tuple[Instruction, ...]

    @classmethod
    def of(cls, tape: Tape, result: int) -> Expression:
        """Keep the instructions that the result needs, in their order."""
        needed = {result}
        for place in range(result, -1, -1):
            if place in needed:
                needed.update(tape.instructions[place].operands)
        new_places = {place: index for index, place in enumerate(sorted(needed))}
        return cls(
            tuple(
                Instruction(old.op, tuple(new_places[operand] for operand in old.operands), old.number, old.name)
                for old in (tape.instructions[place] for place in new_places)
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs, in the order in which they are first needed."""
        return tuple(step.name for step in self.instructions if step.op == "input")


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Expression:
    """Read an expression. Raise a ConfigError that names the column and what was expected there.

    >>> parse("silu(a) * b + a").names
    ('a', 'b')
    >>> [step.op for step in parse("silu(a) * b + silu(a)").instructions]
    ['input', 'silu', 'input', 'mul', 'add']
    >>> parse("a + * b")
    Traceback (most recent call last):
        ...
    raymoe.errors.ConfigError: expression 'a + * b', column 5: found '*', expected a value
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"an expression has {len(text)} characters; at most {MOST_CHARACTERS} are read")
    return _Parser(text).parsed()


_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign><=|>=|==|!=|[-+*/(),<>])"
)
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class _Token:
    """`kind` is number, name, sign, or end. `column` counts from 1."""

    kind: str
    text: str
    column: int


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tape = Tape()
        self._end = 0
        self._depth = 0
        self._next = self._read()

    def parsed(self) -> Expression:
        result = self._expression()
        if self._next.kind != "end":
            raise self._unexpected("an operator or the end")
        expression = Expression.of(self._tape, result)
        if not expression.names:
            raise ConfigError(f"expression {self._shown} names no input; such as a in '2 * a'")
        if len(expression.names) > MOST_INPUTS:
            raise ConfigError(f"expression {self._shown} has {len(expression.names)} inputs; at most {MOST_INPUTS}")
        return expression

    def _expression(self) -> int:
        left = self._term()
        while self._next.text in ("+", "-"):
            op = "add" if self._take().text == "+" else "sub"
            left = self._tape.add(op, left, self._term())
        return left

    def _term(self) -> int:
        left = self._factor()
        while self._next.text in ("*", "/"):
            op = "mul" if self._take().text == "*" else "div"
            left = self._tape.add(op, left, self._factor())
        return left

    def _factor(self) -> int:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ConfigError(
                f"expression {self._shown}, column {self._next.column}: nested more than {MOST_DEPTH} deep"
            )
        value = self._value()
        self._depth -= 1
        return value

    def _value(self) -> int:
        token = self._next
        if token.text == "-":
            self._take()
            return self._tape.add("neg", self._factor())
        if token.text == "(":
            self._take()
            inner = self._expression()
            self._expect(")")
            return inner
        if token.kind == "number":
            return self._number()
        if token.kind == "name":
            self._take()
            return self._function(token) if self._next.text == "(" or token.text in FUNCTIONS else self._input(token)
        raise self._unexpected("a value")

    def _number(self) -> int:
        value = float(self._next.text)
        if not math.isfinite(value) or value > LARGEST_NUMBER:
            raise self._unexpected("a number that float32 can hold")
        self._take()
        return self._tape.number(value)

    def _input(self, token: _Token) -> int:
        return self._tape.input(token.text)

    def _function(self, token: _Token) -> int:
        count = FUNCTIONS.get(token.text)
        if count is None:
            known = ", ".join(FUNCTIONS)
            raise ConfigError(self._at(token, f"there is no function {shown(token.text)!r}, expected one of {known}"))
        self._expect("(")
        values = [self._comparison() if token.text == "where" else self._expression()]
        for _ in range(count - 1):
            self._expect(",")
            values.append(self._expression())
        self._expect(")")
        return self._tape.add(token.text, *values)

    def _comparison(self) -> int:
        left = self._expression()
        if self._next.text not in COMPARISONS:
            raise self._unexpected("a comparison: " + ", ".join(COMPARISONS))
        return self._tape.add(COMPARISONS[self._take().text], left, self._expression())

    def _expect(self, sign: str) -> None:
        if self._next.text != sign:
            raise self._unexpected(repr(sign))
        self._take()

    def _take(self) -> _Token:
        token, self._next = self._next, self._read()
        return token

    def _read(self) -> _Token:
        space = _SPACE.match(self._text, self._end)
        begin = space.end() if space else self._end
        if begin == len(self._text):
            return _Token("end", "", begin + 1)
        match = _TOKEN.match(self._text, begin)
        if match is None or match.lastgroup is None:
            raise ConfigError(
                f"expression {self._shown}, column {begin + 1}: {self._text[begin]!r} has no meaning; expected a "
                "number, a name, a function or one of + - * / ( ) ,"
            )
        self._end = match.end()
        return _Token(match.lastgroup, match[0], begin + 1)

    @property
    def _shown(self) -> str:
        return repr(shown(self._text))

    def _at(self, token: _Token, problem: str) -> str:
        return f"expression {self._shown}, column {token.column}: {problem}"

    def _unexpected(self, expected: str) -> ConfigError:
        token = repr(shown(self._next.text)) if self._next.text else "the end"
        return ConfigError(self._at(self._next, f"found {token}, expected {expected}"))
