"""A launch is packed once; a call changes the parameters it names and keeps the others. No driver is needed."""

from __future__ import annotations

import ctypes
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.cuda import launch as launch_module
from raymoe.cuda.launch import Launch, Shape
from raymoe.cuda.launcher import Launcher
from raymoe.exchange.nccl.rounds import SpreadParams
from tests.emulator.ranks import MachineLauncher
from tests.unit.exchange.nccl.emulated_launcher import EmulatedLauncher


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, int]]]:
    """The stream and the parameters of every launch."""
    found: list[tuple[int, dict[str, int]]] = []

    def enqueue(config: Any, handle: int, pointers: int, extra: int) -> tuple[int]:
        assert (handle, extra) == (77, 0)
        at = ctypes.c_void_p.from_address(pointers).value
        struct = SpreadParams()._struct.from_address(at)
        found.append((int(config.hStream), {name: getattr(struct, name) for name, _ in struct._fields_}))
        return (0,)

    driver = SimpleNamespace(CUlaunchConfig=SimpleNamespace, cuLaunchKernelEx=enqueue)
    monkeypatch.setattr(launch_module, "bindings", lambda: driver)
    monkeypatch.setattr(launch_module, "_check", lambda *_: None)
    return found


def test_a_call_changes_only_the_parameters_it_names(enqueued: list[tuple[int, dict[str, int]]]) -> None:
    gpu = SimpleNamespace(sms=4, is_current=lambda: True)
    function: Any = SimpleNamespace(gpu=gpu, handle=77)
    rows, out, other = (torch.zeros(64, dtype=torch.uint8) for _ in range(3))
    ready = Launch(function, Shape(8, 64), SpreadParams(row_bytes=32, width=3), memory={"rows": rows})
    ready(5, out=out, count=9)
    ready(6, out=other, own=None)
    (first_stream, first), (second_stream, second) = enqueued
    assert (first_stream, second_stream) == (5, 6)
    assert (first["rows"], first["out"], first["own"]) == (rows.data_ptr(), out.data_ptr(), 0)
    assert (first["row_bytes"], first["width"], first["count"]) == (32, 3, 9)
    assert second == first | {"out": other.data_ptr()}


def test_adjacent_addresses_are_set_at_once(enqueued: list[tuple[int, dict[str, int]]]) -> None:
    gpu = SimpleNamespace(sms=4, is_current=lambda: True)
    function: Any = SimpleNamespace(gpu=gpu, handle=77)
    names = [name for name, _ in SpreadParams()._struct._fields_][:2]
    launch = Launch(function, Shape(8, 64), SpreadParams(row_bytes=32), addresses=names)
    launch.enqueue(5)
    launch.set_addresses(1 << 40, 1 << 41)
    launch.enqueue(5)
    (_, first), (_, second) = enqueued
    assert second == first | dict(zip(names, (1 << 40, 1 << 41), strict=True))
    assert (launch.sms, launch.params) == (4, SpreadParams(row_bytes=32))


@pytest.mark.parametrize(
    ("emulated", "methods"),
    [
        (MachineLauncher, {"ready", "words", "error_word", "allocator", "copy", "side_stream", "synchronise", "close"}),
        (EmulatedLauncher, {"ready", "words", "resident", "ordered"}),
    ],
)
def test_launchers_of_the_emulator_take_what_the_launcher_of_a_gpu_takes(emulated: type, methods: set[str]) -> None:
    assert methods <= set(vars(Launcher))
    for method in methods:
        wanted, found = (list(inspect.signature(getattr(kind, method)).parameters) for kind in (Launcher, emulated))
        assert [name for name in wanted if name in found or name != "addresses"] == found
