"""Place the ranks on one node, or each domain on a node of its own, or raise an error that says why it is impossible.

One placement group holds a gang: STRICT_PACK with a bundle for each rank on one node, STRICT_SPREAD with a bundle for
each domain on several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from raymoe.config import Job
from raymoe.config.job import kind_of_ranks
from raymoe.config.sections import SPANNING, WorldSection
from raymoe.errors import PlacementError
from raymoe.gang.domains import GPU_DOMAIN, DomainPlan, plan_domains, ranks_on, wide_nvlink_domain
from raymoe.gang.nodes import autoscaler_runs, free_and_held


@dataclass(frozen=True)
class Location:
    """The place of a started actor. `process` is (pid, start time), since a pid may be reused."""

    seat: int  # the number of its reserved share; on one node it is the number of the bundle
    node: str
    gpu: str | None  # Ray's name of it: a number, or a UUID on a node that was started with UUIDs
    process: tuple[int, int]
    stderr_file: str | None = None
    boot_id: str = ""  # that of the host; processes with the same one share a clock
    network: tuple[str, str] = ("", "")  # processes with the same one reach one another by the loopback address


def seats_by_rank(locations: Sequence[Location]) -> list[int]:
    """Order seats by node, then by GPU, then by seat: the first becomes the seat of rank 0.

    Ray promises no order of bundles on GPUs, and consecutive ranks should have consecutive GPUs. Nodes are in the order
    of their first seats, so that the seats of a domain stay together.

    >>> places = [("n1", "10"), ("n1", "9"), ("n0", "2"), ("n0", "1")]
    >>> seats_by_rank([Location(seat, node, gpu, (1, 1)) for seat, (node, gpu) in enumerate(places)])
    [1, 0, 3, 2]
    """
    first: dict[str, int] = {}
    for location in sorted(locations, key=lambda location: location.seat):
        first.setdefault(location.node, location.seat)

    def sort_key(location: Location) -> tuple[int, int, str, int]:
        gpu = location.gpu or ""
        return first[location.node], int(gpu) if gpu.isdigit() else -1, gpu, location.seat

    return [location.seat for location in sorted(locations, key=sort_key)]


def device_for(job: Job) -> str:
    """Return `cuda` or `cpu` for this job on this cluster.

    Where the job allows both, it is `cuda` if the cluster has any GPU, even too few. The run then fails to be placed,
    rather than measure CPU ranks where GPU ranks were meant.
    """
    return kind_of_ranks(job) or ("cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu")


def bundle_for(world: WorldSection, device: str, sharers: int) -> dict[str, float]:
    """Return the resources of one rank. With `share_gpu`, all ranks on a node take one GPU together.

    >>> shared = WorldSection(ranks=4, device="cuda", share_gpu=True)
    >>> bundle_for(WorldSection(ranks=4, cpus=0.5), "cpu", 4), bundle_for(shared, "cuda", 4)
    ({'CPU': 0.5}, {'CPU': 0.5, 'GPU': 0.25})

    Two domains on a node each take both GPUs whole:

    >>> DomainPlan(2, 2, on_nodes=True).bundles(bundle_for(shared, "cuda", 2))
    [{'CPU': 1.0, 'GPU': 1.0}, {'CPU': 1.0, 'GPU': 1.0}]
    """
    if device == "cpu":
        return {"CPU": world.cpus}
    return {"CPU": world.cpus, "GPU": 1 / sharers if world.share_gpu else 1.0}


@dataclass(frozen=True)
class Reservation:
    """The share of each rank, in one placement group. The generations of a gang use it until a node is lost."""

    group: PlacementGroup
    bundle: dict[str, float]  # of one rank
    device: str
    plan: DomainPlan


def place(job: Job, run: str, stopped: Callable[[], bool], notify: Callable[[str], None]) -> Reservation | None:
    """Reserve resources for the ranks of a job; return None if `stopped` became true meanwhile.

    A request that no node can hold fails at once, unless an autoscaler runs: it may add a larger node. A request that
    must wait does so up to `world.placement_timeout_s`. Meanwhile `notify` gets a line about what is free.
    """
    timeout_s, device = job.world.placement_timeout_s, device_for(job)
    bundle = bundle_for(job.world, device, job.world.ranks)
    nodes = [(node["Labels"], ranks_on(node["Resources"], bundle)) for node in ray.nodes() if node["Alive"]]
    spanning = all(case.job.workload in SPANNING for case in job.cases())
    plan = plan_domains(job.world.domain, job.world.ranks, spanning, [most for _, most in nodes])
    bundle = bundle_for(job.world, device, plan.size if plan.on_nodes else plan.ranks)
    request = _request(plan, bundle)
    if plan.domains > 1:
        wider = _nvlink_hint(plan, nodes, device) if plan.on_nodes else ""
        notify(_explain(plan, request, job.world.domain == "auto") + wider)
    strategy = "STRICT_SPREAD" if plan.on_nodes else "STRICT_PACK"
    group: PlacementGroup = placement_group(plan.bundles(bundle), strategy=strategy, name=f"raymoe/{run}")
    wait = _Wait(notify, request, bundle)
    deadline = time.monotonic() + timeout_s
    while not group.wait(timeout_seconds=0.1):
        if stopped():
            return None
        infeasible = placement_group_table(group)["stats"]["scheduling_state"] == "INFEASIBLE"
        if infeasible and not wait.autoscaler_may_come():
            who = "the nodes of this cluster cannot" if plan.on_nodes else "no node of this cluster can"
            gpus = ray.cluster_resources().get("GPU", 0)
            remedy = _remedy(plan, device, gpus) + _nvlink_hint(plan, nodes, device)
            raise PlacementError(f"{request}, which {who} hold ({_capacity()}); {remedy}")
        if time.monotonic() > deadline:
            why = "no node that can hold it came" if infeasible else "the cluster had no room for it"
            raise PlacementError(
                f"{request}, and {why} within {timeout_s:g} s ({_capacity()}); "
                "wait for other jobs to end or raise world.placement_timeout_s"
            )
        wait.notify_if_due(infeasible)
    return Reservation(group, bundle, device, plan)


def _remedy(plan: DomainPlan, device: str, gpus: float) -> str:
    """Say what a user can do about ranks that no node can hold, in a cluster with `gpus` GPUs.

    >>> _remedy(DomainPlan(1, 4), "cuda", 0)
    'this cluster has no GPU: use one that has, or a job with world.device: cpu, such as quickstart'
    >>> _remedy(DomainPlan(1, 4), "cuda", 2), _remedy(DomainPlan(1, 4), "cpu", 0)[-13:]
    ('lower world.ranks or world.cpus, or use a larger node', 'a larger node')
    """
    if device == "cuda" and not gpus:
        return "this cluster has no GPU: use one that has, or a job with world.device: cpu, such as quickstart"
    return f"lower world.ranks or world.cpus, or use {'more or larger nodes' if plan.on_nodes else 'a larger node'}"


def _nvlink_hint(plan: DomainPlan, nodes: Sequence[tuple[Mapping[str, str], int]], device: str) -> str:
    """Say that an NVLink domain wider than a node does not help.

    >>> nodes = [({GPU_DOMAIN: "rack-1"}, 4)] * 2
    >>> [_nvlink_hint(DomainPlan(1, 8), nodes, device)[:38] for device in ("cuda", "cpu")]
    ["; the nodes of NVLink domain 'rack-1' ", '']
    """
    name = wide_nvlink_domain(plan.ranks, nodes) if device == "cuda" else None
    if name is None:
        return ""
    return (
        f"; the nodes of NVLink domain {name!r} (label {GPU_DOMAIN}) can hold them, but ranks on several nodes cannot "
        "map one another's memory yet"
    )


MONITOR_STARTS_S = 10.0


@dataclass
class _Wait:
    """Says at most every 10 s why the ranks are not placed yet: after 2 s, when that changes, and each minute."""

    notify: Callable[[str], None]
    request: str
    bundle: dict[str, float]
    last: str = ""
    began: float = field(default_factory=time.monotonic)
    next_look: float = field(default_factory=lambda: time.monotonic() + 2.0)
    repeat_at: float = 0.0
    next_question: float = 0.0
    autoscaler: bool | None = None

    def autoscaler_may_come(self) -> bool:
        """Whether an autoscaler runs, or may have started too late for an answer."""
        now = time.monotonic()
        if now >= self.next_question and self.autoscaler is None:
            self.autoscaler, self.next_question = autoscaler_runs(), now + 1.0
        return self.autoscaler if self.autoscaler is not None else now < self.began + MONITOR_STARTS_S

    def notify_if_due(self, infeasible: bool) -> None:
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + 10.0
        why = "no node can hold it, waiting for the autoscaler" if infeasible else "waiting for room"
        text = f"{self.request}, {why}; {free_and_held(tuple(self.bundle))}"
        if text != self.last or now >= self.repeat_at:
            self.last, self.repeat_at = text, now + 60.0
            self.notify(text)


def _request(plan: DomainPlan, bundle: dict[str, float]) -> str:
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
    return f"asked for {plan.ranks} ranks with {amounts} each {plan}"


def _explain(plan: DomainPlan, request: str, by_itself: bool) -> str:
    """Say why the ranks form several domains, or that those on one node are pretended.

    >>> _explain(DomainPlan(2, 4), "asked for 8 ranks with 1 CPU each in 2 domains of 4 on one node", False)
    ... # doctest: +ELLIPSIS
    'asked for 8 ranks with 1 CPU each in 2 domains of 4 on one node: this cluster lacks 2 nodes that can hold 4 ...
    """
    if plan.pretended:
        return (
            f"{request}: this cluster lacks {plan.domains} nodes that can hold {plan.size} ranks each, so the domains "
            "are pretended; times say nothing about a network"
        )
    return f"{request}: {'no node can hold all of them' if by_itself else 'rows between domains cross the network'}"


def _capacity() -> str:
    """Describe the nodes: `largest of 3 nodes has 4 CPU, 8 GPU; free in the cluster: 2 of 4 CPU, 0 of 8 GPU`."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, key=lambda node: (node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)))
    free = ray.available_resources()
    total = ray.cluster_resources()
    has = ", ".join(f"{largest['Resources'].get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    left = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"largest of {len(nodes)} nodes has {has}; free in the cluster: {left}"
