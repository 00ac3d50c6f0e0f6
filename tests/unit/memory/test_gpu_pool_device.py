"""The order of a GPU's calls in a pool, with a fake driver and fake streams: what a GPU makes of them runs on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe.errors import WiringError
from raymoe.memory import pool_devices
from raymoe.memory.cuda_ipc import GRANULE
from raymoe.memory.pool_devices import GpuPoolDevice, PeerPiece
from tests.unit.memory.test_cuda_ipc import FakeGpu, Node

LOG: list[tuple[Any, ...]] = []


@dataclass(eq=False)
class FakeStream:
    cuda_stream: int

    def wait_stream(self, other: FakeStream) -> None:
        LOG.append(("wait", self.cuda_stream, other.cuda_stream))


class FakeEvent:
    def __init__(self, interprocess: bool = False) -> None:
        self.interprocess, self.number = interprocess, len(LOG)

    def record(self, stream: FakeStream) -> None:
        LOG.append(("record", self, stream.cuda_stream))

    def ipc_handle(self) -> bytes:
        assert self.interprocess
        return b"event %d" % self.number

    def query(self) -> bool:
        return False

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> FakeEvent:
        LOG.append(("open", device.index, handle))
        return cls()


def fake_cuda(current: int) -> Any:
    stream = FakeStream(current)
    return SimpleNamespace(Stream=lambda *_: FakeStream(current + 1), Event=FakeEvent, current_stream=lambda *_: stream)


@dataclass(frozen=True)
class Target:
    """A tensor on a GPU, as far as a copy looks at it."""

    address: int
    device: str = "cuda:0"
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Node, int], GpuPoolDevice]:
    LOG.clear()
    monkeypatch.setattr(pool_devices, "relaxed_capture_mode", nullcontext)
    monkeypatch.setattr(pool_devices, "on", lambda *_: nullcontext())
    monkeypatch.setattr(pool_devices, "call", lambda *arguments: LOG.append(arguments))

    def made(node: Node, rank: int) -> GpuPoolDevice:
        gpu: Any = FakeGpu(node, rank)
        gpu.gpu = SimpleNamespace(ordinal=0, current=nullcontext)
        return GpuPoolDevice(gpu, fake_cuda(100 * (rank + 1)))

    return made


def test_a_peer_maps_a_segment_and_copies_after_its_own_stream(make: Callable[[Node, int], GpuPoolDevice]) -> None:
    node = Node()
    source, receiver = make(node, 0), make(node, 1)
    segment = source.own("raymoe-tensors", 3 * GRANULE - 5)
    assert segment.nbytes == 3 * GRANULE
    mapped = receiver.map_peer(segment.descriptor())
    LOG.clear()
    targets: list[Any] = [Target(0x1000), Target(0x2000)]
    mark = receiver.copy([PeerPiece(targets[0], mapped, 256, 10), PeerPiece(targets[1], mapped, 512, 20)])
    assert LOG[:3] == [
        ("wait", 201, 200),
        ("cuMemcpyAsync", 0x1000, mapped.address + 256, 10, 201),
        ("cuMemcpyAsync", 0x2000, mapped.address + 512, 20, 201),
    ]
    assert LOG[3][::2] == ("record", 201) and not mark.is_done()
    mapped.close()
    segment.close()
    assert node.violations == [] and node.mapped == node.live == {}


def test_a_mark_is_an_event_of_the_current_stream_and_is_used_again(
    make: Callable[[Node, int], GpuPoolDevice],
) -> None:
    node = Node()
    source, receiver = make(node, 0), make(node, 1)
    first, second = source.mark(), source.mark()
    assert [entry[::2] for entry in LOG] == [("record", 100)] * 2 and first.handle != second.handle
    source.recycle(first)
    assert source.mark() is first
    receiver.open_mark(first.handle)
    assert LOG[-1] == ("open", 0, first.handle)


def test_a_process_reads_its_own_pool_without_opening_handles(make: Callable[[Node, int], GpuPoolDevice]) -> None:
    """CUDA refuses a handle in the process that made it."""
    node = Node()
    device = make(node, 0)
    segment, mark = device.own("raymoe-tensors", GRANULE), device.mark()
    own = device.map_peer(segment.descriptor())
    assert own.address == segment.address and device.open_mark(mark.handle) is mark
    own.close()
    assert node.live and segment.is_open and not any(entry[0] == "open" for entry in LOG)


def test_a_peers_segment_of_another_kind_is_refused(make: Callable[[Node, int], GpuPoolDevice]) -> None:
    device = make(Node(), 0)
    with pytest.raises(WiringError, match="GPU ranks map cuda_ipc"):
        device.map_peer({"kind": "host_shm", "handle": b"x" * 64, "nbytes": GRANULE})
