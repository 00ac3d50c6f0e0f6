"""Where the ranks go: one bundle a rank, all on one node, and a sentence for the user where that cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from raymoe.config import Job
from raymoe.config.job import kind_of_ranks
from raymoe.config.sections import WorldSection
from raymoe.errors import PlacementError


@dataclass(frozen=True)
class Seat:
    """What a started actor says of where it sits. `process` is (pid, start time): a pid alone may be reused."""

    bundle: int
    node: str
    gpu: str | None  # as Ray names it: mostly a number, a UUID where the node was started with UUIDs
    process: tuple[int, int]
    errors: str | None = None  # the file of its standard error


def order(seats: Sequence[Seat]) -> list[int]:
    """Bundles in the order of their ranks: by node, then by GPU, then by bundle.

    Ray gives bundles to GPUs in no promised order; neighbours in rank should be neighbours on the board.

    >>> order([Seat(0, "n1", "10", (1, 1)), Seat(1, "n0", "2", (2, 1)), Seat(2, "n1", "9", (3, 1))])
    [1, 2, 0]
    """

    def place_of(seat: Seat) -> tuple[str, int, str, int]:
        gpu = seat.gpu or ""
        return seat.node, int(gpu) if gpu.isdigit() else -1, gpu, seat.bundle

    return [seat.bundle for seat in sorted(seats, key=place_of)]


def device_for(job: Job) -> str:
    """`cuda` or `cpu` for this job on this cluster.

    `auto` looks at whether there are GPUs at all, never at whether there are enough: a run that was meant for GPUs and
    found too few fails to be placed, and does not give CPU figures.
    """
    return kind_of_ranks(job) or ("cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu")


def bundle_for(world: WorldSection, device: str) -> dict[str, float]:
    """What one rank asks of Ray.

    >>> shared = WorldSection(ranks=4, device="cuda", share_gpu=True)
    >>> bundle_for(WorldSection(ranks=4, cpus=0.5), "cpu"), bundle_for(shared, "cuda")
    ({'CPU': 0.5}, {'CPU': 0.5, 'GPU': 0.25})
    """
    if device == "cpu":
        return {"CPU": world.cpus}
    return {"CPU": world.cpus, "GPU": 1 / world.ranks if world.share_gpu else 1.0}


@dataclass(frozen=True)
class Reservation:
    """A bundle for each rank, all of one node, that every generation of a gang uses."""

    group: PlacementGroup
    bundle: dict[str, float]
    device: str


def place(job: Job, stopped: Callable[[], bool]) -> Reservation | None:
    """Reserve a place on one node for the ranks of a job; None where `stopped` turned true meanwhile.

    A request that no node could ever hold fails at once; one that must wait for others to finish waits as long as the
    job says.
    """
    ranks, timeout_s, device = job.world.ranks, job.world.placement_timeout_s, device_for(job)
    bundle = bundle_for(job.world, device)
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
    return Reservation(group, bundle, device)


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
