"""Products of 8-bit rows and weights on a GPU by product_fp8.cu: exact cases, float64, all classes and switches."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.fp8 import dequantise_weight, quantise, quantise_weight  # noqa: E402
from raymoe.moe import (  # noqa: E402
    grouped_linear,
    grouped_swiglu,
    product_fp8_launch,
    product_fp8_operators,
    product_launch,
    quantise_experts,
)
from raymoe.moe.expert_kernels import ActivationForm  # noqa: E402
from raymoe.moe.expert_rows import Groups  # noqa: E402
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights  # noqa: E402
from raymoe.moe.product_fp8 import TILES, ScaledProduct, ScaledTiles  # noqa: E402
from raymoe.moe.product_fp8_operators import ScaledOperands, gate_scaled, multiply_scaled  # noqa: E402
from raymoe.moe.product_operators import Added  # noqa: E402
from raymoe.moe.products import Gate  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.unit.moe.emulated_product_fp8 import ScaledCase, check_quantised, judge  # noqa: E402
from tests.unit.moe.grouped_cases import Exact, RowsCase, near  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FP8: Any = "float8_e4m3"
CLASSES = [TILES, ScaledTiles(64, 5)]
"""The one that products take, and one whose tokens are columns always."""
BOUND = 2**-7
ERROR = 4e-3
"""Of results before they are quantised: the tensor cores' sums of 128 columns, and fast functions."""
GPT_OSS_FORM = ActivationForm(True, 1.702, 7.0, 1.0)
FORMS = {"swiglu": ActivationForm(), "limited": ActivationForm(limit=1.0), "gpt_oss": GPT_OSS_FORM}
COUNTS = (137, 0, 300, 1, 16, 65, 8)


def only(tiles: ScaledTiles) -> Any:
    """Let all products take this class."""
    return mock.patch.object(product_fp8_operators, "TILES", tiles)


def moved(scaled: ScaledProduct, device: str) -> ScaledProduct:
    """Copy a product with all its tensors; strides stay."""

    def copied(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        storage = torch.empty(
            value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=device
        )
        return storage.as_strided(value.shape, value.stride()).copy_(value)

    def of(each: Any) -> dict[str, Any]:
        return {field.name: copied(getattr(each, field.name)) for field in fields(each)}

    return replace(scaled, **(of(scaled) | {"product": replace(scaled.product, **of(scaled.product))}))


def operands_of(case: RowsCase, columns: int, products: int) -> ScaledOperands:
    """Rows and weights. Rows of no expert are NaN, and so are their scales."""
    values, scales = quantise(case.rows(columns, 1))
    scales[~case.own()] = torch.nan
    weight = case.drawn(len(case.counts), products, columns, seed=2, scale=columns**-0.5)
    return ScaledOperands(values, scales, *quantise_weight(weight))


def exact_x(operands: ScaledOperands) -> torch.Tensor:
    wide = operands.x_scales.double().repeat_interleave(128, dim=1)[:, : operands.x.shape[1]]
    return operands.x.double() * wide


def exact_weight(operands: ScaledOperands) -> torch.Tensor:
    return dequantise_weight(operands.weight.float(), operands.weight_scales)


# Results.


@pytest.mark.parametrize("tiles", CLASSES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        ScaledCase((137, 0, 300, 1, 16), columns=400, outputs=272),
        ScaledCase((8, 9, 144, 145), columns=128, outputs=16, gap=0),
        ScaledCase((40, 3), columns=16, outputs=528, by_row=True, bias=True, weighted=True),
        ScaledCase((40, 3), columns=144, outputs=256, gate=Gate()),
        ScaledCase((137, 0, 300, 1, 16), columns=400, outputs=384, gate=Gate(), quantised=True),
        ScaledCase((40, 3), columns=144, outputs=192, gate=Gate(True, 1.702, 7.0, 1.0), quantised=True, bias=True),
    ],
    ids=str,
)
def test_small_integers_are_exact(case: ScaledCase, tiles: ScaledTiles) -> None:
    """The cases of the emulator: sums of such operands are exact, and rows of no expert are not written."""
    on_gpu = moved(replace(case, tiles=tiles).product(), "cuda")
    product_fp8_launch.launch(on_gpu)
    judge(moved(on_gpu, "cpu"), ERROR)


