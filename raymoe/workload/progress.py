"""The progress of a case. Apart from the rest, because the driver listens to it and loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of a case, the last of them in a block that took `seconds`."""

    done: int
    total: int
    seconds: float


def step_listener(progress: Callable[[Progress], None], total: int, before: int = 0) -> Callable[[int, float], None]:
    """A listener for one of several loops that make a case of `total` steps; `before` were done by earlier ones.

    >>> step_listener(print, total=100, before=50)(10, 0.2)
    Progress(done=60, total=100, seconds=0.2)
    """
    return lambda done, seconds: progress(Progress(before + done, total, seconds))
