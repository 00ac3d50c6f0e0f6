"""Products of experts on a GPU by product.cu: against float64, by all classes and switches, captured, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe import (  # noqa: E402
    grouped_linear,
    grouped_swiglu,
    product_launch,
)
from raymoe.moe.expert_kernels import ActivationForm  # noqa: E402
from raymoe.moe.expert_rows import Groups  # noqa: E402
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights  # noqa: E402
from raymoe.moe.product_operators import Added, gate_experts, multiply_experts  # noqa: E402
from raymoe.moe.products import TILES, Gate, Product, TileClass  # noqa: E402
from tests.gpu.ranks import GPUS, NEEDS_GPU  # noqa: E402
from tests.unit.moe.grouped_cases import Exact, RowsCase, near  # noqa: E402

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(
        GPUS > 0 and torch.cuda.get_device_capability() != product_launch.CAPABILITY, reason="needs wgmma"
    ),
]

BF16, F16 = torch.bfloat16, torch.float16
CLASSES = [TILES, TileClass(96, 5)]
BOUNDS = {BF16: 2**-7, F16: 2**-10}
GPT_OSS_FORM = ActivationForm(True, 1.702, 7.0, 1.0)
FORMS = {
    "swiglu": ActivationForm(),
    "interleaved": ActivationForm(interleaved=True),
    "limited": ActivationForm(limit=1.0),
    "gpt_oss": GPT_OSS_FORM,
}
COUNTS = (137, 0, 300, 1, 16, 65, 8)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Product]]:
    """The products that product.cu computes."""
    products: list[Product] = []
    launch = product_launch.launch

    def record(product: Product) -> None:
        products.append(product)
        launch(product)

    monkeypatch.setattr(product_launch, "launch", record)
    yield products


def only(tiles: TileClass) -> Any:
    """Let all products take this class, those of gradients too."""
    launch = product_launch.launch
    return mock.patch.object(product_launch, "launch", lambda product: launch(replace(product, tiles=tiles)))


def product_of(case: RowsCase, tiles: TileClass, columns: int, outputs: int, gate: Gate | None = None) -> Product:
    """A product whose results hold NaN."""
    y = torch.full((case.capacity, outputs), torch.nan, device="cuda", dtype=case.dtype)
    weight = case.drawn(len(case.counts), outputs * (1 if gate is None else 2), columns, seed=2, scale=columns**-0.5)
    groups = case.groups
    return Product(case.rows(columns, 1), weight, groups.offsets, groups.counts, y, gate, tiles=tiles)


# Results.


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tiles", CLASSES)
@pytest.mark.parametrize(("columns", "outputs"), [(64, 16), (72, 272), (448, 528), (2048, 1024)])
def test_each_class_multiplies_the_rows_of_each_expert(
    tiles: TileClass, columns: int, outputs: int, dtype: torch.dtype
) -> None:
    case = RowsCase(COUNTS, "cuda", dtype)
    product = product_of(case, tiles, columns, outputs)
    product_launch.launch(product)
    own = case.own()
    near(product.y[own], Exact(case.groups).linear(product.x, product.weight)[own], BOUNDS[dtype])
    assert bool(product.y[~own].isnan().all()), "rows of no expert are not written"


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("counts", [(1,), (0, 0, 3), (8,) * 40, (700, 0, 2), (0,), (176, 177, 352, 353)])
def test_any_counts_and_starts(counts: tuple[int, ...], alignment: int) -> None:
    case = RowsCase(counts, "cuda", alignment=alignment)
    for tiles in CLASSES:
        product = product_of(case, tiles, 192, 256)
        product_launch.launch(product)
        own = case.own()
        if own.any():
            near(product.y[own], Exact(case.groups).linear(product.x, product.weight)[own], BOUNDS[BF16])
        assert bool(product.y[~own].isnan().all())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tiles", CLASSES)
def test_products_by_all_switches(tiles: TileClass, dtype: torch.dtype, biased: bool, weighted: bool) -> None:
    case = RowsCase(COUNTS, "cuda", dtype)
    x, weight = case.rows(136, 1), case.drawn(7, 272, 136, seed=2, scale=136**-0.5)
    bias = case.drawn(7, 272, seed=3) if biased else None
    weights = case.row_weights(4) if weighted else None
    with only(tiles):
        y = multiply_experts(x, weight, case.groups, Added(bias, weights))
    own = case.own()
    near(y[own], Exact(case.groups).linear(x, weight, bias, weights)[own], BOUNDS[dtype])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", CLASSES)
def test_gated_products_by_all_switches(
    tiles: TileClass, form: str, dtype: torch.dtype, keep: bool, biased: bool, weighted: bool
) -> None:
    case, exact = RowsCase(COUNTS, "cuda", dtype), Exact(RowsCase(COUNTS, "cuda").groups)
    x, weight = case.rows(136, 1), case.drawn(7, 2 * 144, 136, seed=2, scale=136**-0.5)
    bias = case.drawn(7, 2 * 144, seed=3) if biased else None
    weights = case.row_weights(4) if weighted else None
    with only(tiles):
        y, gate_up = gate_experts(x, weight, case.groups, Added(bias, weights), FORMS[form], keep)
    own = case.own()
    near(y[own], exact.gated(x, weight, FORMS[form], bias, weights)[own], BOUNDS[dtype])
    if keep:
        near(gate_up[own], exact.products(x, weight, bias)[own], BOUNDS[dtype])


def test_sizes_that_the_kernel_does_not_take_go_to_torch(launched: list[Product]) -> None:
    case = RowsCase((17, 0, 40), "cuda")
    own, groups = case.own(), case.groups
    x = case.rows(64, 1)
    x[~own] = 0
    for outputs, rows in ((24, x), (64, x[:, :64])):
        weight = case.drawn(3, outputs, 64, seed=2, scale=0.125)
        weight = weight if outputs == 24 else weight.repeat_interleave(2, dim=1)[:, ::2]
        y = grouped_linear(rows, weight, groups.offsets, groups.counts)
        near(y[own], Exact(groups).linear(rows, weight)[own], BOUNDS[BF16])
    assert launched == []


# Bits.


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("gate", [None, Gate(), Gate(True, 1.702, 7.0, 1.0)])
def test_the_bits_of_a_row_depend_on_its_values_and_its_experts_weights_alone(
    gate: Gate | None, dtype: torch.dtype
) -> None:
    """The same rows stand at other places, beside other rows, in experts of other sizes, in all classes."""
    columns, outputs, some = 1096, 400, 24
    generator = torch.Generator().manual_seed(3)
    own_rows = torch.randn(some, columns, generator=generator).to("cuda", dtype)
    products = outputs * (1 if gate is None else 2)
    weight = (torch.randn(4, products, columns, generator=generator) * columns**-0.5).to("cuda", dtype)
    bias = torch.randn(4, products, generator=generator).to("cuda", dtype)
    wanted: torch.Tensor | None = None
    for tiles in CLASSES:
        for count, begin, alignment in (
            *((some, 0, 16), (25, 1, 8), (40, 7, 16), (64, 33, 8), (177, 150, 16), (353, 329, 1), (1000, 488, 16)),
        ):
            case = RowsCase((5, count, 0, 3), "cuda", dtype, alignment)
            product = replace(product_of(case, tiles, columns, outputs, gate), weight=weight, bias=bias)
            first = case.starts[1] + begin
            product.x[first : first + some] = own_rows
            product_launch.launch(product)
            have = product.y[first : first + some]
            wanted = have.clone() if wanted is None else wanted
            assert torch.equal(have, wanted), f"{tiles}, {count} rows, from {begin}"
    assert wanted is not None and bool(wanted.isfinite().all())


def test_results_repeat_while_another_stream_computes() -> None:
    case = RowsCase((300, 17, 0, 90), "cuda")
    products = [product_of(case, tiles, 512, 768) for tiles in CLASSES for _ in range(2)]
    for product in products:
        product_launch.launch(product)
    torch.cuda.synchronize()
    wanted = [product.y.clone() for product in products]
    streams = [torch.cuda.Stream() for _ in products]
    for _ in range(30):
        for product, stream in zip(products, streams, strict=True):
            with torch.cuda.stream(stream):
                product.y.fill_(torch.nan)
                product_launch.launch(product)
    torch.cuda.synchronize()
    own = case.own()
    for product, want in zip(products, wanted, strict=True):
        assert torch.equal(product.y[own], want[own])


# Graphs.


@pytest.mark.parametrize("tiles", CLASSES)
def test_a_captured_product_follows_counts_and_values_on_the_device(tiles: TileClass) -> None:
    cases = [RowsCase(counts, "cuda", after=after) for counts, after in (((40, 0, 200), 5), ((200, 16, 8), 5))]
    capacity = max(case.capacity for case in cases)
    x = torch.zeros(capacity, 320, device="cuda", dtype=BF16)
    weight = cases[0].drawn(3, 512, 320, seed=2, scale=320**-0.5)
    groups = Groups(*(places.clone() for places in (cases[0].groups.offsets, cases[0].groups.counts)))
    added = Added()
    with torch.no_grad(), only(tiles):
        multiply_experts(x, weight, groups, added)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            y = multiply_experts(x, weight, groups, added)
            again = multiply_experts(x, weight, groups, added)
        for turn in range(4):
            case = cases[turn % 2]
            x[: case.capacity] = case.rows(320, 10 + turn)
            groups.offsets.copy_(case.groups.offsets)
            groups.counts.copy_(case.groups.counts)
            multiply_experts(x, weight, groups, added)  # an eager call between replays
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                y.fill_(torch.nan)
                graph.replay()
            torch.cuda.synchronize()
            own = torch.nn.functional.pad(case.own(), (0, capacity - case.capacity))
            near(y[own], Exact(case.groups).linear(x, weight)[own], BOUNDS[BF16])
            assert torch.equal(y[own], again[own])
    del graph


def test_no_call_makes_the_host_wait() -> None:
    case = RowsCase((100, 0, 40), "cuda", F16)
    x, up = case.rows(128, 1), case.drawn(3, 256, 128, seed=2)
    down, groups = case.drawn(3, 128, 128, seed=3), case.groups

    def step() -> None:
        h = grouped_swiglu(x, up, groups.offsets, groups.counts)
        grouped_linear(h, down, groups.offsets, groups.counts)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Gradients.


def fill_free_memory_with_nan() -> None:
    """Let the next allocations begin with NaN."""
    torch.cuda.synchronize()
    sizes = [1 << 22] * 8 + [1 << 17] * 64  # torch's cache has a pool for large tensors, and one for small ones
    some = [torch.full((size,), torch.nan, device="cuda", dtype=BF16) for size in sizes]
    torch.cuda.synchronize()
    del some


@pytest.mark.parametrize("tiles", CLASSES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gaps_are_zero_where_gradients_are_needed(tiles: TileClass, dtype: torch.dtype) -> None:
    """Starts need not be multiples of 16."""
    for alignment in (1, 8, 16):
        case = RowsCase((137, 0, 300, 1, 16, 65, 8), "cuda", dtype, alignment)
        x, up = case.rows(128, 1), case.drawn(7, 288, 128, seed=2, scale=0.1).requires_grad_()
        fill_free_memory_with_nan()
        with only(tiles):
            h, gate_up = gate_experts(x, up, case.groups, Added())
            y = multiply_experts(x, up, case.groups, Added())
        zeroed = case.zeroed_gaps()
        assert zeroed.any()
        for rows in (h, gate_up, y):
            assert not rows[zeroed].any() and bool(rows[case.own()].isfinite().all())


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", CLASSES)
def test_gradients_equal_those_of_float64(tiles: TileClass, form: str, how: str) -> None:
    case, exact = RowsCase(COUNTS, "cuda"), Exact(RowsCase(COUNTS, "cuda").groups)
    own, groups = case.own(), case.groups
    x, up = case.rows(128, 1), case.drawn(7, 288, 128, seed=2, scale=128**-0.5)
    down, dy = case.drawn(7, 96, 144, seed=3, scale=144**-0.5), case.rows(96, 4)
    bias, down_bias, weights = case.drawn(7, 288, seed=5), case.drawn(7, 96, seed=6), case.row_weights(7)
    leaves = [each.requires_grad_() for each in (x, up, bias, down, down_bias, weights)]

    def compute(*leaves: torch.Tensor) -> torch.Tensor:
        x, up, bias, down, down_bias, weights = leaves
        h, _ = gate_experts(x, up, groups, Added(bias), FORMS[form])
        return multiply_experts(h, down, groups, Added(down_bias, weights))

    run: Callable[..., Any] = torch.compile(compute, fullgraph=True) if how == "compiled" else compute
    with only(tiles):
        y = run(*leaves)
        found = y, *torch.autograd.grad(y, leaves, dy)
    same = [leaf.detach().double().requires_grad_() for leaf in leaves]
    h = exact.gated(same[0], same[1], FORMS[form], same[2])
    wanted_y = exact.linear(h, same[3], same[4], same[5])
    wanted = wanted_y, *torch.autograd.grad(wanted_y[own], same, dy[own].double())
    for have, want in zip(found, wanted, strict=True):
        rows = own if len(have) == case.capacity else slice(None)
        near(have[rows], want[rows], 2e-2 if form != "limited" else 6e-2)  # a few are beyond the limit


# In a layer's experts.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, Activation(limit=2.0)], ids=["swiglu", "gpt_oss", "limited"])
def test_experts_take_the_kernel_for_both_products(
    activation: Activation, weighted: bool, launched: list[Product]
) -> None:
    case = RowsCase((600, 0, 33, 1000), "cuda")
    biased = activation == GPT_OSS
    weights = ModelWeights(
        case.drawn(4, 256, 128, seed=1, scale=128**-0.5), case.drawn(4, 128, 128, seed=2, scale=128**-0.5)
    )
    if biased:
        weights.gate_up_proj_bias, weights.down_proj_bias = case.drawn(4, 256, seed=3), case.drawn(4, 128, seed=4)
    experts = Experts(weights, activation)
    x, own = case.rows(128, 5), case.own()
    x[: case.starts[-1]][~own[: case.starts[-1]]] = 0
    share = case.row_weights(6).where(own, 0.0) if weighted else None
    with torch.no_grad():
        inferred = experts(x, case.groups.offsets, case.groups.counts, share)
    assert [product.gate is not None for product in launched] == [True, False]
    assert [product.zero_gaps for product in launched] == [False, False]
    launched.clear()
    trained = experts(x.clone().requires_grad_(), case.groups.offsets, case.groups.counts, share)
    assert [product.gate is not None for product in launched] == [True, False]
    assert [product.zero_gaps for product in launched] == [True, False], "no product of the results follows"
    exact = Exact(case.groups)
    h = exact.gated(x, experts.gate_up_proj, activation.form, experts.gate_up_proj_bias)
    y = exact.linear(h, experts.down_proj, experts.down_proj_bias, share)
    for have in (inferred, trained):
        near(have[own], y[own].detach(), 2e-2)
