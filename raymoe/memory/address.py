"""Find the machine that a rank is on, and the address at which ranks of other domains reach it.

No torch here: ranks report both when they start.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from raymoe.errors import WiringError

LOOPBACK = "127.0.0.1"
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR
_FAR_ADDRESS = ("192.0.2.1", 9)  # an address for documentation: the kernel chooses a route to it, and nothing is sent


def boot_id() -> str:
    """Return the id of this machine's boot. Processes with the same one share memory, and the clock CLOCK_MONOTONIC."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network() -> tuple[str, str]:
    """Return a key of this process's network: ranks with the same key reach one another by the loopback address."""
    return boot_id(), str(Path("/proc/self/ns/net").readlink())


def address_for(everywhere: Collection[object], known: str | None = None) -> str:
    """Return the address at which ranks of other domains reach this process.

    `everywhere` holds the networks of all ranks: with a single one it is the loopback address. `known` is an address of
    this machine that the others are known to reach; an interface in GLOO_SOCKET_IFNAME goes before it.
    """
    if len(set(everywhere)) == 1:
        return LOOPBACK
    return outside_address() if known is None or os.environ.get("GLOO_SOCKET_IFNAME") else known


def outside_address() -> str:
    """Return the IPv4 address at which other machines reach this one.

    It belongs to the interface in GLOO_SOCKET_IFNAME, else to the default route, else to the host name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
            try:
                answer = fcntl.ioctl(probe, _GET_INTERFACE_ADDRESS, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                raise WiringError(f"GLOO_SOCKET_IFNAME is {interface}, which has no IPv4 address: {error}") from error
            return socket.inet_ntoa(answer[20:24])
        with suppress(OSError):  # no default route
            probe.connect(_FAR_ADDRESS)
            return str(probe.getsockname()[0])
    with suppress(OSError):  # the host name has no address
        if not (address := socket.gethostbyname(socket.gethostname())).startswith("127."):
            return address
    raise WiringError(
        "this machine has no default route and its host name no address of its own; set GLOO_SOCKET_IFNAME to the "
        "interface by which the other machines reach it"
    )


def listen(host: str) -> socket.socket:
    """Listen at a free port of this address only. `TCPStore` alone would listen at all addresses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise WiringError(f"rank 0 cannot listen at {host}: {error.strerror}") from error
    return listener
