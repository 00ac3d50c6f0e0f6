"""The memory for dispatched rows that an exchange owns (`ExchangeSpec.depth`)."""

from __future__ import annotations

import torch

from raymoe.errors import PlacementError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World


def own_rows(world: World, spec: ExchangeSpec) -> list[torch.Tensor]:
    """Allocate the exchange's own memory for rows, on all ranks or on none: all raise where one cannot."""
    dtype: torch.dtype = getattr(torch, spec.output_dtype)
    shape, blocks = (spec.rows(world.size), spec.hidden), spec.depth if spec.layout != "rank" else 0
    if not blocks:
        return []
    rows, problem = [], None
    try:
        rows = [torch.empty(shape, dtype=dtype, device=world.device) for _ in range(blocks)]
    except RuntimeError as error:  # torch's error for a lack of memory; on GPUs a subclass
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = PlacementError(
            f"rank {world.rank} cannot allocate {blocks} times {shape[0]} rows of {shape[1]} {dtype}: take a smaller "
            f"capacity or depth ({reason})"
        )
    world.agree(problem, "exchange: memory for rows")
    return rows
