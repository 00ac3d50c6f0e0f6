"""The rail of GPU ranks without a GPU: what it tells NCCL, and how its wait ends. A fake device and a fake NCCL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from raymoe.errors import PeerTimeout, WiringError
from raymoe.memory.address import LOOPBACK
from raymoe.memory.world import SpanningWorld, World
from raymoe.net import nccl_rail
from raymoe.net.nccl_rail import NcclRail, environment
from raymoe.net.published import PublishedNumbers
from tests.unit.memory.test_world_of import error_of, groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture


def world_like(share_gpu: bool, pretended: bool = True, address: str = LOOPBACK) -> Any:
    member = SimpleNamespace(share_gpu=share_gpu)
    return SimpleNamespace(
        name="w", rank=3, domain_index=1, member=member, pretended=pretended, address=address, domains=2
    )


def test_pretended_domains_have_a_host_id_each_and_ranks_that_share_a_gpu_one_of_their_own() -> None:
    assert environment(world_like(share_gpu=False)) == {"NCCL_HOSTID": "raymoe-w-domain1", "NCCL_SOCKET_IFNAME": "lo"}
    assert environment(world_like(share_gpu=True))["NCCL_HOSTID"] == f"raymoe-w-rank3-{os.getpid()}"


def test_domains_on_machines_of_their_own_change_no_variable() -> None:
    assert environment(world_like(share_gpu=False, pretended=False)) == {}
    assert environment(world_like(share_gpu=False, address="10.0.0.1")) == {"NCCL_HOSTID": "raymoe-w-domain1"}


def ask_on_cpus(_rank: int) -> Any:
    with World.of(domain=1, timeout_s=20) as world, World.of() as plain:
        return world.pretended, [error_of(lambda at=at: at.shared(NcclRail))[1] for at in (world, plain)]


def test_a_rail_by_nccl_is_for_gpu_ranks_of_several_domains(groups: Groups) -> None:
    for pretended, (on_cpus, in_one) in groups(2, ask_on_cpus):
        assert pretended
        assert on_cpus == "a rail by NCCL was asked for between ranks on cpu; it is for GPU ranks"
        assert in_one == "a rail was asked for in a world of 1 domain; rails are between domains"


class FakeWord:
    """The word of an abort."""

    def __init__(self) -> None:
        self.words, self.closed = [0], False

    def close(self) -> None:
        self.closed = True


class FakeNccl:
    """Ends the device's work when it is aborted."""

    def __init__(self, done: threading.Event, word: FakeWord) -> None:
        self._done, self._word = done, word
        self.word_at_abort: int | None = None

    def abort(self) -> None:
        self.word_at_abort = self._word.words[0]
        self._done.set()

    def exchange(self, *_: object) -> None:
        raise WiringError("a group of ncclSend and ncclRecv failed: remote process exited")


def fake_rail(world: SpanningWorld, done: threading.Event) -> tuple[NcclRail, FakeNccl]:
    """Make a rail whose device is busy until `done`, and its NCCL."""
    rail = NcclRail.__new__(NcclRail)
    device: Any = SimpleNamespace(synchronise=lambda: done.wait(30) and None)
    rail._world, rail._me, rail._entered, rail._failure = world, world.domain_index, 0, None
    word: Any = FakeWord()
    nccl: Any = FakeNccl(done, word)
    rail._word, rail._word_lock = word, threading.Lock()
    rail._numbers, rail._connected = PublishedNumbers(world), nccl
    rail._forget = world.waiter.on_abort(lambda _: rail.abort())
    world.__class__ = type("Fake", (SpanningWorld,), {"gpu": device})
    return rail, nccl


def wait_for_rank_2(rank: int) -> Any:
    """Let ranks 0 and 1 wait for their devices while rank 2 does something else."""
    world, done = World.of(domain=1, timeout_s=1), threading.Event()
    assert isinstance(world, SpanningWorld)
    nccl_rail.MARGIN_S = 0.5
    rail, nccl = fake_rail(world, done)
    if rank == 2:
        time.sleep(4)
        world.close(together=False)
        return None
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        rail.settle("check")
    waited, blocks = time.monotonic() - start, torch.zeros(3, 2)
    again = error_of(lambda: rail.swap("combine", blocks.clone(), blocks))
    world.close(together=False)
    return caught.value.peer, waited, (done.is_set(), nccl.word_at_abort), again


