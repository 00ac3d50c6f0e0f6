"""Device memory that ranks share, without a GPU: a fake of the driver keeps a diary and knows what CUDA forbids."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.errors import ConfigError, CudaError, PeerTimeout, PlacementError, RaymoeError, WiringError
from raymoe.memory.cuda_ipc import GRANULE, DeviceMemory
from raymoe.memory.heap import DeviceHeap, with_proof
from raymoe.memory.layout import Layout, Region
from raymoe.memory.member import Member
from raymoe.memory.world import World
from tests.unit.worlds import close, each, together

ROWS = Layout.of([Region.words("flag", 4), Region("rows", (4, 8), "bfloat16")])
OUT_OF_MEMORY, MAP_FAILED, NOT_SUPPORTED = 2, 205, 801


@dataclass
class Node:
    """The memory of all GPUs of a pretended machine, and what its ranks did with it, in order."""

    total: int = 64 * GRANULE
    diary: list[tuple[Any, ...]] = field(default_factory=list)
    words: dict[int, int] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)  # base → bytes
    handles: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # handle → (rank, base)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # where → (by whom, base)
    broken: list[str] = field(default_factory=list)
    addresses: Iterator[int] = field(default_factory=lambda: itertools.count(1 << 40, 1 << 32))

    def wrote(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [line for line in self.diary if line[1] in kinds]


class FakeGpu:
    """What one rank's process asks of its GPU."""

    def __init__(self, node: Node, rank: int, fails: Callable[[str], int] | None = None) -> None:
        self.node, self.rank, self.fails = node, rank, fails
        self.uuid, self.driver = f"uuid-{rank}", 13000
        self.is_open = True

    def _note(self, call: str, *what: object) -> None:
        code = self.fails(call) if self.fails else 0
        if code:
            raise CudaError(f"{call} failed: CODE_{code}", code)
        self.node.diary.append((self.rank, call, *what))

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.available()[0]:
            raise CudaError("allocate failed: CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY)
        address = next(self.node.addresses)
        self._note("allocate", address, nbytes)
        self.node.live[address] = nbytes
        for word in range(0, 8 * 128, 8):
            self.node.words[address + word] = 99  # what was there before
        return address

    def free(self, address: int) -> None:
        if any(base == address for _, base in self.node.mapped.values()):
            self.node.broken.append(f"rank {self.rank} freed what a peer maps")
        if not self.is_open:
            self.node.broken.append(f"rank {self.rank} freed without a context")
        self._note("free", address)
        del self.node.live[address]

    def available(self) -> tuple[int, int]:
        return self.node.total - sum(self.node.live.values()), self.node.total

    def zero(self, address: int, nbytes: int) -> None:
        self._note("zero", address, nbytes)
        for word in [word for word in self.node.words if address <= word < address + nbytes]:
            self.node.words[word] = 0

    def synchronise(self) -> None:
        self._note("synchronise")

    def export(self, address: int) -> bytes:
        self._note("export", address)
        handle = f"{self.rank}:{address}".encode().ljust(64, b"\0")
        self.node.handles[handle] = (self.rank, address)
        return handle

    def map(self, handle: bytes) -> int:
        self._note("map", handle)
        if handle not in self.node.handles:
            raise CudaError("map failed: CUDA_ERROR_INVALID_HANDLE", 400)
        owner, base = self.node.handles[handle]
        if owner == self.rank:
            self.node.broken.append(f"rank {self.rank} opened its own handle")
        where = next(self.node.addresses)
        self.node.mapped[where] = (self.rank, base)
        return where

    def unmap(self, address: int) -> None:
        self._note("unmap", self.node.mapped[address][1])
        del self.node.mapped[address]

    def _at(self, address: int) -> int:
        where = address >> 32 << 32
        return address - where + (self.node.mapped[where][1] if where in self.node.mapped else where)

    def write(self, address: int, value: int) -> None:
        self._note("write", self._at(address), value)
        self.node.words[self._at(address)] = value

    def read(self, address: int) -> int:
        return self.node.words[self._at(address)]

    def close(self) -> None:
        self.is_open = False
        self._note("close")


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert node.broken == []


def opened(node: Node, size: int, timeout_s: float = 10.0, **fails: Callable[[str], int]) -> list[World]:
    made = []
    for rank in range(size):
        gpu = FakeGpu(node, rank, fails.get(f"rank{rank}"))
        made.append(World(Member(rank, size, name="test", timeout_s=timeout_s, device="cuda"), gpu))
        assert made[rank]._gpu is not None
        made[rank]._gpu._retry_s = 0.05
    return made


def wired(node: Node, size: int, timeout_s: float = 10.0, **fails: Callable[[str], int]) -> list[World]:
    worlds = opened(node, size, timeout_s, **fails)
    descriptors = [world.descriptor() for world in worlds]
    assert each(worlds, lambda world: world.wire(descriptors)) == [None] * size
    return worlds


def heaps(worlds: list[World], what: str = "rows") -> list[DeviceHeap]:
    made = each(worlds, lambda world: world.allocate(ROWS, what, where="device"))
    assert all(isinstance(heap, DeviceHeap) for heap in made), made
    return made


# Ranks and their GPUs


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("device", "cpu", "device is cpu on rank 1 and cuda on rank 0; all ranks must agree"),
        ("driver", 12040, "driver is 12040 on rank 1 and 13000 on rank 0"),
        ("gpu", None, "whose 'gpu' is of type NoneType; str is needed"),
        ("share_gpu", 1, "whose 'share_gpu' is of type int; bool is needed"),
    ],
)
def test_descriptors_that_disagree(node: Node, field: str, value: object, says: str) -> None:
    worlds = opened(node, 2)
    descriptors = [world.descriptor() for world in worlds]
    with pytest.raises(WiringError, match=says):
        worlds[0].wire([descriptors[0], descriptors[1] | {field: value}])
    del descriptors[1][field]
    with pytest.raises(WiringError, match=f"without '{field}'"):
        worlds[0].wire(descriptors)
    close(worlds)


