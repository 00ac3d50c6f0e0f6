"""Weights that sleep: their memory is given back while others need it, and their addresses stay.

A trainer and an engine on one GPU take turns. While the trainer works, the engine's ranks sleep. Captured graphs of
the engine are valid afterwards, because addresses stay. Heaps, and all that peers map, stay mapped.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import torch

from raymoe.cuda.current import capturing
from raymoe.errors import CaptureError, ConfigError, CudaError, PlacementError, RaymoeError
from raymoe.memory.missing_weights import MissingWeights
from raymoe.memory.pages import GpuPages, HostPages, Pages


@dataclass(frozen=True)
class SleepTimes:
    """The bytes that `sleep` gave back or `wake` took, and the seconds. `pinning_s` is the part for page-locking."""

    nbytes: int
    seconds: float
    pinning_s: float = 0.0


class Busy(Protocol):
    """An object of a world that may be in the middle of an operation."""

    @property
    def in_flight(self) -> str | None:
        """The operation that has begun and not ended."""


class SleepingMemory:
    """The memory of a rank that `World.sleep` gives back. `World.shared` has one for each world."""

    def __init__(self, world: Any) -> None:
        self._world = weakref.ref(world)
        self._pages: list[tuple[str, weakref.ref[Pages]]] = []  # weak: dropped weights free their memory
        self._busy: weakref.WeakSet[Busy] = weakref.WeakSet()
        self._slept: set[int] = set()
        self._missing_before: set[int] = set()
        self.asleep = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Make a tensor of such memory. `name` is for errors."""
        world = self._of_world()
        if self.asleep:
            raise ConfigError(f"memory for {name} was asked for on rank {world.rank} while the world sleeps")
        nbytes = max(1, prod(shape)) * dtype.itemsize
        pages = HostPages(nbytes) if world.device.type == "cpu" else GpuPages(world.gpu, nbytes)
        self._pages.append((name, weakref.ref(pages)))
        return pages.tensor()[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def has(self, address: int) -> bool:
        """Whether the memory at this address is its own."""
        return any(pages.address == address for _, pages in self._live())

    def watch(self, busy: Busy) -> None:
        """Refuse to sleep while this object has an operation in flight."""
        self._busy.add(busy)

    @property
    def in_flight(self) -> str | None:
        """An operation that has begun on the host of this rank and not ended; None if there is none."""
        return next((operation for busy in list(self._busy) if (operation := busy.in_flight) is not None), None)

    def sleep(self, copy: bool) -> SleepTimes:
        """Give the memory back on all ranks, or on none."""
        world = self._of_world()
        self._agree(self._problem_of_sleep(world), "sleep: possible")
        began, live = time.monotonic(), self._live()
        for _, pages in live:
            pages.drop_copy()
        if copy:
            self._act(lambda: [pages.copy_out() for _, pages in live], "sleep: copied")
        missing = world.shared(MissingWeights)
        self._slept = {pages.address for _, pages in live}
        self._missing_before = {pages.address for _, pages in live if pages.address in missing}
        missing.add({pages.address: name for name, pages in live}, "they sleep", "call world.wake")
        self.asleep = True
        self._act(lambda: [pages.give_back() for _, pages in live], "sleep: asleep")
        nbytes, pinning = sum(pages.nbytes for _, pages in live), sum(pages.pinning_s for _, pages in live)
        return SleepTimes(nbytes, time.monotonic() - began, pinning if copy else 0.0)

    def wake(self, restore: str) -> SleepTimes:
        """Take memory at the old addresses on all ranks, or on none."""
        world, live = self._of_world(), self._live()
        self._agree(self._problem_of_wake(restore, live), "wake: possible")
        began = time.monotonic()
        taken: list[Pages] = []

        def take() -> None:
            for _, pages in live:
                pages.take()
                taken.append(pages)

        try:
            self._act(take, "wake: memory")
            if restore == "host":
                self._act(lambda: [pages.copy_in() for _, pages in live], "wake: copied")
        except RaymoeError:
            for pages in taken:
                pages.give_back()
            raise
        self.asleep = False
        for _, pages in live:
            pages.drop_copy()
        missing, addresses = world.shared(MissingWeights), {pages.address for _, pages in live}
        missing.remove(self._slept - addresses)  # those that were dropped meanwhile
        if restore == "host":
            missing.remove(addresses - self._missing_before)
        else:
            missing.add({pages.address: name for name, pages in live}, "they were not loaded after a wake")
        return SleepTimes(sum(pages.nbytes for _, pages in live), time.monotonic() - began)

    def close(self, together: bool) -> None:
        """Do nothing. The memory is freed with the last tensor; if it sleeps, nobody may read the tensors."""

    def _of_world(self) -> Any:
        world = self._world()
        assert world is not None, "it belongs to a world, which calls it"
        return world

    def _live(self) -> list[tuple[str, Pages]]:
        self._pages = [(name, reference) for name, reference in self._pages if reference() is not None]
        return [(name, pages) for name, reference in self._pages if (pages := reference()) is not None]

    def _problem_of_sleep(self, world: Any) -> RaymoeError | None:
        rank = world.rank
        if capturing(world.device):
            return CaptureError("sleep was called inside a capture; call it between replays")
        if self.asleep:
            return ConfigError(f"sleep on rank {rank}: it sleeps already")
        if (operation := self.in_flight) is not None:
            return ConfigError(f"sleep on rank {rank} while {operation} is in flight; let it end first")
        if not self._live():
            return ConfigError(f"sleep on rank {rank}: no weights can sleep; call raymoe.moe.let_sleep(model) before")
        return None

    def _problem_of_wake(self, restore: str, live: list[tuple[str, Pages]]) -> RaymoeError | None:
        rank = self._of_world().rank
        if restore not in ("host", "empty"):
            return ConfigError(f"restore is {restore!r}; it is 'host' or 'empty'")
        if not self.asleep:
            return ConfigError(f"wake on rank {rank}: it is awake")
        lacks = [name for name, pages in live if not pages.has_copy]
        if restore == "host" and lacks:
            return ConfigError(
                f"wake on rank {rank}: there is no copy of {', '.join(lacks[:3])}; it slept with copy=False, so take "
                "restore='empty' and load the weights"
            )
        return None

    def _act(self, act: Callable[[], object], what: str) -> None:
        """Act, wait for the device, and raise on all ranks if it failed on one."""
        problem: RaymoeError | None = None
        try:
            act()
            self._synchronise()
        except (CudaError, PlacementError) as error:
            problem = error
        self._of_world().agree(problem, what)

    def _agree(self, problem: RaymoeError | None, what: str) -> None:
        """Raise on all ranks if one has a problem. Else all have ended the same steps."""
        if problem is None:
            self._synchronise()
        self._of_world().agree(problem, what)

    def _synchronise(self) -> None:
        world = self._of_world()
        if world.device.type == "cuda":
            world.gpu.synchronise()


class Sleeper:
    """The calls of a world by which weights sleep. All ranks make them."""

    def sleep(self, *, copy: bool = True) -> SleepTimes:
        """Give back the memory of weights that may sleep (`raymoe.moe.let_sleep`), after all steps of this rank.

        Addresses stay. With `copy` the bytes are kept in host memory, page-locked on GPUs. Until `wake`, steps raise
        `WeightsMissing`. Heaps stay mapped. Refused on all ranks while one has an operation in flight.
        """
        return self._sleeping().sleep(copy)

    def wake(self, restore: Literal["host", "empty"] = "host") -> SleepTimes:
        """Take new memory at the old addresses, on all ranks or on none. Graphs can be replayed again.

        With `host` the bytes are those before `sleep`. With `empty` steps raise `WeightsMissing` until all weights were
        loaded (`MoELayer.load`, `raymoe.moe.load_weights`).
        """
        return self._sleeping().wake(restore)

    def _sleeping(self) -> SleepingMemory:
        world: Any = self
        sleeping: SleepingMemory = world.shared(SleepingMemory)
        return sleeping
