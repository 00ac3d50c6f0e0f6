"""Actors that misbehave, most of them as rank 1.

Ray pickles the classes by value, so that its workers need not find this module.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
from ray import cloudpickle

from raymoe.gang.rank import Rank

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class RaisingRank(Rank):
    """Rank 1 raises an exception in its first case."""

    def _run(self, resolved: Any, finished: Any) -> None:
        if self.index == 1:
            raise ValueError("a device was unplugged")
        super()._run(resolved, finished)


class CorruptingRank(Rank):
    """Rank 1 sends its peers other bytes than the rows that it was given."""

    def _run(self, resolved: Any, finished: Any) -> None:
        from raymoe.exchange.cpu.host import HostSlots

        if self.index == 1:
            dispatch = HostSlots.dispatch
            HostSlots.dispatch = lambda slots, x, *rest: dispatch(slots, x + 1, *rest)  # type: ignore[method-assign]
        super()._run(resolved, finished)


class HungryRank(Rank):
    """Rank 1 takes memory until Ray's memory monitor ends it."""

    def _run(self, resolved: Any, finished: Any) -> None:
        taken = []
        while self.index == 1 and len(taken) < MOST_BLOCKS:
            taken.append(b"x" * BLOCK_BYTES)
            time.sleep(0.02)
        super()._run(resolved, finished)


class CalmRank(Rank):
    """Sleep in every dispatch, so that many steps leave the CPUs to ranks that start."""

    def _run(self, resolved: Any, finished: Any) -> None:
        from raymoe.exchange.cpu.host import HostSlots

        dispatch = HostSlots.dispatch

        def calm(slots: Any, *arguments: Any) -> Any:
            time.sleep(CALM_S)
            return dispatch(slots, *arguments)

        HostSlots.dispatch = calm  # type: ignore[method-assign]
        super()._run(resolved, finished)


CALM_S = 0.02
BLOCK_BYTES, MOST_BLOCKS = 100 * 2**20, 80


def actor(kind: type[Rank]) -> Any:
    """Make an actor class as `raymoe.gang.rank` does."""
    return ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(kind)


def using(kind: type[Rank]) -> str:
    """Make a program for the driver process, which then creates ranks of this kind."""
    name = kind.__name__
    return f"from tests.gang import faulty_ranks as f; import raymoe.gang.gang as g; g.RankActor = f.actor(f.{name})"