def sharing(node: Node, shares: list[bool]) -> tuple[list[World], list[dict[str, object]]]:
    worlds = []
    for rank, share in enumerate(shares):
        gpu = FakeGpu(node, rank)
        gpu.uuid = "one" if rank != 1 else "another"  # so 0 and 2 clash
        worlds.append(World(Member(rank, 3, device="cuda", share_gpu=share), gpu))
    return worlds, [world.descriptor() for world in worlds]


@pytest.mark.parametrize(
    ("shares", "who"),
    [([False] * 3, "no rank set it"), ([True, False, True], "all ranks but 1 set it")],
)
def test_two_ranks_on_one_gpu_are_refused(node: Node, shares: list[bool], who: str) -> None:
    worlds, descriptors = sharing(node, shares)
    for world in worlds:
        with pytest.raises(WiringError, match=rf"ranks 0 and 2 are both on GPU one; .*share_gpu.*{who}"):
            world.wire(descriptors)
    close(worlds)


def test_two_ranks_on_one_gpu_where_all_agreed_to_share(node: Node) -> None:
    worlds, descriptors = sharing(node, [True] * 3)
    assert each(worlds, lambda world: world.wire(descriptors)) == [None] * 3
    assert len(heaps(worlds)) == 3
    close(worlds)


def test_device_memory_is_not_for_cpu_worlds() -> None:
    with World.open(0, 1) as world:
        world.wire([world.descriptor()])
        with pytest.raises(ConfigError, match="device memory was asked for; the world of rank 0 is on cpu"):
            world.allocate(ROWS, "rows", where="device")
        with pytest.raises(ConfigError, match="memory was asked for in gpu; it is in host or device"):
            world.allocate(ROWS, "rows", where="gpu")
        with pytest.raises(ConfigError, match="the GPU of rank 0 was asked for; its world is on cpu"):
            _ = world.gpu
    with pytest.raises(ConfigError, match="device is 'tpu'; a world is on cpu, cuda or a GPU by its number"):
        World.open(0, 1, device="tpu")


def test_options_that_are_not_known_are_refused() -> None:
    with pytest.raises(TypeError, match="sharegpu"):
        World.open(0, 1, sharegpu=True)


