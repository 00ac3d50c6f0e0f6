"""Heaps in device memory that other processes on this machine can map, by the 64-byte handles of CUDA IPC.

A segment is one `cuMemAlloc` of its own, a multiple of 2 MiB: smaller ones may share a block with strangers, and it is
the block that a peer maps; torch's allocator hands out pieces, and pieces of memory that cannot be exported at all
(expandable segments). Its lifetime is held by three invariants:

- **Zeroed, then published.** The memory is zeroed and the device synchronised before the handle exists outside, so no
  peer's first flag is wiped out by a zero that was still under way.
- **Unmapped, then freed.** A rank frees its memory only after every peer has told that its mapping is closed; freeing
  what a peer maps is undefined. A peer that is dead tells nothing: then the memory is left to the end of this process.
- **No invalidation of what is ours.** A tensor over a rank's own memory keeps it, after `close` too. A tensor over a
  peer's memory cannot: it is dead when its heap is closed, as is every address that was given to a kernel.

When a process ends, however it ends, the driver closes its mappings and frees its memory; the memory of one that was
killed can take a moment, so `own` asks again for a while before it gives up.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Any

import torch

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu
from raymoe.errors import CudaError, CudaMissing, PlacementError, WiringError
from raymoe.memory.host_shm import check_fields
from raymoe.memory.layout import round_up

KIND = "cuda_ipc"
HANDLE_BYTES = 64
GRANULE = 2 * 1024 * 1024

RETRY_S = 4.0
"""How long memory that is not there is asked for again; less than any peer's patience."""

_LONGEST_PAUSE_S = 0.25
_FIELDS = {"kind": str, "handle": bytes, "nbytes": int}

_OUT_OF_MEMORY = 2
_SUSPECTS = {
    1: "it is of another machine, or the ranks are in separate IPC namespaces (containers need --ipc=host)",
    101: "the exporter's GPU is hidden from this process by a device cgroup (Slurm: ConstrainDevices) or container",
    205: "its owner has freed it, or this process is out of address space",
    217: "these two GPUs cannot reach one another; `nvidia-smi topo -p2p rw` shows which can",
    304: "the ranks are in separate IPC or PID namespaces (containers need --ipc=host and --pid=host)",
    400: "its owner has freed it or is gone, or the ranks are in separate IPC namespaces",
    801: "MIG slices and WSL have no CUDA IPC; use whole GPUs",
    803: "the driver library and the kernel's driver differ; a container brought its own, or an update needs a reboot",
}
_USUAL = "MIG, separate IPC namespaces (--ipc=host), device cgroups and an old driver each forbid it"


class Owner:
    """What tensors over own memory refer to. While one lives the memory is not freed."""


class DeviceSegment:
    """Device memory of one rank: its own, where there is a handle to give away, or a mapping of a peer's."""

    def __init__(self, device: GpuMemory, address: int, nbytes: int, handle: bytes | None = None) -> None:
        self._device = device
        self._handle = handle
        self._closed = False
        self.owner = Owner() if handle is not None else None
        self.address = address
        self.nbytes = nbytes

    @property
    def is_open(self) -> bool:
        return not self._closed

    def descriptor(self) -> dict[str, object]:
        """What a peer needs to map this memory: plain values only."""
        if self._handle is None or self._closed:
            raise WiringError("only memory of one's own that is not closed can be exported")
        return {"kind": KIND, "handle": self._handle, "nbytes": self.nbytes}

    def unpublish(self) -> None:
        """Nothing: a handle cannot be called back. That it opens once only is `DeviceMemory`'s care."""

    def close(self) -> None:
        """Close the mapping; or, where this is our own and every peer has closed its mapping, free the memory."""
        if self._closed:
            return
        self._closed = True
        if self.owner is None:
            self._device.unmap(self.address)
        else:
            weakref.finalize(self.owner, self._device.free, self.address).atexit = False
            self.owner = None  # runs it now, unless a tensor still needs the memory


