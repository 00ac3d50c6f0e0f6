"""The launches of product_fp8.cu: the class that a product takes, and what a prepared launch gives the kernel."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch

from raymoe.cuda.tensor_map import TensorMap
from raymoe.errors import ConfigError
from raymoe.fp8 import quantise
from raymoe.moe import grouped_linear, grouped_swiglu, product_fp8_launch, product_launch, quantise_experts
from raymoe.moe.experts import GPT_OSS, SWIGLU, Experts, ModelWeights
from raymoe.moe.product_fp8 import TILES, ScaledProduct, ScaledTiles
from raymoe.moe.products import SHARED_BYTES, THREADS, Gate
from tests.emulator.build import compiler
from tests.emulator.tensor_map import emulated_map
from tests.unit.moe.emulated_product_fp8 import ScaledCase, columns_of, dequantised, run_scaled
from tests.unit.moe.grouped_cases import Exact, RowsCase, near
from tests.unit.rows.rows_driver import Counters, RowsDriver

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FP8: Any = "float8_e4m3"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RowsDriver:
    """A GPU that records launches, with maps as the emulator has them."""
    rows_driver = RowsDriver(monkeypatch)
    Counters(monkeypatch, rows_driver)
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(TensorMap, "encoded", emulated_map)
    return rows_driver


def params_of(call: ScaledProduct, taken: int) -> bytes:
    first, second = map(emulated_map, call.product.weight_maps())
    tokens = tuple(map(emulated_map, call.product.token_maps()))
    return bytes(call.params((first, second, tokens), taken).packed())


PLAIN = ScaledCase((17, 0, 40), tiles=TILES)
FORMS = [
    PLAIN,
    replace(PLAIN, tiles=ScaledTiles(32, 6), by_row=True),
    replace(PLAIN, gate=Gate(), outputs=128),
    replace(PLAIN, gate=Gate(True, 1.702, 7.0, 1.0), outputs=64, quantised=True, bias=True, weighted=True),
]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prepared_launches_have_the_parameters_of_their_tensors(
    driver: RowsDriver, form: ScaledCase, traced: bool
) -> None:
    """The second one has other tensors than the one that was prepared."""
    calls = [form.product() for _ in range(3)]
    for call in calls:
        call.product.trace = torch.zeros(132, 16, dtype=torch.int64) if traced else None
        (launched,) = driver.launches_of(lambda call=call: product_fp8_launch.launch(call))
        assert launched.field("product.taken") > 0
        assert launched.params == params_of(call, launched.field("product.taken"))
        assert launched.source == call.source() and not launched.early
        assert (launched.threads, launched.shared_bytes) == (THREADS, call.product.tiles.shared_bytes(3))
        assert launched.blocks == min(132, call.product.most_tiles)
    assert len(driver.loaded) == 1, "a kernel is loaded once"


def test_other_numbers_of_rows_and_strides_of_scales_take_the_same_kernel(driver: RowsDriver) -> None:
    call = replace(PLAIN, gate=Gate(), outputs=128, quantised=True).product()
    for rows in (1, 16, 50):
        product = replace(call.product, x=call.product.x[:rows].clone(), y=call.product.y[:rows].clone())
        fewer = ScaledProduct(product, torch.ones(rows, 2), call.weight_scales, columns_of(rows, 1))
        (launched,) = driver.launches_of(lambda fewer=fewer: product_fp8_launch.launch(fewer))
        assert launched.params == params_of(fewer, launched.field("product.taken"))
        assert (launched.field("row_stride"), launched.field("block_stride")) == (2, 1)
        assert launched.field("y_scale_stride") == -(-rows // 4) * 4
    assert len(driver.loaded) == 1


def test_maps_are_encoded_once_for_an_address(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[TensorMap] = []
    monkeypatch.setattr(TensorMap, "encoded", lambda tensor: encoded.append(tensor) or emulated_map(tensor))
    call = PLAIN.product()
    for _ in range(3):
        product_fp8_launch.launch(replace(call, row_scales=call.row_scales.clone()))
    assert len(encoded) == 2 + 4
    assert {each.element for each in encoded} == {"uint8"} and {each.box[0] for each in encoded} == {128}


def test_captures_rows_and_alignment_are_as_for_other_products(driver: RowsDriver) -> None:
    call = PLAIN.product()
    product_fp8_launch.launch(replace(call, product=replace(call.product, x=call.product.x[:0])))
    assert driver.enqueued == [] == driver.loaded
    product_fp8_launch.launch(call)
    shifted = torch.zeros(call.product.x.numel() + 1, dtype=torch.uint8)[1:].view(E4M3).view_as(call.product.x)
    with pytest.raises(ConfigError, match="product: x does not begin at a multiple of 16 bytes"):
        product_fp8_launch.launch(replace(call, product=replace(call.product, x=shifted)))
    driver.capturing = True
    with pytest.raises(ConfigError, match="first call of product_fp8 with these shapes is inside a CUDA graph"):
        product_fp8_launch.launch(replace(PLAIN, tiles=ScaledTiles(64, 5)).product())


def test_threads_do_not_mix_their_parameters(driver: RowsDriver) -> None:
    calls = [PLAIN.product() for _ in range(8)]

    def run(call: ScaledProduct) -> None:
        for _ in range(50):
            product_fp8_launch.launch(call)

    threads = [Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(driver.enqueued) == 400
    for launched in driver.enqueued:
        (call,) = (each for each in calls if each.product.y.data_ptr() == launched.field("product.y"))
        assert launched.params == params_of(call, launched.field("product.taken"))


# Which class a product takes, and its tensors.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ScaledProduct]:
    """Record the products instead of launching them."""
    products: list[ScaledProduct] = []
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(product_fp8_launch, "launch", products.append)
    return products


def given(rows: int = 4000, products: int = 256, columns: int = 64) -> list[Any]:
    places = torch.tensor([0, 16, 32], dtype=torch.int64), torch.tensor([3, 0], dtype=torch.int64)
    weight = torch.ones(2, products, columns).to(E4M3), torch.ones(2, -(-products // 128), -(-columns // 128))
    return [quantise(torch.ones(rows, columns)), weight, *places]


def test_all_rows_take_one_class(launched: list[ScaledProduct]) -> None:
    for rows in (32, 4000):
        grouped_linear(*given(rows))
        grouped_swiglu(*given(rows))
    assert [each.product.tiles for each in launched] == [TILES] * 4
    assert [each.product.gate for each in launched] == [None, Gate()] * 2
    assert all(each.product.offsets.dtype == each.product.counts.dtype == torch.int32 for each in launched)


def test_a_pair_needs_no_copy_of_its_scales(launched: list[ScaledProduct]) -> None:
    x, weight, *places = given(rows=30)
    by_column = x[1].T.contiguous().T
    values, scales = grouped_swiglu((x[0], by_column), weight, *places, output=FP8)
    grouped_linear(x, weight, *places)
    first, second = launched
    assert first.row_scales is by_column and second.row_scales is x[1]
    assert first.y_scales is scales and first.product.y is values and scales.stride() == (1, 32)
    assert second.y_scales is None and second.product.y.dtype == BF16


def test_sizes_that_the_kernel_does_not_take_are_refused(launched: list[ScaledProduct]) -> None:
    for operands, function in (
        (given(columns=24), grouped_linear),
        (given(products=40), grouped_linear),
        (given(products=128), grouped_swiglu),
    ):
        with pytest.raises(ConfigError, match=r"multiples of 16.*: pad them, as quantise_experts does"):
            function(*operands)
    grouped_swiglu(*given(products=128), interleaved=True)
    assert len(launched) == 1


def test_512_experts_fit_in_shared_memory() -> None:
    assert TILES.shared_bytes(512) <= SHARED_BYTES


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt_oss"])
def test_quantised_experts_by_the_emulated_kernel_equal_float64(
    monkeypatch: pytest.MonkeyPatch, activation: Any
) -> None:
    """Both products, with 8-bit rows between them, against float64 of the same 8-bit weights."""
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr("raymoe.moe.product_fp8_operators.TILES", ScaledTiles(16, 3))
    monkeypatch.setattr(product_fp8_launch, "launch", run_scaled)
    case = RowsCase((5, 0, 17))
    weights = ModelWeights(case.drawn(3, 144, 48, seed=1, scale=0.2), case.drawn(3, 48, 72, seed=2, scale=0.2))
    if activation == GPT_OSS:
        weights.gate_up_proj_bias, weights.down_proj_bias = case.drawn(3, 144, seed=3), case.drawn(3, 48, seed=4)
    experts, own, exact = quantise_experts(Experts(weights, activation)), case.own(), Exact(case.groups)
    x, share = quantise(case.rows(48, 5)), case.row_weights(6)
    up = dequantised(experts.gate_up_proj.detach().float(), experts.gate_up_proj_scale_inv.detach(), 128)
    down = dequantised(experts.down_proj.detach().float(), experts.down_proj_scale_inv.detach(), 128)
    for factor in (None, share):
        with torch.no_grad():
            y = experts(x, case.groups.offsets, case.groups.counts, factor)
        h = exact.gated(dequantised(x[0].float(), x[1]), up, activation.form, experts.gate_up_proj_bias)
        want = exact.linear(h, down, experts.down_proj_bias, factor)
        near(y[own], want[own], 4e-2)