# The life of a heap


def test_zeroed_then_synchronised_then_published(node: Node) -> None:
    segment = DeviceMemory(FakeGpu(node, 0)).own("rows", GRANULE + 1)
    assert [line[1] for line in node.diary] == ["allocate", "zero", "synchronise", "export"]
    assert node.diary[0][3] == node.diary[1][3] == segment.nbytes == 2 * GRANULE
    segment.close()
    assert node.live == {}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_reach_one_another(node: Node, size: int) -> None:
    worlds = wired(node, size)
    made = heaps(worlds)
    assert [heap.nbytes for heap in made] == [GRANULE] * size
    for rank, heap in enumerate(made):
        for peer in range(size):
            heap.set_word("flag", rank, 10 * rank + peer, peer)
            assert heap.address("rows", peer) - heap.base(peer) == ROWS.find("rows").offset
        assert heap.address("rows") == heap.address("rows", rank)
    for rank, heap in enumerate(made):
        assert [heap.word("flag", writer) for writer in range(size)] == [10 * writer + rank for writer in range(size)]
    assert len(node.wrote("map")) == size * (size - 1)  # each peer once, oneself never
    close(worlds)
    assert (node.live, node.mapped) == ({}, {})


def test_every_mapping_is_closed_before_any_memory_is_freed(node: Node) -> None:
    worlds = wired(node, 3)
    first, second = heaps(worlds, "first"), heaps(worlds, "second")
    close(worlds)  # the fake objects to a free while a peer maps
    assert (node.live, node.mapped) == ({}, {})
    for rank in range(3):
        mine = [line[1] for line in node.diary if line[0] == rank]
        assert mine.count("unmap") == 4
        assert mine[-3:] == ["free", "free", "close"]
        assert mine[mine.index("unmap") - 1] == "synchronise"  # what the device still had to do with it is done
    with pytest.raises(WiringError, match="this heap is closed"):
        first[0].address("rows")
    with pytest.raises(WiringError, match="this heap is closed"):
        second[0].tensor("rows", 1)


@given(st.permutations([(rank, heap) for rank in range(2) for heap in range(2)]))
def test_heaps_are_closed_in_any_order(order: list[tuple[int, int]]) -> None:
    node = Node()
    worlds = wired(node, 2)
    made = [heaps(worlds, what) for what in ("first", "second")]
    orders = [[heap for rank, heap in order if rank == mine] for mine in range(2)]
    each(worlds, lambda world: [made[heap][world.rank].unmap_peers() for heap in orders[world.rank]])
    close(worlds)
    assert (node.broken, node.live, node.mapped) == ([], {}, {})


def test_a_heap_that_all_close_is_freed_then(node: Node) -> None:
    worlds = wired(node, 2)
    made = heaps(worlds)
    together([heap.close for heap in made])
    assert (node.live, node.mapped) == ({}, {})
    made[0].close()
    close(worlds)


