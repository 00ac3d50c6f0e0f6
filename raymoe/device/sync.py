"""Twins of the structs in kernels/include/raymoe/sync.cuh, where each word's writer, reader and order are told."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.device.params import U32, U64, Address, Params

FAILURE_TIMEOUT = 1
FAILURE_ABORTED = 2
FAILURE_STALE = 3


@dataclass(frozen=True)
class Operation(Params):
    """How often an operation has run. In device memory, 16-byte aligned, zero before the first run."""

    epoch: U64 = 0
    ticket: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class ErrorRecord(Params):
    """What a failed wait leaves for the host; there is one where `code` is not 0."""

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
    """What bounds the waits of a kernel; `ErrorWord.watch` makes one. All zero: it waits for nothing."""

    abort: Address = 0
    record: Address = 0
    poison: Address = 0
    timeout_ns: U64 = 0


STRUCTS: tuple[type[Params], ...] = (Operation, ErrorRecord, Watch)
