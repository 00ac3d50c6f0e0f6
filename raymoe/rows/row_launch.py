"""Launch kernels over rows on the current stream of a tensor's GPU. A process loads a kernel once.

A `KernelCall` is everything about one launch, computed and checked for its tensors. `Prepared` launches the same kernel
for more tensors of that kind: it sets only addresses and the number of rows, which takes a tenth of the time.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raymoe.cuda.current import capturing
from raymoe.cuda.gpu import Gpu
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Function, Kernels, Shape, SizedLaunch
from raymoe.cuda.params import Params
from raymoe.errors import ConfigError, CudaError
from raymoe.rows.pipe_shape import Limits, PipeShape, blocks_of
from raymoe.rows.tile_counters import TileCounters

LEAST_CAPABILITY = (9, 0)
MOST_TILES = 2**31
MOST_KINDS = 512
"""Kinds of tensors that have prepared launches on a GPU; the oldest is dropped first. To prepare a kind again loads no
kernel."""


def takes(x: torch.Tensor) -> bool:
    """Whether kernels do the work on this tensor: on GPUs that have bulk copies."""
    return x.is_cuda and _has_bulk_copies(x.get_device())


@functools.cache
def _has_bulk_copies(ordinal: int) -> bool:
    return torch.cuda.get_device_capability(ordinal) >= LEAST_CAPABILITY


@dataclass(frozen=True)
class KernelCall:
    """A kernel, its blocks and its parameters. The blocks share `tiles`; a block takes `at_once` of them at a time.

    `blocks_of_sm`, `balanced` and `dynamic` are those of PipeShape. The parameters of a dynamic kernel have a field
    `work`, whose counter is set at each launch. An `early` kernel may begin before the one before it in the stream has
    ended, and waits for that itself. No kernel is both: the launches of a stream share a counter.

    From one number of rows in `breaks` to the next, calls with tensors of the same kind differ in nothing but their
    tiles, their addresses and the number of rows.
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
    breaks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.dynamic and self.early), self.source.stem

    @classmethod
    def of(
        cls, source: KernelSource, shape: PipeShape, params: Params, tiles: int, breaks: tuple[int, ...]
    ) -> KernelCall:
        spread = (shape.at_once, shape.blocks_of_sm, shape.balanced, shape.dynamic)
        return cls(source, shape.threads, shape.shared_bytes, params, tiles, *spread, breaks=breaks)

    def blocks(self, sms: int) -> int:
        """The number of blocks on `sms` SMs."""
        parts = max(1, -(-self.tiles // self.at_once))
        return blocks_of(parts, sms * self.blocks_of_sm, balanced=self.balanced)


class Prepared:
    """A kernel and its parameters, some of which a call sets. Safe from several threads."""

    def __init__(self, device: RowsDevice, call: KernelCall, sms: int | None, names: Sequence[str]) -> None:
        """`names`: the parameters that a call sets, of 32 or 64 bits."""
        self.call = call
        self._device, self._ordinal, self._current_stream = device, device.gpu.ordinal, device.current_stream
        self._launch = device.launch(call.source, call.early)
        self._launch.check(Shape(1, call.threads, call.shared_bytes), call.params)
        self._block = call.threads, call.shared_bytes
        self._at_once, self._most = call.at_once, call.blocks_of_sm * device.sms(sms)
        self._fields = call.params.packed()
        memory = memoryview(self._fields).cast("B")
        views = {4: memory.cast("I"), 8: memory.cast("Q")}
        places = [call.params.place(name) for name in names]
        self._places = [(views[size], offset // size) for offset, size in places]
        self._counter = (views[8], call.params.place("work.taken")[0] // 8) if call.dynamic else None
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._fields))
        self._pointers_at = ctypes.addressof(self._pointers)

    def blocks(self, tiles: int) -> int:
        """The number of blocks that share `tiles` tiles."""
        parts = -(-tiles // self._at_once)
        return blocks_of(parts, self._most, balanced=self.call.balanced) if parts > self._most > 0 else parts

    def __call__(self, tiles: int, values: Sequence[int]) -> None:
        """Launch on the current stream. Only the sizes of the values are checked."""
        if not tiles:
            return
        blocks, launch = self.blocks(tiles), self._launch
        stream = self._current_stream(self._ordinal)
        with launch.lock:  # the driver copies the parameters before it returns
            for (view, at), value in zip(self._places, values):  # noqa: B905  (strict would cost as much as the loop)
                view[at] = value
            if self._counter is not None:
                view, at = self._counter
                view[at] = self._device.counter(stream)
            launch.enqueue(stream, self._pointers_at, blocks, self._block)


class PreparedRows(Prepared):
    """A prepared kernel whose parameters have a field `work`, so a call gives the number of rows."""

    def __init__(self, device: RowsDevice, call: KernelCall, sms: int | None, names: Sequence[str]) -> None:
        super().__init__(device, call, sms, (*names, "work.rows", "work.tiles"))
        params: Any = call.params
        self._tile_rows, self._pieces = params.work.tile_rows, params.work.pieces

    def tiles(self, rows: int) -> int:
        """The number of tiles of `rows` rows."""
        tiles: int = -(-rows // self._tile_rows) * self._pieces
        if tiles >= MOST_TILES:
            raise too_many_tiles(rows)
        return tiles

    def of_rows(self, rows: int, values: Sequence[int]) -> None:
        """Launch for `rows` rows."""
        tiles = self.tiles(rows)
        self(tiles, [*values, rows, tiles])


def too_many_tiles(rows: int) -> ConfigError:
    return ConfigError(f"{rows} rows in one call; split them: a call takes {MOST_TILES} tiles")


@dataclass
class _Kind:
    """The prepared launches for tensors of one kind, by the interval of their rows."""

    breaks: tuple[int, ...]
    launches: dict[int, Any] = field(default_factory=dict)


class RowsDevice:
    """The kernels of one GPU, with a launch for each, and the launches that are prepared for kinds of tensors."""

    def __init__(self, gpu: Gpu, kernels: Kernels) -> None:
        self.gpu, self._kernels = gpu, kernels
        self._device = torch.device("cuda", gpu.ordinal)
        # The driver's number of the current stream, without a stream object; torch's compiled code uses this too.
        self.current_stream: Any = torch._C._cuda_getCurrentRawStream
        self._lock = threading.Lock()
        self._functions: dict[KernelSource, Function] = {}
        self.launches: dict[tuple[KernelSource, bool], SizedLaunch] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        self._counters = TileCounters(gpu)

    def find(self, kind: Hashable, rows: int) -> Any:
        """Return the launches that `keep` has for such tensors and about as many rows, or None."""
        known = self._kinds.get(kind)
        return None if known is None else known.launches.get(bisect_right(known.breaks, rows))

    def keep(self, kind: Hashable, rows: int, breaks: tuple[int, ...], prepared: Any) -> None:
        """Let `find` return `prepared`. `kind` has all that the kernel, its block and its parameters depend on."""
        with self._lock:
            known = self._kinds.get(kind)
            if known is None:
                while len(self._kinds) >= MOST_KINDS:
                    del self._kinds[next(iter(self._kinds))]
                known = self._kinds[kind] = _Kind(breaks)
            known.launches[bisect_right(breaks, rows)] = prepared

    def prepare(self, kind: Hashable, rows: int, call: KernelCall, names: Sequence[str]) -> Prepared:
        """Prepare a call on all SMs, and keep it. `names`: the parameters that a launch sets."""
        prepared = Prepared(self, call, None, names)
        self.keep(kind, rows, call.breaks, prepared)
        return prepared

    def launch_first(
        self,
        kind: Hashable,
        rows: int,
        values: Sequence[int] | None,
        call: KernelCall,
        limits: Limits,
        names: Sequence[str],
    ) -> None:
        """Launch the first call with tensors of a kind, and prepare later ones, which set `names` to `values`. Without
        values, or without tiles, nothing is prepared."""
        if values is None or not call.tiles:
            self.run(call, limits.sms)
            return
        prepared = PreparedRows(self, call, limits.sms, names)
        self.keep(kind, rows, call.breaks, prepared)
        prepared.of_rows(rows, values)

    def run(self, call: KernelCall, sms: int | None) -> None:
        """Launch a call as it is; without tiles there is nothing to do."""
        if call.tiles:
            Prepared(self, call, sms, ())(call.tiles, ())

    def sms(self, limit: int | None) -> int:
        return self.gpu.sms if limit is None else min(limit, self.gpu.sms)

    def launch(self, source: KernelSource, early: bool) -> SizedLaunch:
        launch = self.launches.get((source, early))
        if launch is None:
            function = self._function(source)
            with self._lock:
                launch = self.launches.setdefault((source, early), SizedLaunch(function, early=early))
        return launch

    def counter(self, stream: int) -> int:
        """The counter of tiles for a launch on this stream."""
        captured = capturing(self._device)
        with self._lock:
            return self._counters.new() if captured else self._counters.of_stream(stream)

    def _function(self, source: KernelSource) -> Function:
        function = self._functions.get(source)
        if function is None:
            if capturing(self._device):
                raise ConfigError(
                    f"the first call of {source.stem} with these shapes is inside a CUDA graph's capture, where no "
                    "kernel can be loaded; call it once before the capture"
                )
            function = self._functions[source] = self._kernels.function(source)
        return function


_LOCK = threading.Lock()
_devices: dict[int, RowsDevice] = {}


def device_of(ordinal: int) -> RowsDevice:
    """Return the device with this number, which is `get_device()` of a tensor."""
    device = _devices.get(ordinal)
    return _opened(ordinal) if device is None else device


def _opened(ordinal: int) -> RowsDevice:
    with _LOCK:
        device = _devices.get(ordinal)
        if device is None:
            gpu = Gpu.open(ordinal)
            if gpu.capability < LEAST_CAPABILITY:
                gpu.close()
                raise CudaError(
                    f"kernels with bulk copies need compute capability {LEAST_CAPABILITY}; {gpu.name} has "
                    f"{gpu.capability}"
                )
            device = _devices[ordinal] = RowsDevice(gpu, Kernels(gpu))
        return device
