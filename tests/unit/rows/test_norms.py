"""Norms and SwiGLU: values and gradients against float64, quantised results, tracing, refused arguments."""

from __future__ import annotations

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.moe import add_rms_norm, layer_norm, rms_norm, swiglu
from raymoe.rows import formulas
from raymoe.workload.exchange.received import dequantised

EPS = 1e-3
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_of(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def layer_of(x, weight, bias):
    deviation = x - x.mean(-1, keepdim=True)
    return deviation / (deviation.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def swiglu_of(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


# By name: the function, what it is by plain arithmetic, and the shapes of its arguments for rows of H.
FUNCTIONS = {
    "rms_norm": (lambda *a: rms_norm(*a, eps=EPS), rms_of, lambda rows, H: [(*rows, H), (H,)]),
    "add_rms_norm": (
        lambda *a: add_rms_norm(*a, eps=EPS),
        lambda x, residual, weight: (rms_of(x + residual, weight), x + residual),
        lambda rows, H: [(*rows, H), (*rows, H), (H,)],
    ),
    "layer_norm": (lambda *a: layer_norm(*a, eps=EPS), layer_of, lambda rows, H: [(*rows, H), (H,), (H,)]),
    "swiglu": (swiglu, swiglu_of, lambda rows, H: [(*rows, 2 * H)]),
}


def arguments(name: str, rows: tuple[int, ...], H: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = FUNCTIONS[name][2](rows, H)
    return [drawn(*shape, seed=index, dtype=dtype) for index, shape in enumerate(shapes)]


def as_tuple(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [(7,), (2, 3), (), (0,)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_float64(name, rows, dtype):
    function, plain, _ = FUNCTIONS[name]
    inputs = [each.requires_grad_() for each in arguments(name, rows, 136, dtype)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, want = as_tuple(function(*inputs)), as_tuple(plain(*exact))
    for result, expected in zip(found, want, strict=True):
        assert result.dtype == dtype and result.shape == expected.shape
        torch.testing.assert_close(result.double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    outgoing = [drawn(*each.shape, seed=9, dtype=dtype) for each in found]
    gradients = torch.autograd.grad(found, inputs, outgoing)
    expected = torch.autograd.grad(want, exact, [each.double() for each in outgoing])
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype and gradient.shape == wanted.shape
        # Sums over the rows cancel, so the bound is that of the largest element.
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=BOUNDS[dtype] * max(1.0, largest))


def test_the_gradient_of_either_result_alone():
    x, residual, weight = (each.requires_grad_() for each in arguments("add_rms_norm", (5,), 64, torch.float32))
    for index in range(2):
        found = torch.autograd.grad(add_rms_norm(x, residual, weight, EPS)[index].sum(), (x, residual))
        plain = (rms_of(x + residual, weight), x + residual)[index].sum()
        for result, want in zip(found, torch.autograd.grad(plain, (x, residual)), strict=True):
            torch.testing.assert_close(result, want)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_float32_weights_of_bfloat16_rows_get_float32_gradients(name):
    x, *vectors = arguments(name, (50,), 64, torch.bfloat16)
    vectors = [each.float().requires_grad_() for each in vectors]
    y = FUNCTIONS[name][0](x, *vectors)
    want = FUNCTIONS[name][1](x.float(), *vectors)
    assert y.dtype == torch.bfloat16 and torch.equal(y, want.to(torch.bfloat16))
    outgoing = drawn(50, 64, seed=3)
    found = torch.autograd.grad(y, vectors, outgoing.bfloat16())
    for result, expected in zip(found, torch.autograd.grad(want, vectors, outgoing.bfloat16().float()), strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_rows_give_the_same_and_stay_unchanged(name):
    inputs = arguments(name, (6,), 64, torch.bfloat16)
    wide = torch.zeros(6, 3 * inputs[0].shape[1], dtype=torch.bfloat16)
    strided = wide[:, inputs[0].shape[1] : 2 * inputs[0].shape[1]]
    strided.copy_(inputs[0])
    function = FUNCTIONS[name][0]
    for result, want in zip(as_tuple(function(strided, *inputs[1:])), as_tuple(function(*inputs)), strict=True):
        assert torch.equal(result, want)
        assert result.untyped_storage().data_ptr() != strided.untyped_storage().data_ptr()


# As 8-bit floats.

QUANTISED = {
    "rms_norm": lambda inputs, **how: rms_norm(*inputs, EPS, output="float8_e4m3", **how),
    "add_rms_norm": lambda inputs, **how: add_rms_norm(*inputs, EPS, output="float8_e4m3", **how)[0],
    "layer_norm": lambda inputs, **how: layer_norm(*inputs, EPS, output="float8_e4m3", **how),
    "swiglu": lambda inputs, **how: swiglu(*inputs, output="float8_e4m3", **how),
}


@pytest.mark.parametrize("scales", ["row", "column"])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_rows_are_near_and_their_scales_lie_as_asked(name, scales):
    inputs = arguments(name, (5,), 272, torch.bfloat16)
    values, found = QUANTISED[name](inputs, scales=scales)
    want = as_tuple(FUNCTIONS[name][1](*(each.double() for each in inputs)))[0]
    assert values.dtype == torch.float8_e4m3fn and found.dtype == torch.float32
    assert found.shape == (5, 3) and found.stride() == ((3, 1) if scales == "row" else (1, 8))
    torch.testing.assert_close(dequantised(values, found).double(), want, rtol=2**-4, atol=0.02)
    for block in range(3):
        largest = want[:, block * 128 : block * 128 + 128].abs().amax(1)
        torch.testing.assert_close(found[:, block].double(), largest / 448, rtol=5e-3, atol=0)


def test_blocks_of_zeros_tiny_and_infinite_elements_stay_finite():
    x = torch.zeros(4, 512)
    x[1, :128] = 1e-38
    x[1, 128:256] = 3e-45  # the least float32
    x[2, 0], x[3, 200] = torch.inf, torch.nan
    by_swiglu = swiglu(torch.cat((x + 30, x), dim=1), output="float8_e4m3")
    by_norm = rms_norm(x[:2], torch.ones(512), 1.0, output="float8_e4m3")
    for values, scales in (by_swiglu, by_norm):
        assert bool((scales > 0).all()) and bool(scales.isfinite().all())
        assert int(values.float().isnan().sum()) == (values.shape[0] == 4)
    values, scales = swiglu(torch.cat((torch.full((1, 128), 30.0), x[2:3, :128]), dim=1), output="float8_e4m3")
    assert values[0, 0].item() == 448 and scales.item() == 1


# Rows after the last offset.


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_swiglu_computes_rows_up_to_the_last_offset(kind):
    gate_up = drawn(12, 128)
    gate_up[8:] = torch.nan
    offsets = torch.tensor([0, 4, 4, 8], dtype=kind)
    assert torch.equal(swiglu(gate_up, offsets)[:8], swiglu(gate_up[:8]))
    values, scales = swiglu(gate_up, offsets, output="float8_e4m3")
    assert values.shape == (12, 64) and bool(scales[:8].isfinite().all())
    leaf = gate_up.clone().requires_grad_()
    swiglu(leaf, offsets)[:8].sum().backward()
    whole = gate_up[:8].clone().requires_grad_()
    swiglu(whole).sum().backward()
    assert torch.equal(leaf.grad[:8], whole.grad)


# With a weight for each row.


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [(7,), (2, 3), (), (0,)], ids=str)
def test_weighted_rows_and_their_gradients_are_those_of_float64(rows, dtype):
    gate_up = drawn(*rows, 272, dtype=dtype).requires_grad_()
    weights = drawn(*rows, 1, seed=1)[..., 0].requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in (gate_up, weights)]
    found, want = swiglu(gate_up, weights=weights), swiglu_of(exact[0]) * exact[1][..., None]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), want, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    dy = drawn(*found.shape, seed=9, dtype=dtype)
    wanted = torch.autograd.grad(want, exact, dy.double())
    for result, expected in zip(torch.autograd.grad(found, (gate_up, weights), dy), wanted, strict=True):
        # The gradient of a weight is float32 whatever the rows are.
        bound = BOUNDS[result.dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=bound)


def test_weighted_gradients_pass_gradcheck_in_float64():
    gate_up, weights = drawn(5, 12).double().requires_grad_(), drawn(5, seed=1).double().requires_grad_()
    weighted = torch.ops.raymoe.weighted_swiglu
    assert torch.autograd.gradcheck(lambda x, w: weighted(x, w, None, None), (gate_up, weights))
    assert torch.autograd.gradcheck(lambda x, w: weighted(x, w, torch.tensor([0, 3]), None), (gate_up, weights))


def test_gradcheck_finds_a_gradient_of_weights_that_is_left_out(monkeypatch):
    whole = formulas.weighted_swiglu_backward
    monkeypatch.setattr(
        formulas, "weighted_swiglu_backward", lambda *inputs: (whole(*inputs)[0], torch.zeros_like(inputs[2]))
    )
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        test_weighted_gradients_pass_gradcheck_in_float64()


def test_weighted_rows_after_the_last_offset_have_no_gradient_on_cpus():
    gate_up, weights = drawn(12, 128), drawn(12, seed=1)
    gate_up[8:] = weights[8:] = torch.nan
    leaves = gate_up.clone().requires_grad_(), weights.clone().requires_grad_()
    y = swiglu(leaves[0], torch.tensor([0, 4, 8]), leaves[1])
    whole = gate_up[:8].clone().requires_grad_(), weights[:8].clone().requires_grad_()
    assert torch.equal(y[:8], swiglu(whole[0], weights=whole[1])) and not bool(y[8:].any())
    found = torch.autograd.grad(y.sum(), leaves)
    for result, want in zip(found, torch.autograd.grad(swiglu(whole[0], weights=whole[1]).sum(), whole), strict=True):
        assert torch.equal(result[:8], want) and not bool(result[8:].any())


def test_weighted_operators_pass_opcheck_and_compile_without_a_break():
    inputs = drawn(6, 128).requires_grad_(), drawn(6, seed=1).requires_grad_()
    ops, offsets = torch.ops.raymoe, torch.tensor([0, 4])
    torch.library.opcheck(ops.weighted_swiglu.default, (*inputs, None, None))
    torch.library.opcheck(ops.weighted_swiglu.default, (*inputs, offsets, 3))
    plain = [each.detach() for each in inputs]
    torch.library.opcheck(ops.weighted_swiglu_backward.default, (drawn(6, 64, seed=2), *plain, offsets, None))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: swiglu(x, offsets, w), fullgraph=True, backend="aot_eager")
    for result, want in zip(
        torch.autograd.grad(compiled(*inputs)[:4].square().sum(), inputs),
        torch.autograd.grad(swiglu(inputs[0], offsets, inputs[1])[:4].square().sum(), inputs),
        strict=True,
    ):
        assert torch.equal(result, want)


# As operators of torch.


@pytest.mark.parametrize("rows", [(6,), (2, 3)], ids=["whole", "transposed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_pass_opcheck_and_compile_without_a_break(name, rows):
    inputs = arguments(name, rows, 64, torch.float32)
    inputs = [(each.transpose(0, 1) if each.dim() == 3 else each).requires_grad_() for each in inputs]
    ops = torch.ops.raymoe
    if name == "swiglu":
        torch.library.opcheck(ops.swiglu.default, (*inputs, None, None))
        torch.library.opcheck(ops.swiglu.default, (*inputs, torch.tensor([0, 4]), 3))
    elif name == "layer_norm":
        for launch in ((None,), (3, True)):
            torch.library.opcheck(ops.layer_norm.default, (*inputs, EPS, *launch))
    else:
        x, *residual, weight = inputs
        for launch in ((None,), (3, True)):
            torch.library.opcheck(ops.rms_norm.default, (x, *(residual or [None]), weight, EPS, *launch))
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name][0], fullgraph=True, backend="aot_eager")
    plain, traced = as_tuple(FUNCTIONS[name][0](*inputs)), as_tuple(compiled(*inputs))
    outgoing = [drawn(*each.shape, seed=5) for each in plain]
    for result, want in zip(
        (*traced, *torch.autograd.grad(traced, inputs, outgoing)),
        (*plain, *torch.autograd.grad(plain, inputs, outgoing)),
        strict=True,
    ):
        assert torch.equal(result, want)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "swiglu"])
def test_quantised_operators_pass_opcheck(name):
    inputs = arguments(name, (6,), 192, torch.bfloat16)
    x, *vectors = inputs
    extra = {"rms_norm": (x, None, *vectors, EPS), "layer_norm": (*inputs, EPS), "swiglu": (*inputs, None)}[name]
    for column in (False, True):
        torch.library.opcheck(getattr(torch.ops.raymoe, f"{name}_fp8").default, (*extra, column, None))
    if name != "swiglu":
        torch.library.opcheck(getattr(torch.ops.raymoe, f"{name}_fp8").default, (*extra, True, 3, True))


# Refused arguments.

X, W = torch.ones(4, 64), torch.ones(64)
WRONG = [
    (lambda: rms_norm(X.double(), W), r"rms_norm: x is torch.float64; torch.bfloat16, torch.float16 or torch.float32"),
    (lambda: rms_norm([1.0], W), "x is a list; a tensor is needed"),
    (lambda: rms_norm(X, W[:8]), r"weight is torch.float32 of shape \[8\] on cpu; .* of shape \[64\] on cpu is needed"),
    (lambda: rms_norm(X, W.double()), "weight is torch.float64"),
    (lambda: layer_norm(X, W, W.half()), "bias is torch.float16 and weight is torch.float32; they have one dtype"),
    (lambda: rms_norm(X, W, -1.0), "eps is -1.0"),
    (lambda: rms_norm(X, W, output="fp8"), "output is 'fp8'; it is None"),
    (lambda: rms_norm(X, W, scales="diagonal"), "scales is 'diagonal'"),
    (lambda: rms_norm(X, W, scales="column"), "has no scales; ask for output='float8_e4m3'"),
    (lambda: rms_norm(X, W, sms=0), "sms is 0"),
    (lambda: rms_norm(X[None], W, output="float8_e4m3", scales="column"), r"shape \[1, 4, 64\]; scales by column"),
    (lambda: rms_norm(X.clone().requires_grad_(), W, output="float8_e4m3"), "has no gradient"),
    (lambda: add_rms_norm(X, X[:2], W), r"residual has shape \[2, 64\]"),
    (lambda: layer_norm(X, W, None), "bias is a NoneType"),
    (lambda: swiglu(X[:, :63]), "rows of 63; gate and up together are an even number"),
    (lambda: swiglu(X, torch.tensor([0.0, 4.0])), r"expert_offsets is torch.float32 of shape \[2\]"),
    (lambda: swiglu(X, None, [1.0]), "weights is a list"),
    (lambda: swiglu(X, weights=W), r"weights is torch.float32 of shape \[64\] on cpu; torch.float32 of shape \[4\]"),
    (lambda: swiglu(X, weights=W[:4].half()), "weights is torch.float16"),
    (lambda: swiglu(X, weights=W[:4], output="float8_e4m3"), "8-bit results have none"),
    (lambda: swiglu(X[None], torch.tensor([0, 4])), r"with expert_offsets it is \[C, 2F\]"),
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=[said[:24] for _, said in WRONG])
def test_wrong_arguments_are_refused_with_what_was_found(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="outputs"):
        rms_norm(X, W, outputs="float8_e4m3")
