"""Memory that is given back while its address stays: on CPU ranks, and on GPUs with a fake driver."""

# ruff: noqa: N802, ARG002  (names and parameters of the driver)

from __future__ import annotations

import gc
import itertools
import mmap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.errors import ConfigError, CudaError, PlacementError, RaymoeError, WeightsMissing, WiringError
from raymoe.exchange.exchange import Exchange
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory import pages as pages_module
from raymoe.memory import sleeping as sleeping_module
from raymoe.memory.pages import GpuPages, HostPages
from raymoe.memory.sleeping import SleepingMemory
from raymoe.memory.world import World
from tests.unit.worlds import close, each, wired

MIB = 1 << 20


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    worlds = wired(2)
    yield worlds
    close(worlds)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def weight_of(world: World, name: str = "experts.down_proj", count: int = 64) -> torch.Tensor:
    weight = world.shared(SleepingMemory).empty((count, 4), torch.float32, name)
    return weight.copy_(torch.arange(count * 4.0).view(count, 4))


# On CPU ranks.


def test_pages_of_a_cpu_rank_go_and_come_back_at_one_address() -> None:
    pages = HostPages(64 * MIB)
    tensor = pages.tensor().fill_(7)
    full = resident()
    pages.give_back()
    assert full - resident() > 60 * MIB
    pages.take()
    assert not tensor.any(), "new pages are empty"
    tensor.fill_(7)
    assert abs(resident() - full) < 4 * MIB
    tensor[5] = 9
    pages.copy_out()
    pages.give_back()
    pages.take()
    pages.copy_in()
    assert (
        tensor.data_ptr() == pages.address and tensor[5] == 9 and int(tensor.sum(dtype=torch.int64)) == 7 * 64 * MIB + 2
    )


def test_a_tensor_keeps_its_pages() -> None:
    tensor = HostPages(MIB).tensor().fill_(3)
    gc.collect()
    assert bool((tensor == 3).all())


def test_a_world_sleeps_and_wakes(worlds: list[World]) -> None:
    weights = [weight_of(world) for world in worlds]
    before = [weight.clone() for weight in weights]
    for times in each(worlds, lambda world: world.sleep()):
        assert times.nbytes == 64 * 4 * 4
    assert all(isinstance(world.halt, WeightsMissing) for world in worlds)
    assert not weights[0].any()
    each(worlds, lambda world: world.wake())
    assert all(world.halt is None for world in worlds)
    assert all(map(torch.equal, weights, before))


def test_what_a_sleeping_world_says(worlds: list[World]) -> None:
    def says(function: Any) -> list[str]:
        return [f"{type(error).__name__}: {error}" for error in each(worlds, function)]

    assert "no weights can sleep; call raymoe.moe.let_sleep(model) before" in says(lambda world: world.sleep())[0]
    kept = [weight_of(world) for world in worlds]
    assert "ConfigError: wake on rank 1: it is awake" in says(lambda world: world.wake())[1]
    each(worlds, lambda world: world.sleep(copy=False))
    assert str(worlds[1].halt) == "rank 1 has no values of experts.down_proj, because they sleep: call world.wake"
    assert "ConfigError: sleep on rank 0: it sleeps already" in says(lambda world: world.sleep())[0]
    assert "restore is 'disk'" in says(lambda world: world.wake("disk"))[0]
    assert "it slept with copy=False" in says(lambda world: world.wake())[0]
    with pytest.raises(ConfigError, match="while the world sleeps"):
        weight_of(worlds[0])
    each(worlds, lambda world: world.wake("empty"))
    assert "because they were not loaded after a wake: load them" in str(worlds[0].halt)
    assert not kept[0].any()


def test_exchanges_are_refused_while_a_world_sleeps_and_work_afterwards(worlds: list[World]) -> None:
    spec = ExchangeSpec(tokens=2, hidden=4, experts=2, topk=1, dtype="float32")
    kept = [weight_of(world) for world in worlds]
    exchanges = each(worlds, lambda world: Exchange(world, spec))

    def step(world: World) -> torch.Tensor:
        exchange = exchanges[world.rank]
        got = exchange.dispatch(torch.ones(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1))
        return exchange.combine(got.x, got).clone()

    each(worlds, lambda world: world.sleep())
    assert all(isinstance(outcome, WeightsMissing) for outcome in each(worlds, step))
    each(worlds, lambda world: world.wake())
    assert all(torch.equal(outcome, torch.ones(2, 4)) for outcome in each(worlds, step))
    assert len(kept) == 2
    each(worlds, lambda world: exchanges[world.rank].close())


