"""A system of workload products that is ready to compute, and why one is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.errors import RaymoeError
from raymoe.workload.products.tasks import Task, error_between

Compute = Callable[[], Tensor]


class Unavailable(RaymoeError):  # noqa: N818 - it says what happened
    """A system cannot compute a product here. The message says why."""


@dataclass(frozen=True)
class Prepared:
    """A function that computes on the current stream, and one that returns the error of its result."""

    compute: Compute
    error: Callable[[Tensor], float]
    nbytes: int | None = None
    """Bytes that it must read and write, if they are not those of the task."""


def by_places(task: Task, compute: Compute) -> Prepared:
    """Return a system whose result has the rows of x in their places."""

    def error(y: Tensor) -> float:
        if not bool(y[task.own].isfinite().all()):
            return torch.inf
        return error_between(y[task.checked], task.want)

    return Prepared(compute, error)
