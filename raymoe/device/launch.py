"""Launching a kernel.

By `cuLaunchKernelEx` of the driver's binding: `cuda.core.launch` takes no structs by value.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

from raymoe.device.driver import bindings, failure
from raymoe.device.kernels import Function
from raymoe.device.params import Params
from raymoe.job.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """How many blocks of how many threads, with how much dynamic shared memory each."""

    blocks: int
    threads: int
    shared_bytes: int = 0


class Launch:
    """A kernel, its shape and its parameters, packed and checked once; calling it only launches.

    `fields` is the C struct that the kernel is given. A caller may set fields of it between two calls, by one thread at
    a time; ctypes checks no value. A capture copies the struct, so the values of a captured call are fixed for its
    replays; what changes from run to run lies in memory that they point to.
    """

    def __init__(self, function: Function, shape: Shape, params: Params) -> None:
        _check(function, shape, params)
        self.function = function
        self.shape = shape
        self.params = params
        self.fields: Any = params.packed()
        self.sms = min(shape.blocks, function.gpu.sms)
        """Multiprocessors that it occupies: blocks go to those that have none, as long as there are some."""
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.fields))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._lock = threading.Lock()
        self._config = bindings().CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = shape.blocks, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = shape.threads, 1, 1
        self._config.sharedMemBytes = shape.shared_bytes
        self._config.numAttrs = 0
        self._config.hStream = 0
        self._stream = 0
        self._launch = bindings().cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        """Enqueue on a stream, given as a number (`torch.cuda.Stream.cuda_stream`)."""
        gpu = self.function.gpu
        with self._lock:
            if stream != self._stream:
                self._config.hStream = stream
                self._stream = stream
            if gpu.is_current():
                (code,) = self._launch(self._config, self.function.handle, self._pointers_at, 0)
            else:
                with gpu.current_for(stream):
                    (code,) = self._launch(self._config, self.function.handle, self._pointers_at, 0)
        if code:
            raise failure("cuLaunchKernelEx", code)


def _check(function: Function, shape: Shape, params: Params) -> None:
    name = function.name
    if type(params) not in function.source.structs:
        known = ", ".join(struct.__name__ for struct in function.source.structs) or "none"
        raise ConfigError(
            f"kernel {name} launched with {type(params).__name__}, whose layout the compiler has not checked; its "
            f"source names {known}"
        )
    if shape.blocks < 1 or not 1 <= shape.threads <= function.max_threads:
        raise ConfigError(
            f"kernel {name} launched as {shape.blocks} blocks of {shape.threads} threads; it takes at least one block, "
            f"of 1 to {function.max_threads} threads"
        )
    if not 0 <= shape.shared_bytes <= function.max_dynamic_shared:
        raise ConfigError(
            f"kernel {name} launched with {shape.shared_bytes} bytes of shared memory a block; {function.gpu.name} "
            f"leaves it {function.max_dynamic_shared}"
        )
    # Blocks wait for peers and for one another's tickets: one that found no place would be waited for in vain.
    resident = function.resident_blocks(shape.threads, shape.shared_bytes)
    if shape.blocks > resident:
        raise ConfigError(
            f"kernel {name} launched with {shape.blocks} blocks; {function.gpu.name} holds {resident} of "
            f"{shape.threads} threads and {shape.shared_bytes} bytes of shared memory at once, so ask for fewer"
        )
