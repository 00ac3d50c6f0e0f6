"""Rounds between the domains of a world, over a TCP store that rank 0 serves.

Keys of the store (e: the number of the round, r: a rank):

- `e/r`: the record of rank r in round e: the round's name and a message, after a MAC. Rank r writes it once, ranks of
  other domains read it. Rank r deletes it after round e + 1, when all ranks have left round e.
- `gone`: how many ranks have left the last round. Rank 0 serves until all have.
- `failed`, `waiting r`: see `raymoe.memory.giving_up`.
- `entered by r`: see `raymoe.net.published`.

Inside a domain records go through the shared memory of the domain's own world. A store has no password, so every record
has a MAC. One whose MAC is wrong is refused before it is read. The secret of the MAC came through the caller's process
group. The count `gone` has none: another program can only make rank 0 leave before the others.
"""

from __future__ import annotations

import ctypes
import hmac
import pickle
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import distributed

from raymoe.errors import Aborted, ConfigError, PeerTimeout, WiringError
from raymoe.memory.board import MAX_MESSAGE
from raymoe.memory.wait import Waiter, named_by_world
from raymoe.memory.wiring import Collectives

_CLOSING_S = 2.0  # rank 0 waits this long for the others to leave
_SLICE_S = 0.02  # limits the delay of an abort; an answer wakes its caller at once
_MARGIN_S = 1.0  # torch gets the world's timeout to connect. Where it fails in time, its error says why
_ENDING_S = 1.0  # to end the thread of a store
_MAC_BYTES = 32
_IPV6 = struct.Struct("=H2s4s12x4s4x")
"""An address of a socket: family, port, IPv4 address, and the IPv4 address that an IPv6 address ends with."""

_c10d: Any = distributed  # torch's stubs lack its stores

# The store


@dataclass(frozen=True)
class StoreAddress:
    """The address at which rank 0 serves the store, and the secret of its records."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def seal(self, key: str, record: bytes) -> bytes:
        """Return the record after its MAC, which holds for this key only."""
        return self._mac(key, record) + record

    def opened(self, key: str, sealed: bytes, what: str) -> bytes:
        """Return the record of `sealed`. Raises, with `what` as its name, if no rank of this world wrote it there."""
        mac, record = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, record)):
            raise WiringError(
                f"{what} is not one that it wrote; another program writes into this world's store at "
                f"{self.host}:{self.port}: make a new world"
            )
        return record

    def _mac(self, key: str, record: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + record, "sha256")


def serve(address: StoreAddress, listener: socket.socket) -> Any:
    """Serve the store at a socket that listens already."""
    return _c10d.TCPStore(
        address.host, address.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


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


class BoundedStore:
    """A store whose calls end: a call of torch's store does not return while the process of rank 0 is stopped.

    A thread of its own makes the calls in order, from the one that opens the store. After a call that failed, every
    later one raises. A call that takes too long goes on after its caller has given up, because the link may be slow.
    Later calls wait for it.
    """

    def __init__(self, address: StoreAddress, open_store: Callable[[], Any], waiter: Waiter) -> None:
        self.address = address
        self.raw: Any = None
        """Torch's store, which bounds no call; None before `open`."""
        self._open_store, self._waiter, self._broken = open_store, waiter, False
        self._last: _Call | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        thread = threading.Thread(target=_answer, args=(self._calls,), name="raymoe store", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, thread, self._calls, address)
        """Ends the thread, also where it waits for rank 0. So does dropping this object, and the end of Python."""

    @property
    def busy(self) -> bool:
        """Whether a call that took too long has no answer yet."""
        return self._last is not None and not self._last.done.is_set()

    def open(self, timeout_s: float) -> None:
        """Open the store, before any other call. Raises as `ask` does."""
        self.raw = self._result_of(self._open_store, timeout_s)

    def ask(self, method: str, *arguments: object, timeout_s: float) -> Any:
        """Call a method of the store. Raises RuntimeError if its server is gone or does not answer in time."""
        store = self.raw
        return self._result_of(lambda: getattr(store, method)(*arguments), timeout_s)

    def _result_of(self, act: Callable[[], Any], timeout_s: float) -> Any:
        if self._broken:
            raise RuntimeError("the store of rank 0 is gone")
        self._last = call = _Call(act)
        end = time.monotonic() + timeout_s
        self._calls.put(call)
        while not call.done.wait(_SLICE_S):
            self._waiter.check()
            if time.monotonic() > end:
                raise RuntimeError(f"the store of rank 0 did not answer within {timeout_s:.1f} s")
        if call.error is not None:
            self._broken = True  # torch prints a trace for each call of a store that is gone
            raise call.error
        return call.result


@dataclass
class _Call:
    act: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


