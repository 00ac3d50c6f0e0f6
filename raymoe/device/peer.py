"""Twin of the struct in kernels/include/raymoe/peer.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from raymoe.device.params import U32, Params
from raymoe.job.errors import ConfigError

MAX_RANKS = 16


@dataclass(frozen=True)
class Peers(Params):
    """Where this rank has mapped the heap of each rank."""

    base: Annotated[tuple[int, ...], ctypes.c_uint64 * MAX_RANKS]
    rank: U32
    ranks: U32

    @classmethod
    def of(cls, bases: Sequence[int], rank: int) -> Peers:
        """
        >>> Peers.of([4096, 8192], rank=1).base[:3]
        (4096, 8192, 0)
        """
        if not 0 <= rank < len(bases) <= MAX_RANKS:
            raise ConfigError(f"rank {rank} of {len(bases)}; kernels reach 1 to {MAX_RANKS} ranks of one host")
        return cls((*bases, *[0] * (MAX_RANKS - len(bases))), rank, len(bases))
