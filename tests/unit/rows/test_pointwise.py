"""Pointwise expressions: the parser and its errors, values, derivatives and C++ against plain arithmetic."""

from __future__ import annotations

import math
import re
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raymoe
from raymoe.errors import ConfigError
from raymoe.rows.elementwise import add
from raymoe.rows.elementwise_kernels import adds
from raymoe.rows.expression import FUNCTIONS, MOST_CHARACTERS, MOST_DEPTH, MOST_INPUTS, parse
from raymoe.rows.operators import OUTGOING, code, evaluate, gradients
from tests.emulator.build import compiler
from tests.python_path import REPOSITORY

# Refused expressions.

WRONG = [
    ("", "column 1: found the end, expected a value"),
    ("a +", "column 4: found the end, expected a value"),
    ("a + * b", "column 5: found '[*]', expected a value"),
    ("a b", "column 3: found 'b', expected an operator or the end"),
    ("2a", "column 2: found 'a', expected an operator or the end"),
    ("(a", r"column 3: found the end, expected '\)'"),
    ("a)", r"column 2: found '\)', expected an operator or the end"),
    ("silu a", r"column 6: found 'a', expected '\('"),
    ("silu(a, b)", r"column 7: found ',', expected '\)'"),
    ("min(a)", r"column 6: found '\)', expected ','"),
    ("cosh(a)", "column 1: there is no function 'cosh', expected one of silu, sigmoid"),
    ("where(a, b, c)", "column 8: found ',', expected a comparison: <, <="),
    ("a < b", "column 3: found '<', expected an operator or the end"),
    ("a ** 2", "column 4: found '[*]', expected a value"),
    ("a ^ 2", "column 3: '\\^' has no meaning"),
    ("a.b", r"column 2: '\.' has no meaning"),
    ("__import__('os')", "column 1: there is no function '__import__'"),
    ("a + 'os'", 'column 5: "\'" has no meaning'),
    ("a[0]", r"column 2: '\[' has no meaning"),
    ("a; b", "column 2: ';' has no meaning"),
    ("é * 2", "column 1: 'é' has no meaning"),
    ("a * 1e39", "column 5: found '1e39', expected a number that float32 can hold"),
    ("1 + 2", "names no input"),
    ("-" * (MOST_DEPTH + 1) + "a", f"nested more than {MOST_DEPTH} deep"),
    ("(" * 400 + "a", f"nested more than {MOST_DEPTH} deep"),
    ("a+" * MOST_CHARACTERS + "a", "has 2001 characters; at most 1000"),
    ("+".join(f"x{i}" for i in range(MOST_INPUTS + 1)), f"has 9 inputs; at most {MOST_INPUTS}"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[text[:12] or "nothing" for text, _ in WRONG])
def test_what_is_no_expression_is_refused_by_column(text, said):
    with pytest.raises(ConfigError, match=said):
        parse(text)


A, ROW, COLUMN = torch.ones(4, 6), torch.ones(6), torch.ones(4, 1)
MISUSES = [
    (lambda: raymoe.pointwise("a + b", a=A), "needs b, which is not given; given: a"),
    (lambda: raymoe.pointwise("a + a", a=A, b=A), "has no b; its inputs are a"),
    (lambda: raymoe.pointwise("a", a=1.0), "a is a float; a tensor is needed"),
    (lambda: raymoe.pointwise(3, a=A), "the expression is a int"),
    (lambda: raymoe.pointwise("a + b", **{"a,b": A}), "'a,b' is not a name that an expression can hold"),
    (lambda: raymoe.pointwise("a", a=A.double()), "a is torch.float64"),
    (lambda: raymoe.pointwise("a + b", a=A, b=A.half()), "b is torch.float16 on cpu and a is torch.float32"),
    (lambda: raymoe.pointwise("a + b", a=A, b=torch.ones(4)), r"b has shape \[4\]; with \[4, 6\] it is that"),
    (lambda: raymoe.pointwise("a + b", a=A, b=torch.ones(1, 6)), r"b has shape \[1, 6\]"),
    (lambda: raymoe.pointwise("a + b", a=ROW, b=COLUMN), r"a has shape \[6\]; with \[4, 1\] it is that"),
    (lambda: raymoe.pointwise("a", a=A, sms=0), "sms is 0"),
]


@pytest.mark.parametrize(("call", "said"), MISUSES, ids=[said[:20] for _, said in MISUSES])
def test_wrong_inputs_are_refused_by_name(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


# Random expressions, against torch in float64 and its autograd.

PLAIN = {
    "silu": lambda x: x * torch.sigmoid(x),
    "sigmoid": torch.sigmoid,
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "tanh": torch.tanh,
    "erf": torch.erf,
    "abs": torch.abs,
    # Their domains and growth are held: exp of something bounded, roots and logarithms of something positive.
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "log": lambda x: torch.log(1 + x * x),
    "sqrt": lambda x: torch.sqrt(1 + x * x),
    "rsqrt": lambda x: 1 / torch.sqrt(1 + x * x),
}
TEXT = {"exp": "exp(tanh({0}))", "log": "log(1 + {0} * {0})", "sqrt": "sqrt(1 + {0} * {0})"}
TEXT |= {"rsqrt": "rsqrt(1 + {0} * {0})"}

Tree = tuple  # (text, function of the inputs)


def leaf(name: str) -> Tree:
    return name, lambda inputs: inputs[name]


def number(value: float) -> Tree:
    return f"{value:.3f}", lambda inputs: torch.full_like(inputs["a"], float(f"{value:.3f}"))


def unary(op: str, x: Tree) -> Tree:
    return TEXT.get(op, op + "({0})").format(x[0] if op not in TEXT else f"({x[0]})"), lambda i: PLAIN[op](x[1](i))


def binary(op: str, x: Tree, y: Tree) -> Tree:
    if op in ("min", "max"):
        pick = torch.minimum if op == "min" else torch.maximum
        return f"{op}({x[0]}, {y[0]})", lambda i: pick(x[1](i), y[1](i))
    if op == "/":  # by something that is far from zero
        return f"({x[0]}) / (2 + tanh({y[0]}))", lambda i: x[1](i) / (2 + torch.tanh(y[1](i)))
    compute = {"+": torch.add, "-": torch.sub, "*": torch.mul}[op]
    return f"({x[0]}) {op} ({y[0]})", lambda i: compute(x[1](i), y[1](i))


def chosen(x: Tree, y: Tree, u: Tree, v: Tree) -> Tree:
    return (
        f"where({x[0]} < {y[0]}, {u[0]}, {v[0]})",
        lambda i: torch.where(x[1](i) < y[1](i), u[1](i), v[1](i)),
    )


def negated(x: Tree) -> Tree:
    return f"-({x[0]})", lambda i: -x[1](i)


LEAVES = st.one_of(st.sampled_from("abc").map(leaf), st.floats(0.125, 2).map(number))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(unary, st.sampled_from(sorted(PLAIN)), inner),
        st.builds(binary, st.sampled_from(["+", "-", "*", "/", "min", "max"]), inner, inner),
        st.builds(negated, inner),
        st.builds(chosen, inner, inner, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)  # float32 may decide a near tie in another way
@given(tree=TREES, seed=st.integers(0, 99))
def test_random_expressions_have_the_values_and_gradients_of_torch(tree, seed):
    # With the three inputs in it, each has its place; 0.5 keeps the products small.
    text, plain = f"({tree[0]}) + 0.5 * a * b * c", lambda i: tree[1](i) + 0.5 * i["a"] * i["b"] * i["c"]
    if len(text) > MOST_CHARACTERS:
        return
    source = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 6), "b": (6,), "c": (4, 1)}
    result = {name: torch.rand(shape, generator=source).add(-0.5).requires_grad_() for name, shape in shapes.items()}
    expected = {name: each.detach().double().requires_grad_() for name, each in result.items()}
    found, want = raymoe.pointwise(text, **result), plain(expected)
    scale = max(1.0, float(want.detach().abs().max()))
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-4 * scale)
    outgoing = torch.rand(4, 6, generator=source)
    gradients_found = torch.autograd.grad(found, list(result.values()), outgoing)
    gradients_wanted = torch.autograd.grad(want, list(expected.values()), outgoing.double())
    for gradient, wanted in zip(gradients_found, gradients_wanted, strict=True):
        assert gradient.shape == wanted.shape
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=1e-3 * scale)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(alphabet="ab1.e+-*/(),<= silumx", max_size=24) | st.text(max_size=12))
def test_any_text_is_read_or_refused_in_one_sentence(text):
    try:
        parse(text)
    except ConfigError as error:
        assert "\n" not in str(error)


