"""A machine of several ranks: their memory, and their streams of launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Shape
from raymoe.cuda.params import Params
from tests.emulator.build import Change, built, runtime

RED_ZONE_BYTES = 128
_RED = 0xA5
_HOST_CALL = ctypes.CFUNCTYPE(ctypes.c_int)


class EmulatorError(Exception):
    """A run failed: the error names the thread and its access, or the threads that wait."""


@dataclass(frozen=True)
class Memory:
    """Bytes that kernels may access; the bytes around them may not be accessed."""

    address: int
    bytes: np.ndarray[Any, np.dtype[np.uint8]]


class Emulator:
    """The machine; a process has one at a time. Fill the streams first (`launch`, `call`), then `run`.

    All ranks see a heap at the same addresses. Between two runs the machine forgets only what memory held before.
    """

    _open = False

    def __init__(
        self, ranks: int, most_steps: int = 20_000_000, changes: Sequence[Change] = (), torn_lines: bool = False
    ) -> None:
        """Open the machine. With `torn_lines` the halves of a line of 128 bytes arrive apart, as over PCIe."""
        assert not Emulator._open, "another machine is open; close it first"
        self.ranks, self._most_steps, self._changes = ranks, most_steps, tuple(changes)
        self._machine = _declared(runtime())
        self._machine.machine_open(ranks)
        if torn_lines:
            self._machine.machine_tear_lines()
        Emulator._open = True
        self._calls: list[Any] = []
        self._raised: list[BaseException] = []
        self._red_zones: list[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]] = []

    def memory(self, rank: int, nbytes: int, name: str, arrays: Sequence[tuple[str, int, int]] = ()) -> Memory:
        """Map memory of one rank alone. Its bytes are NaN as floats and absurd as counts.

        With `arrays` (name, offset, bytes) the bytes between them may not be accessed.
        """
        memory = self._mapped(nbytes)
        memory.bytes[:] = 0xFF
        for array, offset, size in arrays or [(name, 0, nbytes)]:
            self._machine.machine_add_region(memory.address + offset, size, rank, 0, array.encode())
        for (array, offset, size), (_, end, _) in pairwise([*arrays, ("", nbytes, 0)]):
            self._guard(f"after {array} of rank {rank}", memory.bytes[offset + size : end])
        return memory

    def reach(self, address: int, nbytes: int, name: str, rank: int = 0) -> None:
        """Let kernels of a rank access memory that was allocated elsewhere, as long as this machine lives."""
        self._machine.machine_add_region(address, nbytes, rank, 0, name.encode())

    def heap(self, rank: int, regions: Sequence[tuple[str, int, int]], nbytes: int) -> Memory:
        """Map zeros that the peers reach too. Regions are (name, offset, bytes); bytes between them are red zones."""
        memory = self._mapped(nbytes)
        end = 0
        for name, offset, size in regions:
            self._guard(f"before {name} of rank {rank}", memory.bytes[end:offset])
            self._machine.machine_add_region(memory.address + offset, size, rank, 1, name.encode())
            end = offset + size
        self._guard(f"at the end of the heap of rank {rank}", memory.bytes[end:])
        return memory

    def launch(self, rank: int, source: KernelSource, shape: Shape, params: Params | ctypes.Structure) -> None:
        """Enqueue a kernel on the rank's stream. Only changes to files of this kernel are injected."""
        kernel = built(source, self._changes)
        packed = params.packed() if isinstance(params, Params) else params
        dimensions = (ctypes.c_uint * 4)(shape.blocks, shape.threads, shape.shared_bytes, shape.early)
        size = ctypes.sizeof(packed)
        self._machine.machine_launch(
            rank, kernel.name.encode(), kernel.entry, ctypes.addressof(packed), size, dimensions
        )

    def call(self, rank: int, action: Callable[[], object]) -> None:
        """Enqueue an action of the host on the rank's stream."""

        def guarded() -> int:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - it cannot pass through C; `run` raises it
                self._raised.append(error)
                return 1
            return 0

        kept = _HOST_CALL(guarded)
        self._calls.append(kept)
        self._machine.machine_call(rank, kept)

    def write(self, into: np.ndarray[Any, np.dtype[np.uint8]], data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Write bytes as the host, inside a `call`.

        A thread that has not acquired the write may still read the old bytes. A direct write to the array would forget
        them.
        """
        if len(data):
            self._machine.machine_write(into.ctypes.data, data.tobytes(), len(data))

    def run(self, seed: int) -> None:
        """Run all streams to their ends, in the interleaving of this seed."""
        done = self._machine.machine_run(seed, self._most_steps)
        self._calls.clear()
        if self._raised:
            raise self._raised.pop()
        if not done:
            raise EmulatorError(f"seed {seed}: {self._machine.machine_error().decode()}")
        for name, zone in self._red_zones:
            if not np.all(zone == _RED):
                raise EmulatorError(f"seed {seed}: something wrote {name}, outside every region")

    @property
    def steps(self) -> int:
        return int(self._machine.machine_ticks())

    def close(self) -> None:
        self._machine.machine_close()
        Emulator._open = False

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mapped(self, nbytes: int) -> Memory:
        address = int(self._machine.machine_map(nbytes))
        array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
        return Memory(address, array)

    def _guard(self, name: str, zone: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        zone[:] = _RED
        self._red_zones.append((name, zone))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.machine_open.argtypes = [ctypes.c_int]
    library.machine_map.argtypes, library.machine_map.restype = [ctypes.c_ulonglong], ctypes.c_void_p
    library.machine_add_region.argtypes = [
        *(ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
    ]
    library.machine_launch.argtypes = [
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint))
    ]
    library.machine_call.argtypes = [ctypes.c_int, _HOST_CALL]
    library.machine_run.argtypes = [ctypes.c_ulonglong, ctypes.c_ulonglong]
    library.machine_write.argtypes = [ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_uint]
    library.machine_error.restype = ctypes.c_char_p
    library.machine_ticks.restype = ctypes.c_ulonglong
    return library
