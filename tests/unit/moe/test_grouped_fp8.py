"""grouped_linear and grouped_swiglu of 8-bit rows and weights on a CPU, by the formula, and experts made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raymoe.fp8 as fp8
from raymoe.errors import ConfigError
from raymoe.fp8 import quantise, quantise_weight
from raymoe.moe import grouped_linear, grouped_swiglu, quantise_experts
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights
from raymoe.moe.product_fp8_operators import ScaledOperands, gate_scaled
from raymoe.moe.product_operators import Added
from tests.unit.moe.emulated_product_fp8 import check_quantised, dequantised
from tests.unit.moe.grouped_cases import Exact, RowsCase, near

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
COUNTS = (5, 0, 16, 1, 23)
BOUND = 2**-8
FP8: Any = "float8_e4m3"


def pairs(case: RowsCase, columns: int, products: int) -> tuple[Any, Any]:
    """Rows and weights as pairs. Rows of no expert are NaN, with scales of NaN."""
    values, scales = quantise(case.rows(columns, 1))
    scales[~case.own()] = torch.nan
    drawn = case.drawn(len(case.counts), products, columns, seed=2, scale=columns**-0.5)
    return (values, scales), quantise_weight(drawn)


def exact(pair: Any, rows: int = 1) -> torch.Tensor:
    return dequantised(pair[0].float(), pair[1], rows)


# Results: against float64 with the same 8-bit operands.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [24, 128, 300])
def test_grouped_linear_by_all_switches(columns: int, biased: bool, weighted: bool) -> None:
    case = RowsCase(COUNTS)
    x, weight = pairs(case, columns, 140)
    bias, weights = case.drawn(5, 140, seed=3) if biased else None, case.row_weights(4) if weighted else None
    groups, own = case.groups, case.own()
    y = grouped_linear(x, weight, groups.offsets, groups.counts, bias=bias, row_weights=weights, expected_rows=9)
    assert y.shape == (case.capacity, 140) and y.dtype == BF16
    near(y[own], Exact(groups).linear(exact(x), exact(weight, 128), bias, weights)[own], BOUND)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("limit", [None, 0.75])
@pytest.mark.parametrize("interleaved", [False, True])
def test_grouped_swiglu_by_all_switches(interleaved: bool, limit: float | None, biased: bool, weighted: bool) -> None:
    case, form = RowsCase(COUNTS), ActivationForm(interleaved, limit=limit or torch.inf)
    x, weight = pairs(case, 200, 2 * 160)
    bias, weights = case.drawn(5, 320, seed=3) if biased else None, case.row_weights(4) if weighted else None
    groups, own = case.groups, case.own()
    switches: Any = {"bias": bias, "limit": limit, "interleaved": interleaved, "row_weights": weights}
    y = grouped_swiglu(x, weight, groups.offsets, groups.counts, **switches)
    values, scales = grouped_swiglu(x, weight, groups.offsets, groups.counts, output=FP8, **switches)
    want = Exact(groups).gated(exact(x), exact(weight, 128), form, bias, weights)
    assert (y.dtype, y.shape) == (BF16, (case.capacity, 160))
    near(y[own], want[own], BOUND)
    assert (values.dtype, values.shape, scales.shape) == (E4M3, (case.capacity, 160), (case.capacity, 2))
    assert scales.stride(0) == 1 and scales.stride(1) % 4 == 0, "as the next product and DeepGEMM take them"
    check_quantised(values[own], scales[own], want[own])


def test_the_pair_of_one_product_is_the_rows_of_the_next() -> None:
    case = RowsCase(COUNTS)
    x, up = pairs(case, 64, 2 * 128)
    down = quantise_weight(case.drawn(5, 64, 128, seed=5, scale=128**-0.5))
    places = case.groups.offsets, case.groups.counts
    h = grouped_swiglu(x, up, *places, output=FP8)
    y, own = grouped_linear(h, down, *places), case.own()
    near(y[own], Exact(case.groups).linear(exact(h).nan_to_num(), exact(down, 128))[own], BOUND)


# Operators.


def test_operators_have_fakes_and_compile() -> None:
    ops, case = torch.ops.raymoe, RowsCase(COUNTS)
    _, weight = pairs(case, 64, 2 * 128)
    places, weights = (case.groups.offsets, case.groups.counts), case.row_weights(4)
    weights[~case.own()] = 0
    x = quantise(case.drawn(case.capacity, 64, seed=1))
    fakes: Any = {"test_utils": "test_faketensor"}  # the others multiply 8-bit floats to compare them
    torch.library.opcheck(ops.grouped_linear_fp8, (*x, *weight, *places, None, weights), **fakes)
    for quantised in (False, True):
        form = (False, 1.0, torch.inf, 0.0, quantised)
        torch.library.opcheck(ops.grouped_gated_fp8, (*x, *weight, *places, None, None, *form), **fakes)

    def both(x: Any, weight: Any) -> Any:
        return grouped_swiglu(x, weight, *places, output=FP8)

    for one, other in zip(
        torch.compile(both, backend="aot_eager", fullgraph=True)(x, weight), both(x, weight), strict=True
    ):
        assert torch.equal(one.float(), other.float()) and one.stride() == other.stride()


def test_tensors_without_values_give_results_without_values() -> None:
    like: Any = {"device": "meta"}
    x = torch.empty(50, 64, dtype=E4M3, **like), torch.empty(50, 1, **like)
    weight = torch.empty(3, 256, 64, dtype=E4M3, **like), torch.empty(3, 2, 1, **like)
    places = (torch.empty(size, dtype=torch.int32, **like) for size in (4, 3))
    offsets, counts = places
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        h, scales = torch.ops.raymoe.grouped_gated_fp8(
            *x, *weight, offsets, counts, None, None, False, 1.0, torch.inf, 0.0, True
        )
        y = torch.ops.raymoe.grouped_linear_fp8(*x, *weight, offsets, counts, None, None)
    assert (h.shape, h.dtype, scales.shape, scales.stride()) == ((50, 128), E4M3, (50, 1), (1, 52))
    assert (y.shape, y.dtype) == ((50, 256), BF16)


# Refusals.


def given(**changed: Any) -> list[Any]:
    case = RowsCase((3, 2))
    x, weight = pairs(case, 64, 256)
    operands = {"x": x, "weight": weight} | changed
    return [operands["x"], operands["weight"], case.groups.offsets, case.groups.counts]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"x": torch.ones(32, 64)},
            "go together, each as a pair .* x is a tensor of torch.float32 and the weights are a",
        ),
        ({"weight": torch.ones(2, 256, 64)}, "go together"),
        ({"x": (torch.ones(32, 64).to(E4M3),)}, "x is a tuple of 1"),
        ({"x": (torch.ones(32, 64), torch.ones(32, 1))}, "values of x are torch.float32; torch.float8_e4m3fn"),
        (
            {"x": (torch.ones(32, 64).to(E4M3), torch.ones(32, 2))},
            r"scales of x are torch.float32 \[32, 2\] on cpu; .*1\]",
        ),
        ({"weight": (torch.ones(2, 256, 64).to(E4M3), torch.ones(2, 1, 1))}, r"scales of weight are .*\[2, 2, 1\] on"),
        ({"x": (torch.ones(32, 200).to(E4M3), torch.ones(32, 2))}, r"x \[32, 200\] by weights \[2, 256, 64\]"),
    ],
    ids=str,
)
def test_pairs_that_do_not_belong_together_are_refused(changed: dict[str, Any], message: str) -> None:
    for function in (grouped_linear, grouped_swiglu):
        with pytest.raises(ConfigError, match=f"(?s){function.__name__}: .*{message}"):
            function(*given(**changed))


def test_gradients_are_refused_in_one_sentence() -> None:
    operands = given()
    weights = torch.ones(len(operands[0][0]), requires_grad=True)
    with pytest.raises(
        ConfigError, match=r"grouped_linear of 8-bit rows and weights has no gradient.*bfloat16 experts$"
    ):
        grouped_linear(*operands, row_weights=weights)
    with torch.no_grad():
        grouped_linear(*operands, row_weights=weights)


def test_main_grad_is_refused() -> None:
    operands = given()
    for function in (grouped_linear, grouped_swiglu):
        with pytest.raises(ConfigError, match=rf"{function.__name__} of 8-bit .* no gradient to add to main_grad"):
            function(*operands, main_grad=torch.zeros(operands[1][0].shape))


def test_outputs_of_no_sense_are_refused() -> None:
    for switches, message in (
        ({"output": "float8"}, "output='float8' of 8-bit rows"),
        ({"return_gate_up": True}, "return_gate_up of 8-bit rows; their output is None"),
    ):
        with pytest.raises(ConfigError, match=message):
            grouped_swiglu(*given(), **switches)
    wide, places = (torch.ones(8, 4), torch.ones(2, 6, 4)), (torch.tensor([0, 4, 8]), torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match=r"output='float8_e4m3' of torch.float32; it needs x and gate_up as"):
        grouped_swiglu(*wide, *places, output=FP8)
    values = [each.to(E4M3) for each in wide]
    for function in (grouped_linear, grouped_swiglu):
        with pytest.raises(ConfigError, match=r"x is torch.float8_e4m3fn without scales"):
            function(*values, *places)


def test_other_gpus_are_refused() -> None:
    like: Any = {"device": "meta"}
    x = torch.empty(8, 64, dtype=E4M3, **like), torch.empty(8, 1, **like)
    weight = torch.empty(1, 256, 64, dtype=E4M3, **like), torch.empty(1, 2, 1, **like)
    places = torch.empty(2, dtype=torch.int32, **like), torch.empty(1, dtype=torch.int32, **like)
    with pytest.raises(ConfigError, match=r"need a GPU of compute capability 9.0, or a CPU"):
        grouped_linear(x, weight, *places)


# Weights.


@pytest.mark.parametrize("power_of_two", [False, True])
def test_weights_have_the_nearest_values_of_their_scales(power_of_two: bool) -> None:
    weight = torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[1, :128, 128:256] = 0
    values, scales = quantise_weight(weight, power_of_two)
    assert values.shape == weight.shape and scales.shape == (3, 2, 3) and values.is_contiguous()
    for row in range(2):
        for column in range(3):
            at = slice(None), slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            reach = weight[at].abs().amax(dim=(1, 2))
            least = torch.where(reach == 0, 1.0, reach / 448)
            own = scales[:, row, column]
            if power_of_two:
                assert bool((torch.frexp(own).mantissa == 0.5).all()) and bool((own >= least).all())
                assert bool(((own < 2 * least) | (reach == 0)).all())
            else:
                assert torch.equal(own, least)
            scaled = weight[at] / own[:, None, None]
            assert torch.equal(values[at].float(), scaled.to(E4M3).float())
    near(fp8.dequantise_weight(values, scales), weight, 4e-2)


def test_infinite_weights_do_not_spoil_the_scale_of_their_block() -> None:
    weight = torch.tensor([[1.0, torch.inf, torch.nan, -2.0]])
    values, scales = quantise_weight(weight)
    assert scales.item() == torch.tensor(2.0).div(448).item()
    assert values[0, 1] == 448 and values[0, 2].isnan() and values[0, 3] == -448


# Experts.


def model(activation: Activation, inner: int, transposed: bool = False) -> Experts:
    case = RowsCase(COUNTS)
    up, down = (
        case.drawn(5, 2 * inner, 64, seed=1, scale=64**-0.5),
        case.drawn(5, 64, inner, seed=2, scale=inner**-0.5),
    )
    weights = ModelWeights(up.transpose(1, 2), down.transpose(1, 2)) if transposed else ModelWeights(up, down)
    weights.transposed = transposed
    if activation == GPT_OSS:
        weights.gate_up_proj_bias, weights.down_proj_bias = case.drawn(5, 2 * inner, seed=3), case.drawn(5, 64, seed=4)
    return Experts(weights, activation)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("inner", [128, 72])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, Activation(limit=2.0)], ids=["swiglu", "gpt_oss", "limited"])
def test_quantised_experts_are_near_those_that_they_come_from(
    activation: Activation, inner: int, weighted: bool
) -> None:
    experts, case = model(activation, inner), RowsCase(COUNTS)
    made, groups, own = quantise_experts(experts), case.groups, case.own()
    x, weights = case.rows(64, 5), case.row_weights(6) if weighted else None
    with torch.no_grad():
        y = made(x, groups.offsets, groups.counts, weights)
        pair = made(quantise(x), groups.offsets, groups.counts, weights)
    assert torch.equal(y[own], pair[own]) and y.dtype == pair.dtype == BF16
    h = Exact(groups).gated(x, experts.gate_up_proj, activation.form, experts.gate_up_proj_bias)
    want = Exact(groups).linear(h, experts.down_proj, experts.down_proj_bias, weights)
    near(y[own], want[own].detach(), 9e-2)
    with pytest.raises(AssertionError):
        near(y[own], want[own].detach(), 1e-2)


@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt_oss"])
def test_padding_changes_no_result(activation: Activation) -> None:
    """Against the formula with the same 8-bit weights, cut to the sizes of the model."""
    experts, case = model(activation, 72), RowsCase(COUNTS)
    made, groups, own = quantise_experts(experts), case.groups, case.own()
    assert made.gate_up_proj.shape == (5, 256, 64) and made.down_proj.shape == (5, 64, 128)
    x = quantise(case.rows(64, 5))
    up = exact((made.gate_up_proj.detach(), made.gate_up_proj_scale_inv.detach()), 128)
    down = exact((made.down_proj.detach(), made.down_proj_scale_inv.detach()), 128)
    kept = torch.arange(256) < 144 if activation.interleaved else torch.arange(256) % 128 < 72
    assert not up[:, ~kept].any() and not down[:, :, 72:].any()
    h = Exact(groups).gated(exact(x), up[:, kept], activation.form, experts.gate_up_proj_bias)
    with torch.no_grad():
        operands = ScaledOperands(*x, made.gate_up_proj, made.gate_up_proj_scale_inv)
        got, scales = gate_scaled(operands, groups, Added(made.gate_up_proj_bias), activation.form, quantise=True)
    check_quantised(got[own][:, :72], scales[own], h[own].detach())
    assert not got[own][:, 72:].float().any()


def test_weights_with_inputs_first_become_outputs_first() -> None:
    plain, other = (quantise_experts(model(SWIGLU, 128, transposed)) for transposed in (False, True))
    for one, another in zip(plain.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one.float(), another.float())


def test_quantised_experts_refuse_gradients_and_keep_their_state() -> None:
    made, case = quantise_experts(model(SWIGLU, 128)), RowsCase(COUNTS)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    x = case.rows(64, 5).requires_grad_()
    with pytest.raises(ConfigError, match=r"have no gradient, and x needs one; call them under torch.no_grad"):
        made(x, case.groups.offsets, case.groups.counts)
    other = quantise_experts(model(SWIGLU, 128))
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(made.state_dict())
    own = case.own()
    with torch.no_grad():
        ours, theirs = (each(x, case.groups.offsets, case.groups.counts)[own] for each in (made, other))
    assert torch.equal(ours, theirs) and ours.any()
