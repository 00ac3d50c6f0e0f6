"""One GPU of this process, and its primary context: the one that torch uses too."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raymoe.device.driver import bindings, call
from raymoe.errors import CudaError

LAST_DEFAULT_STREAM = 2
"""The default stream is 0; 1 and 2 name its two kinds."""


def architecture(capability: tuple[int, int]) -> str:
    """What code for such a GPU is compiled for. From Hopper on with the features that only this very GPU has.

    >>> architecture((9, 0)), architecture((10, 0)), architecture((8, 6))
    ('sm_90a', 'sm_100a', 'sm_86')
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@dataclass(frozen=True)
class Gpu:
    """What a kernel needs to know of its GPU.

    - **The context lives as long as this.** `open` retains it, `close` gives it up, and the driver destroys it only
      when everybody who retained it, torch included, has done so.
    - **Two contexts are never taken for one another.** `context_id` is used once in a process, unlike an address.
    """

    ordinal: int
    name: str
    uuid: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int
    """The most dynamic and static shared memory that one block can have."""
    context: Any
    context_id: int
    address: int
    """Of the context, to compare with."""
    get_current: Callable[[], Any]
    """The driver's question, bound once: looking it up costs more than asking."""

    @classmethod
    def open(cls, ordinal: int = 0) -> Gpu:
        """The `ordinal`-th of the GPUs that this process sees."""
        call("cuInit", 0)
        found = call("cuDeviceGetCount")
        if not 0 <= ordinal < found:
            raise CudaError(f"GPU {ordinal} asked for; this process sees {found}, numbered from 0")
        device = call("cuDeviceGet", ordinal)
        kinds = bindings().CUdevice_attribute

        def attribute(name: str) -> int:
            return int(call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

        capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
        sms, shared = attribute("MULTIPROCESSOR_COUNT"), attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        name = call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
        identity = str(uuid.UUID(bytes=bytes(call("cuDeviceGetUuid", device).bytes)))
        context = call("cuDevicePrimaryCtxRetain", device)
        try:
            context_id = int(call("cuCtxGetId", context))
        except CudaError:
            call("cuDevicePrimaryCtxRelease", device)
            raise
        return cls(
            ordinal,
            name,
            identity,
            capability,
            sms,
            shared,
            context,
            context_id,
            int(context),
            bindings().cuCtxGetCurrent,
        )

    @property
    def arch(self) -> str:
        return architecture(self.capability)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU the calling thread's; what was before comes back. Threads of Ray have none of their own."""
        call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    def is_current(self) -> bool:
        """Whether this GPU is the calling thread's already: cheaper to ask than to push and pop."""
        code, context = self.get_current()
        return not code and int(context) == self.address

    @contextmanager
    def current_for(self, stream: int) -> Iterator[None]:
        """Make current what a stream belongs to: a default stream is that of the current context, which may be a green
        one of this GPU."""
        if stream <= LAST_DEFAULT_STREAM and self.green_context():
            yield
            return
        with self.current():
            yield

    def green_context(self) -> int:
        """The calling thread's context where it is another one of this GPU, else 0."""
        _, context = self.get_current()
        if int(context) in (0, self.address) or int(call("cuCtxGetDevice")) != self.ordinal:
            return 0
        return int(context)

    def synchronise(self) -> None:
        """Until everything that was asked of this GPU is done."""
        with self.current():
            call("cuCtxSynchronize")

    def close(self) -> None:
        """Give up the context; once, after everything that was made in it is closed."""
        call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", self.ordinal))


# A few 64-bit words in host memory that the GPU reads and writes too.


class HostWords:
    """Zeroed words, page-locked and mapped. `words[i]` is one aligned access: the old value or the new one."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        flags = bindings().CU_MEMHOSTALLOC_DEVICEMAP | bindings().CU_MEMHOSTALLOC_PORTABLE
        self._gpu = gpu
        with gpu.current():
            self._address = int(call("cuMemHostAlloc", count * 8, flags))
            ctypes.memset(self._address, 0, count * 8)
            try:
                self._device_address = int(call("cuMemHostGetDevicePointer", self._address, 0))
            except BaseException:
                call("cuMemFreeHost", self._address)
                raise
        self.words = (ctypes.c_uint64 * count).from_address(self._address)
        self._closed = False

    def device_address(self, index: int = 0) -> int:
        """Where the GPU finds a word."""
        return self._device_address + index * 8

    def close(self) -> None:
        """Free the words. Nothing on the GPU may use them any more, nor anybody a view of `words`."""
        if not self._closed:
            self._closed = True
            self.words = (ctypes.c_uint64 * len(self.words))()  # who still looks finds zeros, not freed memory
            with self._gpu.current():
                call("cuMemFreeHost", self._address)
