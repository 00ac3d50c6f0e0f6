"""The progress of a case, in a module of its own because the driver imports it and loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of a case are done; the last block of them took `seconds`."""

    done: int
    total: int
    seconds: float


def step_listener(progress: Callable[[Progress], None], total: int, before: int = 0) -> Callable[[int, float], None]:
    """Return a listener for one of the loops of a case of `total` steps; earlier loops did `before` of them.

    >>> step_listener(print, total=100, before=50)(10, 0.2)
    Progress(done=60, total=100, seconds=0.2)
    """
    return lambda done, seconds: progress(Progress(before + done, total, seconds))
