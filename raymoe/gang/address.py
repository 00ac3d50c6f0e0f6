"""Choose the Ray cluster of a run, and check that it answers. Imports no Ray.

A cluster is never auto-detected: a stale address file makes `ray.init` wait for a head that is gone. A run without an
address starts a local Ray, and stops it at the end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from raymoe.errors import ClusterError
from raymoe.gang.local_ray import temporary_directory
from raymoe.home import home

PROBE_S = 5.0
ADDRESS_FILE = temporary_directory() / "ray_current_cluster"  # written by `ray start --head`


def choose(address: str | None) -> str | None:
    """Return `--address`, else RAY_ADDRESS; None means a local Ray, which the address `local` asks for too."""
    chosen = address or os.environ.get("RAY_ADDRESS") or "local"
    return None if chosen == "local" else chosen


def reachable(address: str) -> str:
    """Check that the cluster's port answers; return its `host:port`. `auto` reads what `ray start --head` wrote."""
    host_port = address
    if address == "auto":
        try:
            host_port = ADDRESS_FILE.read_text().strip()
        except OSError as error:
            raise ClusterError(
                f"asked for --address auto, and {ADDRESS_FILE} cannot be read ({error.strerror}); "
                "start a cluster with `ray start --head`, or omit --address to run on this machine"
            ) from error
    if "://" in host_port:
        raise ClusterError(
            f"asked for {host_port}, and raymoe does not support Ray Client addresses; "
            "submit the run to the cluster (`ray job submit … -- raymoe run …`), or give host:port of its head"
        )
    host, _, port = host_port.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(
            f"asked for the cluster {host_port!r}, which is not host:port; give the address that `ray start --head` "
            "prints"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except OSError as error:
        stale = f" ({ADDRESS_FILE} is stale)" if address == "auto" else ""
        raise ClusterError(
            f"asked for the Ray cluster at {host_port}, and nothing answers there{stale}: {error.strerror or error}; "
            "start one with `ray start --head`, or omit --address and unset RAY_ADDRESS to run on this machine"
        ) from error
    return host_port


# The token, and the address of the Jobs API.


def token_source() -> str | None:
    """Name the place of the token that Ray would send, in Ray's order; None if there is none."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    if (folder := home()) is None:
        return None
    token = folder / ".ray" / "auth_token"
    return str(token) if token.is_file() else None


def send_token() -> bool:
    """Whether RAY_AUTH_MODE=token is needed: a token exists, and no mode is set. Ray's Jobs client then sends none."""
    return "RAY_AUTH_MODE" not in os.environ and token_source() is not None


ASK_S = 40.0  # to ask a head; the import of Ray takes 2 s on an idle machine
ASK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    print("token")
"""


def needs_token(address: str | None) -> bool:
    """Whether the driver of a run must send the token: there is one, no mode is set, and the head asks for it.

    A token that is sent to a head without that guard makes the ranks there fail at their start. The head is asked in
    another process, because Ray reads RAY_AUTH_MODE once, when it is imported. Raises ClusterError if nothing answers.
    """
    if address is None or not send_token() or not _speaks(host_port := reachable(address)):
        return False
    command = [sys.executable, "-c", ASK, host_port]
    try:
        head = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return False  # `ray.init` then fails in its own time, with a sentence
    return head.stdout.strip() == "token"


_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # the preface, and no settings


def _speaks(host_port: str) -> bool:
    """Whether something at the port answers HTTP/2, as a head does at once. Ray's client would wait for an answer."""
    host, _, port = host_port.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as connection:
            connection.sendall(_HELLO)
            return bool(connection.recv(1))
    except OSError:
        return False


JOBS_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that name a cluster, in the order of `ray job submit`. There they also override its --address."""


def jobs_address(*named: str | None) -> str | None:
    """Return the first address that is named, else that of a variable; None if there is none."""
    return next((address for address in (*named, *map(os.environ.get, JOBS_ADDRESSES)) if address), None)
