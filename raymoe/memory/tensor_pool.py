"""A pool of tensors that other processes of the host read: the owner's side. `tensor_reader.py` is the readers'.

An *object* is a list of tensors with a key. `export` copies them into a block of the pool, or takes those that lie in
it already as they are, and describes them in plain values. `release` gives the block back. Rules of the pool:

- **Exported once.** The pool grows by segments, each with a handle for all its blocks. It never shrinks before `close`.
- **Written, then read.** A description has a mark of the stream that writes the object. Readers copy after the mark.
- **Read, then reused.** A block is free again when its object is released, its mark is done, and no reader holds a
  lease. Until then a released object waits, and a dead reader holds nothing.
- **Bounded.** Where no block is free and the pool may not grow, `export` waits for releases, and then raises.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raymoe.errors import ConfigError, PlacementError
from raymoe.memory.blocks import BLOCK_BYTES, Block, Blocks
from raymoe.memory.layout import round_up
from raymoe.memory.leases import OwnLeases
from raymoe.memory.pool_devices import Mark, PoolDevice, as_bytes

_LOOK_S = 0.002


@dataclass(frozen=True)
class PoolLimits:
    """The limits of a pool's growth."""

    pool_bytes: int = 4 * 2**30
    """The most bytes of all segments."""
    segment_bytes: int = 64 * 2**20
    """The bytes of a segment. One for a larger object is as large as the object."""
    wait_s: float = 10.0
    """How long `export` waits for releases where the pool is full."""

    def __post_init__(self) -> None:
        for name in ("pool_bytes", "segment_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 2**21:
                raise ConfigError(f"{name} is {value!r}; it is a number of bytes, at least {2**21}")
        if not self.wait_s >= 0:
            raise ConfigError(f"wait_s is {self.wait_s!r}; it is a number of seconds")


@dataclass(frozen=True)
class Place:
    """The place of one tensor in its owner's segments."""

    segment: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class ExportedTensors:
    """The description of an object for its readers: plain values, which may travel in any way."""

    owner: str
    """The owner's name for messages."""
    kind: str
    """`cpu` or `cuda`."""
    number: int
    leases: dict[str, object]
    segments: dict[int, dict[str, object]]
    places: tuple[Place | None, ...]
    """One for each tensor. A tensor without elements has none."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mark: bytes | None


@dataclass(frozen=True)
class PoolUsage:
    """Bytes and objects of a pool. `waiting`: objects that are released and still read."""

    total_bytes: int
    used_bytes: int
    segments: int
    objects: int
    waiting: int


@dataclass(eq=False)
class _UsedBlock:
    """A block and the number of its users: objects, and a tensor of `empty`."""

    block: Block
    users: int = 1
    lent: bool = False
    """Whether the caller writes to it by streams that the pool does not know."""


@dataclass
class _Object:
    number: int
    blocks: list[_UsedBlock]
    mark: Mark
    description: ExportedTensors


class TensorPool:
    """The pool of one device. Any thread may call."""

    def __init__(self, device: PoolDevice, limits: PoolLimits, owner: str) -> None:
        self._device, self._limits, self._owner = device, limits, owner
        self._changed = threading.Condition(threading.Lock())
        self._label = f"raymoe-tensors-{os.getpid()}"
        self._leases = OwnLeases(self._label)
        self._blocks = Blocks()
        self._segments: list[Any] = []
        self._descriptors: list[dict[str, object]] = []
        self._objects: dict[Hashable, _Object] = {}
        self._released: deque[Hashable] = deque()
        self._waiting: list[_Object] = []
        self._lent: list[_UsedBlock] = []
        self._dropped: deque[_UsedBlock] = deque()  # tensors of `empty` that are gone; a finalizer may not take a lock
        self._unsynchronised: list[_UsedBlock] = []

    def export(self, key: Hashable, tensors: Sequence[Tensor]) -> ExportedTensors:
        """Copy tensors into the pool and describe them. A key that is exported already keeps its description."""
        for tensor in tensors:
            check_tensor(tensor, self._device.device)
        self._device.check_can_enqueue()
        with self._changed:
            self._reclaim()
            if key in self._objects:
                return self._objects[key].description
            blocks, places, mark = self._put(tensors)
            number = self._leases.number()
            description = ExportedTensors(
                owner=self._owner,
                kind=self._device.device.type,
                number=number,
                leases=self._leases.descriptor(),
                segments={place.segment: self._descriptors[place.segment] for place in places if place is not None},
                places=tuple(places),
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                dtypes=tuple(tensor.dtype for tensor in tensors),
                mark=mark.handle,
            )
            self._objects[key] = _Object(number, blocks, mark, description)
            return description

    def release(self, key: Hashable) -> None:
        """Give the memory of an object back, at once or when its last reader is done. Other keys are ignored.

        Never waits for the lock: garbage collection may call this in the thread that has it. Then the holder frees it.
        """
        self._released.append(key)
        if self._changed.acquire(blocking=False):
            try:
                self._reclaim()
                self._changed.notify_all()
            finally:
                self._changed.release()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the pool, whose elements have any value. `export` takes it, and parts of it, as it is."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device.device)
        with self._changed:
            used = _UsedBlock(self._take([nbytes])[0], lent=True)
            memory, keeper = self._device.piece(self._segments[used.block.segment], used.block.start, nbytes)
            self._lent.append(used)
            weakref.finalize(keeper, self._dropped.append, used).atexit = False
        del keeper
        return memory.view(dtype).view(tuple(shape))

    def usage(self) -> PoolUsage:
        with self._changed:
            self._reclaim()
            return PoolUsage(
                total_bytes=self._blocks.total_bytes,
                used_bytes=self._blocks.total_bytes - self._blocks.free_bytes,
                segments=len(self._segments),
                objects=len(self._objects),
                waiting=len(self._waiting),
            )

    def close(self) -> None:
        """Withdraw the pool from readers. Host memory is free when nobody maps it, device memory with the process."""
        with self._changed:
            self._leases.close()
            if self._device.device.type == "cpu":
                for segment in self._segments:
                    segment.close()

    def _put(self, tensors: Sequence[Tensor]) -> tuple[list[_UsedBlock], list[Place | None], Mark]:
        """Find or make the place of each tensor, and mark the end of the copies."""
        homes = [self._home(tensor) if tensor.nbytes else None for tensor in tensors]
        to_copy = [tensor for tensor, home in zip(tensors, homes, strict=True) if tensor.nbytes and home is None]
        new_blocks = iter(self._take([tensor.nbytes for tensor in to_copy]))
        used: list[_UsedBlock] = []
        places: list[Place | None] = []
        for tensor, home in zip(tensors, homes, strict=True):
            if home is not None:
                home[0].users += 1
                used.append(home[0])
                places.append(home[1])
            elif tensor.nbytes:
                used.append(_UsedBlock(next(new_blocks)))
                places.append(Place(used[-1].block.segment, used[-1].block.start, tensor.nbytes))
            else:
                places.append(None)
        try:
            for tensor, home, place in zip(tensors, homes, places, strict=True):
                if home is None and place is not None:
                    self._copy(tensor, place)
            return used, places, self._device.mark()
        except BaseException:
            self._device.synchronise()  # a copy may be under way
            self._unuse(used)
            raise

    def _copy(self, tensor: Tensor, place: Place) -> None:
        target, _ = self._device.piece(self._segments[place.segment], place.start, place.nbytes)
        with torch.no_grad():
            plain = tensor.detach().resolve_conj().resolve_neg()
            if plain.is_contiguous():
                target.copy_(as_bytes(plain))
            else:
                target.view(plain.dtype).view(plain.shape).copy_(plain)

    def _home(self, tensor: Tensor) -> tuple[_UsedBlock, Place] | None:
        """Return the block of `empty` in which a tensor lies, and its place there."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        for used in self._lent:
            segment = self._segments[used.block.segment]
            start = address - self._device.address(segment)
            if used.block.start <= start and start + tensor.nbytes <= used.block.start + used.block.nbytes:
                return used, Place(used.block.segment, start, tensor.nbytes)
        return None

    def _take(self, sizes: Sequence[int]) -> list[Block]:
        """Take blocks, all or none: free ones, those of a new segment, or those that are released within `wait_s`."""
        total = sum(round_up(size, BLOCK_BYTES) for size in sizes)
        deadline = time.monotonic() + self._limits.wait_s
        while True:
            self._reclaim()
            blocks = [self._blocks.take(size) for size in sizes]
            taken = [block for block in blocks if block is not None]
            if len(taken) == len(sizes):
                return taken
            missing = total - sum(block.nbytes for block in taken)
            for block in taken:
                self._blocks.give(block)
            if self._unsynchronised:
                self._device.synchronise()
                self._give(self._unsynchronised)
                self._unsynchronised = []
            elif self._blocks.total_bytes + missing <= self._limits.pool_bytes:
                self._grow(missing)
            elif not self._is_in_use() or total > self._limits.pool_bytes or time.monotonic() > deadline:
                raise PlacementError(self._why_full(total))
            else:
                self._changed.wait(_LOOK_S)

    def _grow(self, nbytes: int) -> None:
        left = self._limits.pool_bytes - self._blocks.total_bytes
        segment = self._device.own(self._label, max(nbytes, min(self._limits.segment_bytes, left)))
        self._segments.append(segment)
        self._descriptors.append(segment.descriptor())
        self._blocks.add(segment.nbytes)

    def _is_in_use(self) -> bool:
        return bool(self._objects or self._waiting or self._lent)

    def _why_full(self, nbytes: int) -> str:
        free = self._limits.pool_bytes - self._blocks.total_bytes + self._blocks.free_bytes
        lent = f" and {len(self._lent)} tensors of empty()" if self._lent else ""
        held = f", {len(self._waiting)} are released and still read" if self._waiting else ""
        waited = f" after {self._limits.wait_s:g} s" if self._is_in_use() else ""
        pieces = " in pieces" if free >= nbytes else ""
        return (
            f"{nbytes} bytes were asked of the pool of tensors of {self._owner}; {free} of {self._limits.pool_bytes} "
            f"are free{pieces}{waited}, with {len(self._objects)} objects{lent} in it{held}: drop ObjectRefs, or "
            "register a larger pool_bytes"
        )

    def _reclaim(self) -> None:
        """Free the blocks of released objects that no reader holds, and of tensors that are gone."""
        while self._dropped:
            self._unuse([self._dropped.popleft()])
        while self._released:
            if (released := self._objects.pop(self._released.popleft(), None)) is not None:
                self._waiting.append(released)
        still_waiting = []
        for waiting in self._waiting:
            if waiting.mark.is_done() and self._leases.retire(waiting.number):
                if waiting.mark.handle is not None:
                    self._device.recycle(waiting.mark)
                self._unuse(waiting.blocks)
            else:
                still_waiting.append(waiting)
        self._waiting = still_waiting

    def _unuse(self, blocks: Sequence[_UsedBlock]) -> None:
        for used in blocks:
            used.users -= 1
            if used.users == 0:
                if used.lent:
                    self._lent.remove(used)
                if used.lent and self._device.has_streams:
                    self._unsynchronised.append(used)
                else:
                    self._give([used])

    def _give(self, blocks: Sequence[_UsedBlock]) -> None:
        for used in blocks:
            self._blocks.give(used.block)


def check_tensor(tensor: Tensor, device: torch.device) -> None:
    """Refuse a tensor that is not plain memory of the pool's device."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        form = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        raise ConfigError(f"a tensor of {form} form cannot be exported: give its parts as plain tensors")
    if hasattr(tensor, "placements"):
        raise ConfigError("a DTensor cannot be exported: give its local tensor, tensor.to_local()")
    if tensor.device != device:
        raise ConfigError(f"a tensor on {tensor.device} was given with one on {device}: one object has one device")
