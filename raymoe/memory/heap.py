"""Heaps: a layout in host memory (`Heap`) or in device memory (`DeviceHeap`), this rank's own and its peers'."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from raymoe.errors import RaymoeError, WiringError
from raymoe.memory.host_shm import HostSegment
from raymoe.memory.layout import WORD_STRIDE, Layout, Region
from raymoe.memory.wait import Words

if TYPE_CHECKING:
    from raymoe.memory.cuda_ipc import DeviceSegment, GpuMemory
    from raymoe.memory.wait import Waiter


# A layout in memory: this rank's own segment and its peers', as tensors and words.


class Heap:
    """The same regions on every rank. Views stay valid after `close`; it only gives up this object's hold on them."""

    def __init__(self, layout: Layout, rank: int, segments: list[HostSegment]) -> None:
        self.layout = layout
        self.rank = rank
        self._segments: list[HostSegment] | None = segments

    def tensor(self, name: str, peer: int | None = None) -> torch.Tensor:
        """A region of this rank, or of a peer, without a copy."""
        placed = self.layout.find(name)
        dtype: torch.dtype = getattr(torch, placed.region.dtype)
        shape = placed.region.shape
        buffer = self._segment(peer).buffer
        return torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=placed.offset).view(shape)

    def words(self, name: str, peer: int | None = None) -> Words:
        placed = self.layout.find(name)
        return Words(self.bytes(name, peer, 0, placed.region.nbytes))

    def word(self, name: str, index: int, peer: int | None = None) -> int:
        return self.words(name, peer)[index]

    def bytes(self, name: str, peer: int | None, start: int, nbytes: int) -> memoryview:
        """A piece of a region as raw bytes."""
        placed = self.layout.find(name)
        if start + nbytes > placed.region.nbytes:
            raise WiringError(f"bytes up to {start + nbytes} asked of region {name}, which has {placed.region.nbytes}")
        return self._segment(peer).view(placed.offset + start, nbytes)

    def close(self) -> None:
        for segment in self._segments or ():
            segment.close()
        self._segments = None

    def _segment(self, peer: int | None) -> HostSegment:
        if self._segments is None:
            raise WiringError("this heap is closed; take tensors and words from it before closing it")
        rank = self.rank if peer is None else peer
        if not 0 <= rank < len(self._segments):
            raise WiringError(f"the heap of rank {rank} asked for in a world of {len(self._segments)}")
        return self._segments[rank]


# A layout in device memory: this rank's own and its peers', as tensors and as addresses for kernels and copies.

CLOSING_S = 2.0
"""How long a rank that leaves waits for its peers to leave too."""

_PROOF = "proof of wiring"
_WORD_BYTES = 8


def with_proof(layout: Layout, size: int) -> Layout:
    """The layout, its regions where they were, and behind them a word for each rank to prove its mapping by.

    Word r is written once, by rank r through its mapping, and read once, by the owner, with a barrier of the board and
    a synchronised device between the two.
    """
    return Layout.of([*(placed.region for placed in layout.placed), Region.words(_PROOF, size)])


def let_go_layout(size: int) -> Layout:
    """Host memory beside a heap. Word r is written by rank r, once, and read by the owner.

    0: rank r may still map the owner's device memory. 1: it never will again. The store follows the closing of the
    mapping, and the owner frees only what all have let go: that order is all that `close` needs, so ranks may close
    their heaps at different times and in different orders.
    """
    return Layout.of([Region.words("let_go", size)])


@dataclass(frozen=True)
class Setting:
    """What a device heap needs of its world."""

    device: GpuMemory
    torch_device: torch.device
    waiter: Waiter
    let_go: Heap


