"""Leases between processes: what a reader holds the owner cannot retire, and a dead reader holds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.errors import WiringError
from raymoe.memory.leases import OwnLeases, PeerLeases
from tests.python_path import python_path

OWNER = """
import json, sys
from raymoe.memory.leases import OwnLeases
leases = OwnLeases("raymoe-test")
print(json.dumps(leases.descriptor()), flush=True)
sys.stdin.read()
"""
READER = """
import json, sys
from raymoe.memory.leases import PeerLeases
lease = PeerLeases(json.loads(sys.argv[1])).hold(7)
print("held", flush=True)
sys.stdin.read()
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def leases() -> Iterator[OwnLeases]:
    own = OwnLeases("raymoe-test")
    yield own
    own.close()


def test_an_object_is_retired_when_nobody_holds_it(leases: OwnLeases) -> None:
    peers = [PeerLeases(leases.descriptor()) for _ in range(2)]
    first, second = leases.number(), leases.number()
    assert first != second
    held = [peer.hold(first) for peer in peers]
    other = peers[0].hold(first)  # the same reader may hold it twice
    for lease in (*held, other):
        assert not leases.retire(first)
        assert lease is not None
        lease.close()
    assert leases.retire(first)
    assert peers[0].hold(first) is None and peers[1].hold(first) is None
    still = peers[0].hold(second)
    assert still is not None and not leases.retire(second)
    del still
    assert leases.retire(second)


def test_many_retired_objects_are_one_lock(leases: OwnLeases) -> None:
    """Else the kernel would go through a list as long as the life of a process at every read."""
    kept = leases.number()
    for _ in range(2000):
        assert leases.retire(leases.number())
    inode = leases.descriptor()["inode"]
    mine = [line for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
    assert len(mine) == 1
    assert PeerLeases(leases.descriptor()).hold(kept) is not None


def test_a_dead_reader_holds_nothing(leases: OwnLeases) -> None:
    for _ in range(7):
        leases.number()
    reader = start(READER, json.dumps(leases.descriptor()))
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "held\n"
        assert not leases.retire(7)
        reader.send_signal(signal.SIGSTOP)  # a reader that stands still keeps its lease
        assert not leases.retire(7)
        reader.kill()
        deadline = time.monotonic() + 30
        while not leases.retire(7):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        end(reader)


def test_a_dead_owner_is_noticed() -> None:
    owner = start(OWNER)
    try:
        assert owner.stdout is not None
        descriptor = json.loads(owner.stdout.readline())
        peer = PeerLeases(descriptor)
        assert peer.is_alive() and peer.hold(1) is not None
        owner.kill()
        deadline = time.monotonic() + 30
        while peer.is_alive():  # also a zombie, which nobody has waited for, is dead
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ProcessLookupError):
            peer.hold(1)
        with pytest.raises(ProcessLookupError, match="is gone"):
            PeerLeases(descriptor)
    finally:
        end(owner)


def test_a_file_that_is_no_owners_is_refused(leases: OwnLeases) -> None:
    with pytest.raises(WiringError, match="PID namespace"):
        PeerLeases(leases.descriptor() | {"pid_ns": "pid:[1]"})
    with pytest.raises(WiringError, match="inode"):
        PeerLeases(leases.descriptor() | {"inode": 1})


def test_a_withdrawn_file_is_a_dead_owner() -> None:
    own = OwnLeases("raymoe-test")
    peer = PeerLeases(own.descriptor())
    own.close()
    assert not peer.is_alive()
    with pytest.raises(ProcessLookupError):
        peer.hold(1)


def test_another_file_in_the_place_of_the_owners_is_no_owner() -> None:
    own, other = OwnLeases("raymoe-test"), OwnLeases("raymoe-other")
    peer, place = PeerLeases(own.descriptor()), int(str(own.descriptor()["fd"]))
    own.close()
    os.dup2(int(str(other.descriptor()["fd"])), place)
    try:
        assert not peer.is_alive()
        with pytest.raises(ProcessLookupError, match="another file"):
            peer.hold(1)
    finally:
        os.close(place)
        other.close()
