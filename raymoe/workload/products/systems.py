"""The systems that workload products measures: raymoe, its kernels one by one, torch, cuBLAS, DeepGEMM, and a copy.

Each entry of SYSTEMS makes a `Prepared` from a task, or raises `Unavailable` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.moe import product_launch
from raymoe.moe.expert_rows import Groups
from raymoe.moe.grouped import grouped_linear, grouped_swiglu
from raymoe.moe.product_gradients import rows_gradient
from raymoe.moe.products import Gate, Product, TileClass
from raymoe.rows.activation import swiglu
from raymoe.workload.products import gradient_systems
from raymoe.workload.products.cublas import by_cublas
from raymoe.workload.products.prepared import Compute, Prepared, Unavailable, by_places
from raymoe.workload.products.systems_fp8 import FP8_SYSTEMS, OURS_FP8
from raymoe.workload.products.tasks import Task, error_between, padded_places


def _gated_if(task: Task, compute: Compute) -> Compute:
    """Apply SwiGLU after a product, as a layer does that has no kernel for both."""
    return (lambda: swiglu(compute())) if task.gated else compute


# raymoe: by its public functions, and by each kernel.


def _raymoe(task: Task) -> Prepared:
    function: Any = grouped_swiglu if task.gated else grouped_linear
    given = task.x, task.weight, task.offsets, task.counts
    if task.op == "dx":
        weight, groups = task.weight.transpose(1, 2), Groups(task.offsets, task.counts)
        return by_places(task, lambda: rows_gradient(task.x, weight, groups))
    return by_places(task, lambda: function(*given))


def _class(tiles: TileClass, task: Task) -> Prepared:
    gate = Gate() if task.gated else None
    if not product_launch.takes(task.x, task.weight, gate):
        raise Unavailable("product.cu needs a GPU of compute capability 9.0, 16-bit elements, and sizes that fit")

    def compute() -> Tensor:
        y = task.x.new_empty(len(task.x), task.sizes.outputs(task.op))
        given = task.x, task.weight, task.offsets, task.counts, y, gate
        product_launch.launch(Product(*given, zero_gaps=task.op == "dx", tiles=tiles))
        return y

    return by_places(task, compute)


OTHER_CLASSES = (TileClass(96, 5), TileClass(128, 4))
"""Smaller tiles of product.cu than those that every product takes."""


# torch.


def _grouped_mm(task: Task) -> Prepared:
    if task.on_gpu and task.x.dtype != torch.bfloat16:
        raise Unavailable(f"torch makes the host wait where grouped_mm multiplies {task.sizes.dtype}")
    product: Any = functional.grouped_mm
    weight, ends = task.weight.transpose(1, 2), task.offsets[1:]
    return by_places(task, _gated_if(task, lambda: product(task.x, weight, offs=ends)))


def _dense(task: Task) -> Prepared:
    """As many rows, by the weights of one expert."""
    x, weight = task.x[: task.rows], task.weight[0].T
    checked = torch.linspace(0, max(0, task.rows - 1), min(task.rows, 64)).round().long().to(x.device)

    def error(y: Tensor) -> float:
        return error_between(y[checked], task.exactly(checked, 0))

    return Prepared(_gated_if(task, lambda: torch.mm(x, weight)), error)


def _cublas(task: Task) -> Prepared:
    return by_places(task, _gated_if(task, by_cublas(task)))


# DeepGEMM: rows padded as it needs them; for few rows by its masked form.

MOST_MASKED = 64


def _deep_gemm(task: Task) -> Prepared:
    if not task.on_gpu or task.x.dtype != torch.bfloat16:
        raise Unavailable("DeepGEMM is compared on GPUs, with bfloat16")
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError as error:
        raise Unavailable(f"DeepGEMM cannot be imported: {error}") from error
    masked = task.sizes.mean <= MOST_MASKED
    return _deep_gemm_masked(task, deep_gemm) if masked else _deep_gemm_contiguous(task, deep_gemm)


def _deep_gemm_contiguous(task: Task, deep_gemm: Any) -> Prepared:
    starts, rows = padded_places(task.sizes.counts, deep_gemm.get_mk_alignment_for_contiguous_layout())
    x = task.x.new_zeros(rows, task.x.shape[1])
    experts = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
    places = _places_from(task, starts)
    x[places] = task.x[task.own]
    counts = torch.tensor(task.sizes.counts, device=x.device)
    experts[places] = torch.arange(len(counts), dtype=torch.int32, device=x.device).repeat_interleave(counts)

    def compute() -> Tensor:
        y = x.new_empty(rows, task.weight.shape[1])
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, task.weight, y, experts)
        return y

    return _moved(task, compute, places)


def _deep_gemm_masked(task: Task, deep_gemm: Any) -> Prepared:
    most = max(16, max(task.sizes.counts))
    experts, columns = len(task.sizes.counts), task.x.shape[1]
    x = task.x.new_zeros(experts, most, columns)
    places = _places_from(task, [most * expert for expert in range(experts)])
    x.view(-1, columns)[places] = task.x[task.own]
    expected = max(1, round(task.sizes.mean))

    def compute() -> Tensor:
        y = x.new_empty(experts, most, task.weight.shape[1])
        deep_gemm.m_grouped_bf16_gemm_nt_masked(x, task.weight, y, task.counts, expected)
        return y.view(experts * most, -1)

    return _moved(task, compute, places)


def _places_from(task: Task, starts: list[int]) -> Tensor:
    """Return where each row is, in the order of `own`, if experts start there."""
    parts = [torch.arange(start, start + count) for start, count in zip(starts, task.sizes.counts, strict=True)]
    return torch.cat(parts).to(task.x.device)


def _moved(task: Task, compute: Compute, places: Tensor) -> Prepared:
    """A system whose rows are at other places than those of x."""

    def error(y: Tensor) -> float:
        back = y.new_empty(len(task.x), y.shape[1])
        back[task.own] = y[places]
        return error_between(back[task.checked], task.want)

    return Prepared(_gated_if(task, compute), error)


# The copy: half of the weights' bytes are read, half written.


def _copy(task: Task) -> Prepared:
    source = torch.ones(max(1, task.weight_bytes // 2), dtype=torch.uint8, device=task.x.device)
    into = torch.empty_like(source)
    return Prepared(lambda: into.copy_(source), lambda y: 0.0 if bool((y == 1).all()) else torch.inf)


# All of them.

OURS, COPY = "raymoe", "copy"
CLASSES = {f"product_{tiles.tokens}": partial(_class, tiles) for tiles in OTHER_CLASSES}
OWN = (OURS, *CLASSES, "added", *OURS_FP8, COPY)
"""The systems that must work: what they do wrong ends the run."""
_BY_ROWS: dict[str, Callable[[Task], Prepared]] = {
    OURS: _raymoe,
    **CLASSES,
    "grouped_mm": _grouped_mm,
    "dense": _dense,
    "cublas": _cublas,
    "deep_gemm": _deep_gemm,
}
_OF_WEIGHTS = {
    OURS: gradient_systems.by_raymoe,
    "grouped_mm": gradient_systems.by_torch,
    "added": gradient_systems.added_by_raymoe,
    "grouped_mm_added": gradient_systems.added_by_torch,
}


def _prepared(name: str, task: Task) -> Prepared:
    if task.op != "dw":
        if name not in _BY_ROWS:
            raise Unavailable("it adds gradients of weights, which this operation has none of")
        return _BY_ROWS[name](task)
    if name not in _OF_WEIGHTS:
        raise Unavailable("it computes no gradients of weights")
    if name.startswith("grouped_mm") and task.on_gpu and task.x.dtype != torch.bfloat16:
        raise Unavailable(f"torch makes the host wait where grouped_mm multiplies {task.sizes.dtype}")
    return Prepared(*_OF_WEIGHTS[name](task))


SYSTEMS: dict[str, Callable[[Task], Prepared]] = {
    **{name: partial(_prepared, name) for name in dict.fromkeys((*_BY_ROWS, *_OF_WEIGHTS))},
    COPY: _copy,
    **FP8_SYSTEMS,
}
