"""Python twins of the structs that all kernels share: those of peer.cuh and sync.cuh in kernels/include/raymoe/base."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from raymoe.cuda.params import U32, U64, Address, Params
from raymoe.errors import ConfigError

# Twin of the struct in kernels/include/raymoe/base/peer.cuh.

MAX_RANKS = 16


@dataclass(frozen=True)
class Peers(Params):
    """The address of each rank's heap, as mapped by this rank."""

    base: Annotated[tuple[int, ...], ctypes.c_uint64 * MAX_RANKS]
    rank: U32
    ranks: U32

    @classmethod
    def of(cls, bases: Sequence[int], rank: int) -> Peers:
        """Fill the unused ranks with 0.

        >>> Peers.of([4096, 8192], rank=1).base[:3]
        (4096, 8192, 0)
        """
        if not 0 <= rank < len(bases) <= MAX_RANKS:
            raise ConfigError(f"rank {rank} of {len(bases)}; kernels reach 1 to {MAX_RANKS} ranks of one host")
        return cls((*bases, *[0] * (MAX_RANKS - len(bases))), rank, len(bases))


# Twins of the structs in kernels/include/raymoe/base/sync.cuh, which gives each word's writer, reader and order.

FAILURE_TIMEOUT = 1
FAILURE_ABORTED = 2
FAILURE_STALE = 3


@dataclass(frozen=True)
class Operation(Params):
    """The number of runs of an operation. In device memory, 16-byte aligned, zero before the first run."""

    epoch: U64 = 0
    ticket: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class ErrorRecord(Params):
    """The record of a failed wait, for the host. It is valid if `code` is not 0."""

    code: U64 = 0
    op: U64 = 0
    epoch: U64 = 0
    peer: U64 = 0
    expected: U64 = 0
    seen: U64 = 0
    waited_ns: U64 = 0
    unused: U64 = 0


@dataclass(frozen=True)
class Watch(Params):
    """Bounds the waits of a kernel; `ErrorWord.watch` makes one. A kernel with all zeros must not wait."""

    abort: Address = 0
    record: Address = 0
    poison: Address = 0
    timeout_ns: U64 = 0


STRUCTS: tuple[type[Params], ...] = (Operation, ErrorRecord, Watch)
