"""Place the ranks: one bundle for each rank, all on one node, or an error that says why that is impossible."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from raymoe.config import Job
from raymoe.config.job import kind_of_ranks
from raymoe.config.sections import WorldSection
from raymoe.errors import PlacementError
from raymoe.gang.capacity import autoscaler_runs, free_and_held


@dataclass(frozen=True)
class Location:
    """The place of a started actor. `process` is (pid, start time), since a pid may be reused."""

    bundle: int
    node: str
    gpu: str | None  # Ray's name of it: a number, or a UUID on a node that was started with UUIDs
    process: tuple[int, int]
    stderr_file: str | None = None
    boot_id: str = ""  # of the host; processes with the same one share a clock


def bundles_by_rank(locations: Sequence[Location]) -> list[int]:
    """Order bundles by node, then by GPU, then by bundle: the first becomes the bundle of rank 0.

    Ray promises no order of bundles on GPUs, and consecutive ranks should have consecutive GPUs.

    >>> places = [("n1", "10"), ("n0", "2"), ("n1", "9")]
    >>> bundles_by_rank([Location(bundle, node, gpu, (1, 1)) for bundle, (node, gpu) in enumerate(places)])
    [1, 2, 0]
    """

    def sort_key(location: Location) -> tuple[str, int, str, int]:
        gpu = location.gpu or ""
        return location.node, int(gpu) if gpu.isdigit() else -1, gpu, location.bundle

    return [location.bundle for location in sorted(locations, key=sort_key)]


def device_for(job: Job) -> str:
    """Return `cuda` or `cpu` for this job on this cluster.

    Where the job allows both, it is `cuda` if the cluster has any GPU, even too few. The run then fails to be placed,
    rather than measure CPU ranks where GPU ranks were meant.
    """
    return kind_of_ranks(job) or ("cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu")


def bundle_for(world: WorldSection, device: str) -> dict[str, float]:
    """Return the resources of one rank.

    >>> shared = WorldSection(ranks=4, device="cuda", share_gpu=True)
    >>> bundle_for(WorldSection(ranks=4, cpus=0.5), "cpu"), bundle_for(shared, "cuda")
    ({'CPU': 0.5}, {'CPU': 0.5, 'GPU': 0.25})
    """
    if device == "cpu":
        return {"CPU": world.cpus}
    return {"CPU": world.cpus, "GPU": 1 / world.ranks if world.share_gpu else 1.0}


@dataclass(frozen=True)
class Reservation:
    """A bundle for each rank, all on one node. Every generation of a gang uses it."""

    group: PlacementGroup
    bundle: dict[str, float]
    device: str


def place(job: Job, run: str, stopped: Callable[[], bool], tell: Callable[[str], None]) -> Reservation | None:
    """Reserve bundles on one node for the ranks of a job; return None if `stopped` became true meanwhile.

    A request that no node can hold fails at once, unless an autoscaler runs: it may add a larger node. A request that
    must wait does so up to `world.placement_timeout_s`. Meanwhile `tell` gets a line about what is free.
    """
    ranks, timeout_s, device = job.world.ranks, job.world.placement_timeout_s, device_for(job)
    bundle = bundle_for(job.world, device)
    asked = _request(ranks, bundle)
    group: PlacementGroup = placement_group([bundle] * ranks, strategy="STRICT_PACK", name=f"raymoe/{run}")
    wait = _Wait(tell, asked, bundle)
    deadline = time.monotonic() + timeout_s
    while not group.wait(timeout_seconds=0.1):
        if stopped():
            return None
        infeasible = placement_group_table(group)["stats"]["scheduling_state"] == "INFEASIBLE"
        if infeasible and not wait.autoscaler_may_come():
            raise PlacementError(
                f"{asked}, which no node of this cluster can hold ({_capacity()}); "
                "lower world.ranks or world.cpus, or use a larger node"
            )
        if time.monotonic() > deadline:
            why = "no node that can hold it came" if infeasible else "the cluster had no room for it"
            raise PlacementError(
                f"{asked}, and {why} within {timeout_s:g} s ({_capacity()}); "
                "wait for other jobs to end or raise world.placement_timeout_s"
            )
        wait.tell_if_due(infeasible)
    return Reservation(group, bundle, device)


MONITOR_STARTS_S = 10.0


@dataclass
class _Wait:
    """Says at most every 10 s why the ranks are not placed yet: after 2 s, when that changes, and each minute."""

    tell: Callable[[str], None]
    asked: str
    bundle: dict[str, float]
    last: str = ""
    began: float = field(default_factory=time.monotonic)
    next_look: float = field(default_factory=lambda: time.monotonic() + 2.0)
    repeat_at: float = 0.0
    next_question: float = 0.0
    autoscaler: bool | None = None

    def autoscaler_may_come(self) -> bool:
        """Whether an autoscaler runs, or may have started too late to have told so."""
        now = time.monotonic()
        if now >= self.next_question and self.autoscaler is None:
            self.autoscaler, self.next_question = autoscaler_runs(), now + 1.0
        return self.autoscaler if self.autoscaler is not None else now < self.began + MONITOR_STARTS_S

    def tell_if_due(self, infeasible: bool) -> None:
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + 10.0
        why = "no node can hold it, waiting for the autoscaler" if infeasible else "waiting for room"
        text = f"{self.asked}, {why}; {free_and_held(tuple(self.bundle))}"
        if text != self.last or now >= self.repeat_at:
            self.last, self.repeat_at = text, now + 60.0
            self.tell(text)


def _request(ranks: int, bundle: dict[str, float]) -> str:
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
    return f"asked for {ranks} ranks with {each} each on one node"


def _capacity() -> str:
    """Describe the nodes: `largest of 3 nodes has 4 CPU, 8 GPU; free in the cluster: 2 of 4 CPU, 0 of 8 GPU`."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, key=lambda node: (node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)))
    free = ray.available_resources()
    total = ray.cluster_resources()
    has = ", ".join(f"{largest['Resources'].get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    left = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"largest of {len(nodes)} nodes has {has}; free in the cluster: {left}"
