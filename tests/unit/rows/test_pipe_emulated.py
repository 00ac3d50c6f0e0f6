"""The kernels that stream rows through one GPU, emulated, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from raymoe.rows import pipe_shape
from raymoe.rows.norm_kernels import LayerNorm, RmsNorm
from raymoe.rows.pipe_shape import Limits
from tests.unit.rows.emulated_pipe import Strided, close, filled, judge_fp8, run_call, scales_for, tensors_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PIPED = Limits(loading="PIPED")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of four warps that compute, and tiles of few rows, so that every loop wraps on small tensors."""
    monkeypatch.setattr(pipe_shape, "CONSUMER_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "WIDE_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "PLAIN_WARPS", 4)
    monkeypatch.setattr(pipe_shape, "TILE_BYTES", 2048)
    monkeypatch.setattr(pipe_shape, "DEEPEST", 2)
    monkeypatch.setattr(pipe_shape, "FEW_ROWS", 0)
    monkeypatch.setattr(pipe_shape, "FEW_SMS", 0)
    monkeypatch.setattr(pipe_shape, "LEAST_STORED", 2)
    yield


@dataclass(frozen=True)
class NormCase:
    rows: int
    hidden: int
    dtype: torch.dtype = BF16
    limits: Limits = PIPED
    fp8: str = ""
    add: bool = False
    gap: int = 0
    registers: int = 72
    dynamic: bool = False

    def choose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the shape be that of this case."""
        monkeypatch.setattr(pipe_shape, "REGISTERS", self.registers)
        monkeypatch.setattr(pipe_shape, "DYNAMIC_TURNS", 0 if self.dynamic else 1000)


NORMS = {
    "one row of one warp": NormCase(1, 64),
    "tiles of several rows": NormCase(21, 72),
    "tiles of several rows that are apart": NormCase(21, 72, gap=8),
    "two warps a row": NormCase(9, 520, registers=8),
    "four warps a row, float16": NormCase(7, 1032, F16, registers=8),
    "float32": NormCase(7, 264, F32, registers=16),
    "a residual": NormCase(9, 520, add=True, registers=8),
    "a residual, float32, apart": NormCase(5, 136, F32, add=True, gap=4),
    "one stage": NormCase(9, 520, limits=Limits(stages=1)),
    "three stages": NormCase(11, 264, limits=Limits(stages=3), add=True),
    "eight stages": NormCase(23, 264, limits=Limits(stages=8)),
    "fp8 by rows": NormCase(9, 520, fp8="row", registers=8),
    "fp8 by columns, a residual": NormCase(7, 392, F16, fp8="column", add=True),
    "fp8, short rows": NormCase(13, 72, fp8="row"),
    "dynamic": NormCase(15, 520, registers=8, dynamic=True),
    "dynamic, groups of one warp": NormCase(23, 264, F16, dynamic=True),
    "dynamic, fewer tiles than blocks": NormCase(1, 264, dynamic=True),
    "dynamic, short rows, apart": NormCase(63, 72, gap=8, dynamic=True),
    "dynamic, one stage": NormCase(11, 520, limits=Limits(stages=1), dynamic=True),
    "dynamic, three stages": NormCase(23, 264, limits=Limits(stages=3), add=True, dynamic=True),
    "dynamic, eight stages": NormCase(23, 264, F32, limits=Limits(stages=8), dynamic=True),
    "dynamic, fp8": NormCase(15, 520, fp8="row", registers=8, dynamic=True),
    "dynamic, fp8, a residual": NormCase(15, 392, F16, fp8="column", add=True, dynamic=True),
    "in turn": NormCase(9, 520, limits=Limits(loading="IN_TURN"), add=True, registers=8),
    "in turn, fp8": NormCase(9, 264, limits=Limits(loading="IN_TURN"), fp8="row"),
    "plain": NormCase(9, 520, limits=Limits(loading="PLAIN"), add=True, registers=8),
    "plain, fp8": NormCase(9, 264, limits=Limits(loading="PLAIN"), fp8="column"),
    "a block for each row": NormCase(9, 520, limits=Limits(loading="ROW")),
    "a block for each row, apart, a residual, float32": NormCase(5, 392, F32, Limits(loading="ROW"), add=True, gap=4),
    "a block for each row, fp8": NormCase(5, 1032, limits=Limits(loading="ROW"), fp8="column"),
    "no rows": NormCase(0, 64),
    "no rows, a block for each": NormCase(0, 1024, limits=Limits(loading="ROW")),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_rms_norm_equals_float64(case: NormCase, monkeypatch: pytest.MonkeyPatch) -> None:
    run_rms_norm(case, monkeypatch)


def run_rms_norm(case: NormCase, monkeypatch: pytest.MonkeyPatch, seed: int = 0, changes: Any = ()) -> None:
    case.choose(monkeypatch)
    x, residual = (filled(case.rows, case.hidden, case.dtype, case.gap, each) for each in (seed, seed + 50))
    weight = torch.randn(case.hidden, generator=torch.Generator().manual_seed(9)).to(case.dtype)
    out_type = torch.float8_e4m3fn if case.fp8 else case.dtype
    out, added = (Strided.empty(case.rows, case.hidden, each, case.gap * 2) for each in (out_type, case.dtype))
    kernel = RmsNorm(x.matrix, weight, out.matrix, 1e-3)
    if case.fp8:
        kernel = replace(kernel, scales=scales_for(case.rows, case.hidden, case.fp8))
    if case.add:
        kernel = replace(kernel, residual=residual.matrix, residual_out=added.matrix)
    before = x.matrix.clone()
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel), seed=seed, changes=changes)
    h = (x.matrix.float() + residual.matrix.float()).to(case.dtype) if case.add else x.matrix
    wide = h.double()
    want = wide / (wide.square().mean(1, keepdim=True) + 1e-3).sqrt() * weight.double()
    if case.fp8:
        judge_fp8(out.matrix.float(), kernel.scales, want)
    else:
        close(out.matrix, want)
    if case.add:
        assert torch.equal(added.matrix, h)
        added.check_gaps()
    out.check_gaps()
    assert torch.equal(x.matrix, before)


LAYER_NORMS = {
    "two warps a row": NormCase(9, 520, registers=12),
    "short rows, apart": NormCase(21, 72, gap=8),
    "float32": NormCase(5, 264, F32, registers=24),
    "fp8": NormCase(9, 520, F16, fp8="row", registers=12),
    "dynamic": NormCase(15, 520, registers=12, dynamic=True),
    "dynamic, fp8": NormCase(15, 520, F16, fp8="row", registers=12, dynamic=True),
    "in turn": NormCase(9, 264, limits=Limits(loading="IN_TURN")),
    "plain": NormCase(9, 264, limits=Limits(loading="PLAIN"), fp8="column"),
    "a block for each row": NormCase(7, 1032, limits=Limits(loading="ROW")),
    "a block for each row, float32": NormCase(7, 264, F32, limits=Limits(loading="ROW")),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", LAYER_NORMS.values(), ids=LAYER_NORMS)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_layer_norm_equals_float64(case: NormCase, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case.choose(monkeypatch)
    x = filled(case.rows, case.hidden, case.dtype, case.gap)
    x.matrix[0] += 100  # a mean far from zero
    weight, bias = (
        torch.randn(case.hidden, generator=torch.Generator().manual_seed(each)).to(case.dtype) for each in (1, 2)
    )
    out = Strided.empty(case.rows, case.hidden, torch.float8_e4m3fn if case.fp8 else case.dtype, case.gap)
    scales = scales_for(case.rows, case.hidden, case.fp8) if case.fp8 else None
    kernel = LayerNorm(x.matrix, weight, bias if with_bias else None, out.matrix, 1e-3, scales)
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel))
    wide = x.matrix.double()
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, keepdim=True, correction=0) + 1e-3).sqrt()
    want = normed * weight.double() + (bias.double() if with_bias else 0)
    if scales is not None:
        judge_fp8(out.matrix.float(), scales, want)
    else:
        close(out.matrix, want, size=1)
    out.check_gaps()


@pytest.mark.parametrize("case", [name for name, case in LAYER_NORMS.items() if case.limits.loading == "ROW"])
def test_layer_norm_in_blocks_that_share_an_sm(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_shape, "ALONE_ROWS", 0)
    test_layer_norm_equals_float64(LAYER_NORMS[case], True, monkeypatch)


def test_blocks_of_zeros_tiny_and_infinite_values_have_finite_scales() -> None:
    x = torch.zeros(3, 384)
    x[0, 128:256] = 1e-42
    x[1, 3], x[1, 130], x[1, 260] = float("inf"), float("nan"), 5.0
    x[2, :4], x[2, 200] = 1e-38, 1.0
    values, scales = torch.empty(3, 384, dtype=torch.float8_e4m3fn), torch.empty(3, 3)
    kernel = RmsNorm(x, torch.ones(384), values, 1.0, scales)
    run_call(kernel.kernel_call(Limits()), tensors_of(kernel))
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    assert scales[0].tolist() == [1.0, float(torch.finfo(F32).tiny), 1.0]
    assert bool((values[0].float() == 0).all()) and bool(values[2].float().isfinite().all())
    assert values[2, 200].float() == 448
