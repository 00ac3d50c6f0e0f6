"""The part of a layer with 8-bit experts: its exchange, and the way of a row without gradients.

A row is quantised once. On GPUs the dispatch does that at its source, and values and scales cross. CPU ranks exchange
rows as they are, and the experts quantise those that came: a row's values and scales depend on that row alone, so they
are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.exchange.abilities import BACKENDS
from raymoe.exchange.backend import Dispatched
from raymoe.exchange.spec import ROW_BYTES, ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.memory.world import World
from raymoe.moe.differentiable import expert_major, expert_major_pair


def scaled_spec(spec: ExchangeSpec, world: World, backend: str) -> ExchangeSpec:
    """Return the spec of the exchange for 8-bit experts: `spec` with rows that cross as values and scales, on GPUs.

    >>> with World.open(rank=0, size=1) as world:
    ...     scaled_spec(ExchangeSpec(tokens=4, hidden=64, experts=2, topk=1), world, "auto").dispatch_wire
    'bfloat16'
    """
    if world.device.type == "cpu":
        return spec
    if backend in BACKENDS and not BACKENDS[backend].float8:
        raise ConfigError(
            f"experts_dtype is {FP8} with backend {backend}, which sends no 8-bit rows on GPUs; take fused or staged"
        )
    if spec.hidden % ROW_BYTES:
        raise ConfigError(
            f"experts_dtype is {FP8} with hidden {spec.hidden}; kernels of 8-bit rows take multiples of {ROW_BYTES}"
        )
    return replace(spec, wire={"dispatch": FP8, "combine": spec.combine_wire}, output="raw")


def refuse_gradients(
    named: Iterable[tuple[str, Tensor]], otherwise: str = "train a layer without experts_dtype"
) -> None:
    """Raise if one of the tensors needs a gradient. `otherwise` says how to get one."""
    for name, tensor in named:
        if tensor.requires_grad:
            raise ConfigError(
                f"a layer with 8-bit experts has no gradients, and {name} needs one; call it under torch.no_grad, or "
                f"{otherwise}"
            )


def rows_for_experts(got: Dispatched) -> Tensor | tuple[Tensor, Tensor]:
    """Return the rows of a dispatch expert by expert, as experts take them: with 8 bits values and scales.

    With layout `rank` they are copied from the slots.
    """
    return expert_major(got) if got.scales is None else expert_major_pair(got)
