"""The launches of product.cu: which kernel a product takes, and what a prepared launch gives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch

from raymoe.cuda.tensor_map import EncodedMap, TensorMap
from raymoe.errors import ConfigError
from raymoe.moe import (
    grouped_linear,
    grouped_swiglu,
    kept_maps,
    outer_launch,
    product_launch,
)
from raymoe.moe.expert_rows import Groups
from raymoe.moe.experts import GPT_OSS, SWIGLU, Experts, ModelWeights
from raymoe.moe.left_sms import leaving
from raymoe.moe.outer_products import OuterProduct
from raymoe.moe.products import THREADS, TILES, Gate, Product, TileClass
from tests.emulator.build import compiler
from tests.emulator.tensor_map import emulated_map
from tests.unit.moe.emulated_outer import run_outer
from tests.unit.moe.emulated_product import run_product
from tests.unit.moe.grouped_cases import Exact, RowsCase, near
from tests.unit.rows.rows_driver import Counters, RowsDriver

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RowsDriver:
    """A GPU that records launches, with maps as the emulator has them."""
    rows_driver = RowsDriver(monkeypatch)
    Counters(monkeypatch, rows_driver)
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(TensorMap, "encoded", emulated_map)
    return rows_driver


def product(
    rows: int = 100,
    gate: Gate | None = None,
    tiles: TileClass = TILES,
    dtype: torch.dtype = BF16,
    transposed: bool = False,
    **others: Any,
) -> Product:
    outputs, columns = 48, 72
    products = outputs * (1 if gate is None else 2)
    weight, y = torch.zeros(3, products, columns, dtype=dtype), torch.zeros(rows, outputs, dtype=dtype)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    x, places = torch.zeros(rows, columns, dtype=dtype), (torch.zeros(size, dtype=torch.int32) for size in (4, 3))
    return Product(x, weight, *places, y, gate, tiles=tiles, **others)


FORMS: list[dict[str, Any]] = [
    {},
    {"tiles": TileClass(96, 5)},
    {"gate": Gate()},
    {"gate": Gate(True, 1.702, 7.0, 1.0), "gate_up": torch.zeros(100, 96, dtype=BF16), "zero_gaps": True},
    {"bias": torch.zeros(3, 48, dtype=BF16), "row_weights": torch.zeros(100)},
    {"dtype": F16},
    {"transposed": True},
    {"trace": torch.zeros(132, 16, dtype=torch.int64)},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prepared_launches_have_the_parameters_of_their_tensors(driver: RowsDriver, form: dict[str, Any]) -> None:
    """The second one has other tensors than the one that was prepared."""
    for _ in range(3):
        call = product(**form)
        (launched,) = driver.launches_of(lambda call=call: product_launch.launch(call))
        first, second, tokens = call.maps()
        encoded = emulated_map(first), emulated_map(second), tuple(map(emulated_map, tokens))
        assert launched.field("taken") > 0
        assert launched.params == bytes(call.params(encoded, launched.field("taken")).packed())
        assert launched.source == call.source() and not launched.early
        assert (launched.threads, launched.shared_bytes) == (THREADS, call.tiles.shared_bytes(3))
        assert launched.blocks == min(132, call.most_tiles)
    assert len(driver.loaded) == 1, "a kernel is loaded once"


def test_transposed_weights_of_the_same_shape_take_another_kernel(driver: RowsDriver) -> None:
    calls = [product(), product(transposed=True)] * 2
    for call in calls:
        (launched,) = driver.launches_of(lambda call=call: product_launch.launch(call))
        assert launched.source == call.source()
    assert len(driver.loaded) == 2


def test_other_numbers_of_rows_take_the_same_kernel(driver: RowsDriver) -> None:
    for rows in (1, 16, 1000, 100_000):
        call = product(rows)
        (launched,) = driver.launches_of(lambda call=call: product_launch.launch(call))
        assert launched.blocks == min(132, min(3, rows) + rows // 176)
        offset, nbytes = launched.source.structs[0].offsets()["tokens"], 4 * 128
        maps = b"".join(bytes(emulated_map(each).packed()) for each in call.token_maps())
        assert launched.params[offset : offset + nbytes] == maps
    assert len(driver.loaded) == 1


def test_products_leave_the_sms_that_they_are_told_to(driver: RowsDriver) -> None:
    call = product(100_000)
    with leaving(32):
        (launched,) = driver.launches_of(lambda: product_launch.launch(call))
    assert launched.blocks == 100
    (launched,) = driver.launches_of(lambda: product_launch.launch(call))
    assert launched.blocks == 132


def test_maps_are_encoded_once_for_an_address(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[TensorMap] = []
    monkeypatch.setattr(TensorMap, "encoded", lambda tensor: encoded.append(tensor) or emulated_map(tensor))
    call = product()
    for _ in range(3):
        product_launch.launch(call)
    assert len(encoded) == 2 + 4
    product_launch.launch(replace(call, x=torch.zeros_like(call.x)))
    assert len(encoded) == 2 + 4 + 4
    product_launch.launch(replace(call, weight=torch.zeros_like(call.weight)))
    assert len(encoded) == 2 + 4 + 4 + 2
    product_launch.launch(call)
    product_launch.launch(replace(call, x=call.x[:60], y=call.y[:60]))
    assert len(encoded) == 2 + 4 + 4 + 2 + 4, "fewer rows at the same address have other maps"
    assert len(driver.enqueued) == 7


def test_no_more_maps_are_kept_than_a_limit(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_maps, "MOST_MAPS", 2)
    call = product()
    some = [call, *(replace(call, x=torch.zeros_like(call.x)) for _ in range(5))]
    for each in some * 2:
        (launched,) = driver.launches_of(lambda each=each: product_launch.launch(each))
        maps = b"".join(bytes(emulated_map(tensor).packed()) for tensor in each.token_maps())
        assert maps in launched.params
    (prepared,) = (found for kind in driver.device._kinds.values() for found in kind.launches.values())
    assert len(prepared._token_maps._kept) == 2


def test_maps_are_encoded_in_the_context_of_the_gpu(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of autograd has no current context, which the driver refuses."""
    inside = []

    @contextmanager
    def current() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def encoded(tensor: TensorMap) -> EncodedMap:
        assert inside, "no context is current"
        return emulated_map(tensor)

    monkeypatch.setattr(driver.gpu, "current", current)
    monkeypatch.setattr(TensorMap, "encoded", encoded)
    product_launch.launch(product())
    rows, places = torch.zeros(100, 48, dtype=BF16), (torch.zeros(size, dtype=torch.int32) for size in (4, 3))
    outer_launch.launch(OuterProduct(rows, torch.zeros(100, 72, dtype=BF16), *places, torch.zeros(3, 48, 72)))
    assert len(driver.enqueued) == 2


