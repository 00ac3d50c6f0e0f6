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
            nccl._connect_members(world, b"identity", (0, 1), None)
    finally:
        release.set()


def test_a_communicator_is_returned_and_a_failure_is_raised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator: Any = object()
    monkeypatch.setattr(nccl, "Communicator", lambda *_: communicator)
    assert nccl._connect_members(world, b"identity", (0, 1), 8) is communicator

    def refuse(*_: object) -> Any:
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(nccl, "Communicator", refuse)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        nccl._connect_members(world, b"identity", (0, 1), None)


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


def communicator_of(library: Library, monkeypatch: pytest.MonkeyPatch) -> nccl.Communicator:
    monkeypatch.setattr(nccl, "library", lambda: library)
    monkeypatch.setattr(nccl, "GRAPHS_S", 0.2)
    return nccl.Communicator(bytes(nccl.ID_BYTES), 0, 2)


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_communicator_that_graphs_hold_ends_when_they_are_freed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    communicator = communicator_of(library, monkeypatch)
    communicator.hold()
    start = time.monotonic()
    getattr(communicator, how)()
    assert 0.1 < time.monotonic() - start < 5 and library.ended == []
    library.freed.set()
    ends = time.monotonic() + 10
    while not library.ended and time.monotonic() < ends:
        time.sleep(0.01)
    assert library.ended == ["destroy" if how == "close" else how]
    communicator.close()  # a second end does nothing
    assert len(library.ended) == 1


@pytest.mark.parametrize("held", [False, True])
def test_an_end_that_fails_raises(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(code=3)
    library.freed.set()
    communicator = communicator_of(library, monkeypatch)
    if held:
        monkeypatch.setattr(nccl, "GRAPHS_S", 10)
        communicator.hold()
    with pytest.raises(WiringError, match="ncclCommDestroy failed: it did not work"):
        communicator.close()
    assert library.ended == ["destroy"]


class LaterLibrary(Library):
    """NCCL of a version that can be given a configuration."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version, self.configured = version, []

    def ncclGetVersion(self, into: Any) -> int:  # noqa: N802
        into._obj.value = self.version
        return 0

    def ncclCommInitRankConfig(self, *arguments: Any) -> int:  # noqa: N802
        config = arguments[-1]._obj
        self.configured.append({name: getattr(config, name) for name, _ in config._fields_})
        return 0


@pytest.mark.parametrize(("version", "bounded"), [(22809, True), (21700, True), (21600, False)])
def test_the_blocks_of_nccl_are_bounded_where_it_can_be_told(
    version: int, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = LaterLibrary(version)
    monkeypatch.setattr(nccl, "library", lambda: library)
    assert nccl.bounds_blocks() is bounded
    nccl.Communicator(bytes(nccl.ID_BYTES), 0, 2, most_blocks=8)
    undefined = -(2**31)
    whole = {"size": 40, "magic": 0xCAFEBEEF, "version": 21700, "blocking": undefined, "cga_cluster_size": 0}
    whole |= {"min_ctas": undefined, "max_ctas": 8, "net_name": None}
    assert library.configured == ([whole] if bounded else [])


def test_an_nccl_without_the_function_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "library", Library)
    assert not nccl.bounds_blocks()
    nccl.Communicator(bytes(nccl.ID_BYTES), 0, 2, most_blocks=8)  # by the function that takes no configuration
