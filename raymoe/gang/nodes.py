"""The nodes of a Ray cluster: which are lost, what is free on them, who holds the rest, and whether more may come."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state as global_state  # no public function shows single nodes and actors
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from raymoe.errors import shown

# Lost nodes. A connection to its raylet shows at once whether a node is lost. Ray itself waits for missed health
# checks, 14 s by its own settings.

PROBE_S = 2.0  # for a raylet to accept a connection
NODE_DIED = "its node has died"  # Ray's words in the error of a call to an actor
OWNER_NODE_DIED = "Owner's node has crashed"  # the same about the node of the driver


@dataclass(frozen=True)
class Node:
    """A node of the cluster, and where its raylet listens. `probed` is False if the driver cannot connect there."""

    id: str
    address: str
    port: int
    probed: bool = True

    @property
    def lost(self) -> bool:
        """Return whether the raylet is gone: nothing accepts a connection at its port."""
        return self.probed and not _accepts(self.address, self.port)

    def __str__(self) -> str:
        return f"node {self.id[:12]} ({self.address})"


def find_node(name: str) -> Node:
    """Return the node with this id, from the cluster's list. Its raylet is running when this is called."""
    entry = _entry(name)
    address, port = str(entry["NodeManagerAddress"]), int(entry["NodeManagerPort"])
    return Node(name, address, port, probed=_accepts(address, port))


def given_up(name: str) -> bool:
    """Return whether the cluster has noticed that a node is lost. Until then it places ranks there."""
    return not _entry(name)["Alive"]


def _entry(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = next(node for node in ray.nodes() if node["NodeID"] == name)
    return entry


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


# Free resources, and their holders.

Amounts = dict[str, float]
MOST_NAMED = 4  # nodes in one line, and holders


def free_and_held(resources: Iterable[str]) -> str:
    """Describe free resources by node, and their holders, in one line: `free: 10.0.0.5 2 of 8 GPU; held by …`."""
    names = sorted(resources)
    free = global_state.available_resources_per_node()
    nodes = [
        (node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    nodes.sort(key=lambda node: tuple(node[1].get(name, 0.0) for name in reversed(names)), reverse=True)
    held: Amounts = defaultdict(float)
    for _, left, total in nodes:
        for name in names:
            held[name] += total.get(name, 0.0) - left.get(name, 0.0)
    return f"free: {free_text(nodes, names)}; held: {held_text(_holders(), held, names)}"


def free_text(nodes: list[tuple[str, Amounts, Amounts]], names: list[str]) -> str:
    """Describe what is free on the nodes with the most.

    >>> free_text([("10.0.0.5", {"CPU": 0.5}, {"CPU": 8.0, "GPU": 2.0})], ["CPU", "GPU"])
    '0.5 of 8 CPU, 0 of 2 GPU on 10.0.0.5'
    """
    parts = [
        ", ".join(f"{left.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in names) + f" on {shown(address)}"
        for address, left, total in nodes[:MOST_NAMED]
    ]
    more = len(nodes) - MOST_NAMED
    return "; ".join(parts) + (f"; and less on {more} more node{'s' * (more > 1)}" if more > 0 else "")


def held_text(holders: Mapping[str, Amounts], held: Amounts, names: list[str]) -> str:
    """Name the largest holders, and count the rest.

    >>> held_text({"raymoe/a": {"CPU": 6.0}}, {"CPU": 7.5}, ["CPU"])
    '6 CPU by raymoe/a, 1.5 CPU by others'
    >>> held_text({}, {"CPU": 0.0}, ["CPU"])
    'nothing'
    """
    ranked = sorted(holders.items(), key=lambda item: [-item[1].get(name, 0.0) for name in reversed(names)])
    named = [(who, amounts) for who, amounts in ranked if any(amounts.get(name) for name in names)][:MOST_NAMED]
    rest = {name: held[name] - sum(amounts.get(name, 0.0) for _, amounts in named) for name in names}
    parts = [f"{_amounts(amounts, names)} by {shown(who)}" for who, amounts in named]
    # Resources are counted a moment before their holders, so a small rest may be negative.
    if others := _amounts({name: amount for name, amount in rest.items() if amount > 1e-4}, names):
        parts.append(f"{others} by others")
    return ", ".join(parts) or "nothing"


def _amounts(amounts: Mapping[str, float], names: list[str]) -> str:
    return " and ".join(f"{amounts[name]:g} {name}" for name in names if amounts.get(name))


def _holders() -> dict[str, Amounts]:
    """Sum what placement groups and actors hold, by name. A run of raymoe has the name `raymoe/<run>`."""
    holders: dict[str, Amounts] = defaultdict(lambda: defaultdict(float))
    groups: dict[str, Any] = placement_group_table()
    for group in groups.values():
        if group["state"] == "CREATED":
            name = group["name"] or f"placement group {group['placement_group_id'][:8]}"
            for bundle in group["bundles"].values():
                for resource, amount in bundle.items():
                    holders[name][resource] += amount
    for actor in _actors():
        if actor.HasField("placement_group_id"):  # counted with its group
            continue
        driver = actor.name.removeprefix("_ray_internal_job_actor_")
        who = f"job {driver}" if driver != actor.name else actor.name or f"an actor {actor.class_name}"
        for resource, amount in actor.required_resources.items():
            holders[who][resource] += amount
    return holders


def _actors() -> list[Any]:
    """List the living actors as Ray's head keeps them.

    Not by `ray.util.state.list_actors`: it needs a dashboard, and took 40 s on a head without an answering one.
    """
    from ray.core.generated import gcs_pb2

    messages: Any = gcs_pb2
    tables = global_state._connect_and_get_accessor()
    return [messages.ActorTableData.FromString(table) for table in tables.get_actor_table(None, "ALIVE")]


# The autoscaler.


def autoscaler_runs() -> bool | None:
    """Whether an autoscaler may add nodes; None if not known yet.

    Every Ray head has a monitor. Most monitors only read.
    """
    worker: Any = ray._private.worker.global_worker
    client = worker.gcs_client
    try:
        answer = adds_nodes_v1(client.internal_kv_get(b"__autoscaling_status", None))
        return answer if answer is not None else adds_nodes_v2(client.get_cluster_status(timeout_s=5))
    except RayError:  # it does not answer now; the next look may succeed
        return None


def adds_nodes_v1(status: bytes | None) -> bool | None:
    """Read the status of the first autoscaler. One that only reads names each node's type after the node.

    >>> adds_nodes_v1(b'{"autoscaler_report": {"node_type_mapping": {"ab12": "node_ab12"}}}')
    False
    >>> adds_nodes_v1(b'{"autoscaler_report": {"node_type_mapping": {"10.0.0.5": "gpu-workers"}}}')
    True
    """
    try:
        types = json.loads(status or b"{}").get("autoscaler_report", {}).get("node_type_mapping") or {}
        return any(kind != f"node_{node}" for node, kind in types.items()) if types else None
    except (ValueError, AttributeError):
        return None


def adds_nodes_v2(status: bytes) -> bool | None:
    """Read the status of the second autoscaler. One that only reads gives the nodes no types."""
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2
    reply = messages.GetClusterStatusReply.FromString(status)
    types = [node.ray_node_type_name for node in reply.cluster_resource_state.node_states]
    return any(types) if reply.autoscaling_state.autoscaler_state_version > 0 else None
