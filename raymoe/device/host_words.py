"""A few 64-bit words in host memory that the GPU reads and writes too."""

from __future__ import annotations

import ctypes

from raymoe.device.driver import bindings, call
from raymoe.device.gpu import Gpu


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
