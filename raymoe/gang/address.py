"""Choose the Ray cluster of a run, and check that it answers. Imports no Ray.

A cluster is never auto-detected: a stale address file makes `ray.init` wait for a head that is gone. A run without an
address starts a local Ray, and stops it at the end.
"""

from __future__ import annotations

import os
import socket

from raymoe.errors import ClusterError
from raymoe.gang.local_ray import temporary_directory

PROBE_S = 5.0
ADDRESS_FILE = temporary_directory() / "ray_current_cluster"  # written by `ray start --head`


def choose(address: str | None) -> str | None:
    """Return `--address`, else RAY_ADDRESS; None means a local Ray, which the address `local` asks for too."""
    chosen = address or os.environ.get("RAY_ADDRESS") or "local"
    return None if chosen == "local" else chosen


def reachable(address: str) -> str:
    """Check that the cluster's port answers; return its `host:port`. `auto` reads what `ray start --head` wrote."""
    found = address
    if address == "auto":
        try:
            found = ADDRESS_FILE.read_text().strip()
        except OSError as error:
            raise ClusterError(
                f"asked for --address auto, and {ADDRESS_FILE} cannot be read ({error.strerror}); "
                "start a cluster with `ray start --head`, or omit --address to run on this machine"
            ) from error
    if "://" in found:
        raise ClusterError(
            f"asked for {found}, and raymoe does not support Ray Client addresses; "
            "submit the run to the cluster (`ray job submit … -- raymoe run …`), or give host:port of its head"
        )
    host, _, port = found.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(
            f"asked for the cluster {found!r}, which is not host:port; give the address that `ray start --head` prints"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except OSError as error:
        stale = f" ({ADDRESS_FILE} is stale)" if address == "auto" else ""
        raise ClusterError(
            f"asked for the Ray cluster at {found}, and nothing answers there{stale}: {error.strerror or error}; "
            "start one with `ray start --head`, or omit --address and unset RAY_ADDRESS to run on this machine"
        ) from error
    return found
