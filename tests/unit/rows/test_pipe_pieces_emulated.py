"""The kernels that work on each element alone, emulated, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.fp8 import quantise
from raymoe.rows import pipe_shape
from raymoe.rows.elementwise_kernels import Pointwise, Swiglu, SwigluBackward, new_piece_sums
from raymoe.rows.expression import parse
from raymoe.rows.operators import code, evaluate
from raymoe.rows.pipe_shape import Limits
from raymoe.rows.quantised_rows import Quantise
from tests.emulator.build import Change
from tests.emulator.machine import EmulatorError
from tests.unit.rows.emulated_pipe import SENTINEL, Strided, close, filled, judge_fp8, run_call, scales_for, tensors_of

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
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
    "plain, a block for each piece": Case(3, 1800, limits=Limits()),
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
    kernel = Swiglu(gate_up.matrix, out.matrix, offsets_of(case.end), scales)
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel))
    there = case.rows if case.end is None else min(max(case.end, 0), case.rows)
    gate, up = gate_up.matrix[:there].double().chunk(2, dim=1)
    want = gate / (1 + (-gate).exp()) * up
    if scales is not None:
        judge_fp8(out.matrix[:there].float(), scales[:there], want)
    else:
        close(out.matrix[:there], want)
    assert bool((out.whole[there:] == SENTINEL).all()), "a row after the last expert's was written"
    out.check_gaps()


QUANTISED = ("one stage, fp8", "fp8 by rows", "fp8 by columns, short rows", "plain, fp8", "short rows apart, float16")


@pytest.mark.parametrize("name", (*QUANTISED, "float32, one stage"))
def test_quantised_rows_have_the_bits_of_the_formula(name: str) -> None:
    judge_quantised(CASES[name])


def judge_quantised(case: Case) -> None:
    x, out = filled(case.rows, case.ffn, case.dtype, case.gap), Strided.empty(case.rows, case.ffn, E4M3, case.gap)
    for row, special in zip(x.matrix[1::2], (torch.inf, 0.0, torch.nan, 1e-30), strict=False):
        row[3:7], row[-1] = special, -special
    x.matrix[-1] = 0
    scales = scales_for(case.rows, case.ffn, case.fp8 or "row")
    kernel = Quantise(x.matrix, out.matrix, scales)
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel))
    values, want = quantise(x.matrix)
    assert torch.equal(scales, want)
    torch.testing.assert_close(out.matrix.float(), values.float(), rtol=0, atol=0, equal_nan=True)
    out.check_gaps()


BACKWARD = (
    *("pieces", "short rows apart, float16", "float32, one stage", "three stages, short rows", "in turn", "plain"),
    "plain, a block for each piece",
    "few of the short rows",
)


@pytest.mark.parametrize("name", BACKWARD)
def test_the_gradient_of_swiglu_equals_float64(name: str) -> None:
    judge_gradient(CASES[name])


def judge_gradient(case: Case) -> None:
    gate_up, dy = filled(case.rows, 2 * case.ffn, case.dtype, case.gap), filled(case.rows, case.ffn, case.dtype, seed=4)
    out = Strided.empty(case.rows, 2 * case.ffn, case.dtype)
    kernel = SwigluBackward(dy.matrix, gate_up.matrix, out.matrix, offsets_of(case.end))
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel))
    there = case.rows if case.end is None else min(max(case.end, 0), case.rows)
    wide = gate_up.matrix[:there].double().requires_grad_()
    gate, up = wide.chunk(2, dim=1)
    (torch.nn.functional.silu(gate) * up).backward(dy.matrix[:there].double())
    assert wide.grad is not None
    close(out.matrix[:there], wide.grad, size=1)
    assert bool((out.whole[there:] == SENTINEL).all())


# With a weight for each row.


def weights_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(5))


WEIGHTED = (*BACKWARD, "two stages, groups of several warps", "no rows of experts", "more rows than there are")


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_swiglu_equals_float64(name: str) -> None:
    case = CASES[name]
    gate_up, out = filled(case.rows, 2 * case.ffn, case.dtype, case.gap), Strided.empty(case.rows, case.ffn, case.dtype)
    weights = weights_of(case.rows)
    kernel = Swiglu(gate_up.matrix, out.matrix, offsets_of(case.end), weights=weights)
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel))
    there = case.rows if case.end is None else min(max(case.end, 0), case.rows)
    gate, up = gate_up.matrix[:there].double().chunk(2, dim=1)
    close(out.matrix[:there], torch.nn.functional.silu(gate) * up * weights[:there, None].double())
    assert bool((out.whole[there:] == SENTINEL).all()), "a row after the last expert's was written"


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_gradients_of_weighted_swiglu_equal_float64(name: str) -> None:
    judge_weighted_gradients(CASES[name])


def judge_weighted_gradients(case: Case, seed: int = 0, changes: tuple[Change, ...] = ()) -> torch.Tensor:
    """Run the kernel, raise if a gradient is wrong, and return those of the weights."""
    gate_up, dy = filled(case.rows, 2 * case.ffn, case.dtype, case.gap), filled(case.rows, case.ffn, case.dtype, seed=4)
    out, weights, offsets = (
        Strided.empty(case.rows, 2 * case.ffn, case.dtype),
        weights_of(case.rows),
        offsets_of(case.end),
    )
    sums = new_piece_sums(gate_up.matrix, offsets, case.limits).fill_(torch.nan)
    kernel = SwigluBackward(dy.matrix, gate_up.matrix, out.matrix, offsets, weights, sums)
    run_call(kernel.kernel_call(case.limits), tensors_of(kernel), seed=seed, changes=changes)
    there = case.rows if case.end is None else min(max(case.end, 0), case.rows)
    wide, share = (each[:there].double().requires_grad_() for each in (gate_up.matrix, weights))
    gate, up = wide.chunk(2, dim=1)
    h, wide_dy = torch.nn.functional.silu(gate) * up, dy.matrix[:there].double()
    (h * share[:, None]).backward(wide_dy)
    assert wide.grad is not None and share.grad is not None
    close(out.matrix[:there], wide.grad, size=1)
    error = (sums[:, :there].double().sum(dim=0) - share.grad).abs()
    assert bool((error <= 1e-6 * (wide_dy * h).detach().abs().sum(dim=1)).all()), f"error {float(error.max())}"
    assert bool((out.whole[there:] == SENTINEL).all()) and bool(sums[:, there:].isnan().all())
    return sums.sum(dim=0)


@pytest.mark.parametrize("name", ["pieces", "two stages, groups of several warps", "short rows"])
def test_the_gradients_of_weights_are_the_same_in_every_interleaving(name: str) -> None:
    first = judge_weighted_gradients(CASES[name])
    for seed in (1, 2, 3):
        assert torch.equal(judge_weighted_gradients(CASES[name], seed), first)


def injected(old: str, new: str = "", file: str = "swiglu_backward.cu") -> Change:
    return Change(file, old, new)


INJECTED_BUGS = {
    "no gradient of the weight": injected("along += dy[j] * (gate[j] * s * by_up);"),
    "the weight's gradient times the weight": injected(
        "along += dy[j] * (gate[j] * s * by_up);\n                    dy[j] *= weight;",
        "dy[j] *= weight;\n                    along += dy[j] * (gate[j] * s * by_up);",
    ),
    "gradients without the weight": injected("dy[j] *= weight;"),
    "the sum of one thread": injected("sums.add(along);"),
    "all pieces in one place": injected("tile.first / p.work.piece", "0"),
    "the weight of the tile's first row": injected("(tile.row + r) * 4)", "tile.row * 4)", "pieces.cuh"),
    "one place for the sums of two rows": injected("parity_ ^= 1;", file="sums.cuh"),
}


@pytest.mark.parametrize("change", INJECTED_BUGS.values(), ids=INJECTED_BUGS)
def test_an_injected_bug_in_weighted_gradients_is_found(change: Change) -> None:
    for seed in range(6):
        for name in ("pieces", "short rows", "three stages, short rows", "two stages, groups of several warps"):
            try:
                judge_weighted_gradients(CASES[name], seed, (change,))
            except (EmulatorError, AssertionError):
                return
    pytest.fail("every interleaving is right with it")


def test_weights_that_the_kernels_cannot_take_are_refused() -> None:
    gate_up, out, weights = torch.zeros(3, 32), torch.zeros(3, 16), torch.zeros(3)
    fp8, scales = torch.zeros(3, 16).to(torch.float8_e4m3fn), torch.zeros(3, 1)
    with pytest.raises(ConfigError, match="8-bit floats; leave out the weights or the scales"):
        Swiglu(gate_up, fp8, None, scales, weights).kernel_call(PIPED)
    with pytest.raises(ConfigError, match=r"weights are torch.float32 \(2,\); 3 contiguous numbers"):
        Swiglu(gate_up, out, weights=weights[:2]).kernel_call(PIPED)
    with pytest.raises(ConfigError, match="needs both the weights and memory"):
        SwigluBackward(out, gate_up, gate_up, weights=weights).kernel_call(PIPED)
    with pytest.raises(ConfigError, match="piece_sums are"):
        SwigluBackward(out, gate_up, gate_up, None, weights, torch.zeros(2, 3)).kernel_call(PIPED)


SILU = "([&] { const float t1 = silu(v0); return t1 * v1 + v2; }())"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("limits", [PIPED, Limits(loading="PLAIN"), Limits(loading="IN_TURN")], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_an_expression_of_rows_and_vectors_equals_float64(dtype: torch.dtype, limits: Limits) -> None:
    a, row = filled(7, 520, dtype, gap=8), filled(1, 520, dtype, seed=1).matrix[0]
    column, out = filled(7, 1, dtype, seed=2).matrix, Strided.empty(7, 520, dtype)
    kernel = Pointwise(SILU, [a.matrix, row, column], out.matrix)
    run_call(kernel.kernel_call(limits), tensors_of(kernel))
    wide = a.matrix.double()
    close(out.matrix, wide / (1 + (-wide).exp()) * row.double() + column.double(), size=1)


LOST = 1.1e-36


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", ["silu", "sigmoid", "exp"])
def test_a_function_of_an_expression_is_right_at_every_size(name: str, dtype: torch.dtype) -> None:
    """Fast forms divide wrongly by numbers above 2^126: sigmoid(-88) is 1 / e^88. Only sizes below LOST may be lost."""
    ends = [0.0, 1e-30, 0.5, 3.0, 10.0, 80.0, 87.0, 87.5, 88.0, 88.5, 89.0, 100.0, 1e4, float("inf")]
    values = torch.tensor([*ends, *(-each for each in ends), float("nan"), 1.0, 2.0, 4.0])
    a = values.repeat(3, 1).to(dtype)
    out = torch.zeros_like(a)
    kernel = Pointwise(code(parse(f"{name}(a)")), [a], out)
    run_call(kernel.kernel_call(Limits(loading="PLAIN")), tensors_of(kernel))
    want = evaluate(parse(f"{name}(a)"), {"a": a.double()}).to(dtype).double()
    found = out.double()
    assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found.isinf(), want.isinf())
    there = want.isfinite()
    assert bool(((found - want).abs() <= 2 * torch.finfo(dtype).eps * want.abs() + LOST)[there].all())


def test_an_expression_takes_nine_rows() -> None:
    inputs = [filled(3, 72, F32, seed=each).matrix for each in range(9)]
    out = Strided.empty(3, 72, F32)
    kernel = Pointwise("v0 - v1 + v2 - v3 + v4 - v5 + v6 - v7 * v8", inputs, out.matrix)
    run_call(kernel.kernel_call(PIPED), tensors_of(kernel))
    a, b, c, d, e, f, g, h, i = (each.double() for each in inputs)
    close(out.matrix, a - b + c - d + e - f + g - h * i, size=10)


@pytest.mark.parametrize(
    ("shape", "says"),
    [((520,), "at least one that is as large"), ((7, 519), "one of"), ((7, 1), "at least one that is as large")],
)
def test_inputs_of_a_wrong_shape_are_refused(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Pointwise("v0", [torch.zeros(shape)], torch.zeros(7, 520)).kernel_call(PIPED)


def test_tensors_that_kernels_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 8"):
        Swiglu(torch.zeros(3, 24), torch.zeros(3, 12)).kernel_call(PIPED)
    with pytest.raises(ConfigError, match="an up of equal size"):
        Swiglu(torch.zeros(3, 25), torch.zeros(3, 12)).kernel_call(PIPED)
    with pytest.raises(ConfigError, match="must have one dtype"):
        Swiglu(torch.zeros(3, 32), torch.zeros(3, 16, dtype=BF16)).kernel_call(PIPED)
    with pytest.raises(ConfigError, match="multiples of 16"):
        Swiglu(torch.zeros(3, 33)[:, 1:], torch.zeros(3, 16)).kernel_call(PIPED)
    with pytest.raises(ConfigError, match="int32"):
        Swiglu(torch.zeros(3, 32), torch.zeros(3, 16), torch.zeros(3)).kernel_call(PIPED)
