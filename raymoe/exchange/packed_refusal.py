"""The 16 bytes of a refusal, as kernels of every family read and write them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from raymoe.cuda.params import U32, U64, Params


@dataclass(frozen=True)
class PackedRefusal(Params):
    """Twin of `Refusal` in kernels/peer/ and of `Status` in kernels/nccl/. `Refusal.pack` (refusal.py) makes it too.

    Without a cause, `number` is the dispatch: its epoch in peer/, its number in the exchange in nccl/.
    """

    cause: U32 = 0
    other: U32 = 0
    number: U64 = 0
