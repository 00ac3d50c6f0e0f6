"""Move the weights of experts to memory that `World.sleep` gives back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raymoe.memory.sleeping import SleepingMemory
from raymoe.moe.layer import expert_parameters
from raymoe.moe.model_loads import world_of


@torch.no_grad()
def let_sleep(model: nn.Module) -> int:
    """Let the weights of all experts of a model sleep, and return their bytes on this rank.

    It moves them, so call it before a graph is captured. The parameters stay the same objects. Another
    move, such as `model.to`, takes them out.

    >>> from raymoe import ExchangeSpec, World
    >>> from raymoe.moe import LayerForm, MoELayer
    >>> with World.open(rank=0, size=1) as world:
    ...     world.wire([world.descriptor()])
    ...     layer = MoELayer(world, ExchangeSpec(tokens=4, hidden=8, experts=2, topk=1), LayerForm(ffn=16))
    ...     nbytes = let_sleep(layer)
    ...     asleep = world.sleep()
    ...     awake = world.wake()
    >>> nbytes, asleep.nbytes, awake.nbytes
    (1536, 1536, 1536)
    """
    sleeping, nbytes = world_of(model).shared(SleepingMemory), 0
    for name, parameter in expert_parameters(model).items():
        held: Any = parameter
        weight: torch.Tensor = getattr(held, "_local_tensor", held)  # of a DTensor, whose to_local gives another tensor
        nbytes += weight.numel() * weight.element_size()
        if not sleeping.has(weight.data_ptr()):
            memory = sleeping.empty(tuple(weight.shape), weight.dtype, name)
            memory.copy_(weight)
            weight.data = memory
    return nbytes
