"""The kernels of exchanges over slots: ids become numbers of slots, and a dispatch gets the digest of its placement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Launch, Shape
from raymoe.cuda.launcher import Launcher
from raymoe.cuda.params import U32, Address, Params
from raymoe.exchange.spec import ExchangeSpec


@dataclass(frozen=True)
class TakeSlotsParams(Params):
    """Twin of the struct in kernels/slots/take_slots.cu, which describes the fields."""

    topk_idx: Address = 0
    slots: Address = 0
    table: Address = 0
    wide_topk_idx: U32 = 0
    entries: U32 = 0
    topk: U32 = 0
    experts: U32 = 0
    every: U32 = 0
    rank: U32 = 0


@dataclass(frozen=True)
class MarkDispatchParams(Params):
    """Twin of the struct in kernels/slots/mark_dispatch.cu, which describes the fields."""

    refusal: Address = 0
    digest: Address = 0


MARK_DISPATCH = KernelSource("slots/mark_dispatch", (MarkDispatchParams,))
"""For backends over NVLink. Others copy the digest, because their numbers and refusals are separate."""
TAKE_SLOTS = KernelSource("slots/take_slots", (TakeSlotsParams,))


class TakeSlots:
    """The launch for one table."""

    def __init__(self, launcher: Launcher, spec: ExchangeSpec, rank: int, table: torch.Tensor) -> None:
        shape = Shape(1, launcher.threads)
        blocks = min(-(-spec.tokens * spec.topk // launcher.threads), launcher.resident(TAKE_SLOTS, shape))
        every = len(table) - 2 - spec.experts
        params = TakeSlotsParams(topk=spec.topk, experts=spec.experts, every=every, rank=rank)
        self._launcher = launcher
        self._launch: Launch = launcher.ready(TAKE_SLOTS, Shape(blocks, launcher.threads), params, table=table)

    def __call__(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return the slots of all ids, on the current stream."""
        slots = torch.empty_like(topk_idx)
        wide = int(topk_idx.dtype == torch.int64)
        with self._launcher.ordered("dispatch") as stream:
            self._launch(stream, topk_idx=topk_idx, slots=slots, wide_topk_idx=wide, entries=topk_idx.numel())
        return slots
