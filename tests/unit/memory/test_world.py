"""Worlds: wiring and its checks, swaps, barriers, shared memory, and every way in which a wait ends."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import Aborted, ConfigError, PeerTimeout, PlacementError, WiringError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory import host_shm
from raymoe.memory.layout import Layout, Region
from raymoe.memory.member import code_hash
from raymoe.memory.world import World
from raymoe.packaged import packaged_folder
from tests.unit.ranks import RankPool
from tests.unit.worlds import close, each, together, wired

ROWS = Layout.of([Region.words("flag", 4), Region("rows", (4, 8), "bfloat16")])


@pytest.fixture
def three_worlds():
    worlds = wired(3)
    yield worlds
    close(worlds)


def errors(outcomes: list, kind: type[Exception]) -> list[str]:
    assert all(type(outcome) is kind for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


def test_a_world_of_one_rank_swaps_and_allocates() -> None:
    with World.open(0, 1) as world:
        world.wire([world.descriptor()])
        assert world.swap("alone", "test") == ["alone"]
        heap = world.allocate(ROWS, "rows")
        assert heap.tensor("rows").shape == (4, 8)
        assert world.device == torch.device("cpu")


def swap_and_write(world: World) -> list:
    got = [world.swap((world.rank, step), f"step {step}") for step in range(20)]
    heap = world.allocate(ROWS, "rows")
    for peer in range(world.size):
        heap.tensor("rows", peer)[world.rank].fill_(world.rank + 1)
        heap.words("flag", peer)[world.rank] = 10 + world.rank
    world.barrier("written")
    return [got, heap.tensor("rows")[: world.size, 0].tolist(), [heap.word("flag", r) for r in range(world.size)]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_processes_swap_values_and_write_into_each_others_memory(pool: RankPool, size: int) -> None:
    ranks = list(range(size))
    for swaps, rows, flags in pool.run(size, swap_and_write):
        assert swaps == [[(rank, step) for rank in ranks] for step in range(20)]
        assert rows == [rank + 1.0 for rank in ranks]
        assert flags == [10 + rank for rank in ranks]


@settings(max_examples=10)
@given(st.lists(st.lists(st.floats(0, 0.003), min_size=3, max_size=3), min_size=1, max_size=8))
def test_swaps_are_correct_at_any_pace(delays: list[list[float]]) -> None:
    worlds = wired(3)

    def run(world: World) -> list:
        got = []
        for step, pauses in enumerate(delays):
            time.sleep(pauses[world.rank])
            got.append(world.swap(step * 10 + world.rank, "pace"))
        return got

    want = [[step * 10 + rank for rank in range(3)] for step in range(len(delays))]
    assert each(worlds, run) == [want] * 3
    close(worlds)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("generation", 1, "generation is 1 on rank 1 and 0 on rank 0"),
        ("name", "other", "name is other on rank 1 and world on rank 0"),
        ("size", 3, "size is 3 on rank 1 and 2 on rank 0"),
        ("layout_hash", "x", "layout_hash is x on rank 1"),
        ("version", "0", "version is 0 on rank 1"),
        ("code_hash", "0", "code_hash is 0 on rank 1"),
        ("rank", 0, "at place 1 is of rank 0"),
    ],
)
def test_descriptors_that_disagree_are_refused(field: str, value: object, says: str) -> None:
    worlds = [World.open(rank, 2) for rank in range(2)]
    descriptors = [world.descriptor() for world in worlds]
    assert pickle.loads(pickle.dumps(descriptors)) == descriptors
    descriptors[1][field] = value
    with pytest.raises(WiringError, match=says):
        worlds[0].wire(descriptors)
    with pytest.raises(WiringError, match="1 descriptors for a world of 2"):
        worlds[0].wire(descriptors[:1])
    for world in worlds:
        world.close()


def test_ranks_on_several_hosts_are_refused_by_name() -> None:
    worlds = [World.open(rank, 3) for rank in range(3)]
    descriptors = [world.descriptor() for world in worlds]
    assert descriptors[0]["host"] == socket.gethostname()
    for rank, host in enumerate(["node-a", "node-b", "node-a"]):
        descriptors[rank] |= {"host": host, "boot_id": f"boot of {host}"}
    for world in worlds:
        with pytest.raises(WiringError, match=r"a world on 2 hosts: ranks 0, 2 on node-a .* and ranks 1 on node-b "):
            world.wire(descriptors)
        world.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rank": "0"}, "rank '0' in a world of 2; rank and size are whole numbers"),
        ({"rank": True}, "rank True in a world of 2; rank and size are whole numbers"),
        ({"size": 2.0}, "rank 0 in a world of 2.0; rank and size are whole numbers"),
        ({"timeout_s": math.nan}, "timeout_s is nan; waits need a number of seconds above 0"),
        ({"timeout_s": math.inf}, "timeout_s is inf; waits need"),
        ({"timeout_s": 0}, "timeout_s is 0; waits need"),
        ({"timeout_s": "9"}, "timeout_s is '9'; waits need"),
        ({"name": ""}, "name is ''; a world is named by text that is not empty"),
        ({"name": "a\0b"}, r"name is 'a\\x00b'; a world is named by text"),
        ({"name": 7}, "name is 7; a world is named by text"),
        ({"device": "cuda:"}, "device is 'cuda:'; a world is on cpu, cuda or a GPU by its number, such as cuda:1"),
        ({"device": 0}, "device is 0; a world is on cpu, cuda or a GPU"),
    ],
)
def test_wrong_arguments_of_a_world_are_refused(wrong: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        World.open(**({"rank": 0, "size": 2} | wrong))


def test_a_forked_process_cannot_use_the_world() -> None:
    [world] = wired(1)
    exchange = Exchange(world, ExchangeSpec(tokens=2, hidden=16, experts=2, topk=1))
    tensors = torch.ones(2, 16, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            with pytest.raises(WiringError, match=f"its world is that of process {os.getppid()}, which this one was"):
                world.swap("child", "test")
            with pytest.raises(ConfigError, match="its world is closed"):
                exchange.dispatch(*tensors)
            exchange.close()
            world.close()
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert world.swap("parent", "test") == ["parent"]
    exchange.dispatch(*tensors)
    exchange.close()
    close([world])


@pytest.mark.parametrize("name", ["x" * 300, "é" * 300, "a/b", "\udcff"])
def test_a_world_may_have_any_name(name: str) -> None:
    with World.open(0, 1, name=name) as world:
        world.wire([world.descriptor()])
        assert world.swap(1, "alone") == [1]


def test_every_call_of_a_closed_world_says_that_it_is_closed() -> None:
    [world] = wired(1)
    with pytest.raises(WiringError, match="descriptor on rank 0: its world is wired already"):
        world.descriptor()
    world.shared(SharedObject)
    for _ in range(2):
        world.close()
    calls = [
        world.descriptor,
        lambda: world.wire([]),
        lambda: world.swap(1, "late"),
        lambda: world.barrier("late"),
        lambda: world.agree(None, "late"),
        lambda: world.allocate(ROWS, "late"),
        lambda: world.shared(SharedObject),
        lambda: world.group([0]),
        lambda: world.gpu,
    ]
    for call in calls:
        with pytest.raises(WiringError, match=r"on rank 0: its world is closed|rank 0 is wired or closed already"):
            call()
    world.abort("late")
    assert world.waiting is None


def test_the_proof_detects_swapped_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [World.open(rank, 3, timeout_s=2) for rank in range(3)]
    descriptors = [world.descriptor() for world in worlds]
    real = host_shm.map_peer

    def crossed(descriptor: dict) -> host_shm.Segment:
        if threading.current_thread().name == "0":  # rank 0 maps rank 1's memory as rank 2's, and the reverse
            descriptor = descriptors[3 - int(str(descriptor["rank"]))]
        return real(descriptor)

    monkeypatch.setattr(host_shm, "map_peer", crossed)
    messages = errors(each(worlds, lambda world: world.wire(descriptors)), WiringError)
    assert "rank 0 wrote" in messages[1]
    for world in worlds:
        world.close(together=False)


def test_all_ranks_that_close_before_the_wiring_are_named() -> None:
    worlds = [World.open(rank, 3, timeout_s=1) for rank in range(3)]
    descriptors = [world.descriptor() for world in worlds]
    for world in worlds[1:]:
        world.close(together=False)
    with pytest.raises(
        WiringError, match=r"^rank 1: process \d+ is gone or has .*; rank 2: process \d+ is gone or has"
    ):
        worlds[0].wire(descriptors)
    worlds[0].close(together=False)


def test_swaps_out_of_order_raise_and_name_both_ranks(three_worlds: list[World]) -> None:
    what = ["counts", "counts", "rows"]
    outcomes = each(three_worlds, lambda world: world.swap(1, what[world.rank]))
    assert "rank 0 is in counts while rank 2 is in rows" in str(outcomes[0])
    assert "rank 2 is in rows while rank 0 is in counts" in str(outcomes[2])
    assert each(three_worlds, lambda world: world.swap(2, "after")) == [[2, 2, 2]] * 3


@pytest.mark.parametrize("what", ["", "a" * 300, "a" + "é" * 200, "a\udcff"])
def test_swaps_may_have_any_name(three_worlds: list[World], what: str) -> None:
    assert each(three_worlds, lambda world: world.swap(world.rank, what)) == [[0, 1, 2]] * 3
    names = (what, what, f"b{what}")
    texts = errors(each(three_worlds, lambda world: world.swap(world.rank, names[world.rank])), ConfigError)
    assert all("all ranks must call in one order" in said for said in texts)


def test_a_swap_name_differs_from_its_prefix(three_worlds: list[World]) -> None:
    errors(each(three_worlds, lambda world: world.swap(None, "step 10" if world.rank == 0 else "step 1")), ConfigError)


def test_all_ranks_raise_if_a_swapped_value_is_too_long(three_worlds: list[World]) -> None:
    outcomes = each(three_worlds, lambda world: world.swap(b"x" * (70_000 if world.rank == 1 else 10), "long"))
    for message in errors(outcomes, ConfigError):
        assert "rank 1" in message
        assert "65536" in message
    assert each(three_worlds, lambda world: world.swap(world.rank, "after")) == [[0, 1, 2]] * 3


def test_a_missing_peer_is_named_and_later_calls_raise_at_once() -> None:
    worlds = wired(2, timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 0 waited .* for rank 1 in sync") as caught:
        worlds[0].barrier("sync")
    assert 0.3 <= time.monotonic() - start < 5
    error = caught.value
    assert (error.op, error.peer, error.rank, error.expected - error.seen) == ("sync", 1, 0, 1)
    start = time.monotonic()
    with pytest.raises(PeerTimeout):
        worlds[0].swap(1, "later")
    assert time.monotonic() - start < 0.2
    start = time.monotonic()
    worlds[0].close()
    worlds[1].close()
    assert time.monotonic() - start < 5


def test_abort_ends_the_current_wait_and_every_later_one() -> None:
    worlds = wired(2, timeout_s=20)
    seen = []

    def end_it() -> float:
        while worlds[0].waiting is None:
            time.sleep(0.001)
        seen.append(worlds[0].waiting)
        worlds[0].abort("rank 1 died")
        return time.monotonic()

    def wait() -> tuple[str, float]:
        with pytest.raises(Aborted) as caught:
            worlds[0].barrier("sync")
        return str(caught.value), time.monotonic()

    (message, ended), aborted = together([wait, end_it])
    assert message == "rank 0 was told to stop: rank 1 died"
    assert seen == [("sync", 1)]
    assert ended - aborted < 0.25  # about a millisecond on an idle machine
    assert worlds[0].waiting is None
    with pytest.raises(Aborted):
        worlds[0].swap(1, "later")
    for world in worlds:
        world.close(together=False)


def test_a_wait_of_0_5_s_takes_under_0_25_s_of_cpu_time() -> None:
    worlds = wired(2, timeout_s=0.5)
    before = time.thread_time()
    with pytest.raises(PeerTimeout):
        worlds[0].barrier("sync")
    assert time.thread_time() - before < 0.25
    for world in worlds:
        world.close(together=False)


def test_all_ranks_raise_if_their_layouts_differ(three_worlds: list[World]) -> None:
    other = Layout.of([Region("rows", (4, 9), "bfloat16")])
    outcomes = each(three_worlds, lambda world: world.allocate(other if world.rank == 2 else ROWS, "rows"))
    assert ROWS.hash in str(outcomes[0])
    assert other.hash in str(outcomes[0])
    assert all(isinstance(outcome, WiringError) for outcome in outcomes)
    assert each(three_worlds, lambda world: world.swap(2, "after")) == [[2, 2, 2]] * 3


def test_all_ranks_raise_if_one_gets_no_memory(three_worlds: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    real = host_shm.own

    def scarce(name: str, nbytes: int) -> host_shm.Segment:
        if threading.current_thread().name == "1":
            raise PlacementError("4096 asked, 0 available")
        return real(name, nbytes)

    monkeypatch.setattr(host_shm, "own", scarce)
    outcomes = each(three_worlds, lambda world: world.allocate(ROWS, "rows"))
    assert isinstance(outcomes[1], PlacementError)
    assert "0 available" in str(outcomes[0])
    assert "0 available" in str(outcomes[2])


def test_a_closed_heap_is_refused_and_its_tensors_stay_valid() -> None:
    [world] = wired(1)
    heap = world.allocate(ROWS, "kept")
    rows = heap.tensor("rows")
    heap.close()
    with pytest.raises(WiringError, match="closed"):
        heap.tensor("rows")
    rows.fill_(3)
    assert rows.sum() == 96
    world.close()


def test_a_closed_world_leaves_no_mappings_and_no_open_files() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    worlds = wired(2, name="gone")
    each(worlds, lambda world: world.allocate(ROWS, "rows"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before  # all memory is mapped, and its files are closed
    assert "raymoe-gone" in Path("/proc/self/maps").read_text()
    close(worlds)
    gc.collect()
    assert "raymoe-gone" not in Path("/proc/self/maps").read_text()
    with pytest.raises(WiringError, match="closed"):
        worlds[0].barrier("late")


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2)])
def test_impossible_ranks_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} in a world of {size}"):
        World.open(rank, size)


def test_a_barrier_before_the_wiring_is_refused() -> None:
    with World.open(0, 2) as world, pytest.raises(WiringError, match="not wired yet"):
        world.barrier("early")


def test_an_abort_calls_its_registered_functions_once() -> None:
    reasons: list[str] = []
    with World.open(rank=0, size=1) as world:
        world.wire([world.descriptor()])
        world.waiter.on_abort(reasons.append)
        forget = world.waiter.on_abort(lambda reason: reasons.append(f"forgotten: {reason}"))
        forget()
        world.abort("enough")
        world.abort("again")
        assert reasons == ["enough"]
        world.waiter.on_abort(reasons.append)
        assert reasons == ["enough", "again"], "a function registered after the abort is called at once"


def test_different_code_has_a_different_hash(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = code_hash(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert code_hash(tmp_path) != before


@pytest.mark.parametrize("changed", ["dispatch.cu", "include/raymoe/base/peer.cuh"])
def test_different_kernels_have_a_different_hash(tmp_path: Path, changed: str) -> None:
    assert code_hash() != code_hash(kernels=None), "the hash includes the kernels of this installation"
    shutil.copytree(packaged_folder("kernels"), tmp_path / "kernels")
    before = code_hash(tmp_path, tmp_path / "kernels")
    with (tmp_path / "kernels" / changed).open("a") as file:
        file.write("\n")
    assert code_hash(tmp_path, tmp_path / "kernels") != before


class SharedObject:
    """An object that users of a world share."""

    def __init__(self, world: World) -> None:
        self.closed: list[bool] = []
        world.barrier("made")

    def close(self, together: bool) -> None:
        self.closed.append(together)


@pytest.mark.parametrize("together", [True, False])
def test_a_shared_object_is_made_once_and_closed_with_the_world(together: bool) -> None:
    worlds = wired(2)
    pairs = each(worlds, lambda world: (world.shared(SharedObject), world.shared(SharedObject)))
    assert all(first is second for first, second in pairs)
    assert pairs[0][0] is not pairs[1][0]
    for _ in range(2):
        each(worlds, lambda world: world.close(together=together))
    assert [first.closed for first, _ in pairs] == [[together]] * 2
