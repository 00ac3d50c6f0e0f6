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


# Host memory


class Heap:
    """Regions in host memory, the same on every rank. Tensors and words stay valid after `close`."""

    def __init__(self, layout: Layout, rank: int, segments: list[HostSegment]) -> None:
        self.layout = layout
        self.rank = rank
        self._segments: list[HostSegment] | None = segments

    def tensor(self, name: str, peer: int | None = None) -> torch.Tensor:
        """Return a region of this rank, or of a peer, without a copy."""
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
        """Return a piece of a region as raw bytes."""
        placed = self.layout.find(name)
        if start + nbytes > placed.region.nbytes:
            raise WiringError(
                f"bytes up to {start + nbytes} of region {name} were asked for; it has {placed.region.nbytes}"
            )
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
            raise WiringError(f"the heap of rank {rank} was asked for in a world of {len(self._segments)}")
        return self._segments[rank]


# Device memory

CLOSING_S = 2.0
"""How long a rank that closes a heap waits for its peers to close theirs."""

_PROOF = "proof of wiring"
_WORD_BYTES = 8


def with_proof(layout: Layout, size: int) -> Layout:
    """Append a proof word for each rank to the layout; the other regions keep their offsets.

    Rank r writes word r once, through its mapping; the owner reads it once. A round of the board and a synchronised
    device lie between the two.
    """
    return Layout.of([*(placed.region for placed in layout.placed), Region.words(_PROOF, size)])


def unmapped_layout(size: int) -> Layout:
    """Lay out the host memory beside a device heap. Rank r writes word r once; the owner reads it.

    0: rank r may still map the owner's device memory. 1: rank r has closed its mapping for good. Rank r stores the 1
    after it has closed the mapping, and the owner frees its memory after it has read 1 from all. `close` needs no other
    order, so ranks may close their heaps at different times and in different orders.
    """
    return Layout.of([Region.words("unmapped", size)])


@dataclass(frozen=True)
class HeapContext:
    """The parts of a world that a device heap needs."""

    device: GpuMemory
    torch_device: torch.device
    waiter: Waiter
    unmapped: Heap


@dataclass(frozen=True)
class DeviceBytes:
    """Device memory that torch wraps without a copy. A tensor over it keeps this object, and so `owner`, alive."""

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
    """Regions in device memory, the same on every rank.

    Tensors over own memory stay valid after `close`; tensors over a peer's memory and all addresses do not.
    """

    def __init__(self, layout: Layout, segments: list[DeviceSegment], context: HeapContext) -> None:
        self.layout = layout
        self._layout_with_proof = with_proof(layout, len(segments))
        self.rank = context.waiter.rank
        self.nbytes = segments[self.rank].nbytes
        self._segments: list[DeviceSegment] | None = segments
        self._own: DeviceSegment | None = segments[self.rank]
        self._context = context
        self._unmapped = context.unmapped.words("unmapped")
        self._unmapped_at = [context.unmapped.words("unmapped", peer) for peer in range(len(segments))]

    def tensor(self, name: str, peer: int | None = None) -> torch.Tensor:
        """Return a region of this rank, or of a peer, without a copy. A peer's region is valid until `close`."""
        region = self._layout_with_proof.region(name)
        dtype: torch.dtype = getattr(torch, region.dtype)
        memory = DeviceBytes(self.address(name, peer), region.nbytes, self._segment(peer).owner)
        # The device is named because a peer's GPU may be one that this process cannot see.
        return torch.as_tensor(memory, device=self._context.torch_device).view(dtype).view(region.shape)

    def address(self, name: str, peer: int | None = None) -> int:
        """Return the start of a region, for kernels and copies of this process; valid until `close`."""
        return self._segment(peer).address + self._layout_with_proof.find(name).offset

    def base(self, peer: int | None = None) -> int:
        """Return the start of a rank's heap. A region lies at its offset from here."""
        return self._segment(peer).address

    def word(self, name: str, index: int, peer: int | None = None) -> int:
        """Read a 64-bit word from the host; waits for the device. Only for checks, never in a step."""
        return self._context.device.read(self._word_address(name, index, peer))

    def set_word(self, name: str, index: int, value: int, peer: int | None = None) -> None:
        """Write a 64-bit word from the host and wait until it is there. Only for checks, never in a step."""
        self._context.device.write(self._word_address(name, index, peer), value)
        self._context.device.synchronise()

    def prove_to(self, peer: int, value: int) -> None:
        """Write this rank's proof word at `peer`, through the mapping."""
        self.set_word(_PROOF, self.rank, value, peer)

    def proof_of(self, peer: int) -> int:
        """Read the proof word that `peer` wrote into this rank's memory."""
        return self.word(_PROOF, peer)

    def close(self) -> None:
        """Close every mapping, wait until the peers have closed theirs (2 s at most), free.

        Not collective: ranks may close in any order. Where a peer takes longer, the memory is freed with a later heap
        or when the world closes. Where a peer has died, the memory is freed with the process.
        """
        self.unmap_peers()
        with suppress(RaymoeError):  # a missing peer only delays the freeing; the world's next round raises for it
            for peer in range(len(self._unmapped_at)):
                self._context.waiter.for_epoch("closing a heap", self._unmapped, peer, 1, timeout_s=CLOSING_S)
        self.free_if_unmapped()

    def unmap_peers(self) -> None:
        """Wait for the device, close the mappings of all peers' memory, and announce it to the peers."""
        if self._segments is None:
            return
        segments, self._segments = self._segments, None
        self._context.device.synchronise()
        for segment in segments:
            if segment is not self._own:
                segment.close()
        self._context.waiter.fence()  # orders the closing before the words that announce it
        for words in self._unmapped_at:
            words[self.rank] = 1

    def free_if_unmapped(self) -> bool:
        """Free own memory if no peer maps it any more. True once it is free, or will be with its last tensor."""
        all_unmapped = all(self._unmapped[r] for r in range(len(self._unmapped)))
        if self._own is not None and self._segments is None and all_unmapped:
            self._context.waiter.fence()
            self._own.close()
            self._own = None
        return self._own is None

    def _word_address(self, name: str, index: int, peer: int | None) -> int:
        words = self._layout_with_proof.region(name).nbytes // (WORD_STRIDE * _WORD_BYTES)
        if not 0 <= index < words:
            raise WiringError(f"word {index} of region {name} was asked for; it has words 0 to {words - 1}")
        return self.address(name, peer) + index * WORD_STRIDE * _WORD_BYTES

    def _segment(self, peer: int | None) -> DeviceSegment:
        if self._segments is None:
            raise WiringError("this heap is closed; take tensors and addresses from it before closing it")
        rank = self.rank if peer is None else peer
        if not 0 <= rank < len(self._segments):
            raise WiringError(f"the heap of rank {rank} was asked for in a world of {len(self._segments)}")
        return self._segments[rank]
