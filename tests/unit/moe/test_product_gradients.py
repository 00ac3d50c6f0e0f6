"""The gradients of products: their launches, their operators, `main_grad`, and NaN in gaps by the emulated kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.cuda.tensor_map import TensorMap
from raymoe.errors import ConfigError
from raymoe.moe import grouped_linear, grouped_swiglu, outer_launch, product_launch
from raymoe.moe import product_operators as operators
from raymoe.moe.expert_kernels import ActivationForm
from raymoe.moe.outer_products import SHARED_BYTES, THREADS, OuterProduct
from raymoe.moe.product_gradients import add_weight_gradient, rows_gradient, weight_gradient
from raymoe.moe.products import Product
from tests.emulator.build import compiler
from tests.emulator.tensor_map import emulated_map
from tests.unit.moe.emulated_outer import run_outer
from tests.unit.moe.emulated_product import SMALL, run_product
from tests.unit.moe.gradient_cases import close
from tests.unit.moe.grouped_cases import Exact, RowsCase, near
from tests.unit.rows.rows_driver import Counters, RowsDriver

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COUNTS = (5, 0, 16, 1, 23)


# Launches.


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RowsDriver:
    """A GPU that records launches, with maps as the emulator has them."""
    rows_driver = RowsDriver(monkeypatch)
    Counters(monkeypatch, rows_driver)
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(TensorMap, "encoded", emulated_map)
    return rows_driver


def outer(rows: int = 100, dtype: torch.dtype = BF16, adds: bool = False) -> OuterProduct:
    dy, x = torch.zeros(rows, 136, dtype=dtype), torch.zeros(rows, 72, dtype=dtype)
    places = (torch.zeros(size, dtype=torch.int32) for size in (4, 3))
    return OuterProduct(dy, x, *places, torch.ones(3, 136, 72, dtype=F32 if adds else dtype))


@pytest.mark.parametrize("form", [{}, {"adds": True}, {"dtype": F16}, {"dtype": F16, "adds": True}], ids=str)
def test_prepared_launches_have_the_parameters_of_their_tensors(driver: RowsDriver, form: dict[str, Any]) -> None:
    """Later ones have other tensors than the one that was prepared, with other numbers of rows."""
    for rows in (100, 60, 3000):
        call = outer(rows, **form)
        (launched,) = driver.launches_of(lambda call=call: outer_launch.launch(call))
        dy, x = call.maps()
        encoded = emulated_map(dy), emulated_map(x)
        assert launched.field("taken") > 0
        assert launched.params == bytes(call.params(encoded, launched.field("taken")).packed())
        assert launched.source == call.source() and not launched.early
        assert (launched.threads, launched.shared_bytes) == (THREADS, SHARED_BYTES)
        assert launched.blocks == call.tiles == 6
    assert len(driver.loaded) == 1, "a kernel is loaded once"


def test_blocks_are_as_many_as_sms_at_most(driver: RowsDriver) -> None:
    call = replace(outer(), d_weight=torch.ones(300, 136, 72, dtype=BF16), counts=torch.zeros(300, dtype=torch.int32))
    (launched,) = driver.launches_of(lambda: outer_launch.launch(call))
    assert launched.blocks == 132


def test_maps_are_encoded_once_for_an_address(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[TensorMap] = []
    monkeypatch.setattr(TensorMap, "encoded", lambda tensor: encoded.append(tensor) or emulated_map(tensor))
    call = outer()
    for _ in range(3):
        outer_launch.launch(call)
    outer_launch.launch(replace(call, dy=call.dy[:60], x=call.x[:60]))
    assert len(encoded) == 2
    outer_launch.launch(replace(call, x=torch.zeros_like(call.x)))
    assert len(encoded) == 3 and len(driver.enqueued) == 5


def test_results_without_rows_are_zeros_and_sums_stay(driver: RowsDriver) -> None:
    plain, adds = outer(0), outer(0, adds=True)
    for call in (plain, adds):
        outer_launch.launch(call)
    assert not plain.d_weight.any() and bool((adds.d_weight == 1).all())
    assert driver.enqueued == [] == driver.loaded


def test_memory_that_is_not_aligned_is_refused_also_in_later_calls(driver: RowsDriver) -> None:
    call = outer()
    outer_launch.launch(call)
    shifted = torch.zeros(100 * 72 + 1, dtype=BF16)[1:].view(100, 72)
    with pytest.raises(ConfigError, match="outer product: x does not begin at a multiple of 16 bytes"):
        outer_launch.launch(replace(call, x=shifted))


def test_a_first_call_inside_a_capture_is_refused(driver: RowsDriver) -> None:
    driver.capturing = True
    with pytest.raises(ConfigError, match="first call of outer_product with these shapes is inside a CUDA graph"):
        outer_launch.launch(outer())


# Which kernel a gradient takes.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Product | OuterProduct]:
    """Record the kernels' calls instead of launching them."""
    recorded: list[Product | OuterProduct] = []
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(product_launch, "launch", recorded.append)
    monkeypatch.setattr(outer_launch, "launch", recorded.append)
    return recorded


