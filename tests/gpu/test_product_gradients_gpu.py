"""Gradients of products on a GPU by product.cu and outer_product.cu: against float64, repeated, added, captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from raymoe.moe import grouped_linear, grouped_swiglu, outer_launch, product_gradients, product_launch  # noqa: E402
from raymoe.moe.expert_rows import Groups  # noqa: E402
from raymoe.moe.experts import GPT_OSS, SWIGLU, Activation, Experts, ModelWeights  # noqa: E402
from raymoe.moe.outer_products import OuterProduct  # noqa: E402
from raymoe.moe.product_gradients import add_weight_gradient, rows_gradient, weight_gradient  # noqa: E402
from raymoe.moe.products import TILES, Product, TileClass  # noqa: E402
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
COUNTS = (137, 0, 300, 1, 16, 65, 8)
SIZES = [(64, 16), (8, 8), (72, 272), (200, 328), (448, 528), (2048, 1024)]
"""Outputs and columns."""


def only(tiles: TileClass) -> Any:
    """Let all products take this class."""
    launch = product_launch.launch
    return mock.patch.object(product_launch, "launch", lambda product: launch(replace(product, tiles=tiles)))


def outer_of(case: RowsCase, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parts = [slice(start, start + count) for start, count in zip(case.starts, case.counts, strict=False)]
    return torch.stack([dy[part].double().T @ x[part].double() for part in parts])


def outer_product(case: RowsCase, outputs: int, columns: int) -> OuterProduct:
    """A product whose results hold NaN, and whose rows are NaN in gaps."""
    d_weight = torch.full((len(case.counts), outputs, columns), torch.nan, device="cuda", dtype=case.dtype)
    dy, x, groups = case.rows(outputs, 1), case.rows(columns, 2), case.groups
    return OuterProduct(dy, x, groups.offsets, groups.counts, d_weight)


# The gradient of rows.


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tiles", CLASSES)
@pytest.mark.parametrize(("outputs", "columns"), [(64, 16), (72, 272), (448, 528), (2048, 1024)])
def test_gradients_of_rows(tiles: TileClass, outputs: int, columns: int, dtype: torch.dtype) -> None:
    """Gaps of dy are NaN; those of the result are zero up to a multiple of 16."""
    for alignment in (1, 8, 16):
        case = RowsCase(COUNTS, "cuda", dtype, alignment)
        dy, weight = case.rows(outputs, 1), case.drawn(7, outputs, columns, seed=2, scale=outputs**-0.5)
        with only(tiles), mock.patch.object(product_gradients, "multiply_by_torch", None):
            dx = rows_gradient(dy, weight, case.groups)
        own = case.own()
        near(dx[own], Exact(case.groups).linear(dy, weight.transpose(1, 2))[own], BOUNDS[dtype])
        assert not dx[case.zeroed_gaps()].any()


@pytest.mark.parametrize("tiles", CLASSES)
def test_transposed_weights_give_the_same_bits(tiles: TileClass) -> None:
    case = RowsCase(COUNTS, "cuda")
    x, weight, groups = case.rows(1096, 1), case.drawn(7, 400, 1096, seed=2, scale=1096**-0.5), case.groups
    results = []
    for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        y = torch.full((case.capacity, 400), torch.nan, device="cuda", dtype=BF16)
        product_launch.launch(Product(x, stored, groups.offsets, groups.counts, y, tiles=tiles))
        results.append(y)
    own = case.own()
    assert torch.equal(results[0][own], results[1][own]) and bool(results[0][own].isfinite().all())
    assert bool(results[1][~own].isnan().all()), "rows of no expert are not written"


# The gradient of weights.


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("outputs", "columns"), SIZES)
def test_gradients_of_weights(outputs: int, columns: int, dtype: torch.dtype) -> None:
    for alignment in (1, 8, 16):
        for after in (0, 5):
            case = RowsCase(COUNTS, "cuda", dtype, alignment, after)
            product = outer_product(case, outputs, columns)
            outer_launch.launch(product)
            near(product.d_weight, outer_of(case, product.dy, product.x), BOUNDS[dtype])
            assert not product.d_weight[1].any(), "an expert without rows has zeros"


@pytest.mark.parametrize("counts", [(1,), (0, 0, 3), (8,) * 40, (700, 0, 2), (0,), (63, 64, 65, 127, 128, 129)])
def test_sums_of_small_integers_are_exact(counts: tuple[int, ...]) -> None:
    """So a row too many or too few shows, whatever its size."""
    case = RowsCase(counts, "cuda", alignment=1)
    product = outer_product(case, 136, 264)
    for rows in (product.dy, product.x):
        rows.copy_(torch.randint(-1, 2, rows.shape, device="cuda").to(BF16).where(case.own()[:, None], torch.nan))
    total = torch.randint(-9, 10, product.d_weight.shape, device="cuda").float()
    wanted, before = outer_of(case, product.dy, product.x), total.double()
    outer_launch.launch(product)
    add_weight_gradient(total, product.dy, product.x, case.groups)
    assert torch.equal(product.d_weight, wanted.to(BF16))
    assert torch.equal(total.double(), before + wanted)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("outputs", "columns"), SIZES)
def test_gradients_of_weights_are_added_in_float32(outputs: int, columns: int, dtype: torch.dtype) -> None:
    case = RowsCase(COUNTS, "cuda", dtype, alignment=4)
    dy, x = case.rows(outputs, 1), case.rows(columns, 2)
    total = torch.rand(7, outputs, columns, device="cuda")
    wanted, before = outer_of(case, dy, x), total.clone()
    for turn in (1, 2):
        add_weight_gradient(total, dy, x, case.groups)
        near(total, before.double() + turn * wanted, 1e-4)
    assert torch.equal(total[1], before[1]), "an expert without rows adds nothing"


def test_results_repeat_while_another_stream_computes() -> None:
    case = RowsCase((300, 17, 0, 90), "cuda")
    products = [outer_product(case, 768, 512) for _ in range(4)]
    total = torch.zeros(4, 768, 512, device="cuda")
    add_weight_gradient(total, products[0].dy, products[0].x, case.groups)
    outer_launch.launch(products[0])
    torch.cuda.synchronize()
    wanted, streams = products[0].d_weight.clone(), [torch.cuda.Stream() for _ in products]
    sums = [torch.zeros_like(total) for _ in products]
    torch.cuda.synchronize()
    for _ in range(30):
        for product, stream, each in zip(products, streams, sums, strict=True):
            with torch.cuda.stream(stream):
                product.d_weight.fill_(torch.nan)
                outer_launch.launch(product)
                each.zero_()
                add_weight_gradient(each, product.dy, product.x, case.groups)
    torch.cuda.synchronize()
    for product, each in zip(products, sums, strict=True):
        assert torch.equal(product.d_weight, wanted) and torch.equal(each, total)


# Together.


@pytest.mark.parametrize("adds", [False, True])
def test_captured_gradients_follow_counts_and_values_on_the_device(adds: bool) -> None:
    cases = [RowsCase(counts, "cuda", after=after) for counts, after in (((40, 0, 200), 5), ((200, 16, 8), 5))]
    capacity = max(case.capacity for case in cases)
    dy, x = (torch.zeros(capacity, width, device="cuda", dtype=BF16) for width in (512, 320))
    weight = cases[0].drawn(3, 512, 320, seed=2, scale=512**-0.5)
    groups = Groups(*(places.clone() for places in (cases[0].groups.offsets, cases[0].groups.counts)))
    total = torch.zeros(3, 512, 320, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        dx = rows_gradient(dy, weight, groups)
        if not adds:
            return dx, weight_gradient(dy, x, groups)
        add_weight_gradient(total, dy, x, groups)
        return dx, total

    step()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        dx, d_weight = step()
    for turn in range(4):
        case = cases[turn % 2]
        dy[: case.capacity], x[: case.capacity] = case.rows(512, 10 + turn), case.rows(320, 20 + turn)
        groups.offsets.copy_(case.groups.offsets)
        groups.counts.copy_(case.groups.counts)
        step()  # an eager call between replays
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            total.zero_()
            if not adds:
                d_weight.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()
        own = torch.nn.functional.pad(case.own(), (0, capacity - case.capacity))
        near(dx[own], Exact(case.groups).linear(dy, weight.transpose(1, 2))[own], BOUNDS[BF16])
        near(d_weight, outer_of(case, dy, x), BOUNDS[BF16])
    del graph


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_step_with_gradients_makes_no_host_wait(dtype: torch.dtype) -> None:
    """Also of float16, where torch's products would wait."""
    case = RowsCase((100, 0, 40), "cuda", dtype)
    x, up = case.rows(128, 1).requires_grad_(), case.drawn(3, 256, 128, seed=2).requires_grad_()
    down, groups, dy = case.drawn(3, 128, 128, seed=3).requires_grad_(), case.groups, case.rows(128, 4)

    def step() -> None:
        h = grouped_swiglu(x, up, groups.offsets, groups.counts)
        y = grouped_linear(h, down, groups.offsets, groups.counts)
        torch.autograd.grad(y, (x, up, down), dy)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, Activation(limit=2.0)], ids=["swiglu", "gpt_oss", "limited"])
