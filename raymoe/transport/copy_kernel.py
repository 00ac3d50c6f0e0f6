"""Launch kernels/copy/copy.cu: its parameters, and how its blocks share the transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Kernels, Launch, Shape
from raymoe.cuda.params import U32, U64, Address, Params
from raymoe.cuda.structs import STRUCTS, Watch
from raymoe.errors import ConfigError

# The ring of bulk copies (kernels/include/raymoe/base/ring.cuh).

MAX_STAGE_BYTES = (1 << 20) - 16
"""An mbarrier counts at most 2^20 - 1 bytes a phase."""


@dataclass(frozen=True)
class Ring:
    """A ring of `stages` stages of `stage_bytes`: half of them hold loads in flight, the other half stores in flight.

    >>> Ring(stages=12, stage_bytes=16384).shared_bytes
    196704
    """

    stages: int = 12
    stage_bytes: int = 16384

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ConfigError(f"a ring of {self.stages} stages; it has at least 1")
        if not 16 <= self.stage_bytes <= MAX_STAGE_BYTES or self.stage_bytes % 16:
            raise ConfigError(
                f"a ring with stages of {self.stage_bytes} bytes; bulk copies take a multiple of 16, up to "
                f"{MAX_STAGE_BYTES}"
            )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the ring: the stages, and an mbarrier of 8 bytes for each."""
        return self.stages * (self.stage_bytes + 8)


THREADS, MOST_TRANSFERS = 128, 32


@dataclass(frozen=True)
class Transfer(Params):
    """A message to move, or a wait or signal without bytes. Twin of the struct in copy/transfers.cuh."""

    dst: Address
    src: Address
    bytes: U64
    operation: Address = 0
    credit: Address = 0
    lag: U64 = 0
    signal: Address = 0
    op: U32 = 0
    peer: U32 = 0
    first: U32 = 0
    blocks: U32 = 0

    def __post_init__(self) -> None:
        if (self.credit or self.signal) and not self.operation:
            raise ConfigError("a copy with a credit or a signal word needs an operation, which counts its runs")
        for name in ("operation", "credit", "signal"):
            if getattr(self, name) % 8:
                raise ConfigError(f"{name} of a copy is at {getattr(self, name):#x}; words are 8-byte aligned")


@dataclass(frozen=True)
class CopyParams(Params):
    """Twin of the struct in kernels/include/raymoe/copy/transfers.cuh."""

    transfers: Annotated[tuple[Transfer, ...], Transfer.array(MOST_TRANSFERS)]
    watch: Watch
    count: U32
    movers: U32
    stages: U32
    stage_bytes: U32
    pace_ns: U32 = 0


COPY = KernelSource("copy/copy", (Transfer, CopyParams, *STRUCTS))


@dataclass(frozen=True)
class Spread:
    """The blocks that move each transfer's bytes, each through a ring of its own.

    By default every transfer has its own blocks. With `in_turn` all transfers share blocks, which move one after the
    other. `gbps` limits the throughput of all blocks together; 0 means no limit.

    >>> Spread(16, Ring(12, 16384), in_turn=True, gbps=365).pace_ns(16)  # a block stores a stage every 0.7 us
    718
    """

    blocks: int = 1
    ring: Ring = field(default_factory=lambda: Ring(1, 16))
    in_turn: bool = False
    gbps: int = 0

    def pace_ns(self, movers: int) -> int:
        return round(movers * self.ring.stage_bytes / self.gbps) if self.gbps else 0


def copy_params(transfers: Sequence[Transfer], spread: Spread, watch: Watch) -> CopyParams:
    """Assign blocks to the transfers, and make the kernel's parameters.

    >>> transfers = [Transfer(64, 0, 16), Transfer(0, 0, 0), Transfer(128, 0, 16)]
    >>> own, shared = (copy_params(transfers, Spread(2, in_turn=turns), Watch()) for turns in (False, True))
    >>> [(transfer.first, transfer.blocks) for transfer in own.transfers], own.movers
    ([(0, 2), (0, 0), (2, 2)], 4)
    >>> [(transfer.first, transfer.blocks) for transfer in shared.transfers], shared.movers
    ([(0, 2), (0, 0), (0, 2)], 2)
    """
    if not 1 <= len(transfers) <= MOST_TRANSFERS:
        raise ConfigError(f"{len(transfers)} transfers in one copy; there are 1 to {MOST_TRANSFERS}")
    if any(transfer.credit for transfer in transfers) and not watch.poison:
        raise ConfigError("a copy that waits for a credit needs a watch, which bounds the wait")
    placed, movers = [], 0
    for transfer in transfers:
        first = 0 if spread.in_turn else movers
        blocks = spread.blocks if transfer.bytes else 0
        movers = max(movers, first + blocks)
        placed.append(replace(transfer, first=first if blocks else 0, blocks=blocks))
    ring, pace = spread.ring, spread.pace_ns(movers)
    return CopyParams(tuple(placed), watch, len(transfers), movers, ring.stages, ring.stage_bytes, pace)


def copy_launch(
    kernels: Kernels, transfers: Sequence[Transfer], spread: Spread | None = None, watch: Watch | None = None
) -> Launch:
    """Prepare a launch of the copy kernel. Transfers without bytes share one extra block."""
    spread = spread or Spread()
    params = copy_params(transfers, spread, watch or Watch())
    blocks = params.movers + any(not transfer.bytes for transfer in transfers)
    return Launch(kernels.function(COPY), Shape(blocks, THREADS, spread.ring.shared_bytes), params)
