"""Memory whose pages can be given back while its address stays, so that captured graphs find new pages at the old one.

Nobody else maps such memory. On GPUs it is a reserved range of addresses, to which the driver maps memory; on CPUs
anonymous memory, whose pages the kernel takes back on advice.
"""

from __future__ import annotations

import ctypes
import mmap
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from raymoe.cuda.driver import bindings, call
from raymoe.cuda.gpu import Gpu
from raymoe.errors import CudaError, PlacementError
from raymoe.memory.heap import DeviceBytes
from raymoe.memory.layout import round_up

_OUT_OF_MEMORY = 2


class Pages(ABC):
    """Memory at a fixed address. It is there at first; tensors over it keep this object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pinning_s = 0.0
        """The seconds that the last `copy_out` took to allocate page-locked host memory; it does so once."""
        self.has_copy = False
        """Whether `copy_in` can restore the bytes."""

    address: int

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """Return the memory as uint8[nbytes]."""

    @abstractmethod
    def give_back(self) -> None:
        """Give the pages back. Until `take` nobody may read the address."""

    @abstractmethod
    def take(self) -> None:
        """Take new pages at the old address. Their bytes are unspecified."""

    @abstractmethod
    def copy_out(self) -> None:
        """Copy the bytes to host memory. On a GPU the copy may be in flight until the device is synchronised."""

    @abstractmethod
    def copy_in(self) -> None:
        """Copy them back, in the same way."""

    def drop_copy(self) -> None:
        """Drop the copy, which later bytes make wrong."""
        self.has_copy = False


class HostPages(Pages):
    """Pages of a CPU rank. A copy in host memory saves nothing there; it is so that programs run as on GPUs."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._memory = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._copy: torch.Tensor | None = None
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))

    def tensor(self) -> torch.Tensor:
        buffer: Any = (ctypes.c_ubyte * self.nbytes).from_buffer(self._memory)
        buffer.pages = self
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def give_back(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def take(self) -> None:
        """Do nothing: the kernel gives a page of zeros at the next access."""

    def copy_out(self) -> None:
        self._copy, self.has_copy = self.tensor().clone(), True

    def copy_in(self) -> None:
        assert self._copy is not None, "copy_out made a copy"
        self.tensor().copy_(self._copy)

    def drop_copy(self) -> None:
        super().drop_copy()
        self._copy = None


class GpuPages(Pages):
    """Pages of a GPU, mapped by the driver's functions for virtual memory. They cannot be exported by CUDA IPC."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        super().__init__(nbytes)
        self._state = _Mapping(gpu, nbytes)
        weakref.finalize(self, self._state.free).atexit = False
        self.address = self._state.address
        self.take()

    def tensor(self) -> torch.Tensor:
        memory = DeviceBytes(self.address, self.nbytes, self)
        return torch.as_tensor(memory, device=torch.device("cuda", self._state.gpu.ordinal))

    def give_back(self) -> None:
        self._state.unmap()

    def take(self) -> None:
        self._state.map()

    def copy_out(self) -> None:
        began = time.monotonic()
        host = self._state.host_memory(self.nbytes)
        self.pinning_s = time.monotonic() - began
        self._state.copy("cuMemcpyDtoHAsync", host, self.address, self.nbytes)
        self.has_copy = True

    def copy_in(self) -> None:
        """The host memory stays for the next time, because page-locking takes longer than the copy."""
        self._state.copy("cuMemcpyHtoDAsync", self.address, self._state.host_memory(self.nbytes), self.nbytes)


class _Mapping:
    """A reserved range of addresses of a GPU, the memory that is mapped there, and page-locked memory beside it."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.gpu = gpu
        driver = bindings()
        self._memory = driver.CUmemAllocationProp()
        self._memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._memory.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory.location.id = gpu.ordinal
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._memory.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._handle: Any = None
        self._host: int | None = None
        granule = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._size = round_up(nbytes, int(self._call("cuMemGetAllocationGranularity", self._memory, granule)))
        self.address = int(self._call("cuMemAddressReserve", self._size, 0, 0, 0))

    def map(self) -> None:
        """Map new memory to the addresses."""
        try:
            handle = self._call("cuMemCreate", self._size, self._memory, 0)
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, total = self._call("cuMemGetInfo")
            raise PlacementError(
                f"{self._size} bytes of device memory were asked for; {free} of {total} are free on GPU {self.gpu.uuid}"
            ) from error
        try:
            self._call("cuMemMap", self.address, self._size, 0, handle, 0)
        except CudaError:
            self._call("cuMemRelease", handle)
            raise
        self._handle = handle
        try:
            self._call("cuMemSetAccess", self.address, self._size, [self._access], 1)
        except CudaError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Unmap the memory and give it back. The device must be synchronised."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._call("cuMemUnmap", self.address, self._size)
            self._call("cuMemRelease", handle)

    def host_memory(self, nbytes: int) -> int:
        """Return the address of page-locked host memory; the first call allocates it."""
        if self._host is None:
            try:
                self._host = int(self._call("cuMemHostAlloc", nbytes, bindings().CU_MEMHOSTALLOC_PORTABLE))
            except CudaError as error:
                raise PlacementError(
                    f"{nbytes} bytes of page-locked host memory were refused for weights that sleep: {error}; give the "
                    "host more memory, or call sleep(copy=False) and load the weights afterwards"
                ) from error
        return self._host

    def copy(self, function: str, to: int, start: int, nbytes: int) -> None:
        """Enqueue a copy on the default stream."""
        self._call(function, to, start, nbytes, 0)

    def free(self) -> None:
        """Give everything back, after all work of the device: what used the memory may still be enqueued."""
        self.gpu.synchronise()
        self.unmap()
        self._call("cuMemAddressFree", self.address, self._size)
        if self._host is not None:
            self._call("cuMemFreeHost", self._host)

    def _call(self, name: str, *arguments: object) -> Any:
        with self.gpu.current():
            return call(name, *arguments)