def test_sleep_is_refused_while_an_operation_is_in_flight(worlds: list[World]) -> None:
    spec = ExchangeSpec(tokens=2, hidden=4, experts=2, topk=1, dtype="float32")
    kept = [weight_of(world) for world in worlds]
    exchanges = each(worlds, lambda world: Exchange(world, spec))

    def dispatch(world: World) -> None:
        exchanges[world.rank].dispatch(torch.ones(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1))

    ahead = threading.Thread(target=dispatch, args=(worlds[0],))
    ahead.start()  # waits for rank 1 inside of its dispatch
    until = time.monotonic() + 30
    while exchanges[0].in_flight is None and time.monotonic() < until:
        time.sleep(0.001)
    first, second = each(worlds, lambda world: world.sleep())
    assert isinstance(first, ConfigError) and "sleep on rank 0 while dispatch is in flight" in str(first)
    assert isinstance(second, WiringError) and str(second) == str(first)
    assert kept[0].any() and worlds[0].halt is None
    dispatch(worlds[1])
    ahead.join(30)
    assert not ahead.is_alive()
    for times in each(worlds, lambda world: world.sleep()):
        assert times.nbytes == 64 * 4 * 4
    each(worlds, lambda world: world.wake())
    each(worlds, lambda world: exchanges[world.rank].close())