def test_streams_and_captures_have_counters_of_their_own(driver: RowsDriver) -> None:
    call = product()

    def counter() -> int:
        (launched,) = driver.launches_of(lambda: product_launch.launch(call))
        return launched.field("taken")

    first, again = counter(), counter()
    driver.stream = 6
    other = counter()
    driver.capturing = True
    captured = {counter() for _ in range(3)}
    assert first == again != other and len(captured) == 3 and not captured & {first, other}


def test_a_first_call_inside_a_capture_is_refused(driver: RowsDriver) -> None:
    driver.capturing = True
    with pytest.raises(ConfigError, match="first call of product with these shapes is inside a CUDA graph"):
        product_launch.launch(product())


def test_no_rows_are_no_launch(driver: RowsDriver) -> None:
    product_launch.launch(product(0))
    assert driver.enqueued == [] == driver.loaded


def test_memory_that_is_not_aligned_is_refused_also_in_later_calls(driver: RowsDriver) -> None:
    call = product()
    product_launch.launch(call)
    shifted = torch.zeros(100 * 72 + 1, dtype=BF16)[1:].view(100, 72)
    with pytest.raises(ConfigError, match="product: x does not begin at a multiple of 16 bytes"):
        product_launch.launch(replace(call, x=shifted))


def test_threads_do_not_mix_their_parameters(driver: RowsDriver) -> None:
    calls = [product() for _ in range(8)]

    def run(call: Product) -> None:
        for _ in range(50):
            product_launch.launch(call)

    threads = [Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(driver.enqueued) == 400
    for launched in driver.enqueued:
        (call,) = (each for each in calls if each.y.data_ptr() == launched.field("y"))
        first, second, tokens = call.maps()
        encoded = emulated_map(first), emulated_map(second), tuple(map(emulated_map, tokens))
        assert launched.params == bytes(call.params(encoded, launched.field("taken")).packed())


# Which kernel a product takes.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the builds of product.cu instead of launching them; results are zeros."""
    builds: list[str] = []

    def by_product(call: Product) -> None:
        for tensor in (call.y, call.gate_up):
            if tensor is not None:
                tensor.zero_()
        assert call.tiles is TILES
        builds.append("product" if call.gate is None else "gated product")

    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(product_launch, "launch", by_product)
    return builds


def given(rows: int = 4000, outputs: int = 64, columns: int = 64, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    places = torch.tensor([0, 16, 32], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    return [torch.ones(rows, columns, dtype=dtype), torch.ones(2, outputs, columns, dtype=dtype), *places]


def test_any_number_of_rows_with_any_switch_takes_the_kernel(kernels: list[str]) -> None:
    bias, weights = torch.ones(2, 64, dtype=BF16), torch.ones(4000)
    for function in (grouped_linear, grouped_swiglu):
        for rows in (1, 33, 4000):
            function(*given(rows), expected_rows=rows)
        function(*given(), bias=bias)
        function(*given(), row_weights=weights)
        x, weight, *places = given()
        function(x, weight.requires_grad_(), *places)
        function(*given(columns=48))
        function(*given(dtype=F16))
    for switches in ({"interleaved": True}, {"limit": 7.0}, {"return_gate_up": True}):
        grouped_swiglu(*given(), **switches)
    assert kernels == ["product"] * 8 + ["gated product"] * 11


def test_weights_may_be_transposed_without_a_gate(kernels: list[str]) -> None:
    x, weight, *places = given()
    grouped_linear(x, weight.transpose(1, 2).contiguous().transpose(1, 2), *places)
    grouped_linear(x, weight[:, ::2], *places)
    assert kernels == ["product"]


def test_products_that_no_kernel_takes_are_those_of_torch(kernels: list[str]) -> None:
    for call in (given(outputs=24), given(columns=12), given(dtype=F32)):
        y = grouped_linear(*call)
        assert bool((y[:3] == call[0].shape[1]).all())
    x, weight, *_ = given()
    assert not product_launch.takes(x, weight.transpose(1, 2).contiguous().transpose(1, 2), Gate())
    assert not product_launch.takes(x, torch.empty(100_000, 16, 64, dtype=BF16, device="meta"), None)
    assert kernels == []


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt_oss"])
def test_experts_on_a_gpu_take_it_with_and_without_gradients(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch, activation: Any, weighted: bool
) -> None:
    monkeypatch.setattr("raymoe.moe.experts._in_kernels", lambda _: True)
    monkeypatch.setattr("raymoe.moe.expert_rows._in_kernels", lambda _: False)
    weights = ModelWeights(torch.ones(2, 128, 64, dtype=BF16), torch.ones(2, 64, 64, dtype=BF16))
    if activation == GPT_OSS:
        weights.gate_up_proj_bias, weights.down_proj_bias = (torch.ones(2, width, dtype=BF16) for width in (128, 64))
    experts, (x, _, *places) = Experts(weights, activation), given()
    share = torch.ones(len(x)) if weighted else None
    with torch.no_grad():
        experts(x, *places, share)
    assert experts(x, *places, share).requires_grad
    assert kernels == ["gated product", "product"] * 2


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt_oss"])
def test_experts_by_the_emulated_kernel_equal_float64(monkeypatch: pytest.MonkeyPatch, activation: Any) -> None:
    """Inference and training. Gaps of results begin with NaN."""
    monkeypatch.setattr("raymoe.moe.experts._in_kernels", lambda _: True)
    monkeypatch.setattr("raymoe.moe.expert_rows._in_kernels", lambda _: False)
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    zeroed: list[bool] = []

    def emulate(call: Product) -> None:
        zeroed.append(call.zero_gaps)
        for tensor in (call.y, call.gate_up):
            if tensor is not None:
                tensor.fill_(torch.nan)
        run_product(replace(call, tiles=TileClass(16, 2)))

    def emulate_outer(call: OuterProduct) -> None:
        call.d_weight.fill_(torch.nan)
        run_outer(call)
        outer.append(call)

    outer: list[OuterProduct] = []
    monkeypatch.setattr(product_launch, "launch", emulate)
    monkeypatch.setattr(outer_launch, "launch", emulate_outer)
    case = RowsCase((5, 0, 17))
    up, down = case.drawn(3, 64, 48, seed=1, scale=0.2), case.drawn(3, 32, 32, seed=2, scale=0.2)
    weights, biased = ModelWeights(up, down), activation == GPT_OSS
    if biased:
        weights.gate_up_proj_bias, weights.down_proj_bias = case.drawn(3, 64, seed=3), case.drawn(3, 32, seed=4)
    experts, own = Experts(weights, activation), case.own()
    x, share = case.rows(48, 5), case.row_weights(6).where(own, 0.0)
    x[: case.starts[-1]][~own[: case.starts[-1]]] = 0
    exact, groups = Exact(case.groups), (case.groups.offsets, case.groups.counts)
    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    for factor in (None, share):
        with torch.no_grad():
            inferred = experts(x, *groups, factor)
        leaf = x.clone().requires_grad_()
        trained = experts(leaf, *groups, factor)
        same = [each.detach().double().requires_grad_() for each in (x, up, down)]
        h = exact.gated(same[0], same[1], activation.form, biases[0])
        wanted = exact.linear(h, same[2], biases[1], factor)
        for have in (inferred, trained):
            near(have[own], wanted[own], 2e-2)
        assert zeroed == [False, False, True, False], "of the second product's results there is no other product"
        zeroed.clear()
        dy = case.rows(32, 7).where(own[:, None], 0)
        found = torch.autograd.grad(trained, [leaf, experts.gate_up_proj, experts.down_proj], dy)
        assert zeroed == [True, True] and len(outer) == 2, "both gradients of both products are by kernels"
        zeroed.clear()
        outer.clear()
        for have, want in zip(found, torch.autograd.grad(wanted, same, dy.double()), strict=True):
            near(have[own] if have.shape == x.shape else have, want[own] if have.shape == x.shape else want, 2e-2)


def test_groups_are_read_as_int32(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[Product] = []
    monkeypatch.setattr(product_launch, "launch", products.append)
    x, weight, offsets, counts = given()
    groups = Groups(offsets.long(), counts.long())
    grouped_linear(x, weight, groups.offsets, groups.counts)
    (call,) = products
    assert call.offsets.dtype == call.counts.dtype == torch.int32 and kernels == []
