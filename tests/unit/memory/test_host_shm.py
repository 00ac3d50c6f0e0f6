"""Host memory that other processes map: which processes may map it, until when, and when it is freed."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raymoe.errors import PlacementError, WiringError
from raymoe.memory import host_shm

DEADLINE_S = 30
PRELUDE = """
import json, os, sys
from raymoe.memory import host_shm
def show(value): print(json.dumps(value), flush=True)
"""


def start(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + code, *(json.dumps(arg) for arg in args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> Any:
    """Wait for the child; return the last value it printed."""
    try:
        out, _ = child.communicate(timeout=DEADLINE_S)
    finally:
        child.kill()
    assert child.returncode == 0
    return json.loads(out.splitlines()[-1])


def path_of(descriptor: dict[str, object]) -> Path:
    return Path(f"/proc/{descriptor['pid']}/fd/{descriptor['fd']}")


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


@pytest.fixture
def segment():
    memory = host_shm.own("raymoe-unit", 8192)
    yield memory
    memory.close()


def test_a_peer_writes_and_the_owner_reads(segment) -> None:
    child = start(
        "peer = host_shm.map_peer(json.loads(sys.argv[1])); peer.view(100, 5)[:] = b'hello'; show(peer.nbytes)",
        segment.descriptor(),
    )
    assert finish(child) == 8192
    assert bytes(segment.view(99, 7)) == b"\0hello\0"


def test_memory_has_no_name_and_only_its_user_may_open_it(segment) -> None:
    path = path_of(segment.descriptor())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [entry for entry in Path("/dev/shm").iterdir() if "raymoe" in entry.name]
    assert "(deleted)" in str(path.readlink())
    with pytest.raises(PermissionError), path.open("r+b") as file:
        file.truncate(0)  # sealed: a mapped page cannot vanish


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_an_error_that_says_so(segment) -> None:
    code = """