@pytest.mark.parametrize("tiles", CLASSES, ids=str)
@pytest.mark.parametrize(("columns", "outputs"), [(128, 16), (144, 272), (2048, 528), (7168, 256)])
def test_each_class_multiplies_the_rows_of_each_expert(tiles: ScaledTiles, columns: int, outputs: int) -> None:
    case = RowsCase(COUNTS, "cuda")
    operands, own = operands_of(case, columns, outputs), case.own()
    with only(tiles):
        y = multiply_scaled(operands, case.groups, Added())
    near(y[own], Exact(case.groups).linear(exact_x(operands), exact_weight(operands))[own], BOUND)


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("counts", [(1,), (0, 0, 3), (8,) * 40, (700, 0, 2), (0,), (64, 65, 128, 129, 193, 256)])
def test_any_counts_and_starts(counts: tuple[int, ...], alignment: int) -> None:
    case = RowsCase(counts, "cuda", alignment=alignment)
    operands, own = operands_of(case, 256, 2 * 128), case.own()
    for tiles in CLASSES:
        with only(tiles):
            values, scales = gate_scaled(operands, case.groups, Added(), quantise=True)
        if own.any():
            want = Exact(case.groups).gated(exact_x(operands), exact_weight(operands), ActivationForm())
            check_quantised(values[own].cpu(), scales[own].cpu(), want[own].cpu(), ERROR)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", CLASSES, ids=str)
def test_gated_products_by_all_switches(tiles: ScaledTiles, form: str, biased: bool, weighted: bool) -> None:
    case, own = RowsCase(COUNTS, "cuda"), RowsCase(COUNTS, "cuda").own()
    operands = operands_of(case, 272, 2 * 384)
    bias = case.drawn(7, 2 * 384, seed=3) if biased else None
    weights = case.row_weights(4) if weighted else None
    with only(tiles):
        y, _ = gate_scaled(operands, case.groups, Added(bias, weights), FORMS[form])
        values, scales = gate_scaled(operands, case.groups, Added(bias, weights), FORMS[form], quantise=True)
    want = Exact(case.groups).gated(exact_x(operands), exact_weight(operands), FORMS[form], bias, weights)[own]
    near(y[own], want, BOUND)
    check_quantised(values[own].cpu(), scales[own].cpu(), want.cpu(), ERROR)


# Bits.


@pytest.mark.parametrize("gate", [None, ActivationForm(), GPT_OSS_FORM])
def test_the_bits_of_a_row_depend_on_its_values_and_its_experts_weights_alone(gate: ActivationForm | None) -> None:
    """The same rows stand at other places, beside other rows, in experts of other sizes, in all classes."""
    columns, products, some = 1104, 2 * 384, 24
    generator = torch.Generator().manual_seed(3)
    own_values, own_scales = quantise(torch.randn(some, columns, generator=generator).cuda())
    weight = quantise_weight((torch.randn(4, products, columns, generator=generator) * columns**-0.5).cuda())
    wanted: list[torch.Tensor] = []
    for tiles in CLASSES:
        for count, begin, alignment in (
            *((some, 0, 16), (25, 1, 8), (40, 7, 16), (64, 33, 8), (177, 150, 16), (353, 329, 1), (1000, 488, 16)),
        ):
            case = RowsCase((5, count, 0, 3), "cuda", BF16, alignment)
            values, scales = quantise(case.rows(columns, 1))
            first = slice(case.starts[1] + begin, case.starts[1] + begin + some)
            values[first], scales[first] = own_values, own_scales
            operands = ScaledOperands(values, scales if count % 2 else scales.T.contiguous().T, *weight)
            with only(tiles):
                if gate is None:
                    have = [multiply_scaled(operands, case.groups, Added())[first]]
                else:
                    have = [each[first] for each in gate_scaled(operands, case.groups, Added(), gate, quantise=True)]
            wanted = wanted or have
            for one, other in zip(have, wanted, strict=True):
                assert torch.equal(one.float(), other.float()), f"{tiles}, {count} rows, from {begin}"
    assert all(bool(each.float().isfinite().all()) for each in wanted)


def test_results_repeat_while_another_stream_computes() -> None:
    case = RowsCase((300, 17, 0, 90), "cuda")
    operands, own, groups = operands_of(case, 512, 2 * 384), case.own(), case.groups
    wanted = gate_scaled(operands, groups, Added(), quantise=True)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(30):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gate_scaled(operands, groups, Added(), quantise=True))
        torch.cuda.synchronize()
        for have in results:
            for one, other in zip(have, wanted, strict=True):
                assert torch.equal(one[own].float(), other[own].float())