def test_a_heap_that_one_closes_is_freed_when_the_other_has(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymoe.memory.heap.CLOSING_S", 0.05)
    worlds = wired(node, 2)
    made = heaps(worlds)
    made[0].close()
    assert len(node.live) == 2
    made[1].set_word("flag", 1, 7, peer=0)  # what rank 1 maps is there still
    made[1].close()
    assert len(node.live) == 1
    assert len(heaps(worlds, "next")) == 2
    assert len(node.live) == 2  # rank 0 freed the old one when it made the new one
    close(worlds)
    assert node.live == {}


def test_what_a_dead_peer_may_map_is_left_to_the_process(node: Node) -> None:
    worlds = wired(node, 3, timeout_s=0.3)
    heaps(worlds)
    assert isinstance(each(worlds[:2], lambda world: world.barrier("lunch"))[0], PeerTimeout)
    start = time.monotonic()
    close(worlds[:2])
    assert time.monotonic() - start < 5
    assert len(node.wrote("unmap")) == 4
    assert node.wrote("free", "close") == []
    assert len(node.live) == 3


def test_memory_lives_while_a_tensor_needs_it(node: Node) -> None:
    segment = DeviceMemory(FakeGpu(node, 0)).own("rows", 100)
    tensor_refers_to = segment.owner
    segment.close()
    assert node.wrote("free") == []
    del tensor_refers_to
    gc.collect()
    assert len(node.wrote("free")) == 1


# What goes wrong


@pytest.mark.parametrize("call", ["allocate", "zero", "synchronise", "export"])
def test_a_failure_in_the_middle_frees_what_was_made(node: Node, call: str) -> None:
    failing = {"now": False}
    worlds = wired(node, 3, rank1=lambda asked: 999 if asked == call and failing["now"] else 0)
    failing["now"] = True
    outcomes = each(worlds, lambda world: world.allocate(ROWS, "rows", where="device"))
    failing["now"] = False
    assert all(isinstance(outcome, RaymoeError) for outcome in outcomes), outcomes
    assert all(f"{call} failed" in str(outcome) for outcome in outcomes)
    assert (node.live, node.mapped) == ({}, {})
    assert len(heaps(worlds, "next")) == 3
    close(worlds)
    assert node.live == {}


def test_a_rank_that_cannot_map_makes_all_let_go_and_free(node: Node) -> None:
    failing = {"code": NOT_SUPPORTED}
    worlds = wired(node, 3, rank2=lambda asked: failing["code"] if asked == "map" else 0)
    outcomes = each(worlds, lambda world: world.allocate(ROWS, "rows", where="device"))
    assert all(isinstance(outcome, WiringError) for outcome in outcomes)
    assert "could not be mapped on GPU uuid-2: map failed: CODE_801; MIG" in str(outcomes[0])
    assert (node.live, node.mapped) == ({}, {})
    assert node.wrote("unmap")
    failing["code"] = 0
    assert len(heaps(worlds, "next")) == 3
    close(worlds)


def test_the_proof_catches_mappings_taken_for_one_another(node: Node) -> None:
    worlds = wired(node, 3)
    gpu = worlds[0]._gpu
    assert gpu is not None
    real = gpu.device.map
    given: list[bytes] = []

    def crossed(handle: bytes) -> int:  # rank 0 takes the memory of 2 for that of 1; the other way would need both
        given.append(handle)
        return real(handle if len(given) == 1 else given[0])

    gpu.device.map = crossed
    outcomes = each(worlds, lambda world: world.allocate(ROWS, "rows", where="device"))
    assert all(isinstance(outcome, WiringError) for outcome in outcomes), outcomes
    assert "rank 0 wrote" in str(outcomes[1])
    assert (node.live, node.mapped) == ({}, {})
    close(worlds)


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        ({"handle": b"x" * 63}, "a handle of 63 bytes; handles of CUDA IPC have 64"),
        ({"handle": b"x" * 65}, "a handle of 65 bytes; handles of CUDA IPC have 64"),
        ({"handle": "x" * 64}, "whose 'handle' is of type str; bytes is needed"),
        ({"nbytes": GRANULE + 1}, f"device memory of {GRANULE + 1} bytes; it comes in multiples of {GRANULE}"),
        ({"nbytes": 0}, "device memory of 0 bytes"),
        ({"kind": "host_shm"}, "memory of kind host_shm; GPU ranks map cuda_ipc"),
        ({"handle": b"x" * 64}, "CUDA_ERROR_INVALID_HANDLE; its owner has freed it"),
    ],
)
def test_a_descriptor_that_is_wrong(node: Node, forged: dict[str, object], says: str) -> None:
    good = DeviceMemory(FakeGpu(node, 1)).own("rows", 100).descriptor()
    with pytest.raises(WiringError, match=says):
        DeviceMemory(FakeGpu(node, 0)).map_peer(good | forged)
    assert node.mapped == {}


@pytest.mark.parametrize("missing", ["kind", "handle", "nbytes"])
def test_a_descriptor_cut_short(node: Node, missing: str) -> None:
    descriptor = DeviceMemory(FakeGpu(node, 1)).own("rows", 100).descriptor()
    del descriptor[missing]
    with pytest.raises(WiringError, match=f"without '{missing}'"):
        DeviceMemory(FakeGpu(node, 0)).map_peer(descriptor)


