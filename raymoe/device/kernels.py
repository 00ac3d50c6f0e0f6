"""Kernels loaded on a GPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from raymoe.device.driver import CudaError, bindings, call
from raymoe.device.gpu import Gpu
from raymoe.device.jit import Compiler, KernelSource, shared_compiler


@dataclass(frozen=True)
class Function:
    """A kernel on a GPU, ready to be launched, also inside a capture. Valid until the `Kernels` it is of is closed."""

    gpu: Gpu
    name: str
    handle: Any
    source: KernelSource
    registers: int
    static_shared: int
    local_bytes: int
    max_threads: int

    @property
    def max_dynamic_shared(self) -> int:
        return self.gpu.shared_bytes - self.static_shared

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        """How many blocks of such a launch the whole GPU holds at once, if it has nothing else to do."""
        with self.gpu.current():
            each = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.handle, threads, shared_bytes)
        return int(each) * self.gpu.sms


class Kernels:
    """What is loaded on one GPU: each source once, whole or not at all. Any thread may ask.

    Plans get their functions before any capture: whether the driver loads code inside one is the driver's affair.
    """

    def __init__(self, gpu: Gpu, compiler: Compiler | None = None) -> None:
        self.gpu = gpu
        self.compiler = compiler or shared_compiler()
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Function] = {}

    def function(self, source: KernelSource, name: str | None = None) -> Function:
        """The kernel `name` of a source; by default the one that is called like its file."""
        name = name or source.stem
        compiled = self.compiler.compiled(source, self.gpu.arch)
        with self._lock, self.gpu.current():
            function = self._functions.get((compiled.key, name))
            if function is None:
                loaded = compiled.key in self._modules
                module = self._modules[compiled.key] if loaded else call("cuModuleLoadData", compiled.cubin)
                try:
                    function = self._look_up(module, source, name)
                except BaseException:
                    if not loaded:
                        call("cuModuleUnload", module)
                    raise
                self._modules[compiled.key] = module
                self._functions[compiled.key, name] = function
            return function

    def _look_up(self, module: Any, source: KernelSource, name: str) -> Function:
        try:
            handle = call("cuModuleGetFunction", module, name.encode())
        except CudaError as error:
            raise CudaError(f'{source.stem}.cu has no kernel {name} (extern "C" __global__): {error}') from error
        # Modules load lazily by default: a first launch inside a capture, or beside a kernel that waits for a peer,
        # would be the moment at which the driver wants to load the code.
        call("cuFuncLoad", handle)
        kinds = bindings().CUfunction_attribute

        def attribute(kind: str) -> int:
            return int(call("cuFuncGetAttribute", getattr(kinds, f"CU_FUNC_ATTRIBUTE_{kind}"), handle))

        function = Function(
            gpu=self.gpu,
            name=name,
            handle=handle,
            source=source,
            registers=attribute("NUM_REGS"),
            static_shared=attribute("SHARED_SIZE_BYTES"),
            local_bytes=attribute("LOCAL_SIZE_BYTES"),
            max_threads=attribute("MAX_THREADS_PER_BLOCK"),
        )
        # All that a block can have, once: what a launch takes of it is the launch's own affair.
        most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", handle, most, function.max_dynamic_shared)
        return function

    def close(self) -> None:
        """Unload everything, when nothing of it runs and no graph holds it any more."""
        with self._lock, self.gpu.current():
            self._functions.clear()
            while self._modules:
                call("cuModuleUnload", self._modules.popitem()[1])