class DeviceMemory:
    """Makes and maps segments on one GPU, for one rank."""

    def __init__(self, device: GpuMemory, retry_s: float = RETRY_S) -> None:
        self.device = device
        self._retry_s = retry_s
        self._known: weakref.WeakValueDictionary[bytes, DeviceSegment] = weakref.WeakValueDictionary()

    def own(self, name: str, nbytes: int) -> DeviceSegment:
        """New memory, zeroed to its end before anybody else can know of it."""
        size = round_up(nbytes, GRANULE)
        address = self._allocate(name, size)
        try:
            self.device.zero(address, size)
            self.device.synchronise()
            handle = self._export(name, address)
        except BaseException:
            self.device.free(address)
            raise
        return self._remember(handle, DeviceSegment(self.device, address, size, handle))

    def map_peer(self, descriptor: dict[str, object]) -> DeviceSegment:
        """Map the memory that a peer's descriptor names."""
        check_fields(descriptor, _FIELDS)
        if descriptor["kind"] != KIND:
            raise WiringError(f"memory of kind {descriptor['kind']}; GPU ranks map {KIND}")
        handle, nbytes = descriptor["handle"], int(str(descriptor["nbytes"]))
        assert isinstance(handle, bytes)
        if len(handle) != HANDLE_BYTES:
            raise WiringError(f"a handle of {len(handle)} bytes; those of CUDA IPC have {HANDLE_BYTES}")
        if nbytes < GRANULE or nbytes % GRANULE:
            raise WiringError(f"device memory of {nbytes} bytes; it comes in multiples of {GRANULE}")
        known = self._known.get(handle)
        if known is not None and known.is_open:
            whose = "this rank's own" if known.owner is not None else "mapped here already"
            raise WiringError(f"a peer gave a handle that is {whose}; every rank gives its own, once")
        try:
            address = self.device.map(handle)
        except CudaError as error:
            suspect = _SUSPECTS.get(error.code, _USUAL)
            raise WiringError(
                f"a peer's memory of {nbytes} bytes could not be mapped on GPU {self.device.uuid}: {error}; "
                f"{suspect}; raymoe doctor tells more"
            ) from error
        return self._remember(handle, DeviceSegment(self.device, address, nbytes))

    def _remember(self, handle: bytes, segment: DeviceSegment) -> DeviceSegment:
        self._known[handle] = segment
        return segment

    def _allocate(self, name: str, nbytes: int) -> int:
        deadline = time.monotonic() + self._retry_s
        pause = 0.01
        while True:
            try:
                return self.device.allocate(nbytes)
            except CudaError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                free, total = self.device.available()
                if nbytes > total or time.monotonic() + pause > deadline:
                    raise PlacementError(
                        f"{name} asks for {nbytes} bytes of device memory; {free} of {total} are free on GPU "
                        f"{self.device.uuid}; make the shape smaller, or end what holds the rest (nvidia-smi lists it)"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _export(self, name: str, address: int) -> bytes:
        try:
            return self.device.export(address)
        except CudaError as error:
            suspect = _SUSPECTS.get(error.code, _USUAL)
            raise WiringError(
                f"{name} on GPU {self.device.uuid} could not be exported: {error}; {suspect}; raymoe doctor tells more"
            ) from error


_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_WORD_BYTES = 8


class GpuMemory:
    """The driver's calls that heaps need, on one GPU of this process. Tests have one that keeps a diary.

    Any thread may call: each call makes the context its own while it lasts.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.uuid = gpu.uuid
        self.driver = int(call("cuDriverGetVersion"))

    @classmethod
    def open(cls, ordinal: int = 0) -> GpuMemory:
        """The `ordinal`-th of the GPUs that this process sees; torch and the driver number them alike."""
        if torch.version.cuda is None:
            raise CudaMissing(f"GPU ranks asked for with torch {torch.__version__}, which knows no CUDA; install one")
        return cls(Gpu.open(ordinal))

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def available(self) -> tuple[int, int]:
        """Bytes free, and bytes in all."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cuMemsetD8", address, 0, nbytes)

    def synchronise(self) -> None:
        self.gpu.synchronise()

    def export(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)  # the binding shows no field

    def map(self, handle: bytes) -> int:
        given = bindings().CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", given, _LAZY_PEER_ACCESS))

    def unmap(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def write(self, address: int, value: int) -> None:
        """Store a 64-bit word; it may still be under way until `synchronise`."""
        word = ctypes.c_int64(value)
        self._call("cuMemcpyHtoD", address, ctypes.addressof(word), _WORD_BYTES)

    def read(self, address: int) -> int:
        word = ctypes.c_int64()
        self._call("cuMemcpyDtoH", ctypes.addressof(word), address, _WORD_BYTES)
        return word.value

    def close(self) -> None:
        """Give up the context. Tensors that outlive this have torch's hold on it."""
        self.gpu.close()

    def _call(self, name: str, *arguments: object) -> Any:
        with self.gpu.current():
            return call(name, *arguments)
