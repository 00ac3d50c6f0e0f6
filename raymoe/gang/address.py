"""Which Ray cluster is meant, and whether anything answers there. Imports no Ray.

A cluster is never auto-detected: a stale address file makes `ray.init` wait for a head that is gone. Where nothing is
named we start a Ray of our own, and take it down again.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from raymoe.errors import ClusterError

PROBE_S = 5.0
ADDRESS_FILE = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/ray_current_cluster")  # left by `ray start --head`


def choose(address: str | None) -> str | None:
    """`--address`, else RAY_ADDRESS, else our own (None); `local` asks for our own by name."""
    named = address or os.environ.get("RAY_ADDRESS") or "local"
    return None if named == "local" else named


def reachable(address: str) -> str:
    """`host:port` of a cluster whose port answers; `auto` is what `ray start --head` wrote down."""
    found = address
    if address == "auto":
        try:
            found = ADDRESS_FILE.read_text().strip()
        except OSError as error:
            raise ClusterError(
                f"asked for --address auto, and {ADDRESS_FILE} cannot be read ({error.strerror}); "
                "start a cluster with `ray start --head`, or leave --address out to run on this machine"
            ) from error
    if "://" in found:
        raise ClusterError(
            f"asked for {found}, and Ray Client addresses are not served; "
            "submit the run to the cluster (`ray job submit … -- raymoe run …`) or give host:port of its head"
        )
    host, _, port = found.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(
            f"asked for the cluster {found!r}, which is not host:port as the head's `ray start` prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except OSError as error:
        stale = f" ({ADDRESS_FILE} is stale)" if address == "auto" else ""
        raise ClusterError(
            f"asked for the Ray cluster at {found}, and nothing answers there{stale}: {error.strerror or error}; "
            "start one with `ray start --head`, or leave --address (and RAY_ADDRESS) out to run on this machine"
        ) from error
    return found
