"""The products of experts by torch: a loop over experts on CPUs, `grouped_mm` on GPUs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from raymoe.errors import ConfigError
from raymoe.moe.by_row import in_tiles
from raymoe.moe.expert_rows import Groups
from raymoe.rows.operator_definitions import define


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype in which a CPU multiplies rows of `dtype`.

    Weights are rounded to `dtype` before, so the choice changes results by rounding only.

    Rates in GFLOP/s on one core of an AMD EPYC (torch 2.13, 256 x 1024 -> 1024, 2026-11-21): with AVX512_BF16 bfloat16
    219, float32 99, float16 21; with AVX2 only bfloat16 22, float32 the same.
    """
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiply_by_torch(rows: Tensor, weight: Tensor, groups: Groups, by_row: bool = False) -> Tensor:
    """Multiply each expert's rows [C, K] by its `weight[e]`, [N, K]. The result has the dtype of the weights.

    On a CPU rows of no expert become zero. On a GPU they are multiplied up to the last offset, and unspecified from
    there on. `by_row`: the bits of a result depend on its row and its expert alone. On GPUs it takes one expert only.
    """
    y: Tensor = _ops.grouped_product(rows, weight, groups.offsets, groups.counts, by_row)
    return y


def outer_by_torch(dy: Tensor, rows: Tensor, groups: Groups) -> Tensor:
    """Compute the gradient of the weights: for each expert, its rows of `dy` transposed times its `rows`.

    On a GPU both must be zero in gaps, and starts are multiples of 16 bytes of a column: of 8 rows of 16 bits.
    """
    d_weight: Tensor = _ops.grouped_outer(dy, rows, groups.offsets, groups.counts)
    return d_weight


_PLACES = "Tensor offsets, Tensor counts"
_SCHEMAS = {
    "grouped_product": f"(Tensor rows, Tensor weight, {_PLACES}, bool by_row=False) -> Tensor",
    "grouped_outer": f"(Tensor dy, Tensor rows, {_PLACES}) -> Tensor",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::grouped_product", "cpu")
def _grouped_product(rows: Tensor, weight: Tensor, offsets: Tensor, counts: Tensor, by_row: bool = False) -> Tensor:
    y = torch.empty(len(rows), weight.shape[1], dtype=weight.dtype)
    arithmetic, end = arithmetic_dtype(weight.dtype), 0
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        y[end:start].zero_()
        end = start + count
        if count:
            part = slice(start, end)
            with torch.autocast("cpu", enabled=False):  # the fake has the dtype of the weights
                multiply = functools.partial(nn.functional.linear, weight=weight[expert].to(arithmetic))
                own_rows = rows[part].to(arithmetic)
                y[part] = in_tiles(multiply, own_rows) if by_row else multiply(own_rows)
    y[end:].zero_()
    return y


def multiply_by_offsets(rows: Tensor, weight: Tensor, offsets: Tensor, counts: Tensor, by_row: bool = False) -> Tensor:
    """Multiply as on a GPU, by offsets that the host never reads; of float16 torch makes the host wait."""
    del counts
    if by_row and len(weight) == 1:
        with torch.autocast(rows.device.type, enabled=False):
            return in_tiles(functools.partial(nn.functional.linear, weight=weight[0]), rows)
    if by_row:
        raise ConfigError(
            f'deterministic="batch" and experts {list(weight.shape)} of {weight.dtype}, which kernels/moe/product.cu '
            "does not take here: torch's products on a GPU add in another order for other numbers of rows; use "
            "bfloat16 or float16 on Hopper GPUs, and sizes that are multiples of 16"
        )
    product: Any = nn.functional.grouped_mm
    with torch.autocast(rows.device.type, enabled=False):
        y: Tensor = product(rows.contiguous(), weight.transpose(-2, -1), offs=_ends(offsets))
    return y


def _fake_grouped_product(
    rows: Tensor, weight: Tensor, offsets: Tensor, counts: Tensor, by_row: bool = False
) -> Tensor:
    del offsets, counts, by_row
    return weight.new_empty(rows.shape[0], weight.shape[1])


@torch.library.impl("raymoe::grouped_outer", "cpu")
def _grouped_outer(dy: Tensor, rows: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    d_weight = torch.zeros(len(counts), dy.shape[1], rows.shape[1], dtype=dy.dtype)
    arithmetic = arithmetic_dtype(dy.dtype)
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        if count:
            part = slice(start, start + count)
            with torch.autocast("cpu", enabled=False):
                d_weight[expert] = dy[part].to(arithmetic).T @ rows[part].to(arithmetic)
    return d_weight


def outer_by_offsets(dy: Tensor, rows: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    """Compute the gradient of the weights as on a GPU."""
    del counts
    product: Any = nn.functional.grouped_mm
    with torch.autocast(rows.device.type, enabled=False):
        d_weight: Tensor = product(dy.contiguous().t(), rows.contiguous(), offs=_ends(offsets))
    return d_weight


def _ends(offsets: Tensor) -> Tensor:
    return offsets[1:].to(torch.int32)


def _fake_grouped_outer(dy: Tensor, rows: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    del offsets
    return dy.new_empty(counts.shape[0], dy.shape[1], rows.shape[1])


def _save_for_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, *others = inputs[:4]
    ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, *others)
    ctx.dtype = rows.dtype
    del output


def _product_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, offsets, counts = ctx.saved_tensors
    groups = Groups(offsets, counts)
    needs_rows, needs_weight = ctx.needs_input_grad[:2]
    drows = multiply_by_torch(dy, weight.transpose(1, 2), groups).to(ctx.dtype) if needs_rows else None
    return drows, outer_by_torch(dy, rows, groups) if needs_weight else None, None, None, None


torch.library.impl("raymoe::grouped_product", "cuda", multiply_by_offsets)
torch.library.impl("raymoe::grouped_outer", "cuda", outer_by_offsets)
torch.library.register_fake("raymoe::grouped_product", _fake_grouped_product)
torch.library.register_fake("raymoe::grouped_outer", _fake_grouped_outer)
torch.library.register_autograd("raymoe::grouped_product", _product_backward, setup_context=_save_for_product)


def check_dtype(rows: Tensor) -> None:
    """Refuse rows that torch multiplies on a GPU with a wait for the host, and no kernel multiplies at all."""
    if rows.device.type != "cpu" and rows.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"experts over {rows.dtype} on a GPU; torch multiplies dtypes other than bfloat16 with a wait for the "
            "host: take bfloat16 or float16"
        )
