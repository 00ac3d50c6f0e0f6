"""Device memory that ranks share, without a GPU: a fake driver logs its calls and detects what CUDA forbids."""

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
    """The memory of all GPUs of a fake machine, and a log of its ranks' calls."""

    total: int = 64 * GRANULE
    call_log: list[tuple[Any, ...]] = field(default_factory=list)
    words: dict[int, int] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)  # base → bytes
    handles: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # handle → (rank, base)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address → (mapping rank, base)
    violations: list[str] = field(default_factory=list)
    addresses: Iterator[int] = field(default_factory=lambda: itertools.count(1 << 40, 1 << 32))

    def calls_of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [line for line in self.call_log if line[1] in kinds]


class FakeGpu:
    """The GPU of one rank's process."""

    def __init__(self, node: Node, rank: int, fails: Callable[[str], int] | None = None) -> None:
        self.node, self.rank, self.fails = node, rank, fails
        self.uuid, self.driver = f"uuid-{rank}", 13000
        self.is_open = True

    def _note(self, call: str, *what: object) -> None:
        code = self.fails(call) if self.fails else 0
        if code:
            raise CudaError(f"{call} failed: CODE_{code}", code)
        self.node.call_log.append((self.rank, call, *what))

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.available()[0]:
            raise CudaError("allocate failed: CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY)
        address = next(self.node.addresses)
        self._note("allocate", address, nbytes)
        self.node.live[address] = nbytes
        for word in range(0, 8 * 128, 8):
            self.node.words[address + word] = 99  # content from an earlier owner
        return address

    def free(self, address: int) -> None:
        if any(base == address for _, base in self.node.mapped.values()):
            self.node.violations.append(f"rank {self.rank} freed what a peer maps")
        if not self.is_open:
            self.node.violations.append(f"rank {self.rank} freed without a context")
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
            self.node.violations.append(f"rank {self.rank} opened its own handle")
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
    assert node.violations == []


def open_worlds(node: Node, size: int, timeout_s: float = 10.0, **fails: Callable[[str], int]) -> list[World]:
    worlds = []
    for rank in range(size):
        gpu = FakeGpu(node, rank, fails.get(f"rank{rank}"))
        worlds.append(World(Member(rank, size, name="test", timeout_s=timeout_s, device="cuda"), gpu))
        assert worlds[rank]._gpu is not None
        worlds[rank]._gpu._retry_s = 0.05
    return worlds


def wire_worlds(node: Node, size: int, timeout_s: float = 10.0, **fails: Callable[[str], int]) -> list[World]:
    worlds = open_worlds(node, size, timeout_s, **fails)
    descriptors = [world.descriptor() for world in worlds]
    assert each(worlds, lambda world: world.wire(descriptors)) == [None] * size
    return worlds


def allocate_heaps(worlds: list[World], what: str = "rows") -> list[DeviceHeap]:
    heaps = each(worlds, lambda world: world.allocate(ROWS, what, where="device"))
    assert all(isinstance(heap, DeviceHeap) for heap in heaps), heaps
    return heaps


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
def test_descriptors_that_disagree_are_refused(node: Node, field: str, value: object, says: str) -> None:
    worlds = open_worlds(node, 2)
    descriptors = [world.descriptor() for world in worlds]
    with pytest.raises(WiringError, match=says):
        worlds[0].wire([descriptors[0], descriptors[1] | {field: value}])
    del descriptors[1][field]
    with pytest.raises(WiringError, match=f"without '{field}'"):
        worlds[0].wire(descriptors)
    close(worlds)


def worlds_on_shared_gpus(node: Node, shares: list[bool]) -> tuple[list[World], list[dict[str, object]]]:
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
def test_two_ranks_on_one_gpu_are_refused_unless_all_share(node: Node, shares: list[bool], who: str) -> None:
    worlds, descriptors = worlds_on_shared_gpus(node, shares)
    for world in worlds:
        with pytest.raises(WiringError, match=rf"ranks 0 and 2 are both on GPU one; .*share_gpu.*{who}"):
            world.wire(descriptors)
    close(worlds)


def test_ranks_that_all_set_share_gpu_may_use_one_gpu(node: Node) -> None:
    worlds, descriptors = worlds_on_shared_gpus(node, [True] * 3)
    assert each(worlds, lambda world: world.wire(descriptors)) == [None] * 3
    assert len(allocate_heaps(worlds)) == 3
    close(worlds)


def test_a_cpu_world_refuses_device_memory() -> None:
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


def test_unknown_options_of_a_world_are_refused() -> None:
    with pytest.raises(TypeError, match="sharegpu"):
        World.open(0, 1, sharegpu=True)


# The life of a heap


def test_memory_is_zeroed_and_synchronised_before_it_is_exported(node: Node) -> None:
    segment = DeviceMemory(FakeGpu(node, 0)).own("rows", GRANULE + 1)
    assert [line[1] for line in node.call_log] == ["allocate", "zero", "synchronise", "export"]
    assert node.call_log[0][3] == node.call_log[1][3] == segment.nbytes == 2 * GRANULE
    segment.close()
    assert node.live == {}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_writes_into_the_heap_of_every_peer(node: Node, size: int) -> None:
    worlds = wire_worlds(node, size)
    heaps = allocate_heaps(worlds)
    assert [heap.nbytes for heap in heaps] == [GRANULE] * size
    for rank, heap in enumerate(heaps):
        for peer in range(size):
            heap.set_word("flag", rank, 10 * rank + peer, peer)
            assert heap.address("rows", peer) - heap.base(peer) == ROWS.find("rows").offset
        assert heap.address("rows") == heap.address("rows", rank)
    for rank, heap in enumerate(heaps):
        assert [heap.word("flag", writer) for writer in range(size)] == [10 * writer + rank for writer in range(size)]
    assert len(node.calls_of("map")) == size * (size - 1)  # each peer once, the rank's own heap never
    close(worlds)
    assert (node.live, node.mapped) == ({}, {})


def test_every_mapping_is_closed_before_any_memory_is_freed(node: Node) -> None:
    worlds = wire_worlds(node, 3)
    first, second = allocate_heaps(worlds, "first"), allocate_heaps(worlds, "second")
    close(worlds)  # the fake driver reports a free while a peer maps the memory
    assert (node.live, node.mapped) == ({}, {})
    for rank in range(3):
        calls = [line[1] for line in node.call_log if line[0] == rank]
        assert calls.count("unmap") == 4
        assert calls[-3:] == ["free", "free", "close"]
        assert calls[calls.index("unmap") - 1] == "synchronise"  # the device's pending work has ended
    with pytest.raises(WiringError, match="this heap is closed"):
        first[0].address("rows")
    with pytest.raises(WiringError, match="this heap is closed"):
        second[0].tensor("rows", 1)


@given(st.permutations([(rank, heap) for rank in range(2) for heap in range(2)]))
def test_heaps_may_be_closed_in_any_order(order: list[tuple[int, int]]) -> None:
    node = Node()
    worlds = wire_worlds(node, 2)
    heaps = [allocate_heaps(worlds, what) for what in ("first", "second")]
    orders = [[heap for rank, heap in order if rank == closing] for closing in range(2)]
    each(worlds, lambda world: [heaps[heap][world.rank].unmap_peers() for heap in orders[world.rank]])
    close(worlds)
    assert (node.violations, node.live, node.mapped) == ([], {}, {})


def test_a_heap_is_freed_once_all_ranks_close_it(node: Node) -> None:
    worlds = wire_worlds(node, 2)
    heaps = allocate_heaps(worlds)
    together([heap.close for heap in heaps])
    assert (node.live, node.mapped) == ({}, {})
    heaps[0].close()
    close(worlds)


def test_a_heap_closed_by_one_rank_is_freed_after_the_other_closes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymoe.memory.heap.CLOSING_S", 0.05)
    worlds = wire_worlds(node, 2)
    heaps = allocate_heaps(worlds)
    heaps[0].close()
    assert len(node.live) == 2
    heaps[1].set_word("flag", 1, 7, peer=0)  # rank 0's memory still exists
    heaps[1].close()
    assert len(node.live) == 1
    assert len(allocate_heaps(worlds, "next")) == 2
    assert len(node.live) == 2  # rank 0 freed the old one when it made the new one
    close(worlds)
    assert node.live == {}


def test_memory_that_a_dead_peer_may_map_is_not_freed(node: Node) -> None:
    worlds = wire_worlds(node, 3, timeout_s=0.3)
    allocate_heaps(worlds)
    assert isinstance(each(worlds[:2], lambda world: world.barrier("without rank 2"))[0], PeerTimeout)
    start = time.monotonic()
    close(worlds[:2])
    assert time.monotonic() - start < 5
    assert len(node.calls_of("unmap")) == 4
    assert node.calls_of("free", "close") == []
    assert len(node.live) == 3


def test_memory_is_freed_after_the_last_tensor_that_needs_it(node: Node) -> None:
    segment = DeviceMemory(FakeGpu(node, 0)).own("rows", 100)
    tensor_refers_to = segment.owner
    segment.close()
    assert node.calls_of("free") == []
    del tensor_refers_to
    gc.collect()
    assert len(node.calls_of("free")) == 1


# Failures


@pytest.mark.parametrize("call", ["allocate", "zero", "synchronise", "export"])
def test_an_allocation_that_fails_half_way_frees_all_memory(node: Node, call: str) -> None:
    failing = {"now": False}
    worlds = wire_worlds(node, 3, rank1=lambda name: 999 if name == call and failing["now"] else 0)
    failing["now"] = True
    outcomes = each(worlds, lambda world: world.allocate(ROWS, "rows", where="device"))
    failing["now"] = False
    assert all(isinstance(outcome, RaymoeError) for outcome in outcomes), outcomes
    assert all(f"{call} failed" in str(outcome) for outcome in outcomes)
    assert (node.live, node.mapped) == ({}, {})
    assert len(allocate_heaps(worlds, "next")) == 3
    close(worlds)
    assert node.live == {}


def test_all_ranks_free_their_memory_if_one_cannot_map(node: Node) -> None:
    failing = {"code": NOT_SUPPORTED}
    worlds = wire_worlds(node, 3, rank2=lambda name: failing["code"] if name == "map" else 0)
    outcomes = each(worlds, lambda world: world.allocate(ROWS, "rows", where="device"))
    assert all(isinstance(outcome, WiringError) for outcome in outcomes)
    assert "could not be mapped on GPU uuid-2: map failed: CODE_801; MIG" in str(outcomes[0])
    assert (node.live, node.mapped) == ({}, {})
    assert node.calls_of("unmap")
    failing["code"] = 0
    assert len(allocate_heaps(worlds, "next")) == 3
    close(worlds)


def test_the_proof_detects_a_mapping_of_the_wrong_peer(node: Node) -> None:
    worlds = wire_worlds(node, 3)
    gpu = worlds[0]._gpu
    assert gpu is not None
    real = gpu.device.map
    handles: list[bytes] = []

    def crossed(handle: bytes) -> int:  # the second mapping of rank 0 repeats its first
        handles.append(handle)
        return real(handle if len(handles) == 1 else handles[0])

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
def test_a_wrong_descriptor_is_not_mapped(node: Node, forged: dict[str, object], says: str) -> None:
    good = DeviceMemory(FakeGpu(node, 1)).own("rows", 100).descriptor()
    with pytest.raises(WiringError, match=says):
        DeviceMemory(FakeGpu(node, 0)).map_peer(good | forged)
    assert node.mapped == {}


@pytest.mark.parametrize("missing", ["kind", "handle", "nbytes"])
def test_an_incomplete_descriptor_is_refused(node: Node, missing: str) -> None:
    descriptor = DeviceMemory(FakeGpu(node, 1)).own("rows", 100).descriptor()
    del descriptor[missing]
    with pytest.raises(WiringError, match=f"without '{missing}'"):
        DeviceMemory(FakeGpu(node, 0)).map_peer(descriptor)


def test_a_ranks_own_handle_is_not_opened(node: Node) -> None:
    memory = DeviceMemory(FakeGpu(node, 0))
    own = memory.own("rows", 100)
    with pytest.raises(WiringError, match="a handle that is this rank's own"):
        memory.map_peer(own.descriptor())


def test_a_peer_is_mapped_only_once_at_a_time(node: Node) -> None:
    memory, other = DeviceMemory(FakeGpu(node, 0)), DeviceMemory(FakeGpu(node, 1)).own("rows", 100)
    mapped = memory.map_peer(other.descriptor())
    with pytest.raises(WiringError, match="mapped here already"):
        memory.map_peer(other.descriptor())
    with pytest.raises(WiringError, match="only open own memory has one"):
        mapped.descriptor()
    mapped.close()
    memory.map_peer(other.descriptor()).close()  # allowed again after the first is closed
    assert node.mapped == {}


@pytest.mark.parametrize(
    ("code", "way_out"), [(1, "--ipc=host"), (304, "--pid=host"), (803, "reboot"), (217, "topo"), (7, "old driver")]
)
def test_a_refusal_of_the_driver_is_quoted_with_advice(node: Node, code: int, way_out: str) -> None:
    other = DeviceMemory(FakeGpu(node, 1)).own("rows", 100)
    refusing = DeviceMemory(FakeGpu(node, 0, lambda call: code if call == "map" else 0))
    with pytest.raises(WiringError, match=f"map failed: CODE_{code}; .*{way_out}.*raymoe doctor"):
        refusing.map_peer(other.descriptor())


def test_an_allocation_waits_for_memory_that_is_freed_late(node: Node) -> None:
    hog = DeviceMemory(FakeGpu(node, 1)).own("a lost gang", node.total)
    memory = DeviceMemory(FakeGpu(node, 0), retry_s=10)

    def end_it() -> None:
        time.sleep(0.1)
        hog.close()

    segment, _ = together([lambda: memory.own("rows", 100), end_it])
    assert segment.nbytes == GRANULE


def test_missing_memory_is_reported_in_bytes(node: Node) -> None:
    DeviceMemory(FakeGpu(node, 1)).own("other", node.total - GRANULE)
    with pytest.raises(
        PlacementError, match=f"rows asks for {2 * GRANULE} bytes .*; {GRANULE} of {node.total} are free on GPU uuid-0"
    ):
        DeviceMemory(FakeGpu(node, 0), retry_s=0.05).own("rows", GRANULE + 1)


def test_more_memory_than_the_gpu_has_is_refused_at_once(node: Node) -> None:
    start = time.monotonic()
    with pytest.raises(PlacementError, match=f"rows asks for {node.total + GRANULE} bytes"):
        DeviceMemory(FakeGpu(node, 0), retry_s=30).own("rows", node.total + 1)
    assert time.monotonic() - start < 5


def test_the_proof_lies_after_the_regions_and_moves_none() -> None:
    proved = with_proof(ROWS, 4)
    assert proved.placed[:-1] == ROWS.placed
    assert proved.placed[-1].offset >= ROWS.placed[-1].offset + ROWS.placed[-1].region.nbytes


def test_words_outside_a_region_and_unknown_ranks_are_refused(node: Node) -> None:
    worlds = wire_worlds(node, 1)
    [heap] = allocate_heaps(worlds)
    with pytest.raises(WiringError, match="word 4 of region flag was asked for; it has words 0 to 3"):
        heap.word("flag", 4)
    with pytest.raises(WiringError, match="heap of rank 1 was asked for in a world of 1"):
        heap.address("flag", 1)
    close(worlds)


def test_a_failing_gpu_raises_at_close_and_nothing_is_freed(node: Node) -> None:
    failing = {"code": 0}
    worlds = wire_worlds(node, 2, rank0=lambda call: failing["code"] if call == "synchronise" else 0)
    allocate_heaps(worlds)
    failing["code"] = 700
    outcomes = together([world.close for world in worlds])
    assert isinstance(outcomes[0], CudaError)
    assert outcomes[1] is None
    assert node.calls_of("free") == []  # rank 0 did not report its unmapping, and frees nothing itself
