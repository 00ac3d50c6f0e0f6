"""Worlds of several domains, pretended on one machine: who the ranks are, their rounds, and what they refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from raymoe.errors import Aborted, PeerTimeout, WiringError
from raymoe.memory import cuda_ipc
from raymoe.memory.across import BoundedStore, StoreAddress
from raymoe.memory.board import MAX_MESSAGE
from raymoe.memory.layout import Layout, Region
from raymoe.memory.wait import Waiter
from raymoe.memory.world import SpanningWorld, World
from raymoe.net.gloo_rail import GlooRail
from raymoe.net.published import PublishedNumbers
from raymoe.transport.channel import Channel
from tests.unit.memory.test_cuda_ipc import FakeGpu, Node
from tests.unit.memory.test_world_of import error_of, groups

Groups = Callable[..., list[Any]]
__all__ = ["groups"]  # a fixture


def who_we_are(rank: int) -> Any:
    with World.of(domain=2) as world:
        dist.destroy_process_group()  # the world no longer needs it
        facts = (world.rank, world.size, world.domains, world.domain.rank, world.domain.size, world.domain.domain.size)
        rounds = [world.swap((rank, step), "who") for step in range(5)]
        inside = world.domain.swap(rank, "inside")
        heap = world.domain.allocate(Layout.of([Region.words("w", 2)]), "words")
        for peer in range(2):
            heap.words("w", peer)[world.domain.rank] = rank + 10
        world.barrier("written")
        return facts, rounds, inside, [heap.word("w", place) for place in range(2)], world.store.raw.num_keys()


def test_rank_is_domain_times_its_size_plus_place(groups: Groups) -> None:
    for rank, (facts, rounds, inside, words, keys) in enumerate(groups(4, who_we_are)):
        domain, place = divmod(rank, 2)
        assert facts == (rank, 4, 2, place, 2, 2)
        assert rounds == [[(r, step) for r in range(4)] for step in range(5)]
        assert inside == [2 * domain, 2 * domain + 1]
        assert words == [10 + r for r in inside]
        assert keys < 12, "rounds delete their records"


def refused(rank: int) -> list[tuple[str, str]]:
    with World.of(domain=2) as world:
        layout = Layout.of([Region.words("w", 4)])
        return [
            error_of(lambda: world.allocate(layout, "words")),
            error_of(lambda: Channel(world, rank ^ 2, 64)),
            error_of(lambda: world.group([0, 2])),
            error_of(lambda: world.descriptor()),
            error_of(lambda: world.swap(b"0" * (MAX_MESSAGE + rank // 3), "too long")),
            error_of(lambda: world.barrier(f"of rank {rank // 2}")),
        ]


def test_memory_channels_and_groups_are_inside_a_domain(groups: Groups) -> None:
    for memory, channel, group, descriptor, long, order in groups(4, refused):
        assert memory == (
            "WiringError",
            "words: memory for all ranks was asked for in a world of 2 domains; ranks map one another's memory inside "
            "a domain only: take world.domain",
        )
        assert channel[0] == "WiringError" and "inside a domain only" in channel[1]
        assert group[0] == "WiringError" and "take world.domain.group" in group[1]
        assert descriptor[0] == "WiringError"
        assert long[0] == "ConfigError" and f"a message holds at most {MAX_MESSAGE}" in long[1]
        assert order[0] == "ConfigError" and "all ranks must call in one order" in order[1]


def arguments(rank: int) -> Any:
    errors = [
        error_of(lambda: World.of(domain=3)),
        error_of(lambda: World.of(domain=0 if rank == 1 else 2)),
        error_of(lambda: World.of(domain=1 if rank == 1 else 2)),
        error_of(lambda: World.of(domain=None if rank == 1 else 2)),
    ]
    with World.of(domain=4) as one, World.of(domain=1) as four:
        return errors, one.domains, four.domains, four.swap(rank, "after")


def test_a_wrong_domain_is_refused_on_all_ranks(groups: Groups) -> None:
    for rank, (errors, one, four, after) in enumerate(groups(4, arguments)):
        assert {kind for kind, _ in errors} <= {"ConfigError", "WiringError"}
        assert errors[0][1].startswith("domain is 3 in a world of 4 ranks")
        assert "domain is 0 in a world of 4 ranks" in errors[1][1]
        assert "domain" in errors[2][1]
        assert rank == 1 or errors[3][1] == "domain is left out on rank 1 and 2 here; all ranks must agree"
        assert (one, four, after) == (1, 4, [0, 1, 2, 3])


def test_descriptors_of_two_domains_are_not_mapped() -> None:
    a, b = (World.open(rank, 2, domain=str(rank)) for rank in range(2))
    with a, b, pytest.raises(WiringError, match=r"rank 0 is in domain '0' and rank 1 in domain '1'; ranks map one"):
        a.wire([a.descriptor(), b.descriptor()])


def absent(rank: int, missing: int) -> Any:
    world = World.of(domain=2, timeout_s=1)
    start = time.monotonic()
    try:
        if rank == missing:
            time.sleep(2)
            return None
        with pytest.raises(PeerTimeout) as caught:
            world.barrier("all")
        with pytest.raises(PeerTimeout) as again:
            world.barrier("again")
        assert again.value is caught.value, "the world is poisoned"
        return caught.value.rank, caught.value.peer, caught.value.op, time.monotonic() - start
    finally:
        world.close(together=False)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_rank_is_named_by_ranks_of_both_domains(groups: Groups, missing: int) -> None:
    for rank, outcome in enumerate(groups(4, absent, missing)):
        if rank != missing:
            assert outcome[:3] == (rank, missing, "all")
            assert 0.9 < outcome[3] < 4


def aborted(rank: int) -> Any:
    world = World.of(domain=2, timeout_s=10)
    start = time.monotonic()
    seen: list[Any] = []
    if rank == 3:
        world.swap(0, "abort")
        time.sleep(0.8)
        world.close(together=False)
        return None
    stop = threading.Timer(0.3, lambda: (seen.append(world.waiting), world.abort("enough")))
    world.swap(0, "abort")
    stop.start()
    with pytest.raises(Aborted) as caught:
        world.barrier("stopped")
    took = time.monotonic() - start
    world.close(together=False)
    return seen, caught.value.peer, str(caught.value), took


def test_an_abort_ends_a_round_and_names_the_rank_waited_for(groups: Groups) -> None:
    for rank, outcome in enumerate(groups(4, aborted)[:3]):
        seen, peer, said, took = outcome
        assert (seen, peer) == ([("stopped", 3)], 3) if rank < 2 else peer == 3
        assert said == f"rank {rank} was told to stop: enough"
        assert took < 4


def forged(rank: int) -> Any:
    with World.of(domain=1, timeout_s=5) as world:
        if rank == 1:
            return error_of(lambda: world.barrier("real"))
        board: Any = world._board
        world.store.raw.set("2/0", b"0" * 32 + b"not a pickle")
        real, board._store = board._store, _Deaf(board._store)
        world.barrier("real")
        board._store = real
        return None


class _Deaf:
    """A store that drops this rank's records, as another program's record is in their place."""

    def __init__(self, store: BoundedStore) -> None:
        self._store, self.address = store, store.address

    def ask(self, method: str, *arguments: object, timeout_s: float) -> Any:
        return None if method == "set" else self._store.ask(method, *arguments, timeout_s=timeout_s)


def test_a_record_that_its_rank_did_not_write_is_refused(groups: Groups) -> None:
    kind, said = groups(2, forged)[1]
    assert kind == "WiringError"
    assert said.startswith("the record of rank 0 in round 2 is not one that it wrote")


def forge_an_address(rank: int) -> Any:
    """Let a program put its own record in the place of rank 0's, in the round in which Gloo's addresses cross."""
    with World.of(domain=1, timeout_s=5) as world:
        board: Any = world._board
        if rank == 0:
            world.store.raw.set("2/0", b"0" * 32 + b"not a pickle")
        real, board._store = board._store, _Deaf(board._store) if rank == 0 else board._store
        said = error_of(lambda: world.shared(GlooRail))
        board._store = real
        return said


def test_a_forged_address_of_a_rail_is_refused(groups: Groups) -> None:
    kind, said = groups(2, forge_an_address)[1]
    assert kind == "WiringError"
    assert said.startswith("the record of rank 0 in round 2 is not one that it wrote")


class SlowStore:
    """A store whose answers wait for an event."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def get(self, key: str) -> str:
        self.answers.wait(20)
        return f"value of {key}"


