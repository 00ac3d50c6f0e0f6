"""Load kernels on a GPU, and launch them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from raymoe.cuda.driver import bindings, call, failure
from raymoe.cuda.gpu import Gpu
from raymoe.cuda.jit import Compiler, KernelSource, shared_compiler
from raymoe.cuda.params import Params, address_setter
from raymoe.errors import ConfigError, CudaError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Function:
    """A kernel on a GPU, ready to be launched, also inside a capture. Valid until its `Kernels` is closed."""

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
        """Return the number of blocks of such a launch that an idle GPU holds at once."""
        with self.gpu.current():
            blocks_of_sm = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.handle, threads, shared_bytes)
        return int(blocks_of_sm) * self.gpu.sms


class Kernels:
    """The kernels that are loaded on one GPU, each source once. Safe from any thread.

    Plans must get their functions before a capture, because a driver may refuse to load code inside one.
    """

    def __init__(self, gpu: Gpu, compiler: Compiler | None = None) -> None:
        self.gpu = gpu
        self.compiler = compiler or shared_compiler()
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Function] = {}

    def function(self, source: KernelSource, name: str | None = None) -> Function:
        """Compile and load a source if it is not yet, and return its kernel `name`, by default the file's name."""
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
        # Modules load lazily by default: the driver would load the code at the first launch, which may be inside a
        # capture or beside a kernel that waits for a peer.
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
        # The most that a block can have, set once; each launch chooses its own amount.
        most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", handle, most, function.max_dynamic_shared)
        return function

    def close(self) -> None:
        """Unload everything. No kernel may be running, and no graph may hold one."""
        with self._lock, self.gpu.current():
            self._functions.clear()
            while self._modules:
                call("cuModuleUnload", self._modules.popitem()[1])


# Launches, by `cuLaunchKernelEx` of the driver's binding: `cuda.core.launch` takes no structs by value.


Field: TypeAlias = "int | torch.Tensor | None"
"""The value of a kernel parameter: a number, a tensor for its address, or None for null."""


def value_of(field: Field) -> int:
    """Return the value of a field as the kernel gets it.

    >>> value_of(None), value_of(7)
    (0, 7)
    """
    return field if isinstance(field, int) else 0 if field is None else field.data_ptr()


@dataclass(frozen=True)
class Shape:
    """The blocks of a launch, the threads of a block, and the dynamic shared memory of a block.

    An `early` launch may begin before the kernel before it in the stream has ended; the kernel waits for that by
    ptx::wait_for_kernel_before.
    """

    blocks: int
    threads: int
    shared_bytes: int = 0
    early: bool = False


class _Enqueuer:
    """A kernel with the driver's description of its launch, which a call reuses."""

    def __init__(self, function: Function, shape: Shape) -> None:
        self.function = function
        self.lock = threading.Lock()
        """Held from setting values to the end of the driver's call, which releases the interpreter's lock."""
        self._blocks, self._block = shape.blocks, (shape.threads, shape.shared_bytes)
        self._config = bindings().CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = shape.blocks, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = shape.threads, 1, 1
        self._config.sharedMemBytes = shape.shared_bytes
        self._config.numAttrs = 0
        if shape.early:
            attribute = bindings().CUlaunchAttribute()
            attribute.id = bindings().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._config.attrs = [attribute]
            self._config.numAttrs = 1
        self._config.hStream = 0
        self._stream = 0
        self._launch = bindings().cuLaunchKernelEx

    def _enqueue(self, stream: int, pointers_at: int) -> None:
        """Launch with the parameters that `pointers_at` leads to. The caller holds the lock."""
        gpu = self.function.gpu
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        if gpu.is_current():
            (code,) = self._launch(self._config, self.function.handle, pointers_at, 0)
        else:
            with gpu.current_for(stream):
                (code,) = self._launch(self._config, self.function.handle, pointers_at, 0)
        if code:
            raise failure("cuLaunchKernelEx", code)


class Launch(_Enqueuer):
    """A kernel, its shape and its parameters, packed and checked once. A call changes some parameters and launches it.

    `fields` is the C struct that the kernel gets. One thread at a time may set its fields between two calls; ctypes
    checks no value. A capture copies the struct, so replays use the values of the captured call. Values that change
    from run to run must lie in memory that the struct points to.
    """

    def __init__(
        self,
        function: Function,
        shape: Shape,
        params: Params,
        *,
        waits: bool = True,
        addresses: Sequence[str] = (),
        memory: Mapping[str, Field] | None = None,
    ) -> None:
        """`waits`: blocks wait for peers or for one another, so all must be resident at once.

        `memory` has values that replace fields of `params`. `addresses` are adjacent fields of 64 bits, which
        `set_addresses` sets all at once: the fastest way.
        """
        _check(function, shape, params, waits)
        super().__init__(function, shape)
        self.shape = shape
        self.params = params
        self.fields: Any = params.packed()
        self.sms = min(shape.blocks, function.gpu.sms)
        """SMs that the launch occupies: blocks go to SMs without a block, as long as there are any."""
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.fields))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._memory = dict(memory or {})  # keeps tensors alive while the kernel may use their addresses
        for name, field in self._memory.items():
            setattr(self.fields, name, value_of(field))
        if addresses:
            self.set_addresses = address_setter(self.fields, type(params), addresses)

    def enqueue(self, stream: int) -> None:
        """Launch on a stream, given as a number (`torch.cuda.Stream.cuda_stream`)."""
        with self.lock:
            self._enqueue(stream, self._pointers_at)

    def __call__(self, stream: int, **changed: Field) -> None:
        """Change some parameters, which later launches keep, and launch on a stream."""
        fields = self.fields
        for name, field in changed.items():  # `value_of` inlined, to save a call each
            setattr(fields, name, field if isinstance(field, int) else 0 if field is None else field.data_ptr())
        with self.lock:
            self._enqueue(stream, self._pointers_at)


class SizedLaunch(_Enqueuer):
    """A kernel whose blocks wait for nothing, so that each call gives the shape. The parameters belong to the caller.

    `early`: as in `Shape`.
    """

    def __init__(self, function: Function, *, early: bool = False) -> None:
        super().__init__(function, Shape(1, 1, early=early))

    def check(self, shape: Shape, params: Params) -> None:
        """Raise unless the kernel takes this shape and these parameters."""
        _check(self.function, shape, params, False)

    def enqueue(self, stream: int, pointers_at: int, blocks: int, block: tuple[int, int]) -> None:
        """Launch blocks of so many threads and shared bytes, which are checked. The caller holds the lock."""
        if blocks != self._blocks:
            self._config.gridDimX = self._blocks = blocks
        if block != self._block:
            self._config.blockDimX, self._config.sharedMemBytes = block
            self._block = block
        self._enqueue(stream, pointers_at)


def _check(function: Function, shape: Shape, params: Params, waits: bool, /) -> None:
    name = function.name
    if type(params) not in function.source.structs:
        known = ", ".join(struct.__name__ for struct in function.source.structs) or "none"
        raise ConfigError(
            f"kernel {name} launched with {type(params).__name__}, whose layout the compiler has not checked; add it "
            f"to the structs of its source ({known})"
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
    if not waits:
        return
    # All others would wait for a block that is not resident.
    resident = function.resident_blocks(shape.threads, shape.shared_bytes)
    if shape.blocks > resident:
        raise ConfigError(
            f"kernel {name} launched with {shape.blocks} blocks; {function.gpu.name} holds {resident} of "
            f"{shape.threads} threads and {shape.shared_bytes} bytes of shared memory at once, so ask for fewer"
        )
