"""The gradients of the norms, emulated, against float64; the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from raymoe.device import pipe_shape
from raymoe.device.pipe_backward import LayerNormBackward, RmsNormBackward, backward_calls
from raymoe.device.pipe_shape import Limits
from tests.unit.emulated_pipe import Strided, close, filled, run_call, tensors_of

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


def gradients(case: Case, kind: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """dx and the vectors' gradients, by the kernels."""
    x, dy = (filled(case.rows, case.hidden, case.dtype, case.gap, each) for each in (1, 2))
    vector = torch.empty(case.hidden, dtype=case.weight or case.dtype)
    weight = torch.randn(case.hidden, generator=torch.Generator().manual_seed(3)).to(vector.dtype)
    dx, vectors = Strided.empty(case.rows, case.hidden, case.dtype, case.gap), [torch.full_like(vector, 7.0)]
    if kind == "rms":
        asked = RmsNormBackward(dy.matrix, x.matrix, weight, dx.matrix, *vectors, eps=EPS)
        if case.add:
            asked = replace(asked, d_total=filled(case.rows, case.hidden, case.dtype, case.gap, 6).matrix)
    else:
        vectors.append(torch.full_like(vector, 7.0))
        asked = LayerNormBackward(dy.matrix, x.matrix, weight, dx.matrix, *vectors, eps=EPS)
    calls = backward_calls(asked, case.limits)
    reachable = [*tensors_of(asked), calls.partials]
    run_call(calls.gradients, reachable, SMS, seed)
    run_call(calls.sums, reachable, SMS, seed)
    dx.check_gaps()
    return dx.matrix, *vectors


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