def test_the_gradient_of_rows_reads_the_weights_as_they_are(calls: list[Product]) -> None:
    case = RowsCase((300, 2))
    weight, dy = case.drawn(2, 64, 48, seed=1), case.rows(64, 2)
    assert rows_gradient(dy, weight, case.groups).shape == (case.capacity, 48)
    (call,) = calls
    assert call.zero_gaps and call.transposed and call.gate is None
    assert call.weight.data_ptr() == weight.data_ptr() and call.x is dy


def test_the_gradient_of_transposed_weights_reads_them_as_they_are(calls: list[Product]) -> None:
    case = RowsCase((30, 2))
    memory = case.drawn(2, 48, 64, seed=1)
    rows_gradient(case.rows(64, 2), memory.transpose(1, 2), case.groups)
    (call,) = calls
    assert not call.transposed and call.weight.data_ptr() == memory.data_ptr()


def test_gradients_of_weights_take_the_kernel_of_outer_products(calls: list[OuterProduct]) -> None:
    case = RowsCase((30, 2))
    dy, x, total = case.rows(64, 1), case.rows(24, 2), torch.zeros(2, 64, 24)
    assert weight_gradient(dy, x, case.groups).dtype == BF16
    add_weight_gradient(total, dy, x, case.groups)
    assert [call.adds for call in calls] == [False, True] and calls[1].d_weight is total
    assert all(call.offsets.dtype == call.counts.dtype == torch.int32 for call in calls)


@pytest.mark.parametrize(
    "total", [torch.zeros(2, 24, 64).transpose(1, 2), torch.zeros(2 * 64 * 24 + 1)[1:].view(2, 64, 24)]
)
def test_sums_that_the_kernel_cannot_add_to_get_its_results_added(
    monkeypatch: pytest.MonkeyPatch, total: torch.Tensor
) -> None:
    case = RowsCase((30, 2))
    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(outer_launch, "launch", lambda call: call.d_weight.fill_(3.0))
    for turn in (1, 2):
        add_weight_gradient(total, case.rows(64, 1), case.rows(24, 2), case.groups)
        assert bool((total == 3.0 * turn).all())


@pytest.mark.parametrize(("outputs", "columns", "dtype"), [(20, 24, BF16), (64, 20, BF16), (64, 24, F32)])
def test_what_no_kernel_takes_is_torchs(calls: list[Any], outputs: int, columns: int, dtype: torch.dtype) -> None:
    case = RowsCase(COUNTS, dtype=dtype)
    dy, x, weight = case.rows(outputs, 1), case.rows(columns, 2), case.drawn(5, outputs, columns, seed=3)
    exact = Exact(case.groups)
    own = case.own()
    dx, d_weight = rows_gradient(dy, weight, case.groups), weight_gradient(dy, x, case.groups)
    near(dx[own], exact.linear(dy, weight.transpose(1, 2))[own], 2**-7)
    near(d_weight, outer_of(case, dy, x), 2**-7)
    assert calls == []


