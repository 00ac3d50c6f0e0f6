"""Keep what a rank's world owns: its heaps, shared objects, and the memory of objects that were dropped unclosed."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Protocol

import torch

from raymoe.errors import ConfigError, RaymoeError
from raymoe.memory import cuda_ipc, host_shm
from raymoe.memory.heap import DeviceHeap, Heap, HeapContext, unmapped_layout, with_proof
from raymoe.memory.layout import Layout
from raymoe.memory.wait import Waiter
from raymoe.memory.wiring import Collectives, prove, share


class Shared(Protocol):
    """An object that the users of a world share, and the world closes."""

    def close(self, together: bool) -> None:
        """Close it. `together` if all ranks close now."""


class Heaps:
    """The heaps of one rank's world. All ranks make them together, in one order."""

    def __init__(self, gpu: cuda_ipc.DeviceMemory | None, device: torch.device, waiter: Waiter) -> None:
        self._gpu, self._torch_device, self._waiter = gpu, device, waiter
        self._on_host: weakref.WeakSet[Heap] = weakref.WeakSet()  # weak: a dropped heap frees its memory
        self._on_device: list[DeviceHeap] = []
        self._device_count = 0  # the same on all ranks

    def make_on_host(self, world: Collectives, layout: Layout, what: str) -> Heap:
        heap = Heap(layout, world.rank, share(world, host_shm, layout, what))
        self._on_host.add(heap)
        return heap

    def make_on_device(self, world: Collectives, layout: Layout, what: str) -> DeviceHeap:
        if self._gpu is None:
            raise ConfigError(
                f"{what}: device memory was asked for; the world of rank {world.rank} is on {self._torch_device}"
            )
        self._device_count += 1
        serial = self._device_count
        self.free_unmapped()
        unmapped = self.make_on_host(world, unmapped_layout(world.size), f"{what}: unmapped")
        segments = share(world, self._gpu, with_proof(layout, world.size), what)
        heap = DeviceHeap(layout, segments, HeapContext(self._gpu.device, self._torch_device, self._waiter, unmapped))
        self._on_device.append(heap)
        try:
            prove(world, what, heap.prove_to, heap.proof_of, serial)
        except RaymoeError:
            heap.close()
            raise
        return heap

    def free_unmapped(self) -> bool:
        """Free the device memory that no peer maps. Return whether all is free."""
        self._on_device = [heap for heap in self._on_device if not heap.free_if_unmapped()]
        return not self._on_device

    def close_in(self, cleanup: ExitStack) -> None:
        """Let `cleanup` close the host heaps, then unmap the peers' device memory."""
        for device_heap in self._on_device:
            cleanup.callback(device_heap.unmap_peers)
        for host_heap in list(self._on_host):
            cleanup.callback(host_heap.close)


# Objects dropped without `close`

Release = Callable[[], object]


class DroppedObjects:
    """The dropped objects of one rank.

    >>> class Owner: ...
    >>> unclosed, owner = DroppedObjects(), Owner()
    >>> end_watch = unclosed.watch(owner, "an owner", lambda: print("released"), at_once=False)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     del owner
    >>> str(caught[0].message)
    'an owner was dropped without close(); close it, or use it in a with statement'
    >>> unclosed.free()
    released
    """

    def __init__(self) -> None:
        self._pending: deque[Release] = deque()

    def watch(self, owner: object, name: str, *releases: Release, at_once: bool) -> Callable[[], object]:
        """Call `releases` after `owner` is gone: at once, or with the next `free`.

        They must not refer to the owner. The owner's `close` calls the result, which ends the watch.
        """
        finalizer = weakref.finalize(owner, _dropped, name, releases, None if at_once else self._pending)
        finalizer.atexit = False  # at exit the kernel and the driver free everything
        return finalizer.detach

    def free(self) -> None:
        """Release what was dropped since the last call."""
        while self._pending:
            release = self._pending.popleft()
            with suppress(RaymoeError):  # the caller did not ask for this; what stays is freed with the process
                release()


def _dropped(name: str, releases: tuple[Release, ...], later: deque[Release] | None) -> None:
    if later is not None:
        later.extend(releases)
    else:
        for release in releases:
            release()
    warnings.warn(
        f"{name} was dropped without close(); close it, or use it in a with statement", ResourceWarning, stacklevel=2
    )
