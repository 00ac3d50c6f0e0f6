"""grouped_linear and grouped_swiglu on a CPU, by the formula: all switches, gradients, compiled, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.moe import grouped_linear, grouped_swiglu
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.experts import Experts, ModelWeights
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts
from raymoe.moe.torch_products import (
    arithmetic_dtype,
    multiply_by_offsets,
    multiply_by_torch,
    outer_by_offsets,
    outer_by_torch,
)
from tests.unit.moe.gradient_cases import close
from tests.unit.moe.grouped_cases import Exact, RowsCase, near

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COUNTS = (5, 0, 16, 1, 23)
BOUNDS = {BF16: 2**-7, F16: 2**-10, F32: 1e-6, F64: 1e-6}  # the sigmoid of the formula is float32 for all but float64
FORMS = {
    "swiglu": ActivationForm(),
    "interleaved": ActivationForm(interleaved=True),
    "limited": ActivationForm(limit=1.0),
    "gpt_oss": ActivationForm(True, 1.702, 1.5, 1.0),
}


# Results.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_grouped_linear_by_all_switches(dtype: torch.dtype, biased: bool, weighted: bool) -> None:
    case = RowsCase(COUNTS, dtype=dtype)
    x, weight, groups = case.rows(24, 1), case.drawn(5, 12, 24, seed=2), case.groups
    bias, weights = case.drawn(5, 12, seed=3) if biased else None, case.row_weights(4) if weighted else None
    y = grouped_linear(x, weight, groups.offsets, groups.counts, bias=bias, row_weights=weights, expected_rows=9)
    assert y.shape == (case.capacity, 12) and y.dtype == dtype
    own = case.own()
    near(y[own], Exact(groups).linear(x, weight, bias, weights)[own], BOUNDS[dtype])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("limit", [None, 0.75])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_grouped_swiglu_by_all_switches(
    dtype: torch.dtype, interleaved: bool, limit: float | None, biased: bool, weighted: bool
) -> None:
    case, form = RowsCase(COUNTS, dtype=dtype), ActivationForm(interleaved, limit=limit or torch.inf)
    x, weight, groups = case.rows(24, 1), case.drawn(5, 20, 24, seed=2, scale=0.2), case.groups
    bias, weights = case.drawn(5, 20, seed=3) if biased else None, case.row_weights(4) if weighted else None
    switches: Any = {"bias": bias, "limit": limit, "interleaved": interleaved, "row_weights": weights}
    y = grouped_swiglu(x, weight, groups.offsets, groups.counts, **switches)
    again, gate_up = grouped_swiglu(x, weight, groups.offsets, groups.counts, return_gate_up=True, **switches)
    assert y.shape == (case.capacity, 10) and y.dtype == dtype and gate_up.shape == (case.capacity, 20)
    exact, own = Exact(groups), case.own()
    near(gate_up[own], exact.products(x, weight, bias)[own], BOUNDS[dtype])
    for have in (y, again):
        near(have[own], exact.gated(x, weight, form, bias, weights)[own], 2 * BOUNDS[dtype])


def test_offsets_and_counts_may_be_int64() -> None:
    case = RowsCase(COUNTS, dtype=F32)
    x, weight, groups = case.rows(8, 1), case.drawn(5, 4, 8, seed=2), case.groups
    y = grouped_linear(x, weight, groups.offsets, groups.counts)
    assert torch.equal(y, grouped_linear(x, weight, groups.offsets.long(), groups.counts.long()))


# Gradients.


def leaves_of(case: RowsCase) -> list[torch.Tensor]:
    """x, gate_up, its bias, down, its bias and the weights of rows."""
    shapes = ((5, 20, 8), (5, 20), (5, 6, 10), (5, 6))
    drawn = [case.drawn(*shape, seed=seed, scale=0.4) for seed, shape in enumerate(shapes)]
    return [each.requires_grad_() for each in (case.rows(8, 5), *drawn, case.row_weights(6))]


def by_products(case: RowsCase, form: ActivationForm, clean: bool = False) -> Callable[..., torch.Tensor]:
    groups = case.groups

    def compute(*leaves: torch.Tensor) -> torch.Tensor:
        x, up, bias, down, down_bias, weights = leaves
        h, _ = gate_experts(x, up, groups, Added(bias, weights, gaps_are_zero=clean), form)
        return multiply_experts(h, down, groups, Added(down_bias, weights, gaps_are_zero=clean))

    return compute


def exactly(case: RowsCase, form: ActivationForm, leaves: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    exact, own = Exact(case.groups), case.own()
    x, up, bias, down, down_bias, weights = same = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = exact.linear(exact.gated(x, up, form, bias, weights), down, down_bias, weights)
    return [y, *torch.autograd.grad(y[own], same, dy[own].double())]


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_those_of_float64(form: str, how: str) -> None:
    """Rows of no expert are NaN in x, in the weights and in the gradient of the result."""
    case = RowsCase(COUNTS, dtype=F32)
    leaves, dy, own = leaves_of(case), case.rows(6, 7), case.own()
    run = by_products(case, FORMS[form])
    if how == "compiled":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    y = run(*leaves)
    wanted = exactly(case, FORMS[form], leaves, dy)
    for have, want in zip((y, *torch.autograd.grad(y, leaves, dy)), wanted, strict=True):
        rows = own if len(have) == case.capacity else slice(None)
        close("gradient", have[rows], want[rows], 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_rows_with_zeros_in_gaps_need_no_pass_over_them(form: str) -> None:
    """As in a layer, whose dispatches zero the gaps."""
    case = RowsCase(COUNTS, dtype=F32)
    leaves, dy, own = leaves_of(case), case.rows(6, 7), case.own()
    for rows in (leaves[0], leaves[-1], dy):
        with torch.no_grad():
            rows[: case.starts[-1]][~own[: case.starts[-1]]] = 0
    y = by_products(case, FORMS[form], clean=True)(*leaves)
    wanted = exactly(case, FORMS[form], leaves, dy)
    for have, want in zip((y, *torch.autograd.grad(y, leaves, dy)), wanted, strict=True):
        rows = own if len(have) == case.capacity else slice(None)
        close("gradient", have[rows], want[rows], 1e-5)


@pytest.mark.parametrize("skipped", range(6))
def test_a_tensor_without_gradients_changes_none_of_the_others(skipped: int) -> None:
    case = RowsCase(COUNTS, dtype=F32)
    leaves, dy = leaves_of(case), case.rows(6, 7)
    compute = by_products(case, ActivationForm())
    whole = torch.autograd.grad(compute(*leaves), leaves, dy)
    leaves[skipped] = leaves[skipped].detach()
    others = [leaf for leaf in leaves if leaf.requires_grad]
    own = case.own()
    fewer = torch.autograd.grad(compute(*leaves), others, dy)
    for have, want in zip(fewer, (each for index, each in enumerate(whole) if index != skipped), strict=True):
        rows = own if len(have) == case.capacity else slice(None)
        assert torch.equal(have[rows], want[rows])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_finite_differences(form: str) -> None:
    case = RowsCase((3, 0, 2), dtype=F64, alignment=4)
    groups, weights, own = case.groups, case.row_weights(1), case.own()
    x, up = case.rows(4, 2), case.drawn(3, 8, 4, seed=3)
    down, bias = case.drawn(3, 4, 4, seed=4), case.drawn(3, 4, seed=5)
    x[~own] = 0

    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        h, _ = gate_experts(x, up, groups, Added(None, weights), FORMS[form])
        return multiply_experts(h, down, groups, Added(bias, weights))[own]

    assert torch.autograd.gradcheck(step, [each.requires_grad_() for each in (x, up, down, bias)])


def test_gaps_are_zero_where_gradients_are_needed() -> None:
    case = RowsCase(COUNTS, dtype=F32)
    x, up, groups = case.rows(8, 1), case.drawn(5, 12, 8, seed=2).requires_grad_(), case.groups
    y, gate_up = grouped_swiglu(x, up, groups.offsets, groups.counts, return_gate_up=True)
    z = grouped_linear(x, up, groups.offsets, groups.counts, bias=case.drawn(5, 12, seed=3))
    zeroed = case.zeroed_gaps()
    assert y.requires_grad and not gate_up.requires_grad and zeroed.any()
    for rows in (y, gate_up, z):
        assert not rows[zeroed].any() and not rows[zeroed].isnan().any()


# Operators.


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("biased", "weighted"), [(True, True), (False, False), (True, False), (False, True)])
def test_operators_pass_opcheck(biased: bool, weighted: bool) -> None:
    ops, case = torch.ops.raymoe, RowsCase(COUNTS, dtype=F32)
    groups = case.groups
    x, weight, bias = case.rows(8, 1), case.drawn(5, 6, 8, seed=2), case.drawn(5, 6, seed=3)
    weights = case.row_weights(4)
    for rows in (x, weights):
        rows[~case.own()] = 0
    for each in (x, weight, bias, weights):
        each.requires_grad_()
    places = groups.offsets, groups.counts
    added = bias if biased else None, weights if weighted else None
    kept = *(None,) * 4, []
    torch.library.opcheck(ops.grouped_linear, (x, weight, *places, *added, False, True, False, None, *kept))
    for form in ((False, 1.0, torch.inf, 0.0), (True, 1.702, 7.0, 1.0)):
        torch.library.opcheck(
            ops.grouped_gated, (x, weight, *places, *added, *form, False, True, True, False, None, *kept)
        )
    torch.library.opcheck(ops.grouped_product, (x, weight, *places))
    torch.library.opcheck(ops.grouped_outer, (x.detach()[:, :6].contiguous(), x.detach(), *places))


def test_a_compiled_function_follows_other_numbers_of_rows() -> None:
    compiled = torch.compile(grouped_swiglu, backend="aot_eager", fullgraph=True)
    for counts in (COUNTS, (1, 2, 3, 4, 5), (0, 40, 0, 1, 0)):
        case = RowsCase(counts, dtype=F32)
        groups, weight = case.groups, case.drawn(5, 12, 8, seed=2)
        given = case.rows(8, 1), weight, groups.offsets, groups.counts
        own = case.own()
        assert torch.equal(compiled(*given)[own], grouped_swiglu(*given)[own])


def test_tensors_without_values_give_results_without_values() -> None:
    """The operators' fakes, for a GPU's dtypes."""
    like: Any = {"device": "meta", "dtype": BF16}
    places = (torch.empty(size, dtype=torch.int32, device="meta") for size in (4, 3))
    offsets, counts = places
    x, weight = torch.empty(50, 64, requires_grad=True, **like), torch.empty(3, 32, 64, requires_grad=True, **like)
    y, gate_up = grouped_swiglu(x, weight, offsets, counts, return_gate_up=True)
    z = grouped_linear(x, weight, offsets, counts)
    assert (y.shape, gate_up.shape, z.shape) == ((50, 16), (50, 32), (50, 32))
    gradients = torch.autograd.grad((y.sum(), z.sum()), (x, weight))
    assert [gradient.shape for gradient in gradients] == [x.shape, weight.shape]


# Products of torch.


def test_products_of_offsets_equal_the_loop_over_experts() -> None:
    """The way of GPUs, here on a CPU. Rows after the last offset are NaN, and spoil nothing."""
    case = RowsCase((16, 0, 8), dtype=BF16)
    x, dy, weight, groups = case.rows(16, 1), case.rows(16, 2), case.drawn(3, 16, 16, seed=3), case.groups
    own, end = case.own(), case.starts[-1]
    for rows in (x, dy):
        rows[:end][~own[:end]] = 0
    places = groups.offsets, groups.counts
    y, d_weight = multiply_by_offsets(x, weight, *places), outer_by_offsets(dy, x, *places)
    near(y[own], multiply_by_torch(x, weight, groups)[own], 1e-2)
    near(d_weight, outer_by_torch(dy, x, groups), 1e-2)


@pytest.mark.parametrize("function", ["public", "experts"])
def test_wide_dtypes_are_refused_on_a_gpu(function: str) -> None:
    like: Any = {"device": "meta", "dtype": F32}
    x, weight = torch.empty(8, 8, **like), torch.empty(1, 16, 8, **like)
    places = torch.empty(2, dtype=torch.int32, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
    experts = Experts(ModelWeights(weight, torch.empty(1, 8, 8, **like)))
    with pytest.raises(ConfigError, match=r"torch.float32 on a GPU.*take bfloat16 or float16"):
        grouped_linear(x, weight, *places) if function == "public" else experts(x, *places)


def test_arithmetic_of_float16_on_a_cpu_is_float32() -> None:
    assert arithmetic_dtype(F16) == F32


# Refusals.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.ones(8, 3)}, r"x \[8, 3\] by weights \[2, 6, 4\]"),
        ({"x": torch.ones(4)}, r"x \[4\] by weights"),
        ({"x": torch.ones(8, 4, dtype=F64)}, "x of torch.float64 by weights of torch.float32; both have one"),
        ({"offsets": torch.zeros(2, dtype=torch.int32)}, r"expert_offsets is torch.int32 of shape \[2\]; .* \[3\]"),
        ({"counts": torch.zeros(2)}, r"expert_counts is torch.float32 of shape \[2\]"),
        ({"bias": torch.ones(6)}, r"bias \[6\]; \[2, 6\] is needed"),
        ({"row_weights": torch.ones(8, dtype=F64)}, r"row_weights is torch.float64 \[8\]; float32 \[8\]"),
        ({"row_weights": torch.ones(7)}, r"row_weights is torch.float32 \[7\]"),
        ({"expected_rows": float("nan")}, "expected_rows is nan"),
        ({"expected_rows": -1}, "expected_rows is -1"),
    ],
    ids=str,
)
def test_tensors_that_do_not_belong_together_are_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(8, 4),
        "weight": torch.ones(2, 6, 4),
        "offsets": torch.tensor([0, 4, 8]),
        "counts": torch.tensor([1, 2]),
    } | changed
    positional = [given.pop(name) for name in ("x", "weight", "offsets", "counts")]
    for function in (grouped_linear, grouped_swiglu):
        with pytest.raises(ConfigError, match=f"{function.__name__}: {message}"):
            function(*positional, **given)


def test_names_that_it_does_not_know_are_refused() -> None:
    given: Any = torch.ones(8, 4), torch.ones(2, 6, 4), torch.tensor([0, 4, 8]), torch.tensor([1, 2])
    with pytest.raises(TypeError, match="limit"):
        grouped_linear(*given, limit=7.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="clamp"):
        grouped_swiglu(*given, clamp=7.0)  # type: ignore[call-overload]


def test_gates_that_have_no_up_and_limits_of_no_sense_are_refused() -> None:
    x, places = torch.ones(8, 4), (torch.tensor([0, 4, 8]), torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="5 rows of gate_up"):
        grouped_swiglu(x, torch.ones(2, 5, 4), *places)
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"limit is {limit}; a number above 0"):
            grouped_swiglu(x, torch.ones(2, 6, 4), *places, limit=limit)
