"""Launch kernels of `raymoe.device.pipe` on the current stream of a tensor's GPU. A process loads each of them once."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raymoe.device.current import capturing, on
from raymoe.device.gpu import Gpu
from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Function, Kernels, Launch, Shape
from raymoe.device.params import Params
from raymoe.device.pipe_shape import PipeShape, blocks_of
from raymoe.device.tile_counters import TileCounters
from raymoe.errors import ConfigError, CudaError

if TYPE_CHECKING:
    import torch

LEAST_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class KernelCall:
    """A kernel, its blocks and its parameters. The blocks share `tiles`, of which each takes `at_once` at a time.

    `blocks_of_sm`, `balanced` and `dynamic` are those of PipeShape. The parameters of a dynamic kernel have a field
    `work`, whose counter is set at each launch. An `early` kernel may begin before the one before it in the stream has
    ended, and waits for that itself. No kernel is both: the launches of a stream share a counter.
    """

    source: KernelSource
    threads: int
    shared_bytes: int
    params: Params
    tiles: int
    at_once: int = 1
    blocks_of_sm: int = 1
    balanced: bool = False
    dynamic: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        assert not (self.dynamic and self.early), self.source.stem

    @classmethod
    def of(cls, source: KernelSource, shape: PipeShape, params: Params, tiles: int) -> KernelCall:
        spread = (shape.at_once, shape.blocks_of_sm, shape.balanced, shape.dynamic)
        return cls(source, shape.threads, shape.shared_bytes, params, tiles, *spread)

    def blocks(self, sms: int) -> int:
        """The number of blocks on so many SMs."""
        parts = max(1, -(-self.tiles // self.at_once))
        return blocks_of(parts, sms * self.blocks_of_sm, balanced=self.balanced)


@dataclass
class _Device:
    """The kernels of one GPU, and their launches."""

    gpu: Gpu
    kernels: Kernels
    lock: threading.Lock = field(default_factory=threading.Lock)
    functions: dict[KernelSource, Function] = field(default_factory=dict)
    launches: dict[tuple[KernelSource, Shape], Launch] = field(default_factory=dict)
    counters: TileCounters = field(init=False)

    def __post_init__(self) -> None:
        self.counters = TileCounters(self.gpu)

    def run(self, call: KernelCall, sms: int | None, device: torch.device) -> None:
        import torch

        function = self._function(call.source, device)
        blocks = call.blocks(self.gpu.sms if sms is None else min(sms, self.gpu.sms))
        shape = Shape(blocks, call.threads, call.shared_bytes)
        stream = torch.cuda.current_stream(device).cuda_stream
        with self.lock:  # a launch copies its fields, which all threads share
            launch = self.launches.get((call.source, shape))
            if launch is None:
                launch = Launch(function, shape, call.params, waits=False, early=call.early)
                self.launches[call.source, shape] = launch
            packed = call.params.packed()
            ctypes.memmove(ctypes.addressof(launch.fields), ctypes.addressof(packed), ctypes.sizeof(packed))
            if call.dynamic:
                new = capturing(device)
                launch.fields.work.taken = self.counters.new() if new else self.counters.of_stream(stream)
            launch(stream)

    def _function(self, source: KernelSource, device: torch.device) -> Function:
        function = self.functions.get(source)
        if function is None:
            if capturing(device):
                raise ConfigError(
                    f"the first call of {source.stem} with these shapes is inside a CUDA graph's capture, where no "
                    "kernel can be loaded; call it once before the capture"
                )
            function = self.functions[source] = self.kernels.function(source)
        return function


_LOCK = threading.Lock()
_devices: dict[int, _Device] = {}


def launch(call: KernelCall, sms: int | None, device: torch.device) -> None:
    """Launch on the current stream of `device`, on at most `sms` SMs. Nothing to do if there are no tiles."""
    if call.tiles:
        with on(device):
            _device(device.index).run(call, sms, device)


def _device(ordinal: int) -> _Device:
    with _LOCK:
        found = _devices.get(ordinal)
        if found is None:
            gpu = Gpu.open(ordinal)
            if gpu.capability < LEAST_CAPABILITY:
                gpu.close()
                raise CudaError(
                    f"kernels with bulk copies need compute capability {LEAST_CAPABILITY}; {gpu.name} has "
                    f"{gpu.capability}"
                )
            found = _devices[ordinal] = _Device(gpu, Kernels(gpu))
        return found


def gpu_sms(device: torch.device) -> int:
    """The number of SMs of a tensor's GPU."""
    return _device(device.index).gpu.sms