@pytest.mark.parametrize("method", ["copy_out", "take", "copy_in"])
def test_if_one_rank_fails_all_stay_as_they_were(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    weights = [weight_of(world) for world in worlds]
    before, works = [weight.clone() for weight in weights], getattr(HostPages, method)

    def fails(pages: HostPages) -> None:
        if pages.address == weights[1].data_ptr():
            raise PlacementError("no memory is left")
        works(pages)

    def turn(world: World) -> None:
        world.sleep()
        world.wake()

    monkeypatch.setattr(HostPages, method, fails)
    first, second = each(worlds, turn)
    assert isinstance(first, WiringError) and isinstance(second, PlacementError)
    asleep = method != "copy_out"
    assert [world.halt is not None for world in worlds] == [asleep, asleep]
    monkeypatch.undo()
    if asleep:
        assert not weights[0].any()
        each(worlds, lambda world: world.wake())
    assert all(map(torch.equal, weights, before))


def test_dropped_weights_do_not_sleep(worlds: list[World]) -> None:
    weights = [[weight_of(world, "a"), weight_of(world, "b", 32)] for world in worlds]
    for kept in weights:
        del kept[0]
    gc.collect()
    assert [times.nbytes for times in each(worlds, lambda world: world.sleep())] == [32 * 16] * 2


def test_weights_that_are_dropped_while_they_sleep_are_not_missed(worlds: list[World]) -> None:
    weights = [[weight_of(world, "a"), weight_of(world, "b", 32)] for world in worlds]
    each(worlds, lambda world: world.sleep())
    for kept in weights:
        del kept[0]
    gc.collect()
    assert [times.nbytes for times in each(worlds, lambda world: world.wake())] == [32 * 16] * 2
    assert [world.halt for world in worlds] == [None, None]


# On GPUs, with a fake driver.

OUT_OF_MEMORY = 2
GRANULE = 2 * MIB


class FakeDriver:
    """The driver's functions for virtual memory. It notes what the driver forbids."""

    def __init__(self, total: int = 16 * GRANULE) -> None:
        self.total = total
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.bytes: dict[int, bytes] = {}
        self.pinned: dict[int, int] = {}
        self.violations: list[str] = []
        self.fails: str | None = None
        self._numbers = itertools.count(1)

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if name == self.fails:
            raise CudaError(f"{name} failed: CUDA_ERROR_UNKNOWN", 999)
        return getattr(self, name)(*arguments)

    def need(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    def cuMemGetAllocationGranularity(self, prop: Any, kind: Any) -> int:
        return GRANULE

    def cuMemAddressReserve(self, size: int, *_: int) -> int:
        address = next(self._numbers) << 40
        self.reserved[address] = size
        return address

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        if sum(self.handles.values()) + size > self.total:
            raise CudaError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY)
        self.need(size % GRANULE == 0, "a size that is no multiple of the granularity")
        handle = next(self._numbers)
        self.handles[handle] = size
        return handle

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.total - sum(self.handles.values()), self.total

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self.need(address not in self.mapped, "mapped twice")
        self.need(self.reserved.get(address) == size == self.handles.get(handle), "mapped with another size")
        self.mapped[address] = handle
        self.bytes[address] = b"other bytes"

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        self.need(address in self.mapped and len(access) == count, "access to what is not mapped")
        self.readable.add(address)

    def cuMemUnmap(self, address: int, size: int) -> None:
        self.need(self.mapped.pop(address, None) is not None, "unmapped what is not mapped")
        self.readable.discard(address)

    def cuMemRelease(self, handle: int) -> None:
        self.need(handle not in self.mapped.values(), "released what is mapped")
        del self.handles[handle]

    def cuMemAddressFree(self, address: int, size: int) -> None:
        self.need(address not in self.mapped, "freed an address that is mapped")
        self.need(self.reserved.pop(address, None) == size, "freed another size")

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        address = next(self._numbers)
        self.pinned[address] = nbytes
        return address

    def cuMemFreeHost(self, address: int) -> None:
        del self.pinned[address]

    def cuMemcpyDtoHAsync(self, to: int, start: int, nbytes: int, stream: int) -> None:
        self.need(to in self.pinned and start in self.readable, "copied from what is not mapped")
        self.bytes[to] = self.bytes[start]

    def cuMemcpyHtoDAsync(self, to: int, start: int, nbytes: int, stream: int) -> None:
        self.need(start in self.pinned and to in self.readable, "copied to what is not mapped")
        self.bytes[to] = self.bytes[start]


class FakeGpu:
    """A GPU of the fake driver."""

    ordinal, uuid = 0, "uuid-0"

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver

    def current(self) -> Any:
        return torch.no_grad()  # any context manager

    def synchronise(self) -> None:
        self.driver.calls.append("synchronise")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(pages_module, "call", fake)
    yield fake
    gc.collect()
    assert fake.violations == []


def gpu_pages(driver: FakeDriver, nbytes: int = 3 * MIB) -> GpuPages:
    gpu: Any = FakeGpu(driver)
    return GpuPages(gpu, nbytes)


def test_a_gpu_maps_new_memory_at_the_old_address(driver: FakeDriver) -> None:
    pages = gpu_pages(driver)
    address, handles = pages.address, dict(driver.handles)
    assert driver.reserved == {address: 2 * GRANULE} and address in driver.readable
    driver.bytes[address] = b"weights"
    pages.copy_out()
    pages.give_back()
    assert driver.handles == {} and driver.mapped == {} and driver.reserved == {address: 2 * GRANULE}
    pages.take()
    assert pages.address == address and driver.handles.keys() != handles.keys()
    assert driver.bytes[address] == b"other bytes"
    pages.copy_in()
    assert driver.bytes[address] == b"weights"
    pinned = dict(driver.pinned)
    pages.copy_out()
    assert driver.pinned == pinned, "page-locked memory is allocated once"


def test_a_gpu_without_memory_says_how_much_is_free_and_the_next_try_works(driver: FakeDriver) -> None:
    pages = gpu_pages(driver)
    pages.give_back()
    driver.total = GRANULE
    with pytest.raises(
        PlacementError, match=f"{2 * GRANULE} bytes of device memory were asked for; {GRANULE} of {GRANULE}"
    ):
        pages.take()
    driver.total = 2 * GRANULE
    pages.take()
    assert pages.address in driver.readable


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_no_memory_taken(driver: FakeDriver, function: str) -> None:
    pages = gpu_pages(driver)
    pages.give_back()
    driver.fails = function
    with pytest.raises(CudaError, match=function):
        pages.take()
    assert driver.handles == {} and driver.mapped == {}
    driver.fails = None
    pages.take()


def test_refused_host_memory_says_what_to_do(driver: FakeDriver) -> None:
    pages = gpu_pages(driver)
    driver.fails = "cuMemHostAlloc"
    with pytest.raises(PlacementError, match=r"page-locked host memory were refused .* or call sleep\(copy=False\)"):
        pages.copy_out()


@pytest.mark.parametrize("asleep", [False, True])
def test_dropped_pages_of_a_gpu_are_freed_once_the_device_is_idle(driver: FakeDriver, asleep: bool) -> None:
    pages = gpu_pages(driver)
    pages.copy_out()
    if asleep:
        pages.give_back()
    driver.calls.clear()
    del pages
    gc.collect()
    assert driver.calls[0] == "synchronise"
    assert (driver.reserved, driver.handles, driver.pinned) == ({}, {}, {})


class GpuWorld:
    """The part of a world of one GPU rank that sleeps."""

    rank, halt, device = 0, None, torch.device("cuda", 0)

    def __init__(self, real: World, driver: FakeDriver) -> None:
        self.gpu, self.agree, self.shared = FakeGpu(driver), real.agree, real.shared


def test_a_world_on_a_gpu_waits_for_its_device_before_it_copies_and_before_it_unmaps(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = gpu_pages(driver)
    monkeypatch.setattr(sleeping_module, "capturing", lambda _: False)
    with World.open(rank=0, size=1) as real:
        real.wire([real.descriptor()])
        world = GpuWorld(real, driver)
        sleeping = SleepingMemory(world)
        sleeping._pages.append(("experts.down_proj", weakref.ref(pages)))
        driver.bytes[pages.address] = b"weights"
        driver.calls.clear()
        times = sleeping.sleep(copy=True)
        order = [name for name in driver.calls if name in ("synchronise", "cuMemcpyDtoHAsync", "cuMemUnmap")]
        assert order[:4] == ["synchronise", "cuMemcpyDtoHAsync", "synchronise", "cuMemUnmap"]
        assert (times.nbytes, times.pinning_s > 0) == (3 * MIB, True)
        driver.total = 0
        with pytest.raises(RaymoeError, match="bytes of device memory were asked for"):
            sleeping.wake("host")
        assert sleeping.asleep
        driver.total = 16 * GRANULE
        driver.calls.clear()
        sleeping.wake("host")
        assert driver.calls[-1] == "synchronise" and driver.bytes[pages.address] == b"weights"
