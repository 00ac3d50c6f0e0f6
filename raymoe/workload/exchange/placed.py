"""The placement of experts in slots that a run plans for its own load, and its draws by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raymoe.exchange.exchange import Exchange
from raymoe.exchange.slots import SlotTable
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.moe.placement import Placement, plan_placement
from raymoe.workload.inputs import Draw
from raymoe.workload.oracle import AffineExperts
from raymoe.workload.traffic import entries_of_experts


@dataclass(frozen=True)
class PlacedDraws:
    """The draws of a rank as the protocol sees them: with slots in the place of experts, and the spec over slots."""

    draws: Sequence[Draw]
    spec: ExchangeSpec
    placement: Placement | None
    """None: the exchange has no slots."""

    @classmethod
    def of(cls, world: World, draws: Sequence[Draw], spec: ExchangeSpec) -> PlacedDraws:
        """Plan a placement for the load of the draws of all ranks, which call this together."""
        if spec.slots is None:
            return cls(draws, spec, None)
        load = entries_of_experts(world, draws, spec.experts).sum(dim=0)
        placement = plan_placement(load, ranks=world.size, slots=spec.slots)
        table = SlotTable(world, spec)
        table.write(placement.experts)
        by_slot = [Draw(table.slots_of(draw.ids.to(world.device)).to(draw.ids.device), draw.weights) for draw in draws]
        return cls(by_slot, spec.over_slots(world.size), placement)


@dataclass(frozen=True)
class ExpertsOfSlots:
    """The experts of an exchange by the number of their slot, which without slots is that of the expert."""

    experts: AffineExperts
    exchange: Exchange

    def __call__(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        if self.exchange.spec.slots is None:
            return self.experts(slot, x)
        return self.experts(int(self.exchange.placement().flatten()[slot]), x)