def bounded(open_store: Callable[[], Any]) -> BoundedStore:
    return BoundedStore(StoreAddress("127.0.0.1", 1, b"secret"), open_store, Waiter(rank=0, timeout_s=5))


def test_a_store_that_answers_late_can_be_asked_again() -> None:
    slow = SlowStore()
    store = bounded(lambda: slow)
    store.open(timeout_s=5)
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.1 s"):
        store.ask("get", "a", timeout_s=0.1)
    assert store.busy
    slow.answers.set()
    assert store.ask("get", "b", timeout_s=5) == "value of b"
    assert not store.busy
    store.close()


def ask_a_silent_store(rank: int) -> Any:
    """Return the ranks in the error of a round, and the rank that a wait for the rail names."""
    with World.of(domain=1, timeout_s=5) as world:
        assert isinstance(world, SpanningWorld)
        numbers = PublishedNumbers(world)
        numbers.lagging(1)
        with mock.patch.object(BoundedStore, "ask", side_effect=RuntimeError("no answer")):
            with pytest.raises(PeerTimeout) as caught:
                world.barrier("silent")
            named = numbers.lagging(1)[0]
        return (caught.value.rank, caught.value.peer), named


def test_no_rank_names_itself_where_the_store_does_not_answer(groups: Groups) -> None:
    assert groups(3, ask_a_silent_store) == [((0, 1), 1), ((1, 0), 0), ((2, 0), 0)]


