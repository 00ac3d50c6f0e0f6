"""The gradients of the experts' products as operators of torch: of the rows, and of the weights.

On Hopper product.cu computes those of rows, from the weights as they are in memory, and outer_product.cu those of
weights. Neither reads gaps. Elsewhere, and for sizes that no kernel takes, they are torch's products, which need zeros
in gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import raymoe.moe.outer_launch as outer_launch
import raymoe.moe.product_launch as product_launch
from raymoe.moe.expert_rows import Groups, zero_gaps
from raymoe.moe.outer_products import OuterProduct
from raymoe.moe.products import Product
from raymoe.moe.torch_products import multiply_by_torch, outer_by_torch
from raymoe.rows.operator_definitions import define
from raymoe.rows.pipe_tensors import ALIGNMENT, as_dense


def rows_gradient(dy: Tensor, weight: Tensor, groups: Groups, *, gaps_are_zero: bool = False) -> Tensor:
    """Multiply each expert's rows of dy[C, N] by its `weight[e]`, [N, K]: the gradient of a product's rows, [C, K].

    Gaps become zero up to a multiple of 16, or to the next expert. `gaps_are_zero`: those of dy are.
    """
    dx: Tensor = _ops.product_rows_gradient(dy, weight, groups.offsets, groups.counts, gaps_are_zero)
    return dx


def weight_gradient(dy: Tensor, x: Tensor, groups: Groups, *, gaps_are_zero: bool = False) -> Tensor:
    """Multiply each expert's rows of dy[C, N], transposed, by its rows of x[C, K]: a weight's gradient, [L, N, K].

    `gaps_are_zero`: those of dy and x are.
    """
    d_weight: Tensor = _ops.product_weight_gradient(dy, x, groups.offsets, groups.counts, gaps_are_zero)
    return d_weight


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor, groups: Groups, *, gaps_are_zero: bool = False) -> None:
    """Add what `weight_gradient` computes to `total`, float32[L, N, K], in its place.

    The kernel adds the float32 sums, if the memory of `total` is dense and begins at a multiple of 16 bytes. Otherwise
    GPUs add sums that were rounded to the dtype of the rows.
    """
    _ops.add_weight_gradient(total, dy, x, groups.offsets, groups.counts, gaps_are_zero)


# The operators.

_PLACES = "Tensor offsets, Tensor counts"
_SCHEMAS = {
    "product_rows_gradient": f"(Tensor dy, Tensor weight, {_PLACES}, bool gaps_are_zero) -> Tensor",
    "product_weight_gradient": f"(Tensor dy, Tensor x, {_PLACES}, bool gaps_are_zero) -> Tensor",
    "add_weight_gradient": f"(Tensor(a!) total, Tensor dy, Tensor x, {_PLACES}, bool gaps_are_zero) -> ()",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe
_DEVICES = ("cpu", "cuda")


def _rows_gradient(dy: Tensor, weight: Tensor, offsets: Tensor, counts: Tensor, gaps_are_zero: bool) -> Tensor:
    transposed, groups = weight.transpose(1, 2), Groups(offsets, counts)
    if not product_launch.takes(dy, transposed, None):
        return multiply_by_torch(dy if gaps_are_zero else zero_gaps(dy, groups), transposed, groups)
    dx, places = dy.new_empty(len(dy), weight.shape[2]), _places(offsets, counts)
    product_launch.launch(Product(as_dense(dy), transposed, *places, dx, zero_gaps=True))
    return dx


def _weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor, counts: Tensor, gaps_are_zero: bool) -> Tensor:
    if not outer_launch.takes(dy, x):
        groups = Groups(offsets, counts)
        if not gaps_are_zero:
            dy, x = zero_gaps(dy, groups), zero_gaps(x, groups)
        return outer_by_torch(dy, x, groups)
    d_weight = x.new_empty(len(counts), dy.shape[1], x.shape[1])
    outer_launch.launch(OuterProduct(as_dense(dy), as_dense(x), *_places(offsets, counts), d_weight))
    return d_weight


def _add_weight_gradient(
    total: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, counts: Tensor, gaps_are_zero: bool
) -> None:
    kernel = outer_launch.takes(dy, x)
    if kernel and total.is_contiguous() and total.data_ptr() % ALIGNMENT == 0:
        outer_launch.launch(OuterProduct(as_dense(dy), as_dense(x), *_places(offsets, counts), total))
        return
    if not kernel and not x.is_cuda:
        dy, x = dy.float(), x.float()
    total.add_(_weight_gradient(dy, x, offsets, counts, gaps_are_zero))


def _places(offsets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return offsets.to(torch.int32).contiguous(), counts.to(torch.int32).contiguous()


def _fake_rows_gradient(dy: Tensor, weight: Tensor, *_: object) -> Tensor:
    return weight.new_empty(dy.shape[0], weight.shape[2])


def _fake_weight_gradient(dy: Tensor, x: Tensor, _offsets: Tensor, counts: Tensor, _gaps_are_zero: bool) -> Tensor:
    return dy.new_empty(counts.shape[0], dy.shape[1], x.shape[1])


def _fake_add_weight_gradient(*_: object) -> None:
    pass


torch.library.impl("raymoe::product_rows_gradient", _DEVICES, _rows_gradient)
torch.library.impl("raymoe::product_weight_gradient", _DEVICES, _weight_gradient)
torch.library.impl("raymoe::add_weight_gradient", _DEVICES, _add_weight_gradient)
torch.library.register_fake("raymoe::product_rows_gradient", _fake_rows_gradient)
torch.library.register_fake("raymoe::product_weight_gradient", _fake_weight_gradient)
torch.library.register_fake("raymoe::add_weight_gradient", _fake_add_weight_gradient)
