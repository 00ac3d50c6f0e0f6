"""Heaps in host memory that other processes on this machine can map.

A segment is a `memfd`: memory without a path in a file system. A peer opens it through `/proc/<pid>/fd/<n>` while its
owner keeps the file descriptor open. A descriptor gives the two numbers and no path. A peer maps the file only if it is
such a segment: a sealed `memfd` of this user with mode 0600 and a label of raymoe.

Three invariants govern the lifetime of a segment:

- **Nothing is left.** The kernel frees the memory when the last mapping is gone, at the latest with the last
  process that mapped it.
- **Tensors stay valid.** A tensor or a view over a segment keeps the mapping, after `close` too. The size is sealed, so
  a mapped page cannot vanish under its reader.
- **The memory becomes private.** `unpublish` closes the owner's file descriptor after all peers have mapped. From then
  on no other process can map the memory. The peers keep their mappings.

The memory is reserved when it is made. So a machine with too little memory fails then, not in the middle of a step.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from raymoe.errors import PlacementError, WiringError
from raymoe.memory.address import boot_id

KIND = "host_shm"

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FIELDS = {
    "kind": str,
    "pid": int,
    "fd": int,
    "started": int,
    "pid_ns": str,
    "boot_id": str,
    "inode": int,
    "nbytes": int,
}


LABEL = "raymoe-"
"""The labels of all segments begin with it."""
_LABEL_BYTES = 200  # the kernel takes 249
_MODE = 0o600

_MAP_FAILED = ctypes.c_void_p(-1).value

Mapping: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"


class HostSegment:
    """Memory of one rank, mapped here. In a peer, and after `unpublish`, it has no descriptor."""

    def __init__(self, buffer: Mapping, nbytes: int, fd: int | None = None) -> None:
        self._buffer: Mapping | None = buffer
        self._fd = fd
        self.nbytes = nbytes

    @property
    def buffer(self) -> Mapping:
        if self._buffer is None:
            raise WiringError("this segment is closed; take tensors from it before closing it")
        return self._buffer

    def view(self, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise WiringError(f"bytes {offset} to {offset + nbytes} asked of a segment of {self.nbytes} bytes")
        return memoryview(self.buffer).cast("B")[offset : offset + nbytes]

    def descriptor(self) -> dict[str, object]:
        """Return what a peer needs to map this memory, as plain values."""
        if self._fd is None:
            raise WiringError("this segment cannot be mapped any more; take its descriptor before unpublish()")
        try:
            return self._described(self._fd)
        except OSError as error:
            raise WiringError(f"a heap of {self.nbytes} bytes could not be described: {error.strerror}") from error

    def _described(self, fd: int) -> dict[str, object]:
        return {
            "kind": KIND,
            "pid": os.getpid(),
            "fd": fd,
            "started": start_time(os.getpid()),
            "pid_ns": _pid_namespace(),
            "boot_id": boot_id(),
            "inode": os.fstat(fd).st_ino,
            "nbytes": self.nbytes,
        }

    def unpublish(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        self.unpublish()
        self._buffer = None


def own(name: str, nbytes: int) -> HostSegment:
    """Make zeroed memory of mode 0600, reserved at once. `name` begins with LABEL."""
    try:
        _refuse_if_too_large(name, nbytes)
        fd = os.memfd_create(memory_label(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PlacementError(f"{nbytes} bytes of shared memory for {name} were refused: {error.strerror}") from error
    try:
        os.fchmod(fd, _MODE)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return HostSegment(_map(fd, nbytes), nbytes, fd)
    except OSError as error:
        os.close(fd)
        raise PlacementError(f"{nbytes} bytes of shared memory for {name} were refused: {error.strerror}") from error


def memory_label(name: str) -> str:
    """Turn `name` into a label that the kernel accepts. The label is for readers of /proc/<pid>/maps only.

    >>> memory_label("raymoe-experts-board"), memory_label("a\\0b/c")
    ('raymoe-experts-board', 'a_b_c')
    >>> len(memory_label("é" * 300)), memory_label("a" * 300) == memory_label("a" * 301)
    (106, False)
    """
    plain = "".join("_" if letter in "\0/" else letter for letter in name)
    encoded = plain.encode(errors="replace")
    if len(encoded) > _LABEL_BYTES:
        start = encoded[: _LABEL_BYTES - 13].decode(errors="ignore")
        return f"{start}-{hashlib.sha256(encoded).hexdigest()[:12]}"
    return encoded.decode()


def map_peer(descriptor: dict[str, object]) -> HostSegment:
    """Map the memory that a peer's descriptor names, after checking that the descriptor is still valid."""
    check_fields(descriptor, _FIELDS)
    pid, nbytes = int(str(descriptor["pid"])), int(str(descriptor["nbytes"]))
    path = f"/proc/{pid}/fd/{descriptor['fd']}"
    try:
        _check_same_machine(descriptor)
        if start_time(pid) != descriptor["started"]:
            raise WiringError(f"process {pid} is not the one that exported the heap: another process has its pid now")
        _check_link(path)  # before it is opened: to open a device or a FIFO can have an effect
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise WiringError(f"process {pid} is gone or has withdrawn its heap ({path})") from error
    except PermissionError as error:
        raise WiringError(f"{path} may not be opened; all ranks of a host must run as one user") from error
    except OSError as error:  # this process has too many files open
        raise WiringError(f"the heap of process {pid} could not be opened ({path}): {error.strerror}") from error
    try:
        _check_link(f"/proc/self/fd/{fd}")
        _check_segment(path, fd)
        status = os.fstat(fd)
        if status.st_ino != descriptor["inode"]:
            raise WiringError(f"{path} is inode {status.st_ino} now, not {descriptor['inode']} as exported")
        if status.st_size != nbytes:
            raise WiringError(f"{path} holds {status.st_size} bytes; its descriptor says {nbytes}")
        return HostSegment(_map(fd, nbytes), nbytes)
    except OSError as error:
        raise WiringError(f"{nbytes} bytes of {path} could not be mapped: {error.strerror}") from error
    finally:
        os.close(fd)


