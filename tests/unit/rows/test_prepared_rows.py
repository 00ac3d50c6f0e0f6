"""A prepared launch of a function over rows is equal to the one that is computed and checked anew for its tensors."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from raymoe.cuda.launch import Shape
from raymoe.errors import ConfigError
from raymoe.moe.router_formulas import RouterForm
from raymoe.moe.router_kernels import Route, RouteBackward, RouterSums, runs_of
from raymoe.rows.elementwise_kernels import Pointwise, Swiglu, SwigluBackward, new_piece_sums
from raymoe.rows.norm_kernels import LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward
from raymoe.rows.pipe_shape import (
    Limits,
    PipeShape,
    RowWork,
    piece_breaks,
    piece_shape,
    row_breaks,
    row_shape,
)
from raymoe.rows.quantised_rows import Quantise
from raymoe.rows.row_launch import KernelCall
from tests.unit.rows.rows_driver import Counters, Enqueued, RowsDriver

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 2, 3, 5, 48, 49, 127, 128, 132, 133, 192, 193, 512, 513, 1024, 1025, 2500)
HIDDEN = (64, 72, 1032, 4096)
LIMITS = (
    *(Limits(), Limits(), Limits(48), Limits(1), Limits(stages=3), Limits(48, 2), Limits(loading="IN_TURN")),
    *(Limits(batch_invariant=True), Limits(48, batch_invariant=True)),
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RowsDriver:
    rows_driver = RowsDriver(monkeypatch)
    Counters(monkeypatch, rows_driver)
    return rows_driver


class Draw:
    """Draws tensors of one kind after another, mostly with other numbers of rows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pick = self.random.choice
        self.dtype, self.hidden, self.limits = self.pick((BF16, F16, F32)), self.pick(HIDDEN), self.pick(LIMITS)
        self.gap, self.more = self.pick((0, 0, 8)), self.pick((False, True))
        self.rows = 0

    def sizes(self) -> None:
        self.rows = self.pick(ROWS)

    def matrix(self, hidden: int | None = None, dtype: torch.dtype | None = None, gap: int | None = None) -> Any:
        """Rows, contiguous or apart; without a gap perhaps in more dimensions."""
        hidden, dtype, gap = hidden or self.hidden, dtype or self.dtype, self.gap if gap is None else gap
        whole = torch.empty(self.rows, hidden + gap, dtype=dtype)
        if not gap and self.more and self.rows % 2 == 0:
            return whole.view(2, -1, hidden)
        return whole[:, :hidden]

    def vector(self) -> torch.Tensor:
        return torch.empty(self.hidden, dtype=self.dtype)

    def scales(self, layout: str) -> torch.Tensor:
        blocks = -(-self.hidden // 128)
        aligned = -(-self.rows // 4) * 4
        strides = (blocks, 1) if layout == "row" else (1, aligned)
        return torch.empty_strided((self.rows, blocks), strides, dtype=F32)


Made = tuple[Callable[[], None], Sequence[KernelCall]]


def rms_norm(draw: Draw) -> Made:
    call = RmsNorm(draw.matrix(), draw.vector(), draw.matrix(gap=0), 1e-5)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def add_rms_norm(draw: Draw) -> Made:
    added = None, draw.matrix(), draw.matrix(gap=0)
    call = RmsNorm(draw.matrix(), draw.vector(), draw.matrix(gap=0), 1e-6, *added)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def rms_norm_fp8(draw: Draw) -> Made:
    values = draw.matrix(dtype=torch.float8_e4m3fn, gap=0)
    scales = draw.scales("column" if draw.more else "row")
    call = RmsNorm(draw.matrix(), draw.vector(), values, 1e-6, scales)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def layer_norm(draw: Draw) -> Made:
    call = LayerNorm(draw.matrix(), draw.vector(), draw.vector(), draw.matrix(gap=0), 1e-5)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def both(draw: Draw, call: Any) -> list[KernelCall]:
    limits = Limits(min(draw.limits.sms or 132, 132), draw.limits.stages, draw.limits.loading)
    calls = call.kernel_calls(limits)
    return [calls.gradients, calls.sums]


def rms_norm_backward(draw: Draw) -> Made:
    total = draw.matrix(gap=0) if draw.more else None
    tensors = draw.matrix(), draw.matrix(gap=0), draw.vector(), draw.matrix(gap=0), draw.vector()
    call = RmsNormBackward(*tensors, 1e-6, total)
    return lambda: call.launch(draw.limits), both(draw, call)


def layer_norm_backward(draw: Draw) -> Made:
    tensors = draw.matrix(gap=0), draw.matrix(), draw.vector(), draw.matrix(gap=0), draw.vector(), draw.vector()
    call = LayerNormBackward(*tensors, 1e-6)
    return lambda: call.launch(draw.limits), both(draw, call)


def swiglu(draw: Draw) -> Made:
    offsets = torch.zeros(draw.pick((2, 9)), dtype=torch.int32) if draw.more else None
    weights = torch.zeros(draw.rows) if draw.limits.sms else None
    out = draw.matrix(gap=0)
    call = Swiglu(draw.matrix(2 * draw.hidden), out, offsets, None, weights)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def swiglu_fp8(draw: Draw) -> Made:
    values = draw.matrix(dtype=torch.float8_e4m3fn, gap=0)
    scales = draw.scales("column" if draw.more else "row")
    call = Swiglu(draw.matrix(2 * draw.hidden), values, None, scales)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def quantise(draw: Draw) -> Made:
    values, scales = draw.matrix(dtype=torch.float8_e4m3fn, gap=0), draw.scales("column")
    call = Quantise(draw.matrix(), values, scales)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def swiglu_backward(draw: Draw) -> Made:
    offsets = torch.zeros(9, dtype=torch.int32) if draw.more else None
    gate_up, weights, sums = draw.matrix(2 * draw.hidden), None, None
    if draw.limits.sms:
        weights = torch.zeros(draw.rows)
        sums = new_piece_sums(gate_up, offsets, draw.limits)
    into = draw.matrix(2 * draw.hidden, gap=0)
    call = SwigluBackward(draw.matrix(), gate_up, into, offsets, weights, sums)
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def pointwise(draw: Draw) -> Made:
    column = draw.matrix(8, gap=0)[..., :1] if draw.limits.sms else draw.matrix(1, gap=0)
    column = column if column.is_contiguous() else column.reshape(-1, 1)
    inputs = [draw.matrix(), draw.vector(), draw.matrix(gap=0), column][: draw.pick((1, 4))]
    call = Pointwise(f"of {len(inputs)}", inputs, draw.matrix(gap=0))
    return lambda: call.launch(draw.limits), [call.kernel_call(draw.limits)]


def route(draw: Draw) -> Made:
    bias = torch.zeros(64) if draw.more else None
    form = RouterForm(64, 4, "sigmoid", scale=2.5, groups=8, topk_groups=4)
    results = torch.zeros(draw.rows, 4, dtype=torch.int64), torch.zeros(draw.rows, 4)
    kernel = Route(form, torch.zeros(draw.rows, 64, dtype=draw.dtype), bias, *results)
    return kernel.launch, [kernel.kernel_call()]


def route_backward(draw: Draw) -> Made:
    tensors = torch.zeros(draw.rows, 64, dtype=draw.dtype), torch.zeros(draw.rows, 4, dtype=torch.int64)
    form, dweights = RouterForm(64, 4, normalise=draw.more, scale=2.5), torch.zeros(draw.rows, 4)
    kernel = RouteBackward(form, dweights, *tensors, torch.zeros(draw.rows, 64, dtype=draw.dtype))
    return kernel.launch, [kernel.kernel_call()]


def router_sums(draw: Draw) -> Made:
    runs, _ = runs_of(draw.rows)
    tensors = torch.zeros(draw.rows, 64, dtype=draw.dtype), torch.zeros(draw.rows, 4, dtype=torch.int64)
    kernel = RouterSums(draw.more, *tensors, torch.zeros(runs, 64), torch.zeros(runs, 64, dtype=torch.int32))
    return kernel.launch, [kernel.kernel_call()]


FUNCTIONS: list[Callable[[Draw], Made]] = [
    *(rms_norm, add_rms_norm, rms_norm_fp8, layer_norm, rms_norm_backward, layer_norm_backward, swiglu, swiglu_fp8),
    *(swiglu_backward, quantise, pointwise, route, route_backward, router_sums),
]
UNLIMITED = (route, route_backward, router_sums)
"""They take no number of SMs."""
NOT_COMPARED = ("partials", "work.taken")
"""Memory that each call has of its own."""


def differences(found: Enqueued, want: KernelCall, sms: int) -> list[str]:
    shape = Shape(want.blocks(sms), want.threads, want.shared_bytes)
    params = bytearray(bytes(want.params.packed()))
    enqueued = bytearray(found.params)
    for name in NOT_COMPARED:
        if name in want.params.offsets():
            offset, size = want.params.place(name)
            params[offset : offset + size] = enqueued[offset : offset + size] = bytes(size)
    equal = {
        "source": found.source == want.source,
        "shape": Shape(found.blocks, found.threads, found.shared_bytes) == shape,
        "early": found.early == want.early,
        "params": params == enqueued,
    }
    return [name for name, same in equal.items() if not same]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_a_prepared_launch_is_the_one_that_is_computed_anew(
    function: Callable[[Draw], Made], driver: RowsDriver
) -> None:
    for seed in range(16):
        draw = Draw(seed)
        for _ in range(25):
            draw.sizes()
            launch, wanted = function(draw)
            found = driver.launches_of(launch)
            assert len(found) == len(wanted)
            for launched, want in zip(found, wanted, strict=True):
                sms = 132 if function in UNLIMITED else min(draw.limits.sms or 132, 132)
                assert not differences(launched, want, sms), f"{function.__name__}, seed {seed}, {draw.rows} rows"
    packed = len(driver.loaded)
    assert packed < len(driver.enqueued) / 2, "kernels are shared"


def test_a_second_call_of_a_kind_computes_nothing_anew(driver: RowsDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(0)
    for function in FUNCTIONS:
        draw.rows = 300
        function(draw)[0]()
        draw.rows = 310
        launch, _ = function(draw)
        with monkeypatch.context() as patched:
            patched.setattr(KernelCall, "__post_init__", lambda *_: pytest.fail("a call was computed anew"))
            assert driver.launches_of(launch)


def test_tensors_of_another_kind_are_checked(driver: RowsDriver) -> None:
    x, weight, out = torch.zeros(40, 64), torch.zeros(64), torch.zeros(40, 64)
    RmsNorm(x, weight, out).launch()
    flat = torch.zeros(40 * 64 + 1)
    for wrong in (
        RmsNorm(flat[1:].view(40, 64), weight, out),
        RmsNorm(x, torch.zeros(65)[1:], out),
        RmsNorm(x, torch.zeros(128)[::2], out),
        RmsNorm(x, weight, torch.zeros(39, 64)),
        RmsNorm(x, weight, torch.zeros(64, 40).T),
        RmsNorm(torch.zeros(40, 66)[:, :64], weight, out),
        RmsNorm(x, weight, out.half()),
        RmsNorm(x, weight, out, residual=x),
    ):
        with pytest.raises(ConfigError):
            wrong.launch()
    assert len(driver.enqueued) == 1


def works() -> list[tuple[RowWork, Limits]]:
    pick = random.Random(7).choice
    drawn = []
    for _ in range(120):
        item, inputs = pick((2, 4)), pick((1, 2, 3))
        limits = Limits(
            pick((None, None, 1, 7, 48, 132)),
            pick((None, None, 1, 4, 9)),
            pick((None, None, "PIPED", "ROW")),
            pick((False, False, True)),
        )
        hidden = pick((8, 64, 72, 128, 1024, 4096, 4104, 7168, 16384, 32768))
        flags = [pick((False, False, True)) for _ in range(4)]
        work = RowWork(1, hidden, 8 * item * inputs, inputs, pick((8, 12, 20, 36)), pick((0, 0, 1, 2)), *flags)
        drawn.append((work, limits))
    return drawn


@pytest.mark.parametrize(("choose", "breaks_of"), [(row_shape, row_breaks), (piece_shape, piece_breaks)])
def test_numbers_of_rows_between_two_breaks_have_one_shape(
    choose: Callable[[RowWork, Limits], PipeShape], breaks_of: Callable[[RowWork, Limits], tuple[int, ...]]
) -> None:
    numbers = random.Random(9)
    for work, limits in works():
        breaks = breaks_of(work, limits)
        near = {each + by for each in breaks for by in (-1, 0, 1)}
        shapes: dict[int, PipeShape] = {}
        for rows in sorted({*range(1, 300, 7), *near, *(numbers.randrange(1, 300_000) for _ in range(30))} - {0}):
            shape = choose(replace(work, rows=rows), limits)
            assert shapes.setdefault(bisect_right(breaks, rows), shape) == shape, f"{work}, {limits}, {rows} rows"
