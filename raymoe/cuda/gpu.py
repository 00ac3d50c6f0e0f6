"""One GPU of this process, and its primary context, which torch uses too."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raymoe.cuda.driver import bindings, call
from raymoe.errors import CudaError

LAST_DEFAULT_STREAM = 2
"""The default stream is 0; 1 and 2 are the numbers of its two kinds."""


def architecture(capability: tuple[int, int]) -> str:
    """Return the architecture to compile for. From Hopper on it includes the features of exactly this architecture.

    >>> architecture((9, 0)), architecture((10, 0)), architecture((8, 6))
    ('sm_90a', 'sm_100a', 'sm_86')
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@dataclass(frozen=True)
class Gpu:
    """A GPU, its properties and its primary context.

    - **The context lives as long as this.** `open` retains it and `close` releases it. The driver destroys it when all
      users, torch included, have released it.
    - **`context_id` identifies a context.** It is used once in a process; an address can be used again.
    """

    ordinal: int
    name: str
    uuid: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int
    """The most shared memory of one block, dynamic and static together."""
    context: Any
    context_id: int
    address: int
    """The context's address, for comparisons."""
    get_current: Callable[[], Any]
    """The driver's cuCtxGetCurrent, bound once: the lookup costs more than the call."""

    @classmethod
    def open(cls, ordinal: int = 0) -> Gpu:
        """Open a GPU by its number among the GPUs that this process sees."""
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise CudaError(f"GPU {ordinal} asked for; this process sees {count}, numbered from 0")
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
        """Make this GPU's context the calling thread's inside the `with`. Threads of Ray have no current context."""
        call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    def is_current(self) -> bool:
        """Return whether this GPU's context is the calling thread's already. Cheaper than a push and a pop."""
        code, context = self.get_current()
        return not code and int(context) == self.address

    @contextmanager
    def current_for(self, stream: int) -> Iterator[None]:
        """Make the context of a stream current inside the `with`.

        A default stream belongs to the current context, which may be a green context of this GPU.
        """
        if stream <= LAST_DEFAULT_STREAM and self.green_context():
            yield
            return
        with self.current():
            yield

    def green_context(self) -> int:
        """Return the address of the calling thread's context if it is another context of this GPU, else 0."""
        _, context = self.get_current()
        if int(context) in (0, self.address) or int(call("cuCtxGetDevice")) != self.ordinal:
            return 0
        return int(context)

    def synchronise(self) -> None:
        """Wait until all work of this context is done."""
        with self.current():
            call("cuCtxSynchronize")

    def close(self) -> None:
        """Release the context. Call this once, after all that was made in the context is closed."""
        call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", self.ordinal))


# Host memory that the GPU reads and writes too.


class HostWords:
    """64-bit words in page-locked, mapped host memory, zero at first.

    `words[i]` is one aligned access, so it gives the old value or the new one.
    """

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
        """Return the address of a word on the GPU."""
        return self._device_address + index * 8

    @property
    def memory(self) -> int:
        """The words, as a kernel parameter."""
        return self._device_address

    def read(self, first: int, count: int) -> list[int]:
        """Read some words. Each is the old value or the new one."""
        values: list[int] = self.words[first : first + count]
        return values

    def close(self) -> None:
        """Free the words. No kernel may use them any more, and no view of `words` may be used."""
        if not self._closed:
            self._closed = True
            self.words = (ctypes.c_uint64 * len(self.words))()  # a late reader finds zeros, not freed memory
            with self._gpu.current():
                call("cuMemFreeHost", self._address)