def test_a_wait_ends_in_time_names_the_rank_that_is_late_and_ends_the_devices_work(groups: Groups) -> None:
    first, second, _ = groups(3, wait_for_rank_2)
    for peer, waited, aborted, (kind, said) in (first, second):
        assert peer == 2
        assert 1.4 < waited < 4
        assert aborted == (True, 1)
        assert kind == "PeerTimeout" and "rank 2" in said


def abort_a_wait(rank: int) -> Any:
    world, done = World.of(domain=1, timeout_s=20), threading.Event()
    assert isinstance(world, SpanningWorld)
    rail, nccl = fake_rail(world, done)
    threading.Timer(0.3, world.abort, ["the test says so"]).start()
    said = error_of(lambda: rail.settle("check"))
    world.close(together=False)
    return said, (done.is_set(), nccl.word_at_abort)


def test_an_abort_ends_the_wait_and_the_devices_work(groups: Groups) -> None:
    for rank, ((kind, said), aborted) in enumerate(groups(2, abort_a_wait)):
        assert (kind, said) == ("Aborted", f"rank {rank} was told to stop: the test says so")
        assert aborted == (True, 1)


def fail_a_rail(rank: int) -> Any:
    """Let rank 2 fail while the others wait for their devices. Return what they raise, and later calls."""
    world, done = World.of(domain=1, timeout_s=20), threading.Event()
    assert isinstance(world, SpanningWorld)
    rail, nccl = fake_rail(world, done)
    start, blocks = time.monotonic(), torch.zeros(3, 2)
    if rank == 2:
        time.sleep(0.3)
        rail.fail("rank 2 left dispatch")
        said = error_of(lambda: rail.settle("check"))
    else:
        said = error_of(lambda: rail.settle("check"))
    took = time.monotonic() - start
    errors = (
        said,
        error_of(lambda: rail.swap("combine", blocks.clone(), blocks)),
        took,
        (done.is_set(), nccl.word_at_abort),
    )
    world.barrier("failed")  # rank 0 serves the store until all have read it
    world.close(together=False)
    return errors


def test_a_rank_that_fails_ends_the_waits_of_all_with_its_reason(groups: Groups) -> None:
    for said, again, took, aborted in groups(3, fail_a_rail):
        assert said == again == ("RaymoeError", "rank 2 left dispatch")
        assert aborted == (True, 1)
        assert took < 5, "no rank waits for the deadline of 20 s"


def lose_a_connection(rank: int) -> Any:
    """Let rank 2 be gone when the others call NCCL, which has noticed it."""
    world, done = World.of(domain=1, timeout_s=20), threading.Event()
    assert isinstance(world, SpanningWorld)
    (rail, nccl), blocks, said = fake_rail(world, done), torch.zeros(3, 2), []
    with mock.patch("raymoe.net.nccl_rail.current_stream", lambda _: 0):
        if rank == 2:
            time.sleep(2)
        else:
            said = [error_of(lambda: rail.swap("combine", blocks.clone(), blocks)) for _ in range(2)]
    world.close(together=False)
    return said, (done.is_set(), nccl.word_at_abort)


def test_a_call_after_a_lost_connection_names_the_rank_that_is_gone(groups: Groups) -> None:
    for said, aborted in groups(3, lose_a_connection)[:2]:
        assert aborted == (True, 1)
        for kind, text in said:
            assert kind == "PeerTimeout" and "for rank 2 in combine" in text


def close_alone(_rank: int, idle: bool) -> Any:
    """Close a rail while the peers do not. `idle`: the device has no work left once NCCL's kernels have ended."""
    with World.of(domain=1, timeout_s=20) as world, mock.patch("raymoe.net.nccl_rail.CLOSING_S", 0.5):
        assert isinstance(world, SpanningWorld)
        done, never = threading.Event(), threading.Event()
        rail, nccl = fake_rail(world, done)
        waits: Any = SimpleNamespace(synchronise=lambda: (done if idle else never).wait(30) and None)
        world.__class__ = type("Fake", (SpanningWorld,), {"gpu": waits})
        word: Any = rail._word
        rail.close(together=False)
        never.set()
        return nccl.word_at_abort, word.closed


@pytest.mark.parametrize("idle", [True, False])
def test_the_word_of_an_abort_is_freed_when_no_kernel_can_read_it(groups: Groups, idle: bool) -> None:
    assert groups(2, close_alone, idle) == [(1, idle), (1, idle)]
