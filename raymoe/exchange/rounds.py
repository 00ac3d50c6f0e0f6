"""What the NCCL backends ask of those who move bytes between ranks and of those who launch kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch

from raymoe.device.jit import KernelSource
from raymoe.device.launch import Shape
from raymoe.device.params import Params

Field: TypeAlias = int | torch.Tensor | None
"""A number, memory whose address is meant, or no memory."""


Lagging: TypeAlias = Callable[[], tuple[int, int, int]]
"""A peer that has not come, or any; how many times it has come, and how many times this rank has."""


class Rounds(Protocol):
    """Bytes between all ranks of a world, on the current stream; `NcclRounds` has them by NCCL."""

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`mine` of all ranks, in rank order, into `out`, of which it may be this rank's part."""

    def exchange(self, receives: Mapping[int, torch.Tensor], sends: Mapping[int, torch.Tensor]) -> None:
        """Bytes to and from each other rank; an empty tensor where there are none."""

    def wait(self, op: str, over: Callable[[], bool], lagging: Lagging | None = None) -> None:
        """Until `over`; where that takes too long, raises `PeerTimeout` of the peer that `lagging` tells of."""

    def wait_for_all(self, op: str) -> None:
        """Until the device is done, also with replays on other streams."""


class Ready(Protocol):
    """A kernel that is ready to be launched: only what changes between calls is given."""

    def __call__(self, stream: int, **changed: Field) -> None: ...


class Words(Protocol):
    """Words of the host that kernels write."""

    @property
    def memory(self) -> Field:
        """Where kernels find them."""

    def read(self, first: int, count: int) -> Sequence[int]: ...


class Launcher(Protocol):
    """Launches kernels; `GpuLauncher` does it on a GPU."""

    threads: int
    """Of a block."""
    sms: int

    def ordered(self, op: str) -> AbstractContextManager[int]:
        """Whatever is enqueued inside runs behind the last operation; gives the current stream."""

    def resident(self, source: KernelSource, shape: Shape) -> int:
        """How many blocks of this shape there can be at once."""

    def ready(self, source: KernelSource, shape: Shape, params: Params, **memory: Field) -> Ready:
        """A launch with these parameters, and with these addresses in place of those that `params` has."""

    def words(self, count: int) -> Words:
        """Of 64 bits, zero at first; as long as the launcher lives."""