def test_experts_take_the_kernels_for_all_gradients(activation: Activation, weighted: bool) -> None:
    case, biased = RowsCase((600, 0, 33, 1000), "cuda"), activation == GPT_OSS
    up, down = case.drawn(4, 256, 128, seed=1, scale=128**-0.5), case.drawn(4, 128, 128, seed=2, scale=128**-0.5)
    weights = ModelWeights(up, down)
    if biased:
        weights.gate_up_proj_bias, weights.down_proj_bias = case.drawn(4, 256, seed=3), case.drawn(4, 128, seed=4)
    experts = Experts(weights, activation)
    x, own = case.rows(128, 5), case.own()
    x[: case.starts[-1]][~own[: case.starts[-1]]] = 0
    share = case.row_weights(6).where(own, 0.0).requires_grad_() if weighted else None
    x.requires_grad_()
    dy = case.rows(128, 7).where(own[:, None], 0)
    leaves = [x, *experts.parameters(), *([] if share is None else [share])]
    with (
        mock.patch.object(product_gradients, "multiply_by_torch", None),
        mock.patch.object(product_gradients, "outer_by_torch", None),
    ):
        y = experts(x, case.groups.offsets, case.groups.counts, share)
        found = torch.autograd.grad(y, leaves, dy)
    exact = Exact(case.groups)
    same = {id(leaf): leaf.detach().double().requires_grad_() for leaf in leaves}
    up_bias, down_bias = experts.gate_up_proj_bias, experts.down_proj_bias
    h = exact.gated(
        same[id(x)],
        same[id(experts.gate_up_proj)],
        activation.form,
        None if up_bias is None else same[id(up_bias)],
    )
    wanted_y = exact.linear(
        h,
        same[id(experts.down_proj)],
        None if down_bias is None else same[id(down_bias)],
        None if share is None else same[id(share)],
    )
    wanted = torch.autograd.grad(wanted_y[own], list(same.values()), dy[own].double())
    bound = 6e-2 if activation.limit is not None else 2e-2  # a few are beyond the limit
    for have, want in zip(found, wanted, strict=True):
        rows = own if len(have) == case.capacity else slice(None)
        near(have[rows], want[rows], bound)


