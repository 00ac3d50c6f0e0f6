"""Heaps in device memory that other processes on this machine can map, by the 64-byte handles of CUDA IPC.

A segment is one `cuMemAlloc` of its own, a multiple of 2 MiB. A smaller allocation may share its block with others, and
a peer maps the whole block. Torch's allocator hands out pieces of a block, and expandable segments cannot be exported.
Three invariants govern the lifetime of a segment:

- **Zeroed, then published.** The memory is zeroed and the device synchronised before the handle leaves this process.
  So no zeroing that is still in flight overwrites a peer's first flag.
- **Unmapped, then freed.** A rank frees its memory only after every peer has said that its mapping is closed. Freeing
  memory that a peer maps is undefined. A dead peer says nothing: then the memory stays until this process ends.
- **Own tensors stay valid.** A tensor over a rank's own memory keeps that memory, after `close` too. A tensor over a
  peer's memory is invalid once its heap is closed, and so is every address that was given to a kernel.

When a process ends, in any way, the driver closes its mappings and frees its memory. After a kill that can take a
moment, so `own` retries for a while before it gives up.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Any

import torch

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import Gpu
from raymoe.errors import CudaError, CudaMissing, PlacementError, WiringError
from raymoe.memory.host_shm import check_fields
from raymoe.memory.layout import round_up

KIND = "cuda_ipc"
HANDLE_BYTES = 64
GRANULE = 2 * 1024 * 1024

RETRY_S = 4.0
"""How long an allocation that found too little memory is retried; shorter than the default timeout of peers' waits."""

_LONGEST_PAUSE_S = 0.25
_FIELDS = {"kind": str, "handle": bytes, "nbytes": int}

_OUT_OF_MEMORY = 2
_CAUSES = {
    1: "it is of another machine, or the ranks are in separate IPC namespaces (containers need --ipc=host)",
    101: "the exporter's GPU is hidden from this process by a device cgroup (Slurm: ConstrainDevices) or container",
    205: "its owner has freed it, or this process is out of address space",
    217: "these two GPUs cannot reach one another; `nvidia-smi topo -p2p rw` shows which can",
    304: "the ranks are in separate IPC or PID namespaces (containers need --ipc=host and --pid=host)",
    400: "its owner has freed it or is gone, or the ranks are in separate IPC namespaces",
    801: "MIG slices and WSL have no CUDA IPC; use whole GPUs",
    803: "the driver library and the kernel's driver differ: a container has its own, or an update needs a reboot",
}
_OTHER_CAUSES = "MIG, separate IPC namespaces (--ipc=host), device cgroups and an old driver each forbid it"


class Owner:
    """Tensors over a rank's own memory refer to this object. While it lives the memory is not freed."""


class DeviceSegment:
    """Device memory: this rank's own, which has a handle, or a mapping of a peer's, which has none."""

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
        """Return what a peer needs to map this memory, as plain values."""
        if self._handle is None or self._closed:
            raise WiringError(
                "a descriptor of a closed segment or of a peer's was asked for; only open own memory has one"
            )
        return {"kind": KIND, "handle": self._handle, "nbytes": self.nbytes}

    def unpublish(self) -> None:
        """Do nothing: a handle cannot be called back. `DeviceMemory` refuses to open one twice."""

    def close(self) -> None:
        """Close the mapping of a peer's memory, or free own memory, which every peer must have unmapped before."""
        if self._closed:
            return
        self._closed = True
        if self.owner is None:
            self._device.unmap(self.address)
        else:
            weakref.finalize(self.owner, self._device.free, self.address).atexit = False
            self.owner = None  # frees the memory now, unless a tensor still needs it


class DeviceMemory:
    """Makes and maps segments on one GPU, for one rank."""

    def __init__(self, device: GpuMemory, retry_s: float = RETRY_S) -> None:
        self.device = device
        self._retry_s = retry_s
        self._known: weakref.WeakValueDictionary[bytes, DeviceSegment] = weakref.WeakValueDictionary()

    def own(self, name: str, nbytes: int) -> DeviceSegment:
        """Allocate memory and zero all of it before its handle exists."""
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
            raise WiringError(f"a handle of {len(handle)} bytes; handles of CUDA IPC have {HANDLE_BYTES}")
        if nbytes < GRANULE or nbytes % GRANULE:
            raise WiringError(f"device memory of {nbytes} bytes; it comes in multiples of {GRANULE}")
        known = self._known.get(handle)
        if known is not None and known.is_open:
            which = "this rank's own" if known.owner is not None else "mapped here already"
            raise WiringError(f"a peer gave a handle that is {which}; every rank gives its own, once")
        try:
            address = self.device.map(handle)
        except CudaError as error:
            cause = _CAUSES.get(error.code, _OTHER_CAUSES)
            raise WiringError(
                f"a peer's memory of {nbytes} bytes could not be mapped on GPU {self.device.uuid}: {error}; "
                f"{cause}; raymoe doctor tells more"
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
                        f"{self.device.uuid}; make the shape smaller, or end the processes that hold the rest "
                        "(nvidia-smi lists them)"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _export(self, name: str, address: int) -> bytes:
        try:
            return self.device.export(address)
        except CudaError as error:
            cause = _CAUSES.get(error.code, _OTHER_CAUSES)
            raise WiringError(
                f"{name} on GPU {self.device.uuid} could not be exported: {error}; {cause}; raymoe doctor tells more"
            ) from error


_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_WORD_BYTES = 8


class GpuMemory:
    """The driver's calls that heaps need, on one GPU of this process. Any thread may call: a call sets the context."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.uuid = gpu.uuid
        self.driver = int(call("cuDriverGetVersion"))

    @classmethod
    def open(cls, ordinal: int = 0) -> GpuMemory:
        """Open a GPU by its number among those that this process sees. Torch and the driver number them alike."""
        if torch.version.cuda is None:
            raise CudaMissing(
                f"GPU ranks were asked for with torch {torch.__version__}, which has no CUDA; install a torch with CUDA"
            )
        return cls(Gpu.open(ordinal))

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def available(self) -> tuple[int, int]:
        """Return the bytes that are free, and all bytes."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cuMemsetD8", address, 0, nbytes)

    def synchronise(self) -> None:
        self.gpu.synchronise()

    def export(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)  # the binding gives no access to the bytes

    def map(self, handle: bytes) -> int:
        ipc_handle = bindings().CUipcMemHandle()
        ctypes.memmove(ipc_handle.getPtr(), handle, HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", ipc_handle, _LAZY_PEER_ACCESS))

    def unmap(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def write(self, address: int, value: int) -> None:
        """Store a 64-bit word. The store may be in flight until `synchronise`."""
        word = ctypes.c_int64(value)
        self._call("cuMemcpyHtoD", address, ctypes.addressof(word), _WORD_BYTES)

    def read(self, address: int) -> int:
        word = ctypes.c_int64()
        self._call("cuMemcpyDtoH", ctypes.addressof(word), address, _WORD_BYTES)
        return word.value

    def close(self) -> None:
        """Release the context. Tensors that outlive this keep it through torch."""
        self.gpu.close()

    def _call(self, name: str, *arguments: object) -> Any:
        with self.gpu.current():
            return call(name, *arguments)