def map_all(own: HostSegment, rank: int, descriptors: Sequence[dict[str, object]]) -> list[HostSegment]:
    """Map the memory of all ranks, of which `rank` has its `own`.

    The error names every rank that failed: one may have left because of another.
    """
    segments, problems = [], []
    for peer, descriptor in enumerate(descriptors):
        try:
            segments.append(own if peer == rank else map_peer(descriptor))
        except WiringError as error:
            problems.append(f"rank {peer}: {error}")
    if problems:
        raise WiringError("; ".join(problems))
    return segments


def _check_link(path: str) -> None:
    """Refuse a link of /proc that does not lead to a `memfd` with a label of raymoe. A file cannot have such a path."""
    target = str(Path(path).readlink())
    if not target.startswith(f"/memfd:{LABEL}"):
        raise WiringError(f"{path} leads to {target}, which is no heap of raymoe")


def _check_segment(path: str, fd: int) -> None:
    """Refuse an open file that `own` has not made for this user."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise WiringError(
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}; all ranks of a host must run as one "
            "user"
        )
    if stat.S_IMODE(status.st_mode) != _MODE:
        raise WiringError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; a heap has {_MODE:04o}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _SEALS:
        raise WiringError(f"{path} is not sealed as a heap is, so its owner could take mapped pages away")


def check_fields(descriptor: dict[str, object], fields: dict[str, type]) -> None:
    """Refuse a descriptor that lacks one of `fields` or holds a value of another type."""
    for name, kind in fields.items():
        if name not in descriptor:
            raise WiringError(f"a descriptor without {name!r}; it has {', '.join(descriptor) or 'nothing'}")
        if type(descriptor[name]) is not kind:
            actual = type(descriptor[name]).__name__
            raise WiringError(f"a descriptor whose {name!r} is of type {actual}; {kind.__name__} is needed")


def start_time(pid: int) -> int:
    """Return when a process began, in clock ticks since boot. It differs between two processes with the same pid."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _map(fd: int, nbytes: int) -> Mapping:
    """Map a whole file and make its pages present. Python's `mmap` would keep a file descriptor open."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapping = (ctypes.c_ubyte * nbytes).from_address(address)
    # Views and tensors refer to `mapping`, so munmap runs when the last of them is gone. At exit the kernel unmaps.
    weakref.finalize(mapping, libc.munmap, address, nbytes).atexit = False
    return mapping


def _check_same_machine(descriptor: dict[str, object]) -> None:
    if descriptor["kind"] != KIND:
        raise WiringError(f"a heap of kind {descriptor['kind']}; CPU ranks map {KIND}")
    if descriptor["boot_id"] != boot_id():
        raise WiringError(
            f"a heap of a machine with boot id {descriptor['boot_id']}; this one has {boot_id()}: put all ranks on "
            "one host"
        )
    if descriptor["pid_ns"] != _pid_namespace():
        own, other = _pid_namespace(), descriptor["pid_ns"]
        raise WiringError(
            f"a heap of a process in PID namespace {other}; this rank is in {own} and cannot see its /proc: put all "
            "ranks in one (containers need --pid=host)"
        )


def _refuse_if_too_large(name: str, nbytes: int) -> None:
    # Reserving more than is available would start the kernel's out-of-memory killer, which names no cause.
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if nbytes > available:
                raise PlacementError(f"{name} asks for {nbytes} bytes of shared memory; {available} are available")


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