# Graphs.


@pytest.mark.parametrize("tiles", CLASSES, ids=str)
def test_a_captured_pair_of_products_follows_counts_and_values_on_the_device(tiles: ScaledTiles) -> None:
    cases = [RowsCase(counts, "cuda", after=5) for counts in ((40, 0, 200), (200, 16, 8))]
    capacity = max(case.capacity for case in cases)
    x, scales = torch.zeros(capacity, 320, device="cuda").to(E4M3), torch.zeros(capacity, 3, device="cuda")
    up = quantise_weight(cases[0].drawn(3, 512, 320, seed=2, scale=320**-0.5))
    down = quantise_weight(cases[0].drawn(3, 320, 256, seed=3, scale=256**-0.5))
    groups = Groups(*(places.clone() for places in (cases[0].groups.offsets, cases[0].groups.counts)))

    def both() -> torch.Tensor:
        h = gate_scaled(ScaledOperands(x, scales, *up), groups, Added(), quantise=True)
        return multiply_scaled(ScaledOperands(*h, *down), groups, Added())

    with torch.no_grad(), only(tiles):
        both()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            y = both()
        for turn in range(4):
            case = cases[turn % 2]
            x[: case.capacity], scales[: case.capacity] = quantise(case.rows(320, 10 + turn))
            groups.offsets.copy_(case.groups.offsets)
            groups.counts.copy_(case.groups.counts)
            eager = both()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                y.fill_(torch.nan)
                graph.replay()
            torch.cuda.synchronize()
            own = torch.nn.functional.pad(case.own(), (0, capacity - case.capacity))
            h = Exact(case.groups).gated(
                exact_x(ScaledOperands(x, scales, *up)), dequantise_weight(up[0].float(), up[1]), ActivationForm()
            )
            near(y[own], Exact(case.groups).linear(h, dequantise_weight(down[0].float(), down[1]))[own], 4e-2)
            assert torch.equal(y[own], eager[own])
    del graph


def test_no_call_makes_the_host_wait() -> None:
    case = RowsCase((100, 0, 40), "cuda")
    operands, places = operands_of(case, 128, 256), (case.groups.offsets, case.groups.counts)
    x, up = (operands.x, operands.x_scales), (operands.weight, operands.weight_scales)
    down = quantise_weight(case.drawn(3, 128, 128, seed=3))

    def step() -> None:
        grouped_linear(grouped_swiglu(x, up, *places, output=FP8), down, *places)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Experts.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("inner", [256, 96])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, Activation(limit=2.0)], ids=["swiglu", "gpt_oss", "limited"])
def test_quantised_experts_equal_their_formula_on_a_cpu(activation: Activation, inner: int, weighted: bool) -> None:
    case, on_cpu = RowsCase((600, 0, 33, 100), "cuda"), RowsCase((600, 0, 33, 100))
    weights = ModelWeights(
        on_cpu.drawn(4, 2 * inner, 128, seed=1, scale=128**-0.5), on_cpu.drawn(4, 128, inner, seed=2, scale=inner**-0.5)
    )
    if activation == GPT_OSS:
        weights.gate_up_proj_bias = on_cpu.drawn(4, 2 * inner, seed=3)
        weights.down_proj_bias = on_cpu.drawn(4, 128, seed=4)
    experts = quantise_experts(Experts(weights, activation))
    x, share = quantise(on_cpu.rows(128, 5)), on_cpu.row_weights(6) if weighted else None
    with torch.no_grad():
        want = experts(x, on_cpu.groups.offsets, on_cpu.groups.counts, share)
        there = experts.cuda()
        moved_share = None if share is None else share.cuda()
        y = there((x[0].cuda(), x[1].cuda()), case.groups.offsets, case.groups.counts, moved_share)
    own = on_cpu.own()
    near(y.cpu()[own], want[own], 2e-2)


def test_quantised_weights_are_the_same_on_a_gpu() -> None:
    weight = torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(1)) * 0.02
    for one, other in zip(quantise_weight(weight.cuda()), quantise_weight(weight), strict=True):
        assert torch.equal(one.cpu().float(), other.float())
