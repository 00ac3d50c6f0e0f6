"""Where the ranks go: one bundle a rank, all on one node, and a sentence for the user where that cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from raymoe.job.errors import PlacementError


@dataclass(frozen=True)
class Seat:
    """What a started actor says of where it sits. `process` is (pid, start time): a pid alone may be reused."""

    bundle: int
    node: str
    gpu: int | None
    process: tuple[int, int]


def order(seats: Sequence[Seat]) -> list[int]:
    """Bundles in the order of their ranks: by node, then by GPU, then by bundle.

    Ray gives bundles to GPUs in no promised order; neighbours in rank should be neighbours on the board.

    >>> order([Seat(0, "n1", 3, (1, 1)), Seat(1, "n0", 2, (2, 1)), Seat(2, "n1", 0, (3, 1))])
    [1, 2, 0]
    """
    return [seat.bundle for seat in sorted(seats, key=lambda s: (s.node, -1 if s.gpu is None else s.gpu, s.bundle))]


def place(ranks: int, bundle: dict[str, float], timeout_s: float, stopped: Callable[[], bool]) -> PlacementGroup | None:
    """A placement group with one bundle a rank on one node; None where `stopped` turned true meanwhile.

    A request that no node could ever hold fails at once; one that must wait for others to finish waits `timeout_s`.
    """
    group: PlacementGroup = placement_group([bundle] * ranks, strategy="STRICT_PACK")
    deadline = time.monotonic() + timeout_s
    while not group.wait(timeout_seconds=0.1):
        if stopped():
            return None
        scheduling = placement_group_table(group)["stats"]["scheduling_state"]
        if scheduling == "INFEASIBLE":
            raise PlacementError(
                f"{_asked(ranks, bundle)}, which no node of this cluster can hold ({_found()}); "
                "lower world.ranks or world.cpus, or use a larger node"
            )
        if time.monotonic() > deadline:
            raise PlacementError(
                f"{_asked(ranks, bundle)}, and the cluster had no room for it within {timeout_s:g} s ({_found()}); "
                "wait for other jobs to end or raise world.placement_timeout_s"
            )
    return group


def _asked(ranks: int, bundle: dict[str, float]) -> str:
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
    return f"asked for {ranks} ranks with {each} each on one node"


def _found() -> str:
    """The nodes' resources, as `largest node: 2 of 4 CPU, 0 of 8 GPU free; 3 nodes`."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, key=lambda node: (node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)))
    free = ray.available_resources()
    total = ray.cluster_resources()
    has = ", ".join(f"{largest['Resources'].get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    left = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"largest of {len(nodes)} nodes has {has}; free in the cluster: {left}"
