"""Decide how many domains the ranks form, and whether each has a node of its own. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_TINY = 1e-6  # Ray counts resources in steps of 1e-4


@dataclass(frozen=True)
class DomainPlan:
    """`domains` equal domains of `size` ranks. With `on_nodes` each has a node of its own, else all share one node."""

    domains: int
    size: int
    on_nodes: bool = False

    @property
    def ranks(self) -> int:
        return self.domains * self.size

    @property
    def pretended(self) -> bool:
        """Whether there are several domains on one node."""
        return self.domains > 1 and not self.on_nodes

    def place_of(self, seat: int) -> int:
        """Return the bundle of the placement group that holds an actor.

        >>> [DomainPlan(2, 2, on_nodes=True).place_of(seat) for seat in range(4)], DomainPlan(2, 2).place_of(3)
        ([0, 0, 1, 1], 3)
        """
        return seat // self.size if self.on_nodes else seat

    def bundles(self, per_rank: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the bundles to reserve, of ranks that take `per_rank`: one for a rank, or one for a domain on a node.

        >>> DomainPlan(2, 4, on_nodes=True).bundles({"CPU": 0.5}), DomainPlan(1, 2).bundles({"CPU": 0.5})
        ([{'CPU': 2.0}, {'CPU': 2.0}], [{'CPU': 0.5}, {'CPU': 0.5}])
        """
        if self.on_nodes:
            return [{name: self.size * amount for name, amount in per_rank.items()} for _ in range(self.domains)]
        return [dict(per_rank) for _ in range(self.ranks)]

    def __str__(self) -> str:
        """Say where the ranks go, as the end of a sentence.

        >>> print(DomainPlan(1, 4)), print(DomainPlan(2, 4, on_nodes=True)), print(DomainPlan(2, 4))
        on one node
        in 2 domains of 4 on a node each
        in 2 domains of 4 on one node
        (None, None, None)
        """
        where = "on a node each" if self.on_nodes else "on one node"
        return where if self.domains == 1 else f"in {self.domains} domains of {self.size} {where}"


def plan_domains(size: int | Literal["auto"], ranks: int, may_span: bool, capacities: Sequence[int]) -> DomainPlan:
    """Choose the domains of a gang. `capacities` has the number of ranks that each node can hold.

    `auto` is one domain if a node can hold it, or if the ranks may not span; else the fewest equal domains that nodes
    can hold. A plan that no nodes can hold is returned too: its request to Ray then says why, or waits for more nodes.

    >>> plan_domains("auto", 4, True, [4, 2]), plan_domains("auto", 4, True, [2, 3])
    (DomainPlan(domains=1, size=4, on_nodes=False), DomainPlan(domains=2, size=2, on_nodes=True))
    >>> plan_domains("auto", 4, False, [2, 3]), plan_domains("auto", 4, True, [0, 3])
    (DomainPlan(domains=1, size=4, on_nodes=False), DomainPlan(domains=1, size=4, on_nodes=False))

    A number is spread over nodes, else pretended on one.

    >>> plan_domains(2, 4, True, [4, 2]), plan_domains(2, 4, True, [4]), plan_domains(2, 4, True, [3])
    (DomainPlan(domains=2, size=2, on_nodes=True), DomainPlan(domains=2, size=2, on_nodes=False), \
DomainPlan(domains=2, size=2, on_nodes=True))
    """
    if size == "auto":
        for domains in range(1, ranks + 1 if may_span else 2):
            if ranks % domains == 0 and _nodes_for(ranks // domains, capacities) >= domains:
                return DomainPlan(domains, ranks // domains, on_nodes=domains > 1)
        return DomainPlan(1, ranks)
    domains = ranks // size
    if domains == 1:
        return DomainPlan(1, ranks)
    spread = _nodes_for(size, capacities) >= domains or _nodes_for(ranks, capacities) == 0
    return DomainPlan(domains, size, on_nodes=spread)


def _nodes_for(ranks: int, capacities: Sequence[int]) -> int:
    return sum(most >= ranks for most in capacities)


def ranks_on(resources: Mapping[str, float], per_rank: Mapping[str, float]) -> int:
    """Return how many ranks that take `per_rank` a node with these resources can hold.

    >>> ranks_on({"CPU": 2.0}, {"CPU": 0.5}), ranks_on({"CPU": 2.0}, {"CPU": 0.5, "GPU": 1.0})
    (4, 0)
    """
    return min(int(resources.get(name, 0.0) / amount + _TINY) for name, amount in per_rank.items())


GPU_DOMAIN = "ray.io/gpu-domain"
"""Ray's label for the nodes whose GPUs are in one NVLink domain."""


def wide_nvlink_domain(ranks: int, nodes: Sequence[tuple[Mapping[str, str], int]]) -> str | None:
    """Return an NVLink domain whose nodes can hold the ranks together. `nodes` has each node's labels and capacity.

    >>> rack = {GPU_DOMAIN: "rack-1"}
    >>> wide_nvlink_domain(8, [(rack, 4), ({}, 4), (rack, 4)]), wide_nvlink_domain(8, [(rack, 4), ({}, 4)])
    ('rack-1', None)
    """
    held: dict[str, int] = {}
    for labels, most in nodes:
        if name := labels.get(GPU_DOMAIN):
            held[name] = held.get(name, 0) + most
    return next((name for name, most in sorted(held.items()) if most >= ranks), None)
