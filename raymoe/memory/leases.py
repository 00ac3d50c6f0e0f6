"""Leases: readers in other processes hold an object while they read it, and its owner learns when nobody does.

An owner numbers its objects. Number n is byte n of a file, and the file's locks say who uses it. No byte is written:

- **A reader holds byte n** by a shared lock on an open file of its own.
- **The owner retires byte n** by an exclusive lock, which it keeps. From then on no reader can hold n, so the owner may
  reuse the memory. Where a reader holds n, the owner is refused, and tries again later.

The kernel gives up the locks of a process that ends, so a dead reader holds nothing. Retired numbers side by side are
one lock for it. The file is a `memfd` of `host_shm`: it has no path that could be left behind.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from raymoe.errors import WiringError
from raymoe.memory import host_shm

_FILE_BYTES = 4096
_LOOK_S = 0.01
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OwnLeases:
    """The owner's side."""

    def __init__(self, name: str) -> None:
        self._file = host_shm.own(name, _FILE_BYTES)
        self._descriptor = self._file.descriptor()
        self._fd = int(str(self._descriptor["fd"]))
        self._last = 0

    def descriptor(self) -> dict[str, object]:
        """Return what a reader needs to hold objects, as plain values."""
        return self._descriptor

    def number(self) -> int:
        """Return the number of a new object."""
        self._last += 1
        return self._last

    def retire(self, number: int) -> bool:
        """End an object for good, unless a reader holds it: then return False."""
        return _lock(self._fd, fcntl.F_WRLCK, number)

    def close(self) -> None:
        """Withdraw the file: to readers the owner is gone."""
        self._file.close()


class PeerLeases:
    """A reader's side: the objects of one owner in another process, or in this one."""

    def __init__(self, descriptor: dict[str, object]) -> None:
        """Check the owner's file. Raises `ProcessLookupError` if the owner is gone, else `WiringError`."""
        try:
            host_shm.map_peer(descriptor).close()
        except WiringError as error:
            if isinstance(error.__cause__, FileNotFoundError | ProcessLookupError):
                raise ProcessLookupError(str(error)) from error
            raise
        self._path = Path(f"/proc/{descriptor['pid']}/fd/{descriptor['fd']}")
        self._inode = descriptor["inode"]

    def is_alive(self) -> bool:
        """Return whether the owner still has its file. A process that has ended has none, even while its pid lives."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def ends_within(self, seconds: float) -> bool:
        """Return whether the owner has ended, at once or within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def hold(self, number: int) -> Lease | None:
        """Hold an object; None if it is retired. Raises `ProcessLookupError` if the owner is gone."""
        try:
            fd = os.open(self._path, _OPEN_FLAGS)
        except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
            raise ProcessLookupError(f"{self._path} is gone") from error
        lease = Lease(fd)
        if os.fstat(fd).st_ino != self._inode:
            raise ProcessLookupError(f"{self._path} is another file now")
        if not _lock(fd, fcntl.F_RDLCK, number):
            lease.close()
            return None
        return lease


class Lease:
    """A reader's hold on an object, until it is closed or dropped."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _lock(fd: int, kind: int, byte: int) -> bool:
    """Lock one byte for this open file, which may lie after the file's end. False where another open file forbids it.

    Locks of open files (OFD) conflict inside one process too, and closing another file of the process leaves them.
    """
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: the two answers to a conflict
        return False
    return True
