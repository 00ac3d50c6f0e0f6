"""What a rank does with a job.

Nothing is imported before it is needed: the driver, which has no use for torch, takes `room` and `Progress` from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raymoe.errors import ConfigError

if TYPE_CHECKING:
    from raymoe.config import Case
    from raymoe.memory.world import World


# How far a case is. Apart from the rest, because whoever only listens needs no torch.


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of a case, the last of them in a block that took `seconds`."""

    done: int
    total: int
    seconds: float


def telling(progress: Callable[[Progress], None], total: int, before: int = 0) -> Callable[[int, float], None]:
    """A listener for one of several loops that make a case of `total` steps; `before` were done by earlier ones.

    >>> telling(print, total=100, before=50)(10, 0.2)
    Progress(done=60, total=100, seconds=0.2)
    """
    return lambda done, seconds: progress(Progress(before + done, total, seconds))


__all__ = ["Progress", "run_case"]


def run_case(case: Case, world: World, progress: Callable[[Progress], None]) -> list[dict[str, object]]:
    """Run one case on this rank. All ranks of the world call it together and get the same result lines."""
    if case.job.world.ranks != world.size:
        raise ConfigError(f"case {case.name} is for {case.job.world.ranks} ranks and this world has {world.size}")
    if case.job.workload == "p2p":
        from raymoe.workload.p2p.run import run_p2p

        return run_p2p(case, world, progress)
    if case.job.workload == "exchange":
        from raymoe.workload.exchange.run import run_exchange

        return run_exchange(case, world, progress)
    if case.job.workload == "overlap":
        from raymoe.workload.overlap.run import run_overlap

        return run_overlap(case, world, progress)
    from raymoe.workload.layer.run import run_layer

    return run_layer(case, world, progress)
