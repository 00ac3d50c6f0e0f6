"""The kernels that work on each element alone, emulated, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from raymoe.device import pipe_shape
from raymoe.device.pipe_pieces import (
    Pointwise,
    Swiglu,
    SwigluBackward,
    pointwise_call,
    swiglu_backward_call,
    swiglu_call,
)
from raymoe.device.pipe_shape import Limits
from raymoe.errors import ConfigError
from tests.unit.emulated_pipe import SENTINEL, Strided, close, filled, judge_fp8, run_call, scales_for, tensors_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PIPED = Limits(loading="PIPED")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of three warps that compute, and short pieces, so that every loop wraps on small tensors."""
    monkeypatch.setattr(pipe_shape, "CONSUMER_WARPS", 3)
    monkeypatch.setattr(pipe_shape, "PLAIN_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "PIECE", 48)
    monkeypatch.setattr(pipe_shape, "DEEPEST", 2)
    monkeypatch.setattr(pipe_shape, "FEW_ROWS", 0)
    yield


@dataclass(frozen=True)
class Case:
    rows: int
    ffn: int
    dtype: torch.dtype = BF16
    limits: Limits = PIPED
    fp8: str = ""
    gap: int = 0
    end: int | None = None


CASES = {
    "pieces": Case(7, 520),
    "short rows": Case(23, 72),
    "short rows apart, float16": Case(11, 72, F16, gap=8),
    "float32, one stage": Case(5, 264, F32, Limits(stages=1)),
    "two stages, groups of several warps": Case(9, 520, limits=Limits(stages=2)),
    "three stages, short rows": Case(23, 72, limits=Limits(stages=3)),
    "one stage, fp8": Case(9, 1032, fp8="row", limits=Limits(stages=1)),
    "fp8 by rows": Case(7, 520, fp8="row"),
    "fp8 by columns, short rows": Case(9, 72, fp8="column"),
    "in turn": Case(7, 520, limits=Limits(loading="IN_TURN")),
    "plain": Case(9, 72, limits=Limits(loading="PLAIN")),
    "plain, fp8": Case(7, 520, limits=Limits(loading="PLAIN"), fp8="row"),
    "few of the rows": Case(23, 520, end=5),
    "few of the short rows": Case(23, 72, end=9),
    "more rows than there are": Case(5, 72, end=77),
    "no rows of experts": Case(5, 72, end=0),
    "a negative end": Case(5, 72, end=-3),
}


def offsets_of(end: int | None) -> torch.Tensor | None:
    return None if end is None else torch.tensor([0, max(end, 0) // 2, end], dtype=torch.int32)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_swiglu_equals_float64(case: Case) -> None:
    gate_up = filled(case.rows, 2 * case.ffn, case.dtype, case.gap)
    out = Strided.empty(case.rows, case.ffn, torch.float8_e4m3fn if case.fp8 else case.dtype, case.gap)
    scales = scales_for(case.rows, case.ffn, case.fp8) if case.fp8 else None
    asked = Swiglu(gate_up.matrix, out.matrix, offsets_of(case.end), scales)
    run_call(swiglu_call(asked, case.limits), tensors_of(asked))
    there = case.rows if case.end is None else min(max(case.end, 0), case.rows)
    gate, up = gate_up.matrix[:there].double().chunk(2, dim=1)
    want = gate / (1 + (-gate).exp()) * up
    if scales is not None:
        judge_fp8(out.matrix[:there].float(), scales[:there], want)
    else:
        close(out.matrix[:there], want)
    assert bool((out.whole[there:] == SENTINEL).all()), "a row after the last expert's was written"
    out.check_gaps()


BACKWARD = (
    *("pieces", "short rows apart, float16", "float32, one stage", "three stages, short rows", "in turn", "plain"),
    "few of the short rows",
)


@pytest.mark.parametrize("name", BACKWARD)
def test_the_gradient_of_swiglu_equals_float64(name: str) -> None:
    judge_gradient(CASES[name])


def judge_gradient(case: Case) -> None:
    gate_up, dy = filled(case.rows, 2 * case.ffn, case.dtype, case.gap), filled(case.rows, case.ffn, case.dtype, seed=4)
    out = Strided.empty(case.rows, 2 * case.ffn, case.dtype)
    asked = SwigluBackward(dy.matrix, gate_up.matrix, out.matrix, offsets_of(case.end))
    run_call(swiglu_backward_call(asked, case.limits), tensors_of(asked))
    there = case.rows if case.end is None else min(max(case.end, 0), case.rows)
    wide = gate_up.matrix[:there].double().requires_grad_()
    gate, up = wide.chunk(2, dim=1)
    (torch.nn.functional.silu(gate) * up).backward(dy.matrix[:there].double())
    assert wide.grad is not None
    close(out.matrix[:there], wide.grad, size=1)
    assert bool((out.whole[there:] == SENTINEL).all())


SILU = "([&] { const float t1 = v0 / (1.0f + expf(-v0)); return t1 * v1 + v2; }())"


@pytest.mark.parametrize("limits", [PIPED, Limits(loading="PLAIN"), Limits(loading="IN_TURN")], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_an_expression_of_rows_and_vectors_equals_float64(dtype: torch.dtype, limits: Limits) -> None:
    a, row = filled(7, 520, dtype, gap=8), filled(1, 520, dtype, seed=1).matrix[0]
    column, out = filled(7, 1, dtype, seed=2).matrix, Strided.empty(7, 520, dtype)
    asked = Pointwise(SILU, [a.matrix, row, column], out.matrix)
    run_call(pointwise_call(asked, limits), tensors_of(asked))
    wide = a.matrix.double()
    close(out.matrix, wide / (1 + (-wide).exp()) * row.double() + column.double(), size=1)


def test_an_expression_takes_nine_rows() -> None:
    inputs = [filled(3, 72, F32, seed=each).matrix for each in range(9)]
    out = Strided.empty(3, 72, F32)
    asked = Pointwise("v0 - v1 + v2 - v3 + v4 - v5 + v6 - v7 * v8", inputs, out.matrix)
    run_call(pointwise_call(asked, PIPED), tensors_of(asked))
    a, b, c, d, e, f, g, h, i = (each.double() for each in inputs)
    close(out.matrix, a - b + c - d + e - f + g - h * i, size=10)


@pytest.mark.parametrize(
    ("shape", "says"),
    [((520,), "at least one that is as large"), ((7, 519), "one of"), ((7, 1), "at least one that is as large")],
)
def test_inputs_of_a_wrong_shape_are_refused(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pointwise_call(Pointwise("v0", [torch.zeros(shape)], torch.zeros(7, 520)), PIPED)


def test_tensors_that_kernels_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 8"):
        swiglu_call(Swiglu(torch.zeros(3, 24), torch.zeros(3, 12)), PIPED)
    with pytest.raises(ConfigError, match="an up of equal size"):
        swiglu_call(Swiglu(torch.zeros(3, 25), torch.zeros(3, 12)), PIPED)
    with pytest.raises(ConfigError, match="must have one dtype"):
        swiglu_call(Swiglu(torch.zeros(3, 32), torch.zeros(3, 16, dtype=BF16)), PIPED)
    with pytest.raises(ConfigError, match="multiples of 16"):
        swiglu_call(Swiglu(torch.zeros(3, 33)[:, 1:], torch.zeros(3, 16)), PIPED)
    with pytest.raises(ConfigError, match="int32"):
        swiglu_call(Swiglu(torch.zeros(3, 32), torch.zeros(3, 16), torch.zeros(3)), PIPED)
