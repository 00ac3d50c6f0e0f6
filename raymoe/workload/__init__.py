"""Run the cases of a job on a rank: a folder for each workload, `compare/` for baselines and other systems.

Read first: `measure.py` (the loop of steps), `clock.py` (the time of an operation), `exchange/run_exchange.py`.
`run_case` imports a workload only when a case needs it, because the driver loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raymoe.errors import ConfigError
from raymoe.workload.progress import Progress

if TYPE_CHECKING:
    from raymoe.config import Case
    from raymoe.memory.world import World

__all__ = ["Progress", "run_case"]


def run_case(case: Case, world: World, progress: Callable[[Progress], None]) -> list[dict[str, object]]:
    """Run one case on this rank. All ranks of the world call it together and get the same result lines."""
    if case.job.world.ranks != world.size:
        raise ConfigError(
            f"case {case.name} is for {case.job.world.ranks} ranks and this world has {world.size}; "
            f"set world.ranks to {world.size}, or open a world of {case.job.world.ranks}"
        )
    if case.job.workload == "p2p":
        from raymoe.workload.p2p.run_p2p import run_p2p

        return run_p2p(case, world, progress)
    if case.job.workload == "exchange":
        from raymoe.workload.exchange.run_exchange import run_exchange

        return run_exchange(case, world, progress)
    if case.job.workload == "overlap":
        from raymoe.workload.overlap.run_overlap import run_overlap

        return run_overlap(case, world, progress)
    if case.job.workload == "pointwise":
        from raymoe.workload.pointwise.run_pointwise import run_pointwise

        return run_pointwise(case, world, progress)
    if case.job.workload == "products":
        from raymoe.workload.products.run_products import run_products

        return run_products(case, world, progress)
    if case.job.workload == "train":
        from raymoe.workload.train.run_train import run_train

        return run_train(case, world, progress)
    from raymoe.workload.layer.run_layer import run_layer

    return run_layer(case, world, progress)