def test_ones_own_handle_is_never_opened(node: Node) -> None:
    memory = DeviceMemory(FakeGpu(node, 0))
    own = memory.own("rows", 100)
    with pytest.raises(WiringError, match="a handle that is this rank's own"):
        memory.map_peer(own.descriptor())


def test_a_peer_is_mapped_once(node: Node) -> None:
    memory, other = DeviceMemory(FakeGpu(node, 0)), DeviceMemory(FakeGpu(node, 1)).own("rows", 100)
    mapped = memory.map_peer(other.descriptor())
    with pytest.raises(WiringError, match="mapped here already"):
        memory.map_peer(other.descriptor())
    with pytest.raises(WiringError, match="only open own memory has one"):
        mapped.descriptor()
    mapped.close()
    memory.map_peer(other.descriptor()).close()  # and again once that is closed
    assert node.mapped == {}


@pytest.mark.parametrize(
    ("code", "way_out"), [(1, "--ipc=host"), (304, "--pid=host"), (803, "reboot"), (217, "topo"), (7, "old driver")]
)
def test_a_driver_that_refuses_is_quoted_with_the_way_out(node: Node, code: int, way_out: str) -> None:
    other = DeviceMemory(FakeGpu(node, 1)).own("rows", 100)
    refusing = DeviceMemory(FakeGpu(node, 0, lambda call: code if call == "map" else 0))
    with pytest.raises(WiringError, match=f"map failed: CODE_{code}; .*{way_out}.*raymoe doctor"):
        refusing.map_peer(other.descriptor())


def test_memory_that_becomes_free_late_is_waited_for(node: Node) -> None:
    hog = DeviceMemory(FakeGpu(node, 1)).own("a lost gang", node.total)
    memory = DeviceMemory(FakeGpu(node, 0), retry_s=10)

    def end_it() -> None:
        time.sleep(0.1)
        hog.close()

    segment, _ = together([lambda: memory.own("rows", 100), end_it])
    assert segment.nbytes == GRANULE


def test_memory_that_stays_away_is_told_in_bytes(node: Node) -> None:
    DeviceMemory(FakeGpu(node, 1)).own("other", node.total - GRANULE)
    with pytest.raises(
        PlacementError, match=f"rows asks for {2 * GRANULE} bytes .*; {GRANULE} of {node.total} are free on GPU uuid-0"
    ):
        DeviceMemory(FakeGpu(node, 0), retry_s=0.05).own("rows", GRANULE + 1)


def test_more_than_the_gpu_has_is_refused_at_once(node: Node) -> None:
    start = time.monotonic()
    with pytest.raises(PlacementError, match=f"rows asks for {node.total + GRANULE} bytes"):
        DeviceMemory(FakeGpu(node, 0), retry_s=30).own("rows", node.total + 1)
    assert time.monotonic() - start < 5


def test_the_proof_lies_behind_the_regions_and_moves_none() -> None:
    proved = with_proof(ROWS, 4)
    assert proved.placed[:-1] == ROWS.placed
    assert proved.placed[-1].offset >= ROWS.placed[-1].offset + ROWS.placed[-1].region.nbytes


def test_words_outside_a_region_are_refused(node: Node) -> None:
    worlds = wired(node, 1)
    [heap] = heaps(worlds)
    with pytest.raises(WiringError, match="word 4 of region flag was asked for; it has words 0 to 3"):
        heap.word("flag", 4)
    with pytest.raises(WiringError, match="heap of rank 1 was asked for in a world of 1"):
        heap.address("flag", 1)
    close(worlds)


def test_a_failing_gpu_says_so_when_the_world_closes_and_frees_nothing(node: Node) -> None:
    failing = {"code": 0}
    worlds = wired(node, 2, rank0=lambda call: failing["code"] if call == "synchronise" else 0)
    heaps(worlds)
    failing["code"] = 700
    outcomes = together([world.close for world in worlds])
    assert isinstance(outcomes[0], CudaError)
    assert outcomes[1] is None
    assert node.wrote("free") == []  # rank 0 told nobody that it let go, and frees nothing itself
