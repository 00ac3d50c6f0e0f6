"""The systems that compute `dw`, the gradients of the weights of `up`: raymoe, torch, and both into float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raymoe.moe.expert_rows import Groups
from raymoe.moe.product_gradients import add_weight_gradient, weight_gradient
from raymoe.moe.torch_products import outer_by_offsets
from raymoe.workload.products.tasks import Task, error_between

OUTPUTS = (0, -1)
"""Outputs of an expert that are compared with float64."""


def by_raymoe(task: Task) -> tuple[Callable[[], Tensor], Callable[[Tensor], float]]:
    """Return the function that computes, and the one that returns the error of its result."""
    dy, groups = dy_of(task), Groups(task.offsets, task.counts)
    return lambda: weight_gradient(dy, task.x, groups, gaps_are_zero=True), lambda y: _error(task, y)


def by_torch(task: Task) -> tuple[Callable[[], Tensor], Callable[[Tensor], float]]:
    dy = dy_of(task)
    return lambda: outer_by_offsets(dy, task.x, task.offsets, task.counts), lambda y: _error(task, y)


def added_by_raymoe(task: Task) -> tuple[Callable[[], Tensor], Callable[[Tensor], float]]:
    """Add to `task.total`. Its sums grow, so one more call adds to zeros, and that sum is compared."""
    dy, groups = dy_of(task), Groups(task.offsets, task.counts)

    def add(total: Tensor) -> Tensor:
        add_weight_gradient(total, dy, task.x, groups, gaps_are_zero=True)
        return total.new_empty(1)

    return _adding(task, add)


def added_by_torch(task: Task) -> tuple[Callable[[], Tensor], Callable[[Tensor], float]]:
    """Add to `task.total` in a second pass."""
    dy = dy_of(task)

    def add(total: Tensor) -> Tensor:
        total.add_(outer_by_offsets(dy, task.x, task.offsets, task.counts))
        return total.new_empty(1)

    return _adding(task, add)


def _adding(task: Task, add: Callable[[Tensor], Tensor]) -> tuple[Callable[[], Tensor], Callable[[Tensor], float]]:
    def error(_: Tensor) -> float:
        task.total.zero_()
        add(task.total)
        return _error(task, task.total)

    return lambda: add(task.total), error


def _error(task: Task, d_weight: Tensor) -> float:
    """Return the largest error of the compared outputs. All others must be finite, and zero without rows."""
    with_rows = task.counts > 0
    if not bool(d_weight.isfinite().all()) or bool(d_weight[~with_rows].any()):
        return torch.inf
    have, want = d_weight[with_rows][:, OUTPUTS], _wanted(task)[with_rows]
    return error_between(have.flatten(0, 1), want.flatten(0, 1))


def _wanted(task: Task) -> Tensor:
    places = zip(task.sizes.starts, task.sizes.counts, strict=False)
    dy, x = dy_of(task)[:, OUTPUTS], task.x
    return torch.stack([dy[start:][:count].double().T @ x[start:][:count].double() for start, count in places])


def dy_of(task: Task) -> Tensor:
    assert task.dy is not None, "only dw has the gradients of results"
    return task.dy