# Fixed cases.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_is_rounded_once(dtype):
    a, b = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    c, d = b[0, 0], b[..., :1]
    want = torch.nn.functional.silu(a.float()) * b.float() + c.float() / (2 + d.float() * d.float())
    found = raymoe.pointwise("silu(a) * b + c / (2 + d * d)", a=a, b=b, c=c, d=d)
    assert found.dtype == dtype and torch.equal(found, want.to(dtype))


def test_operators_bind_from_the_left_and_products_first():
    a = torch.tensor([8.0])
    for text, want in (
        ("a - 3 - 2", 3),
        ("a / 4 / 2", 1),
        ("a + 2 * 3", 14),
        ("-a * 2", -16),
        ("-(a - 9)", 1),
        ("2--a", 10),
    ):
        assert raymoe.pointwise(text, a=a).item() == want, text


def test_equal_halves_of_min_and_max_share_the_gradient():
    a, b = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    for op in ("min", "max"):
        want = torch.autograd.grad(getattr(torch, f"{op}imum")(a, b).sum(), (a, b))
        found = torch.autograd.grad(raymoe.pointwise(f"{op}(a, b)", a=a, b=b).sum(), (a, b))
        assert all(torch.equal(result, expected) for result, expected in zip(found, want, strict=True))


def test_an_input_that_only_decides_has_no_gradient():
    a, b = torch.tensor([1.0, -1.0], requires_grad=True), torch.tensor([2.0, 3.0], requires_grad=True)
    found = torch.autograd.grad(raymoe.pointwise("where(a > 0, b, 7)", a=a, b=b).sum(), (a, b))
    assert [each.tolist() for each in found] == [[0.0, 0.0], [1.0, 0.0]]


