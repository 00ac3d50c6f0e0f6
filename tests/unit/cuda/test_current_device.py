"""Code that uses the world's device where torch's current device is another one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from raymoe.cuda.current import CapturedMemory, capturing, on


class Cuda:
    """Replaces torch.cuda by two GPUs; a stream of the second one is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.set, self.pools = 0, 0, []
        for name in ("current_device", "device", "is_current_stream_capturing", "MemPool", "use_mem_pool"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, device: torch.device):
        before, self.current = self.current, device.index
        self.set += 1
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current == 1

    def MemPool(self) -> int:  # noqa: N802 - as torch calls it
        return self.current

    def use_mem_pool(self, pool: int, device: torch.device | None = None) -> None:
        self.pools.append((pool, self.current if device is None else device.index))


def test_capturing_sees_a_capture_on_a_device_that_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    assert [capturing(torch.device("cuda", ordinal)) for ordinal in (0, 1)] == [False, True]
    assert not capturing(torch.device("cpu"))
    assert (cuda.current, cuda.set) == (0, 1), "a device is set only if it is not current"
    cuda.current = 1
    assert [capturing(torch.device("cuda", ordinal)) for ordinal in (0, 1)] == [False, True]
    with on(torch.device("cuda", 1)), on(torch.device("cpu")):
        assert (cuda.current, cuda.set) == (1, 2)


def test_captured_memory_is_on_the_worlds_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    CapturedMemory(torch.device("cuda", 1))()
    assert cuda.pools == [(1, 1)]
    assert cuda.current == 0
