"""Connecting a private NCCL communicator ends even if a member has died; NCCL itself would wait without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from raymoe.errors import WiringError
from raymoe.memory.world import World
from raymoe.net import nccl
from raymoe.net.nccl import BackgroundWait


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The world of one CPU rank, which makes a communicator of ranks 0 and 1."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(nccl, "_exchange_a_byte", lambda *_: None)
    monkeypatch.setattr(nccl, "CONNECT_S", 0.1)
    with World.open(0, 1, timeout_s=0.1) as world:
        world.wire([world.descriptor()])
        yield world


def test_a_missing_member_ends_the_connection_after_a_timeout(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(nccl, "Communicator", lambda *_: release.wait(20))
    try:
        with pytest.raises(WiringError, match=r"its ranks 0, 1 did not all come within 0\.1 s"):
            nccl._connect_members(world, b"identity", (0, 1))
    finally:
        release.set()


def test_a_communicator_is_returned_and_a_failure_is_raised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = object()
    monkeypatch.setattr(nccl, "Communicator", lambda *_: made)
    assert nccl._connect_members(world, b"identity", (0, 1)) is made

    def refuse(*_: object) -> Any:
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(nccl, "Communicator", refuse)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        nccl._connect_members(world, b"identity", (0, 1))


def test_the_wait_for_another_thread_is_over_when_the_thread_ends() -> None:
    go = threading.Event()
    wait = BackgroundWait(lambda: go.wait(20) and None)
    assert not wait.done()
    go.set()
    for _ in range(1000):
        if wait.done():
            return
        threading.Event().wait(0.01)
    pytest.fail("the wait is not over")


class Library:
    """Replaces the functions of NCCL. Abort and destroy end when `freed` is set, as with a graph that is not freed."""

    def __init__(self, code: int = 0) -> None:
        self.freed, self.ended, self._code = threading.Event(), [], code

    def ncclCommInitRank(self, *_: object) -> int:  # noqa: N802
        return 0

    def ncclGetErrorString(self, _: int) -> bytes:  # noqa: N802
        return b"it did not work"

    def ncclGetLastError(self, _: object) -> bytes:  # noqa: N802
        return b""

    def ncclCommAbort(self, _: object) -> int:  # noqa: N802
        return self._end("abort")

    def ncclCommDestroy(self, _: object) -> int:  # noqa: N802
        return self._end("destroy")

    def _end(self, how: str) -> int:
        assert self.freed.wait(20)
        self.ended.append(how)
        return self._code


def communicator_of(found: Library, monkeypatch: pytest.MonkeyPatch) -> nccl.Communicator:
    monkeypatch.setattr(nccl, "library", lambda: found)
    monkeypatch.setattr(nccl, "GRAPHS_S", 0.2)
    return nccl.Communicator(bytes(nccl.ID_BYTES), 0, 2)


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_communicator_that_graphs_hold_ends_when_they_are_freed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Library()
    communicator = communicator_of(found, monkeypatch)
    communicator.hold()
    start = time.monotonic()
    getattr(communicator, how)()
    assert 0.1 < time.monotonic() - start < 5 and found.ended == []
    found.freed.set()
    ends = time.monotonic() + 10
    while not found.ended and time.monotonic() < ends:
        time.sleep(0.01)
    assert found.ended == ["destroy" if how == "close" else how]
    communicator.close()  # a second end does nothing
    assert len(found.ended) == 1


@pytest.mark.parametrize("held", [False, True])
def test_an_end_that_fails_raises(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Library(code=3)
    found.freed.set()
    communicator = communicator_of(found, monkeypatch)
    if held:
        monkeypatch.setattr(nccl, "GRAPHS_S", 10)
        communicator.hold()
    with pytest.raises(WiringError, match="ncclCommDestroy failed: it did not work"):
        communicator.close()
    assert found.ended == ["destroy"]
