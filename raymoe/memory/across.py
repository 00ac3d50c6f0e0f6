"""Rounds between the domains of a world, over a TCP store that rank 0 serves.

Keys of the store (e: the number of the round, r: a rank):

- `e/r`: the record of rank r in round e: the round's name and a message, behind a MAC. Rank r writes it once, ranks of
  other domains read it. Rank r deletes it after round e + 1, when all ranks have left round e.
- `gone`: how many ranks have left the last round. Rank 0 serves until all have.

Inside a domain records go through the shared memory of the domain's own world. A store has no password, so a record
whose MAC is wrong is refused before it is unpickled. The secret of the MAC came through the caller's process group.
"""

from __future__ import annotations

import ctypes
import fcntl
import hmac
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from raymoe.errors import ConfigError, PeerTimeout, WiringError
from raymoe.memory.board import MAX_MESSAGE
from raymoe.memory.wait import named_by_world

if TYPE_CHECKING:
    from raymoe.memory.world import World

LOOPBACK = "127.0.0.1"
_CLOSING_S = 2.0  # rank 0 waits this long for the others to leave
_MAC_BYTES = 32
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR
_FAR_ADDRESS = ("192.0.2.1", 9)  # of documentation: the kernel chooses a route to it, and nothing is sent

T = TypeVar("T")
_c10d: Any = distributed  # torch's stubs lack its stores

# Addresses


def network() -> tuple[str, str]:
    """Return a key of this process's network: ranks with the same key reach one another by the loopback address."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, str(Path("/proc/self/ns/net").readlink())


def outside_address() -> str:
    """Return the IPv4 address at which other machines reach this one.

    It is that of the interface in GLOO_SOCKET_IFNAME, by default that of the default route, else of the host name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
            try:
                found = fcntl.ioctl(probe, _GET_INTERFACE_ADDRESS, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                raise WiringError(f"GLOO_SOCKET_IFNAME is {interface}, which has no IPv4 address: {error}") from error
            return socket.inet_ntoa(found[20:24])
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


# The store


@dataclass(frozen=True)
class StoreAddress:
    """Where rank 0 serves the store, and the secret of its records."""

    host: str
    port: int
    secret: bytes


def serve(address: StoreAddress, listener: socket.socket) -> Any:
    """Serve the store at a socket that listens already."""
    return _c10d.TCPStore(
        address.host, address.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
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


def connect(address: StoreAddress, timeout_s: float) -> Any:
    """Connect to the store of rank 0."""
    try:
        timeout = timedelta(seconds=timeout_s)
        return _c10d.TCPStore(address.host, address.port, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise WiringError(
            f"rank 0 did not answer at {address.host}:{address.port}: {str(error).splitlines()[0]}; set "
            "GLOO_SOCKET_IFNAME on all ranks to the interface by which the machines reach one another"
        ) from error


# Rounds


class StoreBoard:
    """Rounds in which the ranks of all domains take part, in one order."""

    def __init__(self, world: World, domain: World, store: Any, secret: bytes) -> None:
        self._rank, self._size, self._waiter, self._domain = world.rank, world.size, world.waiter, domain
        self._first = world.rank - domain.rank
        inside = range(self._first, self._first + domain.size)
        self._elsewhere = [rank for rank in range(world.size) if rank not in inside]
        self._store, self._secret = store, secret
        self._epoch = 0

    def meet(self, what: str, message: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        """Post `message`, wait for all ranks, return their messages in rank order.

        `what` names the round. A rank whose message is too long posts an error instead, so that all raise.
        """
        self._waiter.check()
        self._epoch += 1
        start, limit = time.monotonic(), self._waiter.timeout_s if timeout_s is None else timeout_s
        if too_long := len(message) > MAX_MESSAGE:
            message = f"{len(message)} bytes posted in {what}; a message holds at most {MAX_MESSAGE}".encode()
        record = pickle.dumps((what, too_long, message))
        self._ask(what, start, lambda: self._store.set(self._key(self._rank), self._mac(self._rank, record) + record))
        records: dict[int, Any] = self._inside(what, record, limit)
        keys = [self._key(rank) for rank in self._elsewhere]
        if not self._ask(what, start, lambda: self._store.check(keys)):
            for rank, key in zip(self._elsewhere, keys, strict=True):
                self._wait(what, rank, key, start, limit)
        found = self._ask(what, start, lambda: self._store.multi_get(keys))
        records |= {rank: self._opened(rank, each) for rank, each in zip(self._elsewhere, found, strict=True)}
        self._ask(what, start, lambda: self._store.delete_key(self._key(self._rank, self._epoch - 1)))
        return [self._read(what, rank, records[rank]) for rank in range(self._size)]

    def close(self, together: bool) -> None:
        """Leave the store. Rank 0 serves it until the others have left, if all close now.

        Else rank 0 leaks the server, which ends with the process: others may still wait, and must find who is missing.
        """
        store, self._store = self._store, None
        if not together:
            if self._rank == 0:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
            return
        with suppress(RuntimeError, PeerTimeout):  # a peer that is gone needs no store
            store.add("gone", 1)
            if self._rank == 0:
                self._waiter.until("close", 1, lambda: int(store.add("gone", 0)) >= self._size, _CLOSING_S)

    def _inside(self, what: str, record: bytes, limit: float) -> dict[int, Any]:
        """Swap records in this rank's domain."""
        with named_by_world(self._waiter, self._first, what):
            theirs = self._domain.swap(record, "a round between domains", limit)
        return {self._first + place: pickle.loads(each) for place, each in enumerate(theirs) if type(each) is bytes}

    def _wait(self, what: str, rank: int, key: str, start: float, limit: float) -> None:
        left = max(0.0, start + limit - time.monotonic())
        here = self._waiter.until(what, rank, lambda: self._ask(what, start, lambda: self._store.check([key])), left)
        if not here:
            raise self._late(what, rank, start)

    def _ask(self, what: str, start: float, call: Callable[[], T]) -> T:
        """Call the store. Where its server is gone, the error names rank 0, which served it."""
        try:
            return call()
        except RuntimeError as error:
            self._waiter.check()
            raise self._late(what, 0, start) from error

    def _late(self, what: str, rank: int, start: float) -> PeerTimeout:
        epoch = self._epoch
        return PeerTimeout(what, epoch, rank, epoch, epoch - 1, time.monotonic() - start, self._rank)

    def _key(self, rank: int, epoch: int | None = None) -> str:
        return f"{self._epoch if epoch is None else epoch}/{rank}"

    def _mac(self, rank: int, record: bytes) -> bytes:
        return hmac.digest(self._secret, self._key(rank).encode() + b"\0" + record, "sha256")

    def _opened(self, rank: int, sealed: bytes) -> Any:
        mac, record = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(rank, record)):
            raise WiringError(
                f"the record of rank {rank} in round {self._epoch} is not one that it wrote; another program writes "
                "into this world's store: make a new world"
            )
        return pickle.loads(record)

    def _read(self, what: str, rank: int, record: tuple[str, bool, bytes]) -> bytes:
        name, is_error, message = record
        if name != what:
            raise ConfigError(
                f"rank {self._rank} is in {what} while rank {rank} is in {name}; all ranks must call in one order"
            )
        if is_error:
            raise ConfigError(f"rank {rank}: {message.decode()}")
        return message
