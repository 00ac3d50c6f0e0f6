"""A process loads each kernel once, and every launch gets the parameters of its own call. No driver is needed."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.device import graph, pipe_launch, tile_counters
from raymoe.device import kernels as launch_module
from raymoe.device.pipe import NormParams, RmsNorm, rms_norm_call
from raymoe.device.pipe_shape import Limits
from raymoe.errors import ConfigError

DEVICE = torch.device("cpu")


class Driver:
    """Records each launch: stream, blocks, and the parameters as the driver would copy them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enqueued: list[tuple[int, int, Any]] = []
        self.loaded: list[Any] = []
        self.stream = 5
        found = SimpleNamespace(CUlaunchConfig=SimpleNamespace, cuLaunchKernelEx=self._launch)
        monkeypatch.setattr(launch_module, "bindings", lambda: found)
        monkeypatch.setattr(launch_module, "_check", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=self.stream))
        gpu: Any = SimpleNamespace(
            sms=132, is_current=lambda: True, current=nullcontext, green_context=lambda: self.green
        )
        self.green = 0
        self._function = SimpleNamespace(gpu=gpu, handle=7, resident_blocks=lambda *_: 528)
        self.device = pipe_launch._Device(gpu, SimpleNamespace(function=self._load))  # type: ignore[arg-type]

    def _load(self, source: Any) -> Any:
        self.loaded.append(source)
        return self._function

    def _launch(self, config: Any, _handle: int, pointers: int, _extra: int) -> tuple[int]:
        at = ctypes.c_void_p.from_address(pointers).value
        params = NormParams._struct.from_buffer_copy((ctypes.c_char * NormParams.nbytes()).from_address(at))
        self.enqueued.append((int(config.hStream), config.gridDimX, params))
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


class Words:
    """Stands for the memory of counters: allocates blocks of addresses, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.mode = 0
        flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
        found = SimpleNamespace(CUstream_flags=flags, CUstreamCaptureMode=modes)
        for module in (tile_counters, graph):
            monkeypatch.setattr(module, "bindings", lambda: found)
            monkeypatch.setattr(module, "call", self._call)
        monkeypatch.setattr(tile_counters, "TOGETHER", 3)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        if name == "cuThreadExchangeStreamCaptureMode":
            before, self.mode = self.mode, arguments[0]
            return before
        assert self.mode == 2, f"{name} would invalidate a capture"
        allocated = [each for each in self.calls if each[0] == "cuMemAlloc"]
        return {"cuMemAlloc": 0x1000 * len(allocated), "cuStreamCreate": 99}.get(name)


def norm(rows: int, sms: int | None = None) -> tuple[RmsNorm, Any]:
    call = RmsNorm(torch.zeros(rows, 64), torch.zeros(64), torch.zeros(rows, 64))
    return call, rms_norm_call(call, Limits(sms))


def test_each_launch_gets_the_parameters_of_its_call(driver: Driver) -> None:
    (first, one), (second, two) = norm(300), norm(300)
    for made in (one, two, one):
        driver.device.run(made, None, DEVICE)
        driver.stream += 1
    assert [params.inputs[0].at for _, _, params in driver.enqueued] == [
        first.x.data_ptr(),
        second.x.data_ptr(),
        first.x.data_ptr(),
    ]
    assert [stream for stream, _, _ in driver.enqueued] == [5, 6, 7]
    assert len(driver.loaded) == 1
    assert len(driver.device.launches) == 1


def test_blocks_fill_the_gpu_or_the_sms_that_are_asked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    Words(monkeypatch)
    for rows, sms in ((1000, None), (100_000, None), (100_000, 48), (300, 48)):
        driver.device.run(norm(rows, sms)[1], sms, DEVICE)
    # 1000 rows are 32 tiles of 32 rows, 300 are 10. On the whole GPU many rows go without a pipeline, 4 in a block.
    assert [blocks for _, blocks, _ in driver.enqueued] == [32, 25_000, 48, 10]


def test_a_first_call_inside_a_capture_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_launch, "capturing", lambda _: True)
    made = norm(300)[1]
    with pytest.raises(ConfigError, match="call it once before the capture"):
        driver.device.run(made, None, DEVICE)
    monkeypatch.setattr(pipe_launch, "capturing", lambda _: False)
    driver.device.run(made, None, DEVICE)
    monkeypatch.setattr(pipe_launch, "capturing", lambda _: True)
    driver.device.run(made, None, DEVICE)
    assert len(driver.enqueued) == 2


def test_launches_that_may_run_at_once_have_counters_of_their_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words(monkeypatch)
    call = norm(100_000, 48)[1]
    assert call.dynamic

    def counters(stream: int, launches: int, captured: bool = False) -> list[int]:
        monkeypatch.setattr(pipe_launch, "capturing", lambda _: captured)
        driver.stream, begin = stream, len(driver.enqueued)
        for _ in range(launches):
            driver.device.run(call, None, DEVICE)
        return [params.work.taken for _, _, params in driver.enqueued[begin:]]

    assert counters(5, 2) == [0x1000, 0x1000], "the launches of a stream run one after the other"
    assert counters(6, 1) == [0x1020]
    assert counters(5, 3, captured=True) == [0x1040, 0x2000, 0x2020], "graphs of one stream may run at once"
    assert counters(5, 1) == [0x1000]
    with ThreadPoolExecutor(1) as pool:
        assert counters(2, 1) != pool.submit(counters, 2, 1).result(), "each thread has a stream of this number"
    own = counters(0, 1)
    driver.green = 0x77
    assert counters(0, 1) != own, "each green context has a stream of this number"
    driver.green = 0
    assert counters(0, 1) == own
    zeroed = [each[1:3] for each in words.calls if each[0] == "cuMemsetD8Async"]
    assert zeroed == [(0x1000, 0), (0x2000, 0), (0x3000, 0)] and words.mode == 0


def test_blocks_without_stages_and_few_rows_take_no_counter(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_counters, "call", lambda *_: pytest.fail("counters were allocated"))
    for made in (norm(100_000)[1], norm(1000, 48)[1]):
        assert not made.dynamic
        driver.device.run(made, None, DEVICE)
    assert [params.work.taken for _, _, params in driver.enqueued] == [0, 0]


def test_no_tiles_are_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_launch, "_device", lambda _: pytest.fail("a device was opened"))
    pipe_launch.launch(norm(0)[1], None, DEVICE)
