"""Find out at once whether a node is lost. Ray itself waits for missed health checks, 14 s by its own settings."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import ray

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
