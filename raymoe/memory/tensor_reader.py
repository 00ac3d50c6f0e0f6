"""Read tensors of other processes' pools: the readers' side of `tensor_pool.py`.

A read holds a lease of its object, waits for the owner's mark, copies, and waits for the copy. So a tensor that is
returned is complete on every stream, and the owner may reuse its memory from then on. Segments and marks of an owner
are opened once. They are closed when a read meets an owner that has ended, when a read of a new owner's tensors begins
after that, or with the reader.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from raymoe.errors import Aborted, CudaError, WiringError
from raymoe.memory.address import boot_id
from raymoe.memory.leases import Lease, PeerLeases
from raymoe.memory.pool_devices import Mark, PeerPiece, PoolDevice
from raymoe.memory.tensor_pool import ExportedTensors

_SPIN_S = 0.0005
_LOOK_S = 0.00005
_LONGEST_LOOK_S = 0.002
_LOOKS = 20  # a pause is this part of the time waited so far, so that a read ends at most 5 % late
_LIFE_S = 0.05  # between two looks whether the owner lives
_ENDING_S = 2.0  # a process that is killed loses its events some time before its files


class _Owner:
    """An owner in another process, or in this one, and what of it is open here."""

    def __init__(self, exported: ExportedTensors, device: PoolDevice) -> None:
        self.name = exported.owner
        self._device = device
        if exported.leases["boot_id"] != boot_id():
            raise WiringError(
                f"the tensors of {self.name} are on another host: processes of one host can read them; take Ray's "
                "transport nixl, or its object store, between hosts"
            )
        try:
            with self._named():
                self.leases = PeerLeases(exported.leases)
        except ProcessLookupError as error:
            raise self.ended() from error
        self._segments: dict[int, Any] = {}
        self._marks: dict[bytes | None, Mark] = {}
        self._lock = threading.Lock()
        self.reads: set[object] = set()
        """A token for each read that is under way. While there are any, what is open stays open."""

    def open(self, exported: ExportedTensors) -> tuple[dict[int, Any], Mark]:
        """Return the segments of an object and the mark of its writes. Each is opened once."""
        with self._lock, self._named():
            for number, descriptor in exported.segments.items():
                if number not in self._segments:
                    self._segments[number] = self._device.map_peer(descriptor)
            if exported.mark not in self._marks:
                self._marks[exported.mark] = self._device.open_mark(exported.mark)
            return dict(self._segments), self._marks[exported.mark]

    def ended(self) -> WiringError:
        return WiringError(f"{self.name} has ended, and its tensors with it: let another actor make them again")

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments, self._marks = {}, {}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the owner in errors of its memory."""
        try:
            yield
        except (RuntimeError, WiringError) as error:  # the first is torch's, of an event
            cause = str(error).partition("\n")[0]
            raise WiringError(f"the tensors of {self.name} cannot be read here: {cause}") from error


class TensorReader:
    """Reads objects by one device of this process. Any thread may call."""

    def __init__(self, device: PoolDevice) -> None:
        self._device = device
        self._owners: dict[tuple[object, ...], _Owner] = {}
        self._lock = threading.Lock()

    def start(self, exported: ExportedTensors, targets: Sequence[Tensor] | None = None) -> Reading:
        """Begin to read an object, into `targets` if they are given. Raises `WiringError` if its owner has ended."""
        with self._lock:
            owner = self._owner(exported)
            owner.reads.add(token := object())
        try:
            return Reading(self._device, owner, token, exported, targets)
        except WiringError:
            self.close_ended()
            raise

    @property
    def open_owners(self) -> int:
        return len(self._owners)

    def close_ended(self) -> None:
        """Unmap the memory of owners that have ended, which would else stay allocated as long as this process lives."""
        with self._lock:
            self._close_ended()

    def close(self) -> None:
        """Close all that is open. No read may be under way."""
        with self._lock:
            for owner in self._owners.values():
                owner.close()
            self._owners = {}

    def _owner(self, exported: ExportedTensors) -> _Owner:
        key = tuple(exported.leases.values())
        if key not in self._owners:
            self._close_ended()
            self._owners[key] = _Owner(exported, self._device)
        return self._owners[key]

    def _close_ended(self) -> None:
        ended = [key for key, owner in self._owners.items() if not owner.reads and not owner.leases.is_alive()]
        for key in ended:
            self._owners.pop(key).close()