def test_a_store_that_failed_is_not_asked_again() -> None:
    store = bounded(object)
    store.open(timeout_s=5)
    for says in ("no attribute 'get'", "the store of rank 0 is gone"):
        with pytest.raises((AttributeError, RuntimeError), match=says):
            store.ask("get", "a", timeout_s=5)
    store.close()


def on_gpus(rank: int, uuids: list[str], kinds: list[str]) -> Any:
    """Make a world of domains of one rank on fake GPUs; return its facts, or the error."""
    gpus: list[FakeGpu] = []

    def fake(ordinal: int) -> FakeGpu:
        assert ordinal == rank + 2
        gpus.append(FakeGpu(Node(), rank))
        gpus[-1].uuid = uuids[rank]
        return gpus[-1]

    real_open, cuda_ipc.GpuMemory.open = cuda_ipc.GpuMemory.open, fake  # type: ignore[assignment,method-assign]
    try:
        with World.of(device=f"cuda:{rank + 2}" if kinds[rank] == "cuda" else "cpu", domain=1) as world:
            seen = str(world.device), str(world.domain.device), world.swap(rank, "who"), [gpu.is_open for gpu in gpus]
        return *seen, [gpu.node.calls_of("close") for gpu in gpus]
    except WiringError as error:
        return str(error)
    finally:
        cuda_ipc.GpuMemory.open = real_open  # type: ignore[method-assign]


def test_gpu_ranks_of_several_domains_use_the_gpu_of_their_domain(groups: Groups) -> None:
    for rank, seen in enumerate(groups(2, on_gpus, ["a", "b"], ["cuda", "cuda"])):
        name = f"cuda:{rank + 2}"
        assert seen == (name, name, [0, 1], [True], [[(rank, "close")]])


def test_ranks_of_two_domains_on_one_gpu_are_refused_and_so_are_two_kinds_of_ranks(groups: Groups) -> None:
    for said in groups(2, on_gpus, ["a", "a"], ["cuda", "cuda"]):
        assert said.startswith("ranks 0 and 1 are both on GPU a; ")
    assert groups(2, on_gpus, ["a", "b"], ["cuda", "cpu"]) == [
        "device is cpu on rank 1 and cuda on rank 0; all ranks must agree",
        "device is cuda on rank 0 and cpu on rank 1; all ranks must agree",
    ]
