"""The driver's calls that heaps in device memory need, on one GPU of this process."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from raymoe.device.driver import CudaMissing, bindings, call
from raymoe.device.gpu import Gpu
from raymoe.memory.cuda_ipc import HANDLE_BYTES

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_WORD_BYTES = 8


class GpuMemory:
    """`cuda_ipc.Device` on a real GPU. Any thread may call: each call makes the context its own while it lasts."""

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