class Reading:
    """A read that is under way. `poll` takes it on and never waits; `wait` waits."""

    def __init__(
        self,
        device: PoolDevice,
        owner: _Owner,
        token: object,
        exported: ExportedTensors,
        targets: Sequence[Tensor] | None,
    ) -> None:
        self._device, self._owner, self._token = device, owner, token
        self._lease: Lease | None = None
        self._end: Mark | None = None
        self._next_look = 0.0
        self._is_read, self._is_closed = False, False
        try:
            self._lease = self._hold(exported.number)
            segments, self._written = owner.open(exported)
            self.tensors = list(targets) if targets else self._new_tensors(exported)
            self._pieces = [
                PeerPiece(tensor, segments[place.segment], place.start, place.nbytes)
                for tensor, place in zip(self.tensors, exported.places, strict=True)
                if place is not None
            ]
        except BaseException:
            self.close()
            raise

    def poll(self) -> bool:
        """Start the copy if the owner has written the object; return whether the copy is done."""
        if self._is_read:
            return True
        try:
            done = self._advance()
        except (
            CudaError,
            RuntimeError,
        ) as error:  # the second is torch's: the owner may be ending, and its event with it
            if self._owner.leases.ends_within(_ENDING_S):
                raise self._owner.ended() from error
            raise
        if done or time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LIFE_S
            if not self._owner.leases.is_alive():
                raise self._owner.ended()
        if done:
            self._is_read = True
            self.close()
        return done

    def wait(self, timeout_s: float | None = None, is_aborted: Callable[[], bool] | None = None) -> list[Tensor]:
        """Wait for the tensors. Raises `TimeoutError`, or `WiringError` if the owner ends meanwhile."""
        began = time.monotonic()
        while not self.poll():
            waited = time.monotonic() - began
            if is_aborted is not None and is_aborted():
                raise Aborted(f"the read of tensors of {self._owner.name} was aborted after {waited:.1f} s")
            if timeout_s is not None and waited > timeout_s:
                raise TimeoutError(f"tensors of {self._owner.name} were not there after {waited:.1f} s")
            if waited > _SPIN_S:
                time.sleep(min(max(waited / _LOOKS, _LOOK_S), _LONGEST_LOOK_S))
        return self.tensors

    def close(self) -> None:
        """Let the object go, at once or after a copy that is under way, for which this call does not wait."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._end is None or self._is_read:
            self._let_go()
        elif not sys.is_finalizing():  # then no thread starts, and the process's end lets go
            # The copy reads the owner's memory and writes to the tensors here. The thread keeps both.
            threading.Thread(target=self._let_go_after_copy, name="raymoe ends a read", daemon=True).start()

    def _let_go_after_copy(self) -> None:
        try:
            while self._end is not None and not self._end.is_done():
                time.sleep(_LONGEST_LOOK_S)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self._owner.reads.discard(self._token)  # takes no lock: garbage collection may call this in any thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _advance(self) -> bool:
        if self._end is None and self._written.is_done():
            self._end = self._device.copy(self._pieces)
        return self._end is not None and self._end.is_done()

    def _hold(self, number: int) -> Lease:
        try:
            lease = self._owner.leases.hold(number)
        except ProcessLookupError as error:
            raise self._owner.ended() from error
        if lease is None:
            raise WiringError(
                f"these tensors of {self._owner.name} were freed before they were read: keep their ObjectRef until "
                "the reader has them"
            )
        return lease

    def _new_tensors(self, exported: ExportedTensors) -> list[Tensor]:
        return [
            torch.empty(shape, dtype=dtype, device=self._device.device)
            for shape, dtype in zip(exported.shapes, exported.dtypes, strict=True)
        ]