def test_expressions_stay_small_when_values_are_used_again():
    text = "a"
    for _ in range(20):
        text = f"silu({text}) * 2"
    assert len(parse(text).instructions) <= 42
    assert all(len(each.instructions) <= 300 for each in gradients(parse(text)).values())


def test_the_operator_passes_opcheck_and_compiles_without_a_break():
    a, b = torch.rand(4, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    torch.library.opcheck(torch.ops.raymoe.pointwise.default, ("silu(a) * b", "a,b", [a, b], None))
    torch.library.opcheck(torch.ops.raymoe.pointwise.default, ("a", "a", [a], None))  # a result that is an input
    apart = torch.rand(2, 4, 8).transpose(0, 1).requires_grad_()
    torch.library.opcheck(torch.ops.raymoe.pointwise.default, ("silu(a) * b", "a,b", [apart, b], None))
    torch._dynamo.reset()

    def program(a, b):
        return raymoe.pointwise("silu(a) * b + a", a=a, b=b).sum()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(each(a, b), (a, b)) for each in (compiled, program))
    assert all(torch.equal(result, want) for result, want in zip(found, wanted, strict=True))


# The C++ of an expression, compiled for this machine.

EVERY = [
    *(
        f"{name}(a)"
        for name in ("silu", "sigmoid", "relu", "gelu", "tanh", "exp", "sqrt", "rsqrt", "erf", "abs", "log")
    ),
    *("min(a, b)", "max(a, b)", "where(a <= b, a * 0.1, -b / 3)", "where(a != b, a, 1e-30)", "silu(silu(a)) * silu(a)"),
]


KERNEL = (REPOSITORY / "kernels" / "rows" / "pointwise.cu").read_text()


