"""The gradients of the norms, emulated, against float64; the same in every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from raymoe.rows import pipe_shape
from raymoe.rows.norm_kernels import LayerNormBackward, RmsNormBackward
from raymoe.rows.pipe_shape import Limits
from tests.emulator.build import Change
from tests.emulator.machine import EmulatorError
from tests.unit.rows.emulated_pipe import Strided, close, filled, run_call, tensors_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMS = 2
PIPED, PLAIN, IN_TURN = Limits(SMS), Limits(SMS, loading="PLAIN"), Limits(SMS, loading="IN_TURN")
EPS = 1e-3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipe_shape, "CONSUMER_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "WIDE_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "PLAIN_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "TILE_BYTES", 1024)
    monkeypatch.setattr(pipe_shape, "DEEPEST", 2)
    monkeypatch.setattr(pipe_shape, "FEW_ROWS", 0)
    yield


@dataclass(frozen=True)
class Case:
    rows: int
    hidden: int
    dtype: torch.dtype = BF16
    limits: Limits = PIPED
    weight: torch.dtype | None = None
    gap: int = 0
    budget: int = 96
    add: bool = False
    loading: str | None = None
    """The expected loading; None: any."""


CASES = {
    "a warp a row": Case(9, 264),
    "short rows apart, float16": Case(21, 72, F16, gap=8),
    "four warps a row": Case(7, 1032, budget=32),
    "float32, three stages": Case(9, 136, F32, Limits(SMS, stages=3)),
    "rows taken again": Case(5, 1288, budget=256),
    "a float32 weight": Case(7, 264, weight=F32),
    "in turn": Case(7, 264, limits=IN_TURN),
    "plain": Case(9, 264, limits=PLAIN),
    "plain, rows taken again": Case(5, 1288, limits=PLAIN, budget=512),
    "a gradient of the sum": Case(9, 264, add=True),
    "a gradient of the sum, plain, float32": Case(5, 136, F32, PLAIN, add=True),
    "one row": Case(1, 72),
    "no rows": Case(0, 72),
}


def gradients(case: Case, kind: str, seed: int = 0, changes: Sequence[Change] = ()) -> tuple[torch.Tensor, ...]:
    """dx and the vectors' gradients, by the kernels."""
    x, dy = (filled(case.rows, case.hidden, case.dtype, case.gap, each) for each in (1, 2))
    vector = torch.empty(case.hidden, dtype=case.weight or case.dtype)
    weight = torch.randn(case.hidden, generator=torch.Generator().manual_seed(3)).to(vector.dtype)
    dx, vectors = Strided.empty(case.rows, case.hidden, case.dtype, case.gap), [torch.full_like(vector, 7.0)]
    if kind == "rms":
        kernel = RmsNormBackward(dy.matrix, x.matrix, weight, dx.matrix, *vectors, eps=EPS)
        if case.add:
            kernel = replace(kernel, d_total=filled(case.rows, case.hidden, case.dtype, case.gap, 6).matrix)
    else:
        vectors.append(torch.full_like(vector, 7.0))
        kernel = LayerNormBackward(dy.matrix, x.matrix, weight, dx.matrix, *vectors, eps=EPS)
    calls = kernel.kernel_calls(case.limits)
    assert case.loading in (None, dict(calls.gradients.source.defines)["PIPE_LOADING"])
    reachable = [*tensors_of(kernel), calls.partials]
    run_call(calls.gradients, reachable, calls.sms, seed, changes)
    run_call(calls.sums, reachable, calls.sms, seed)
    dx.check_gaps()
    return dx.matrix, *vectors


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_equal_float64(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_shape, "GRADIENT_BUDGET", case.budget)
    dx, *vectors = gradients(case, kind)
    x, dy = (filled(case.rows, case.hidden, case.dtype, case.gap, each).matrix.double() for each in (1, 2))
    weight = torch.randn(case.hidden, generator=torch.Generator().manual_seed(3)).to(vectors[0].dtype).double()
    x.requires_grad_()
    weight.requires_grad_()
    bias = torch.zeros(case.hidden, dtype=torch.float64, requires_grad=True)
    if kind == "rms":
        y = x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight
    else:
        centred = x - x.mean(1, keepdim=True)
        y = centred / (centred.square().mean(1, keepdim=True) + EPS).sqrt() * weight + bias
    y.backward(dy)
    if case.add and kind == "rms":
        x.grad += filled(case.rows, case.hidden, case.dtype, case.gap, 6).matrix.double()
    close(dx, x.grad, size=1)
    for got, want in zip(vectors, (weight.grad, bias.grad), strict=False):
        close(got, torch.zeros_like(weight) if want is None else want, size=4 * max(1, case.rows) ** 0.5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_are_the_same_in_every_interleaving(kind: str) -> None:
    first = gradients(Case(19, 264), kind)
    for seed in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(Case(19, 264), kind, seed), strict=True))


ALONE = Case(5, 1032, limits=Limits(5), loading="ROW")
FEW = {
    "as many rows as SMs": ALONE,
    "fewer rows than SMs": replace(ALONE, rows=3, hidden=1544),
    "one row": replace(ALONE, rows=1),
    "one row, one SM": replace(ALONE, rows=1, limits=Limits(1)),
    "float16, apart": replace(ALONE, rows=4, dtype=F16, gap=8),
    "float32": replace(ALONE, hidden=520, dtype=F32),
    "a float32 weight": replace(ALONE, rows=2, weight=F32),
    "a gradient of the sum": replace(ALONE, add=True),
    "a gradient of the sum, float32, apart": replace(ALONE, rows=3, hidden=520, dtype=F32, gap=4, add=True),
    "no rows": replace(ALONE, rows=0),
    "more rows than SMs": replace(ALONE, limits=Limits(4), loading="PIPED"),
    "stages that a caller asks for": replace(ALONE, limits=Limits(5, stages=2), loading="PIPED"),
}


@pytest.fixture
def all_rows_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_shape, "LONG_ROW", 8)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("all_rows_long")
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("case", FEW.values(), ids=FEW)
def test_gradients_of_few_long_rows_equal_float64(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_gradients_equal_float64(case, kind, monkeypatch)


@pytest.mark.usefixtures("all_rows_long")
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_of_few_long_rows_are_the_same_in_every_interleaving_and_on_more_sms(kind: str) -> None:
    first = gradients(ALONE, kind)
    for seed in (1, 2, 3):
        more = replace(ALONE, limits=Limits(5 + seed))
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(more, kind, seed), strict=True))


@pytest.mark.usefixtures("all_rows_long")
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_sums_of_warps_that_are_read_too_early_are_found(kind: str) -> None:
    first, change = gradients(ALONE, kind), Change("sums.cuh", "            group_barrier();", "", None)
    for seed in range(6):
        try:
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(ALONE, kind, seed, (change,)), strict=True))
        except (EmulatorError, AssertionError):
            return
    pytest.fail("6 interleavings are all right without the barrier")
