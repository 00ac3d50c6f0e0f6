"""A GPU without a driver, for tensors on the CPU: it records the launches of functions over rows."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.cuda import graph
from raymoe.cuda import launch as launch_module
from raymoe.cuda.jit import KernelSource
from raymoe.rows import row_launch, tile_counters
from raymoe.rows.row_launch import RowsDevice

ORDINAL_OF_CPU = -1
"""`get_device()` of tensors on the CPU."""


@dataclass(frozen=True)
class Enqueued:
    """A launch: its kernel and everything that the driver would copy."""

    source: KernelSource
    stream: int
    blocks: int
    threads: int
    shared_bytes: int
    early: bool
    params: bytes

    def field(self, name: str) -> int:
        """The value of a parameter, as an unsigned number."""
        offset, size = self.source.structs[0].place(name)
        return int.from_bytes(self.params[offset : offset + size], "little")


class Counters:
    """The memory of counters: gives addresses, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: RowsDriver) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.mode, self._driver = 0, driver
        flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
        found = SimpleNamespace(CUstream_flags=flags, CUstreamCaptureMode=modes)
        for module in (tile_counters, graph):
            monkeypatch.setattr(module, "bindings", lambda: found)
            monkeypatch.setattr(module, "call", self._call)
        monkeypatch.setattr(tile_counters, "TOGETHER", 3)

    def _call(self, name: str, *arguments: Any) -> Any:
        if name == "cuStreamGetId":
            return self._driver.stream_id(arguments[0])
        if name == "cuCtxGetId":
            return self._driver.context_ids[arguments[0]]
        self.calls.append((name, *arguments))
        if name == "cuThreadExchangeStreamCaptureMode":
            before, self.mode = self.mode, arguments[0]
            return before
        assert self.mode == 2, f"{name} would invalidate a capture"
        allocated = [each for each in self.calls if each[0] == "cuMemAlloc"]
        return {"cuMemAlloc": 0x1000 * len(allocated), "cuStreamCreate": 99}.get(name)


class RowsDriver:
    """Records launches in `enqueued`. `stream` is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enqueued: list[Enqueued] = []
        self.loaded: list[KernelSource] = []
        self.stream, self.green = 5, 0
        self.generation = 0
        """Changes the id of every stream, as if each were destroyed and made again with its number."""
        self.context_ids: dict[int, int] = {}
        self.during_launch: Callable[[], object] = lambda: None
        """Runs in the driver's call, before the parameters are copied."""
        found = SimpleNamespace(
            CUlaunchConfig=SimpleNamespace,
            CUlaunchAttribute=lambda: SimpleNamespace(id=None, value=SimpleNamespace()),
            CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
            cuLaunchKernelEx=self._launch,
        )
        monkeypatch.setattr(launch_module, "bindings", lambda: found)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.stream, raising=False)
        self.capturing = False
        monkeypatch.setattr(row_launch, "capturing", lambda _: self.capturing)
        monkeypatch.setattr("raymoe.rows.row_launch.takes", lambda _: True)
        self.gpu: Any = SimpleNamespace(
            sms=132,
            ordinal=0,
            name="no GPU",
            is_current=lambda: True,
            current=nullcontext,
            current_for=nullcontext,
            green_context=lambda: self.green,
        )
        self.device = RowsDevice(self.gpu, SimpleNamespace(function=self._load))  # type: ignore[arg-type]
        monkeypatch.setattr(row_launch, "_devices", {ORDINAL_OF_CPU: self.device})

    def stream_id(self, stream: int) -> int:
        if stream == 2:  # of each thread
            return 1000 * threading.get_ident() + self.generation
        return 10 * stream + self.generation

    def launches_of(self, call: Callable[[], object]) -> list[Enqueued]:
        """What a call enqueues."""
        begin = len(self.enqueued)
        call()
        return self.enqueued[begin:]

    def _load(self, source: KernelSource) -> Any:
        self.loaded.append(source)
        return SimpleNamespace(
            gpu=self.gpu, handle=source, name=source.stem, source=source, max_threads=1024, max_dynamic_shared=227 << 10
        )

    def _launch(self, config: Any, source: KernelSource, pointers: int, _extra: int) -> tuple[int]:
        self.during_launch()
        at = ctypes.c_void_p.from_address(pointers).value
        assert at is not None
        params = bytes((ctypes.c_char * source.structs[0].nbytes()).from_address(at))
        shape = int(config.hStream), config.gridDimX, config.blockDimX, config.sharedMemBytes
        self.enqueued.append(Enqueued(source, *shape, early=bool(config.numAttrs), params=params))
        return (0,)
