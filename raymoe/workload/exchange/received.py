"""The rows of a dispatch as the workload's experts read them, and the sums that they give back with layout `token`."""

from __future__ import annotations

import torch

from raymoe.exchange.backend import Dispatched
from raymoe.fp8 import FP8_BLOCK
from raymoe.workload.oracle import Rows


def received(dispatched: Dispatched, row: slice | torch.Tensor) -> torch.Tensor:
    """Return some rows of a dispatch, by their numbers, multiplied by their scales.

    They are read out of the slots if they are still there.
    """
    place = row if dispatched.index is None else dispatched.index[row]
    rows, scales = dispatched.x[place], dispatched.scales
    return rows if scales is None else dequantised(rows, scales[place])


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply `values[N, H]` by the scale of each block of 128, `scales[N, ceil(H / 128)]`, in float32.

    >>> values = torch.ones(1, 160).to(torch.float8_e4m3fn)
    >>> dequantised(values, torch.tensor([[2.0, 3.0]]))[0, [0, 127, 128, 159]].tolist()
    [2.0, 2.0, 3.0, 3.0]
    """
    scale_of_value = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
    return values.float() * scale_of_value


def sum_experts(dispatched: Dispatched, experts: Rows, first: int) -> torch.Tensor:
    """Return for each row by token the weighted sum of its experts' results, float64[n, H]. `first` is expert 0 here.

    >>> from raymoe import Exchange, ExchangeSpec, World
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=2, hidden=8, experts=4, topk=2, dtype="float32", layout="token")
    >>> with world, Exchange(world, spec) as exchange:
    ...     got = exchange.dispatch(torch.ones(1, 8), torch.tensor([[3, 1]]), torch.tensor([[0.5, 2.0]]))
    ...     sum_experts(got, lambda expert, x: x.double() + expert, first=0)[:, 0].tolist()
    [6.0]
    """
    assert dispatched.topk_idx is not None
    there, hidden = dispatched.count(), dispatched.x.shape[1]
    topk_idx, weights = dispatched.topk_idx[:there], dispatched.weights[:there].double()
    sums = torch.zeros(there, hidden, dtype=torch.float64, device=dispatched.x.device)
    for local in range(len(dispatched.expert_counts)):
        row, k = (topk_idx == local).nonzero(as_tuple=True)
        if len(row):
            sums.index_add_(0, row, weights[row, k, None] * experts(first + local, received(dispatched, row)))
    return sums
