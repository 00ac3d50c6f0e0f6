"""The systems that multiply 8-bit rows and weights: raymoe, its classes one by one, SwiGLU to 8 bits, and DeepGEMM.

They have the rows and weights of the other systems, quantised: a scale for each 128 elements of a row, and for each
128 x 128 of a weight. Their results are compared with those of the quantised operands in float64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import raymoe.moe.product_fp8_launch as product_fp8_launch
import raymoe.moe.product_launch as product_launch
from raymoe.fp8 import FP8_BLOCK, dequantise
from raymoe.moe.expert_rows import Groups
from raymoe.moe.product_fp8 import ScaledProduct, ScaledTiles, fits
from raymoe.moe.product_fp8_operators import ScaledOperands, gate_scaled, multiply_scaled
from raymoe.moe.product_operators import Added
from raymoe.moe.products import Gate, Product
from raymoe.moe.products import fits as fits_outputs
from raymoe.workload.products.prepared import Compute, Prepared, Unavailable
from raymoe.workload.products.tasks import FORWARD, Task, error_between, padded_places

OTHER_CLASSES = (ScaledTiles(64, 5),)
"""Classes that no product takes."""


def _operands(task: Task) -> ScaledOperands:
    if task.x.dtype != torch.bfloat16:
        raise Unavailable("8-bit products are measured beside bfloat16")
    return task.quantised


def _prepared(task: Task, compute: Compute, places: Tensor | None = None) -> Prepared:
    """Return a system with rows in the places of x, or at `places`, in the order of `own`."""

    def error(y: Tensor) -> float:
        if places is not None:
            back = y.new_empty(len(task.x), y.shape[1])
            back[task.own] = y[places]
            y = back
        if not bool(y[task.own].isfinite().all()):
            return torch.inf
        return error_between(y[task.checked], task.quantised_want)

    return Prepared(compute, error, _nbytes(task, task.sizes.outputs(task.op) * 2))


def _nbytes(task: Task, row_bytes: int) -> int:
    """Bytes that must be read and written, with results of so many bytes a row."""
    return task.weight_bytes // 2 + task.rows * (task.sizes.columns(task.op) + row_bytes)


def _raymoe(task: Task) -> Prepared:
    operands, groups = _operands(task), Groups(task.offsets, task.counts)
    _check(task, kernel=False)
    added = Added()
    if task.gated:
        return _prepared(task, lambda: gate_scaled(operands, groups, added)[0])
    return _prepared(task, lambda: multiply_scaled(operands, groups, added))


def _quantised(task: Task) -> Prepared:
    """SwiGLU with results as 8-bit floats and scales."""
    operands, groups = _operands(task), Groups(task.offsets, task.counts)
    if not task.gated:
        raise Unavailable("only results of SwiGLU become 8-bit floats")
    _check(task, kernel=False)
    added, scales = Added(), [task.x.new_empty(0)]

    def compute() -> Tensor:
        values, scales[0] = gate_scaled(operands, groups, added, quantise=True)
        return values

    def error(values: Tensor) -> float:
        y = dequantise(values, scales[0])
        if not bool(y[task.own].isfinite().all()):
            return torch.inf
        return error_beyond_rounding(y[task.checked], scales[0][task.checked], task.quantised_want)

    return Prepared(compute, error, _nbytes(task, task.sizes.outputs(task.op)))


def error_beyond_rounding(have: Tensor, scales: Tensor, want: Tensor) -> float:
    """Return the largest error of rows beyond that of the nearest 8-bit floats with these scales.

    >>> error_beyond_rounding(torch.tensor([[30.0, 400.0]]), torch.tensor([[1.0]]), torch.tensor([[31.0, 400.0]]))
    0.0
    >>> error_beyond_rounding(torch.tensor([[26.0, 400.0]]), torch.tensor([[1.0]]), torch.tensor([[32.0, 400.0]]))
    0.01
    """
    steps = scales.double().repeat_interleave(FP8_BLOCK, dim=1)[:, : want.shape[1]] * 2.0**-9
    rounding = torch.maximum(want.abs() * 2.0**-4, steps / 2)
    excess = ((have.double() - want).abs() - rounding).clamp(min=0)
    return error_between(want + excess, want)


def _class(tiles: ScaledTiles, task: Task) -> Prepared:
    _check(task, kernel=True)
    operands, gate = _operands(task), Gate() if task.gated else None

    def compute() -> Tensor:
        y = task.x.new_empty(len(task.x), task.sizes.outputs(task.op))
        product = Product(operands.x, operands.weight, task.offsets, task.counts, y, gate, tiles=tiles)
        product_fp8_launch.launch(ScaledProduct(product, operands.x_scales, operands.weight_scales))
        return y

    return _prepared(task, compute)


def _check(task: Task, kernel: bool) -> None:
    """Raise where product_fp8.cu does not compute the product; unless `kernel`, CPU ranks compute the formula."""
    if not kernel and not task.on_gpu:
        return
    rows, columns = task.weight.shape[1:]
    sizes = fits(rows, columns, task.gated, False) and fits_outputs(task.sizes.outputs(task.op), columns)
    if not product_launch.has_kernel(task.x) or not sizes:
        raise Unavailable("product_fp8.cu needs a GPU of compute capability 9.0, and sizes that fit")


# DeepGEMM: rows padded as it needs them, and their scales column after column.


def _deep_gemm(task: Task) -> Prepared:
    if not task.on_gpu:
        raise Unavailable("DeepGEMM is compared on GPUs")
    if task.gated:
        raise Unavailable("DeepGEMM has no SwiGLU; its product is in operation up")
    operands = _operands(task)
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError as error:
        raise Unavailable(f"DeepGEMM cannot be imported: {error}") from error
    return _deep_gemm_contiguous(task, operands, deep_gemm)


def _deep_gemm_contiguous(task: Task, operands: ScaledOperands, deep_gemm: Any) -> Prepared:
    starts, rows = padded_places(task.sizes.counts, deep_gemm.get_mk_alignment_for_contiguous_layout())
    parts = [torch.arange(start, start + count) for start, count in zip(starts, task.sizes.counts, strict=True)]
    places, device = torch.cat(parts).to(task.x.device), task.x.device
    x = torch.zeros(rows, operands.x.shape[1], dtype=torch.uint8, device=device)
    x[places] = operands.x.view(torch.uint8)[task.own]
    scales = torch.ones(operands.x_scales.shape[1], rows, device=device).T
    scales[places] = operands.x_scales[task.own]
    experts = torch.full((rows,), -1, dtype=torch.int32, device=device)
    counts = torch.tensor(task.sizes.counts, device=device)
    experts[places] = torch.arange(len(counts), dtype=torch.int32, device=device).repeat_interleave(counts)
    pair, weights = (x.view(torch.float8_e4m3fn), scales), (operands.weight, operands.weight_scales)

    def compute() -> Tensor:
        y = torch.empty(rows, task.weight.shape[1], dtype=torch.bfloat16, device=device)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(pair, weights, y, experts)
        return y

    return _prepared(task, compute, places)


CLASSES = {f"fp8_{tiles.tokens}": tiles for tiles in OTHER_CLASSES}
OURS_FP8 = ("raymoe_fp8", "raymoe_fp8_quantised", *CLASSES)
_BY_NAME: dict[str, Callable[[Task], Prepared]] = {
    "raymoe_fp8": _raymoe,
    "raymoe_fp8_quantised": _quantised,
    **{name: partial(_class, tiles) for name, tiles in CLASSES.items()},
    "deep_gemm_fp8": _deep_gemm,
}


def _unless_gradients(name: str, task: Task) -> Prepared:
    if task.op not in FORWARD:
        raise Unavailable("8-bit products have no gradients")
    return _BY_NAME[name](task)


FP8_SYSTEMS: dict[str, Callable[[Task], Prepared]] = {name: partial(_unless_gradients, name) for name in _BY_NAME}