def _answer(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.result = call.act()
        except Exception as error:  # noqa: BLE001  `ask` raises it
            call.error = error
        call.done.set()


def _end(thread: threading.Thread, calls: SimpleQueue[_Call | None], address: StoreAddress) -> None:
    """End the thread of a store, within 1 s.

    A thread that still waits for rank 0 while Python ends would end the process by SIGABRT if rank 0 died then. It
    would come back from C++, not get the interpreter's lock, and be ended inside a destructor. So its connection is
    shut down.
    """
    calls.put(None)
    end = time.monotonic() + _ENDING_S
    thread.join(_SLICE_S)
    while thread.is_alive() and time.monotonic() < end:  # torch may connect again
        _hang_up(address)
        thread.join(_SLICE_S)


def _hang_up(address: StoreAddress) -> None:
    """Shut down this process's connections to the store. Torch does not give their file descriptors away."""
    libc = ctypes.CDLL(None)
    port, host = struct.pack("!H", address.port), socket.inet_aton(address.host)
    for path in list(Path("/proc/self/fd").iterdir()):
        peer, size = ctypes.create_string_buffer(_IPV6.size), ctypes.c_uint32(_IPV6.size)
        if libc.getpeername(int(path.name), peer, ctypes.byref(size)) != 0:
            continue
        family, its_port, ipv4, ipv6 = _IPV6.unpack(peer.raw)
        peer_host = {socket.AF_INET: ipv4, socket.AF_INET6: ipv6}.get(family)  # torch's socket may have either family
        if (its_port, peer_host) == (port, host):
            libc.shutdown(int(path.name), socket.SHUT_RDWR)


# Rounds


class StoreBoard:
    """Rounds in which the ranks of all domains take part, in one order."""

    def __init__(self, world: Collectives, domain: Collectives, store: BoundedStore, waiter: Waiter) -> None:
        self._rank, self._size, self._waiter, self._domain = world.rank, world.size, waiter, domain
        self._first = world.rank - domain.rank
        inside = range(self._first, self._first + domain.size)
        self._elsewhere = [rank for rank in range(world.size) if rank not in inside]
        self._store = store
        self._epoch = 0

    def connect(self) -> None:
        """Open the store, before the first round."""
        what, start, limit_s = "domains: connect", time.monotonic(), self._waiter.timeout_s
        try:
            self._store.open(limit_s + _MARGIN_S)
        except RuntimeError as error:
            raise PeerTimeout(what, 1, self._server(), 1, 0, time.monotonic() - start, self._rank) from error

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
        end = start + limit
        own_key = self._key(self._rank)
        self._ask(what, end, "set", own_key, self._store.address.seal(own_key, record))
        records: dict[int, Any] = self._inside(what, record, limit)
        keys = [self._key(rank) for rank in self._elsewhere]
        if not self._ask(what, end, "check", keys):
            for rank, key in zip(self._elsewhere, keys, strict=True):
                self._wait(what, rank, key, start, end)
        sealed = self._ask(what, end, "multi_get", keys)
        records |= {rank: self._opened(rank, record) for rank, record in zip(self._elsewhere, sealed, strict=True)}
        self._ask(what, end, "delete_key", self._key(self._rank, self._epoch - 1))
        return [self._read(what, rank, records[rank]) for rank in range(self._size)]

    def close(self, together: bool) -> None:
        """Leave the store. Rank 0 serves it until the others have left, if all close now.

        Else rank 0 leaks the server, which ends with the process: others may still wait, and must find who is missing.
        """
        if together:
            with suppress(RuntimeError, Aborted):  # a peer that is gone needs no store
                self._store.ask("add", "gone", 1, timeout_s=_CLOSING_S)
                if self._rank == 0:
                    self._waiter.until("close", 1, self._all_gone, _CLOSING_S)
        elif self._rank == 0:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store.raw))
        self._store.close()

    def _all_gone(self) -> bool:
        return bool(self._store.ask("add", "gone", 0, timeout_s=_CLOSING_S) >= self._size)

    def _inside(self, what: str, record: bytes, limit: float) -> dict[int, Any]:
        """Swap records in this rank's domain."""
        with named_by_world(self._waiter, self._first, what):
            theirs = self._domain.swap(record, "a round between domains", limit)
        return {
            self._first + place: pickle.loads(message) for place, message in enumerate(theirs) if type(message) is bytes
        }

    def _wait(self, what: str, rank: int, key: str, start: float, end: float) -> None:
        left = max(0.0, end - time.monotonic())
        if not self._waiter.until(what, rank, lambda: bool(self._ask(what, end, "check", [key])), left):
            raise self._late(what, rank, time.monotonic() - start)

    def _ask(self, what: str, end: float, method: str, *arguments: object) -> Any:
        """Call the store. Where it does not answer, the error names the rank of `_server`."""
        start = time.monotonic()
        try:
            return self._store.ask(method, *arguments, timeout_s=max(_SLICE_S, end - start))
        except RuntimeError as error:
            self._waiter.check(0)
            raise self._late(what, self._server(), time.monotonic() - start) from error

    def _server(self) -> int:
        """Return rank 0, which serves the store. Rank 0, on a machine that is too busy, names a rank elsewhere."""
        return 0 if self._rank else self._elsewhere[0]

    def _late(self, what: str, rank: int, waited_s: float) -> PeerTimeout:
        epoch = self._epoch
        return PeerTimeout(what, epoch, rank, epoch, epoch - 1, waited_s, self._rank)

    def _key(self, rank: int, epoch: int | None = None) -> str:
        return f"{self._epoch if epoch is None else epoch}/{rank}"

    def _opened(self, rank: int, sealed: bytes) -> Any:
        what = f"the record of rank {rank} in round {self._epoch}"
        return pickle.loads(self._store.address.opened(self._key(rank), sealed, what))

    def _read(self, what: str, rank: int, record: tuple[str, bool, bytes]) -> bytes:
        name, is_error, message = record
        if name != what:
            raise ConfigError(
                f"rank {self._rank} is in {what} while rank {rank} is in {name}; all ranks must call in one order"
            )
        if is_error:
            raise ConfigError(f"rank {rank}: {message.decode()}")
        return message