os.setuid(65534)
try: host_shm.map_peer(json.loads(sys.argv[1]))
except Exception as error: show([type(error).__name__, str(error)])
"""
    kind, message = finish(start(code, segment.descriptor()))
    assert kind == "WiringError"
    assert "one user" in message


@pytest.mark.parametrize("field", ["kind", "pid", "fd", "started", "pid_ns", "boot_id", "inode", "nbytes"])
def test_a_descriptor_with_missing_or_mistyped_fields_is_refused(segment, field: str) -> None:
    descriptor = segment.descriptor()
    with pytest.raises(WiringError, match=f"whose '{field}' is of type NoneType"):
        host_shm.map_peer(descriptor | {field: None})
    del descriptor[field]
    with pytest.raises(WiringError, match=f"without '{field}'"):
        host_shm.map_peer(descriptor)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "cuda_ipc", "heap of kind cuda_ipc; CPU ranks map host_shm"),
        ("boot_id", "another", "heap of a machine with boot id another; this one has .*: put all ranks on one host"),
        ("pid_ns", "pid:[1]", r"PID namespace pid:\[1\]; this rank is in"),
        ("started", 1, "not the one that exported"),
        ("inode", 1, "is inode .* now, not 1"),
        ("nbytes", 4096, "holds 8192 bytes; its descriptor says 4096"),
        ("fd", 99999, "gone or has withdrawn"),
        ("fd", -1, "gone or has withdrawn"),
        ("pid", -1, "is gone"),
    ],
)
def test_a_descriptor_with_wrong_values_is_refused(segment, field: str, value: object, says: str) -> None:
    with pytest.raises(WiringError, match=says):
        host_shm.map_peer(segment.descriptor() | {field: value})


def test_the_memory_of_a_dead_exporter_cannot_be_mapped() -> None:
    descriptor = finish(start("own = host_shm.own('raymoe-unit-dead', 4096); show(own.descriptor())"))
    with pytest.raises(WiringError, match=f"process {descriptor['pid']} is gone"):
        host_shm.map_peer(descriptor)


def test_a_file_number_that_now_belongs_to_other_memory_is_refused(segment) -> None:
    descriptor = segment.descriptor()
    segment.unpublish()
    other = host_shm.own("raymoe-unit-other", 8192)  # takes the file number that has just become free
    try:
        assert other.descriptor()["fd"] == descriptor["fd"]
        with pytest.raises(WiringError, match="is inode"):
            host_shm.map_peer(descriptor)
    finally:
        other.close()


@pytest.mark.parametrize("taken_by", ["socket", "folder"])
def test_a_file_number_that_now_belongs_to_a_socket_or_folder_is_refused(segment, taken_by: str) -> None:
    descriptor = segment.descriptor()
    segment.unpublish()
    if taken_by == "socket":
        with socket.socket() as other:
            assert descriptor["fd"] == other.fileno()
            with pytest.raises(WiringError, match=r"leads to socket:\[\d+\], which is no heap"):
                host_shm.map_peer(descriptor)
        return
    number = os.open("/", os.O_RDONLY)
    try:
        assert descriptor["fd"] == number
        with pytest.raises(WiringError, match="leads to /, which is no heap"):
            host_shm.map_peer(descriptor)
    finally:
        os.close(number)


# A descriptor that leads to something other than a heap. Each plant gives a file descriptor of this process.

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(label: str, seals: int = SEALS, mode: int = 0o600) -> int:
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.truncate(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def file(folder: Path, name: str) -> int:
    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 8192)
    return fd


def deleted_file(folder: Path, name: str) -> int:
    fd = file(folder, name)
    (folder / name).unlink()
    return fd


def fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR)


PLANTS = {
    "a file": (lambda folder: file(folder, "authorized_keys"), "authorized_keys, which is no heap"),
    "a file with a label": (lambda folder: file(folder, "memfd:raymoe-x"), "memfd:raymoe-x, which is no heap"),
    "a deleted file": (lambda folder: deleted_file(folder, "memfd:raymoe-x"), r"\(deleted\), which is no heap"),
    "a FIFO": (fifo, "fifo, which is no heap"),
    "a device": (lambda _: os.open("/dev/zero", os.O_RDWR), "leads to /dev/zero, which is no heap"),
    "shared memory": (lambda _: deleted_file(Path("/dev/shm"), f"raymoe-{os.getpid()}"), "which is no heap"),
    "another program's memfd": (lambda _: memfd("somebody's"), "leads to /memfd:somebody's .* which is no heap"),
    "a memfd that can shrink": (lambda _: memfd("raymoe-x", fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "is not sealed"),
    "a memfd that can be sealed": (lambda _: memfd("raymoe-x", SEALS & ~fcntl.F_SEAL_SEAL), "is not sealed"),
    "a memfd for everybody": (lambda _: memfd("raymoe-x", mode=0o666), "has mode 0666; a heap has 0600"),
}


@pytest.mark.parametrize(("plant", "says"), PLANTS.values(), ids=PLANTS)
def test_only_a_heap_is_mapped(segment, tmp_path, monkeypatch, plant: Callable[[Path], int], says: str) -> None:
    fd = plant(tmp_path)
    opened: list[object] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(path) or real(path, *rest))
    try:
        status = os.fstat(fd)
        path = f"/proc/self/fd/{fd}"
        lie = {"fd": fd, "path": path, "inode": status.st_ino, "nbytes": status.st_size}
        with pytest.raises(WiringError, match=says):
            host_shm.map_peer(segment.descriptor() | lie)
    finally:
        os.close(fd)
    assert not opened or "no heap" not in says, "it is not even opened"


def test_a_descriptor_names_no_path(segment, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(8192))
    lie = {"path": str(victim), "inode": victim.stat().st_ino}
    with pytest.raises(WiringError, match=r"not .* as exported"):
        host_shm.map_peer(segment.descriptor() | lie)


@pytest.mark.skipif(os.geteuid() != 0, reason="lets another user make a heap")
def test_a_heap_of_another_user_is_not_mapped() -> None:
    child = start("os.setuid(65534); own = host_shm.own('raymoe-unit', 8192); show(own.descriptor()); input()")
    try:
        assert child.stdout is not None
        descriptor = json.loads(child.stdout.readline())
        with pytest.raises(WiringError, match=r"belongs to user 65534, not to user 0; all ranks .* one user"):
            host_shm.map_peer(descriptor)
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


def test_unpublished_memory_stays_mapped_but_cannot_be_mapped_again(segment) -> None:
    descriptor = segment.descriptor()
    peer = host_shm.map_peer(descriptor)
    segment.unpublish()
    with pytest.raises(WiringError, match="gone or has withdrawn"):
        host_shm.map_peer(descriptor)
    with pytest.raises(WiringError, match="cannot be mapped any more"):
        segment.descriptor()
    peer.view(0, 1)[0] = 7
    assert segment.view(0, 1)[0] == 7


def test_a_peer_keeps_the_memory_of_a_dead_owner() -> None:
    child = start(
        "own = host_shm.own('raymoe-unit-first', 4096); own.view(0, 2)[:] = b'ok'; show(own.descriptor()); input()"
    )
    assert child.stdout is not None
    peer = host_shm.map_peer(json.loads(child.stdout.readline()))
    child.kill()
    child.wait(DEADLINE_S)
    assert bytes(peer.view(0, 2)) == b"ok"
    peer.view(4095, 1)[0] = 1
    peer.close()


def test_memory_stays_mapped_until_its_last_view_is_dropped() -> None:
    segment = host_shm.own("raymoe-unit-views", 8192)
    view = segment.view(0, 8192)
    segment.close()
    segment.close()
    view[5] = 5
    assert is_mapped("raymoe-unit-views")
    with pytest.raises(WiringError, match="closed"):
        segment.view(0, 1)
    del view
    gc.collect()
    assert not is_mapped("raymoe-unit-views")


def test_a_view_outside_the_segment_is_refused(segment) -> None:
    with pytest.raises(WiringError, match="bytes 8000 to 8193 asked of a segment of 8192"):
        segment.view(8000, 193)


def test_more_shared_memory_than_available_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"asks for \d+ bytes of shared memory; \d+ are available"):
        host_shm.own("raymoe-unit-huge", 1 << 60)
    assert not is_mapped("raymoe-unit-huge")