def functions_of_the_kernel() -> str:
    """The functions of pointwise.cu for rows of float32. test_pipe_pieces_emulated.py has those of 16 bits."""
    found = re.findall(r"^__device__ __forceinline__ (float \w+\(float x\) .*)$", KERNEL, re.MULTILINE)
    assert len(found) == 3
    fast = "constexpr bool FAST = false; float sigmoid(float); float __expf(float);"
    return "\n".join(("#include <cmath>", "#include <cstdio>", fast, *(f"inline {each}" for each in found), ""))


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_the_code_gives_the_values_of_torch(tmp_path):
    expressions = [parse(text) for text in EVERY]
    expressions += [each for whole in list(expressions) for each in gradients(whole).values()]
    points = [(0.3, 1.5, -0.7), (2.0, 2.0, 1.0), (7.5, 0.01, 0.5), (0.02, 3.0, 2.0)]
    lines = []
    for expression in expressions:
        for a, b, outgoing in points:
            values = {"a": a, "b": b, OUTGOING: outgoing}
            variables = " ".join(f"const float v{i} = {values[name]}f;" for i, name in enumerate(expression.names))
            lines.append(f'    {{ {variables} printf("%.9g\\n", (double)({code(expression)})); }}')
    source = functions_of_the_kernel() + "int main() {\n" + "\n".join(lines) + "\n}\n"
    (tmp_path / "program.cpp").write_text(source)
    command = [str(compiler()), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O0", "-o", "program", "program.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    printed = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True, timeout=10).stdout
    found = iter(map(float, printed.split()))
    for expression in expressions:
        for a, b, outgoing in points:
            values = {"a": torch.tensor(a), "b": torch.tensor(b), OUTGOING: torch.tensor(outgoing)}
            want = float(evaluate(expression, {name: values[name] for name in expression.names}))
            assert next(found) == pytest.approx(want, rel=3e-6, abs=1e-7), code(expression)


# The page.


def test_the_code_of_the_page_runs():
    page = REPOSITORY / "docs" / "rows.md"
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, names)
    assert names["values"].dtype == torch.float8_e4m3fn and names["weight"].grad.isfinite().all()
    listed = re.search(r"these functions: (.*?)\n\n", page.read_text(), re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)", listed)) == set(FUNCTIONS)


def test_added_terms_pass_opcheck_and_their_gradient_is_that_of_the_sum():
    terms = [torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3)]
    torch.library.opcheck(torch.ops.raymoe.sum_terms, (terms,))
    dy = torch.rand(3, 8)
    for total in (add(*terms), torch.ops.raymoe.sum_terms(terms)):
        torch.testing.assert_close(total, terms[0] + terms[1] + terms[2])
        assert all(torch.equal(each, dy) for each in torch.autograd.grad(total, terms, dy))


@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [torch.float32, torch.float64, torch.float32]])
def test_terms_that_the_kernel_does_not_take_are_added_by_torch(dtypes, monkeypatch):
    monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: True)
    terms = [torch.rand(3, 12, dtype=dtype) for dtype in dtypes]
    assert torch.equal(add(*terms), terms[0] + terms[1] + terms[2])
    assert torch.equal(torch.ops.raymoe.sum_terms(terms[:1] * 3), terms[0] * 3)  # 12 is no multiple of 8
    assert not adds([torch.rand(3, 8)] * 9) and not adds([torch.rand(3, 32776)] * 3)
    assert adds([torch.rand(3, 8)] * 8)


@pytest.mark.parametrize("names", ["aw", "wa"])
def test_rows_may_be_none_whatever_the_order_of_the_inputs(names):
    inputs = {"a": torch.ones(0, 5, requires_grad=True), "w": torch.ones(0, 1, requires_grad=True)}
    found = raymoe.pointwise("w * a", **{name: inputs[name] for name in names})
    assert found.shape == (0, 5)
    found.sum().backward()
    assert inputs["a"].grad.shape == (0, 5) and inputs["w"].grad.shape == (0, 1)


def test_numbers_are_those_that_float32_has():
    """The compiler of kernels refuses others where they are denormal."""
    for text in ("1e-40", "1e-45", "7e-46", "1e-50", "0.1", "3.4e38"):
        shown = re.search(r"[-+.\w]+(?=f\b)", code(parse(f"a * {text}")).replace("v0", ""))
        assert shown is not None
        assert float.fromhex(shown[0]) == float(torch.tensor(float(text)))