def outer_of(case: RowsCase, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parts = [slice(start, start + count) for start, count in zip(case.starts, case.counts, strict=False)]
    return torch.stack([dy[part].double().T @ x[part].double() for part in parts])


# Operators, and `main_grad`.


def test_operators_pass_opcheck() -> None:
    ops, case = torch.ops.raymoe, RowsCase(COUNTS, dtype=F32)
    places = case.groups.offsets, case.groups.counts
    dy, x, weight = case.rows(6, 1), case.rows(8, 2), case.drawn(5, 6, 8, seed=3)
    torch.library.opcheck(ops.product_rows_gradient, (dy, weight, *places, False))
    torch.library.opcheck(ops.product_weight_gradient, (dy, x, *places, False))
    torch.library.opcheck(ops.add_weight_gradient, (torch.zeros(5, 6, 8), dy, x, *places, False))


@pytest.mark.parametrize("weighted", [False, True])
def test_micro_batches_add_to_main_grad(weighted: bool) -> None:
    """Both forward passes come before both backward passes. Sums are not rounded to the dtype of the weights."""
    case = RowsCase(COUNTS)
    up, down = (case.drawn(5, *shape, seed=seed).requires_grad_() for seed, shape in enumerate([(24, 8), (16, 12)]))
    totals, groups = [torch.ones(5, 24, 8), torch.ones(5, 16, 12)], (case.groups.offsets, case.groups.counts)
    weights = case.row_weights(9) if weighted else None
    results = []
    for seed in (3, 4):
        x = case.rows(8, seed).requires_grad_()
        h = grouped_swiglu(x, up, *groups, row_weights=weights, main_grad=totals[0])
        results.append((x, grouped_linear(h, down, *groups, main_grad=totals[1])))
    same = [each.detach().double().requires_grad_() for each in (up, down)]
    wanted: list[torch.Tensor] = [torch.ones_like(each) for each in same]
    exact, own = Exact(case.groups), case.own()
    for seed, (x, y) in enumerate(results):
        dy = case.rows(16, 5 + seed)
        assert torch.autograd.grad(y, [up, down, x], dy, allow_unused=True)[:2] == (None, None)
        z = exact.linear(exact.gated(x.detach().double(), same[0], ActivationForm(), None, weights), same[1])
        gradients = torch.autograd.grad(z[own], same, dy[own].double())
        wanted = [total + gradient for total, gradient in zip(wanted, gradients, strict=True)]
    for have, want in zip(totals, wanted, strict=True):
        close("main_grad", have, want, 2e-2)


@pytest.mark.parametrize("function", [grouped_linear, grouped_swiglu])
def test_compiled_functions_add_to_main_grad(function: Any) -> None:
    case = RowsCase(COUNTS, dtype=F32)
    x, weight, places = case.rows(8, 1), case.drawn(5, 12, 8, seed=2), (case.groups.offsets, case.groups.counts)
    weight.requires_grad_()
    totals = torch.ones(5, 12, 8), torch.ones(5, 12, 8)
    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    for run, total in zip((function, compiled), totals, strict=True):
        for _ in range(2):
            y = run(x, weight, *places, main_grad=total)
            y.backward(case.rows(y.shape[1], 3))
    assert weight.grad is None and not torch.equal(totals[0], torch.ones(5, 12, 8))
    torch.testing.assert_close(totals[1], totals[0])


def test_main_grad_of_another_form_is_refused() -> None:
    x, weight, places = torch.ones(8, 4), torch.ones(2, 6, 4), (torch.tensor([0, 4, 8]), torch.tensor([1, 2]))
    for wrong in (torch.zeros(2, 6, 4, dtype=F64), torch.zeros(2, 4, 6), torch.zeros(2, 6, 4, requires_grad=True)):
        for function in (grouped_linear, grouped_swiglu):
            with pytest.raises(ConfigError, match=rf"{function.__name__}: main_grad is .*; float32 \[2, 6, 4\]"):
                function(x, weight, *places, main_grad=wrong)


# The kernels.


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles kernels for a CPU")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_gradients_by_the_emulated_kernels_with_nan_in_gaps(
    monkeypatch: pytest.MonkeyPatch, weighted: bool, into: bool
) -> None:
    """Rows of no expert are NaN in x and in the gradient of the result; no pass makes them zero."""

    def emulate(call: Product) -> None:
        for tensor in (call.y, call.gate_up):
            if tensor is not None:
                tensor.fill_(torch.nan)
        run_product(replace(call, tiles=SMALL))

    def emulate_outer(call: OuterProduct) -> None:
        if not call.adds:
            call.d_weight.fill_(torch.nan)
        run_outer(call)

    monkeypatch.setattr(product_launch, "has_kernel", lambda _: True)
    monkeypatch.setattr(product_launch, "launch", emulate)
    monkeypatch.setattr(outer_launch, "launch", emulate_outer)
    if not weighted:
        monkeypatch.setattr(operators, "zero_gaps", None)
    case = RowsCase((5, 0, 17), alignment=4)
    x, weight = case.rows(16, 1).requires_grad_(), case.drawn(3, 32, 16, seed=2, scale=0.2).requires_grad_()
    share = case.row_weights(3).requires_grad_() if weighted else None
    total = torch.ones(3, 32, 16) if into else None
    y = grouped_linear(x, weight, case.groups.offsets, case.groups.counts, row_weights=share, main_grad=total)
    dy, own = case.rows(32, 4), case.own()
    leaves = [x, weight, share] if weighted else [x, weight]
    found = torch.autograd.grad(y, leaves, dy, allow_unused=into)
    same = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = Exact(case.groups).linear(same[0], same[1], None, same[2] if weighted else None)
    wanted = torch.autograd.grad(z[own], same, dy[own].double())
    near(found[0][own], wanted[0][own], 2e-2)
    assert not found[0][case.zeroed_gaps()].any()
    if total is None:
        near(found[1], wanted[1], 2e-2)
    else:
        assert found[1] is None
        near(total, wanted[1] + 1, 2e-2)
    if weighted:
        near(found[2][own], wanted[2][own], 2e-2)
