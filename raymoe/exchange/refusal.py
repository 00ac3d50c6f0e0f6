"""Why a rank refuses the data of a step. It travels with the flags, so that all ranks raise on the same step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from raymoe.exchange.spec import ExchangeSpec
from raymoe.job.errors import DataRefused

_PACKED = struct.Struct("<iiq")


class Cause(IntEnum):
    NONE = 0
    ID = 1  # other: the token, number: the id
    CAPACITY = 2  # number: the rows that were needed
    COUNT = 3  # other: the source, number: the rows it said it had sent
    EXPERT = 4  # other: the source, number: the local expert that it named
    TOKENS = 5  # other: the rows of x, number: the tokens that were to be sent


@dataclass(frozen=True)
class Refusal:
    """16 bytes: they fit where a row fits."""

    cause: Cause = Cause.NONE
    other: int = 0
    number: int = 0

    NBYTES = _PACKED.size

    def __bool__(self) -> bool:
        return self.cause is not Cause.NONE

    def pack(self) -> bytes:
        return _PACKED.pack(self.cause, self.other, self.number)

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> Refusal:
        cause, other, number = _PACKED.unpack(packed)
        return cls(Cause(cause), other, number)

    def sentence(self, rank: int, spec: ExchangeSpec, ranks: int) -> str:
        if self.cause is Cause.ID:
            last = spec.experts - 1
            return f"rank {rank} asked for expert {self.number} for its token {self.other}; ids are -1 to {last}"
        if self.cause is Cause.CAPACITY:
            rows = f"{self.number} rows, gaps included, came to rank {rank}"
            return f"{rows}; its capacity is {spec.rows(ranks)}: raise exchange.capacity"
        if self.cause is Cause.TOKENS:
            return (
                f"num_tokens is {self.number} on rank {rank}; x has {self.other} rows, so 0 to {self.other} can be sent"
            )
        if self.cause is Cause.COUNT:
            return f"rank {self.other} told rank {rank} of {self.number} rows; 0 to {spec.tokens} can be sent"
        return (
            f"rank {self.other} sent rank {rank} a row for its expert {self.number}; it has {spec.local_experts(ranks)}"
        )


NO_REFUSAL = Refusal()


def raise_first(refusals: Sequence[Refusal], spec: ExchangeSpec) -> None:
    """Raise for the lowest rank that refused, the same on every rank."""
    for rank, refusal in enumerate(refusals):
        if refusal:
            raise DataRefused(refusal.sentence(rank, spec, len(refusals)))
