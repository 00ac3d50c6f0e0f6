"""The functions over rows on the path of GPUs, with their kernels emulated: equal to the formulas, for any strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import raymoe
from raymoe.moe import add_rms_norm, layer_norm, rms_norm, swiglu
from raymoe.moe import experts as experts_of_a_layer
from raymoe.moe.experts import Experts, ModelWeights
from raymoe.rows import pipe_shape
from raymoe.rows.elementwise_kernels import Pointwise, Swiglu, SwigluBackward
from raymoe.rows.norm_kernels import LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward
from raymoe.rows.pipe_shape import NO_LIMITS, Limits
from raymoe.workload.exchange.received import dequantised
from raymoe.workload.pointwise import operations
from raymoe.workload.pointwise.operations import RowSizes
from raymoe.workload.pointwise.row_systems import SYSTEMS, Task
from tests.emulator.build import compiler
from tests.unit.rows.emulated_pipe import run_call, tensors_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which compiles the kernels for a CPU")

BF16 = torch.bfloat16
ONE_KERNEL = (RmsNorm, LayerNorm, Swiglu, SwigluBackward, Pointwise)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Emulate the kernels for tensors on the CPU; yields the names of those that were launched."""
    names: list[str] = []

    def emulate(kernel: Any, limits: Limits = NO_LIMITS) -> None:
        call = kernel.kernel_call(limits)
        names.append(call.source.stem)
        run_call(call, tensors_of(kernel))

    def emulate_both(norm: RmsNormBackward | LayerNormBackward, limits: Limits) -> None:
        """A backward is two kernels, with memory between them."""
        calls = norm.kernel_calls(replace(limits, sms=2))
        names.append(calls.gradients.source.stem)
        for call in (calls.gradients, calls.sums):
            run_call(call, [*tensors_of(norm), calls.partials])

    for one in ONE_KERNEL:
        monkeypatch.setattr(one, "launch", emulate)
    for two in (RmsNormBackward, LayerNormBackward):
        monkeypatch.setattr(two, "launch", emulate_both)
    monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: True)
    for name, few in (
        ("CONSUMER_WARPS", 4),
        ("WIDE_WARPS", 4),
        ("PLAIN_WARPS", 4),
        ("TILE_BYTES", 1024),
        ("DEEPEST", 2),
        ("FEW_ROWS", 0),
    ):
        monkeypatch.setattr(pipe_shape, name, few)
    yield names


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_formula(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr("raymoe.rows.row_launch.takes", lambda _: False)
        return compute()


def near(found: torch.Tensor, want: torch.Tensor) -> None:
    """Results may differ by the rounding of their dtype, because sums have another order."""
    assert found.dtype == want.dtype and found.shape == want.shape
    step = torch.finfo(want.dtype).eps if want.dtype != torch.float32 else 1e-5
    torch.testing.assert_close(found.float(), want.float(), rtol=step, atol=step)


CALLS = {
    "rms_norm": lambda: rms_norm(drawn(5, 64), drawn(64, seed=1)),
    "rms_norm of three dimensions": lambda: rms_norm(drawn(2, 3, 64), drawn(64, seed=1)),
    "rms_norm of one row": lambda: rms_norm(drawn(64), drawn(64, seed=1)),
    "rms_norm with float32 weights": lambda: rms_norm(drawn(5, 64), drawn(64, dtype=torch.float32)),
    "rms_norm of a part of rows": lambda: rms_norm(drawn(5, 200)[:, 64:128], drawn(64)),
    "rms_norm of rows that begin anywhere": lambda: rms_norm(drawn(5, 67)[:, 3:], drawn(67)[3:]),
    "rms_norm of columns": lambda: rms_norm(drawn(64, 5).T, drawn(64)),
    "rms_norm of one row many times": lambda: rms_norm(drawn(1, 64).expand(4, 64), drawn(64)),
    "rms_norm of nothing": lambda: rms_norm(drawn(0, 64), drawn(64)),
    "add_rms_norm": lambda: add_rms_norm(drawn(5, 64), drawn(5, 64, seed=2), drawn(64, seed=1)),
    "layer_norm": lambda: layer_norm(drawn(5, 64), drawn(64, seed=1), drawn(64, seed=2)),
    "swiglu": lambda: swiglu(drawn(2, 3, 128)),
    "swiglu with weights": lambda: swiglu(drawn(2, 3, 128), weights=drawn(2, 3, dtype=torch.float32, seed=1)),
    "swiglu of one row with a weight": lambda: swiglu(drawn(128), weights=torch.tensor(0.3)),
    "swiglu with weights that lie apart": lambda: swiglu(
        drawn(5, 128), weights=drawn(5, 2, dtype=torch.float32, seed=1)[:, 1]
    ),
    "pointwise": lambda: raymoe.pointwise(
        "silu(a) * b + c / (2 + d * d)", a=drawn(2, 3, 64), b=drawn(2, 3, 64, seed=1), c=drawn(64), d=drawn(2, 3, 1)
    ),
    "pointwise of strided inputs": lambda: raymoe.pointwise(
        "max(a, c) - b", a=drawn(64, 5).T, b=drawn(5, 9)[:, 3:4], c=drawn(128)[::2]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_and_formulas_agree(name, launched, monkeypatch):
    found, want = CALLS[name](), by_formula(monkeypatch, CALLS[name])
    assert launched == [name.split()[0].removeprefix("add_")]
    pairs = zip(found, want, strict=True) if isinstance(found, tuple) else [(found, want)]
    for result, expected in pairs:
        near(result, expected)


QUANTISED = {
    "rms_norm": lambda **how: rms_norm(drawn(5, 136), drawn(136, seed=1), **how),
    "add_rms_norm": lambda **how: add_rms_norm(drawn(5, 136), drawn(5, 136, seed=2), drawn(136, seed=1), **how)[0],
    "layer_norm": lambda **how: layer_norm(drawn(5, 136), drawn(136, seed=1), drawn(136, seed=2), **how),
    "swiglu": lambda **how: swiglu(drawn(5, 272), **how),
}


@pytest.mark.parametrize("scales", ["row", "column"])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_results_agree(name, scales, launched, monkeypatch):
    def compute() -> Any:
        return QUANTISED[name](output="float8_e4m3", scales=scales)

    found, want = compute(), by_formula(monkeypatch, compute)
    assert len(launched) == 1 and found[1].stride() == want[1].stride()
    torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(dequantised(*found), dequantised(*want), rtol=2**-3, atol=1e-3)
    assert int((found[0].view(torch.uint8) != want[0].view(torch.uint8)).sum()) <= 3  # near the middle of two values


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_swiglu_leaves_rows_after_the_last_offset(kind, launched, monkeypatch):
    gate_up, offsets = drawn(12, 128), torch.tensor([0, 4, 8], dtype=kind)
    gate_up[8:] = torch.nan
    near(swiglu(gate_up, offsets)[:8], by_formula(monkeypatch, lambda: swiglu(gate_up[:8])))
    assert launched == ["swiglu"]


BACKWARDS = {
    "rms_norm": (lambda x, w: rms_norm(x, w), [(5, 64), (64,)], ["rms_norm", "rms_norm_backward"]),
    "add_rms_norm": (
        lambda x, residual, w: torch.cat(add_rms_norm(x, residual, w), dim=1),
        [(5, 64), (5, 64), (64,)],
        ["rms_norm", "rms_norm_backward"],
    ),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, w, b),
        [(5, 64), (64,), (64,)],
        ["layer_norm", "layer_norm_backward"],
    ),
    "swiglu": (lambda x: swiglu(x), [(3, 128)], ["swiglu", "swiglu_backward"]),
    "swiglu with weights": (
        lambda x, w: swiglu(x, weights=w),
        [(2, 3, 128), (2, 3)],
        ["swiglu", "swiglu_backward"],
    ),
    "swiglu with weights, rows in pieces": (
        lambda x, w: swiglu(x, weights=w),
        [(3, 2400), (3,)],
        ["swiglu", "swiglu_backward"],
    ),
    "pointwise": (
        lambda a, b, c, d: raymoe.pointwise("silu(a) * b + where(c > 0, b, d)", a=a, b=b, c=c, d=d),
        [(6, 64), (64,), (6, 64), (6, 1)],
        ["pointwise"] * 4,  # forward, and three gradients: c only decides
    ),
}


EXPERTS = [(12, 16), (12,), (3, 64, 16), (3, 16, 32)]
"""The shapes of rows, their weights, gate_up_proj and down_proj."""


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_agree(name, launched, monkeypatch, dtype=torch.float32):
    function, shapes, kernels_used = BACKWARDS[name]
    leaves = [drawn(*shape, dtype=dtype, seed=index).requires_grad_() for index, shape in enumerate(shapes)]

    def compute() -> Any:
        y = function(*leaves)
        return torch.autograd.grad(y, leaves, drawn(*y.shape, dtype=dtype, seed=9))

    found = compute()
    assert launched == kernels_used
    for result, want in zip(found, by_formula(monkeypatch, compute), strict=True):
        # A kernel rounds the elements of a vector's gradient before they are summed.
        summed = 1 if result.shape == leaves[0].shape else 8
        step = 0.01 if dtype == BF16 else 1e-5
        torch.testing.assert_close(result.float(), want.float(), rtol=2 * step, atol=summed * step)


def test_experts_weigh_their_rows_in_the_kernels_of_swiglu(launched, monkeypatch):
    """The gradient of the router's weights comes from SwiGLU's backward kernel, and from no other pass over rows."""
    monkeypatch.setattr(experts_of_a_layer, "_in_kernels", lambda _: True)
    counts, offsets = torch.tensor([4, 0, 5], dtype=torch.int32), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    leaves = [drawn(*shape, dtype=torch.float32, seed=index) for index, shape in enumerate(EXPERTS)]
    x, share, *weights = (each.requires_grad_() for each in leaves)
    experts = Experts(ModelWeights(*weights))

    def compute() -> Any:
        y = experts(x, offsets, counts, share)[:9]
        return [
            y,
            *torch.autograd.grad(y, [x, share, *experts.parameters()], drawn(9, 16, dtype=torch.float32, seed=8)),
        ]

    found = compute()
    assert launched == ["swiglu", "swiglu_backward"]
    monkeypatch.setattr(experts_of_a_layer, "_in_kernels", lambda _: False)
    want = compute()  # by torch's functions, one after the other
    for result, expected in zip(found, want, strict=True):
        rows = slice(9 if len(result) == len(x) else None)  # those from the last offset on are unspecified
        torch.testing.assert_close(result[rows], expected[rows], rtol=1e-5, atol=1e-4)
    assert float(want[2][:9].abs().min()) > 0, "a weight without a gradient"


def test_gradients_of_vectors_are_near_in_bfloat16(launched, monkeypatch):
    test_gradients_agree("pointwise", launched, monkeypatch, BF16)


# Workload pointwise: the systems that are kernels of raymoe.

TASKS = [
    ("raymoe", "rms_norm", 2),
    ("raymoe", "layer_norm_backward", 2),
    ("raymoe", "swiglu_experts", None),
    ("in_turn", "rms_norm", None),
    ("in_turn", "swiglu_backward", None),
]


@pytest.mark.parametrize(("system", "op", "stages"), TASKS, ids=[f"{system} {op}" for system, op, _ in TASKS])
def test_the_workloads_kernels_are_right(system, op, stages, launched):
    sizes = RowSizes(tokens=6, width=64, dtype="float32")
    task = Task(op, operations.drawn(op, sizes, 0, torch.device("cpu")), sizes, sms=2, stages=stages)
    found = SYSTEMS[system](task)()
    assert launched == [op.removesuffix("_experts")]
    assert operations.error_of(op, found, task.tensors, sizes) <= operations.OPERATIONS[op].bound(torch.float32)


def test_the_own_copy_copies_as_many_bytes(launched):
    sizes = RowSizes(tokens=6, width=64, dtype="bfloat16")
    task = Task("add_rms_norm", operations.drawn("add_rms_norm", sizes, 0, torch.device("cpu")), sizes)
    (found,) = SYSTEMS["own_copy"](task)()
    assert launched == ["pointwise"] and bool((found == 1).all())
    assert 0 <= task.nbytes - 2 * found.nbytes < 2 * 64 * 2