@dataclass(frozen=True)
class Span:
    """Bytes on the device as torch takes them without a copy. A tensor over them keeps this, and so `owner`, alive."""

    address: int
    nbytes: int
    owner: object

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class DeviceHeap:
    """The same regions on every rank. `cuda_ipc` says what outlives `close`: own tensors do, all else does not."""

    def __init__(self, layout: Layout, segments: list[DeviceSegment], setting: Setting) -> None:
        self.layout = layout
        self._all = with_proof(layout, len(segments))
        self.rank = setting.waiter.rank
        self.nbytes = segments[self.rank].nbytes
        self._segments: list[DeviceSegment] | None = segments
        self._own: DeviceSegment | None = segments[self.rank]
        self._setting = setting
        self._let_go = setting.let_go.words("let_go")
        self._let_go_at = [setting.let_go.words("let_go", peer) for peer in range(len(segments))]

    def tensor(self, name: str, peer: int | None = None) -> torch.Tensor:
        """A region of this rank, or of a peer, without a copy. That of a peer is valid until `close`, no longer."""
        region = self._all.region(name)
        dtype: torch.dtype = getattr(torch, region.dtype)
        span = Span(self.address(name, peer), region.nbytes, self._segment(peer).owner)
        # The device is named because a peer's GPU may be one that this process cannot see.
        return torch.as_tensor(span, device=self._setting.torch_device).view(dtype).view(region.shape)

    def address(self, name: str, peer: int | None = None) -> int:
        """Where a region begins, for kernels and copies of this process; valid until `close`."""
        return self._segment(peer).address + self._all.find(name).offset

    def base(self, peer: int | None = None) -> int:
        """Where a rank's heap begins; a region lies at its offset from here."""
        return self._segment(peer).address

    def word(self, name: str, index: int, peer: int | None = None) -> int:
        """Read a 64-bit word from the host; waits for the device. For checks, never in a step."""
        return self._setting.device.read(self._word_address(name, index, peer))

    def set_word(self, name: str, index: int, value: int, peer: int | None = None) -> None:
        """Write a 64-bit word from the host, there when this returns. For checks, never in a step."""
        self._setting.device.write(self._word_address(name, index, peer), value)
        self._setting.device.synchronise()

    def prove_to(self, peer: int, value: int) -> None:
        """Through the mapping of `peer`, write what it expects of this rank."""
        self.set_word(_PROOF, self.rank, value, peer)

    def proof_of(self, peer: int) -> int:
        """What `peer` wrote here."""
        return self.word(_PROOF, peer)

    def close(self) -> None:
        """Close every mapping, wait for the peers to do the same (2 s at most), free.

        Not collective: no order is asked for. Where a peer takes longer the memory is freed with a later heap, or when
        the world closes; where it has died, with the process.
        """
        self.let_go()
        with suppress(RaymoeError):  # an absent peer only delays the freeing; the rounds of the world tell of it
            for peer in range(len(self._let_go_at)):
                self._setting.waiter.for_epoch("closing a heap", self._let_go, peer, 1, timeout_s=CLOSING_S)
        self.free_if_let_go()

    def let_go(self) -> None:
        """Let the device finish, close the mappings of all peers and tell them."""
        if self._segments is None:
            return
        segments, self._segments = self._segments, None
        self._setting.device.synchronise()
        for segment in segments:
            if segment is not self._own:
                segment.close()
        self._setting.waiter.fence()  # orders the closing before the words that tell of it
        for words in self._let_go_at:
            words[self.rank] = 1

    def free_if_let_go(self) -> bool:
        """Free our own memory if no peer maps it any more. True once it is free, or will be with its last tensor."""
        if self._own is not None and self._segments is None and all(self._let_go[r] for r in range(len(self._let_go))):
            self._setting.waiter.fence()
            self._own.close()
            self._own = None
        return self._own is None

    def _word_address(self, name: str, index: int, peer: int | None) -> int:
        words = self._all.region(name).nbytes // (WORD_STRIDE * _WORD_BYTES)
        if not 0 <= index < words:
            raise WiringError(f"word {index} asked of region {name}, which has {words}")
        return self.address(name, peer) + index * WORD_STRIDE * _WORD_BYTES

    def _segment(self, peer: int | None) -> DeviceSegment:
        if self._segments is None:
            raise WiringError("this heap is closed; take tensors and addresses from it before closing it")
        rank = self.rank if peer is None else peer
        if not 0 <= rank < len(self._segments):
            raise WiringError(f"the heap of rank {rank} asked for in a world of {len(self._segments)}")
        return self._segments[rank]