def test_micro_batches_add_to_main_grad() -> None:
    """Both forward passes come before both backward passes; gaps are NaN."""
    case = RowsCase(COUNTS, "cuda")
    up, down = case.drawn(7, 288, 128, seed=2, scale=0.1), case.drawn(7, 96, 144, seed=3, scale=0.1)
    groups = case.groups.offsets, case.groups.counts
    totals = [torch.zeros(each.shape, device="cuda") for each in (up, down)]
    for each in (up, down):
        each.requires_grad_()
    own, exact, results = case.own(), Exact(case.groups), []
    for seed in (4, 5):
        x = case.rows(128, seed)
        h = grouped_swiglu(x, up, *groups, main_grad=totals[0])
        results.append((x, grouped_linear(h, down, *groups, main_grad=totals[1])))
    same = [each.detach().double().requires_grad_() for each in (up, down)]
    wanted = [torch.zeros_like(each) for each in same]
    for seed, (x, y) in enumerate(results):
        dy = case.rows(96, 6 + seed)
        y.backward(dy)
        z = exact.linear(exact.gated(x.double(), same[0], SWIGLU.form), same[1])
        gradients = torch.autograd.grad(z[own], same, dy[own].double())
        wanted = [total + gradient for total, gradient in zip(wanted, gradients, strict=True)]
    assert up.grad is None and down.grad is None
    for have, want in zip(totals, wanted, strict=True):
        near(have, want, 2e-2)
