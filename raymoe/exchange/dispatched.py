"""What a dispatch gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Dispatched:
    """Rows for this rank's experts, all of it on the device of the world. Everything but the rows belongs to this
    object, so several may be outstanding.

    With layout `expert`, row i is `x[i]`, in the memory that the caller gave or in the exchange's own, which is
    overwritten `depth` dispatches later. With layout `rank`, row i is `x[index[i]]`, where `x` is all slots: its
    rows stay until this rank's next dispatch (or `dispatch_send`), and gaps point to a row of zeros.

    `expert_offsets` and `expert_counts` say where the rows of each local expert are, without a wait for the device:

    >>> from raymoe import Exchange, ExchangeSpec, World
    >>> world = World.open(rank=0, size=1)
    >>> world.wire([world.descriptor()])
    >>> spec = ExchangeSpec(tokens=3, hidden=8, experts=2, topk=1, dtype="float32", alignment=4)
    >>> with world, Exchange(world, spec) as exchange:
    ...     x = torch.arange(3.0)[:, None].repeat(1, 8)
    ...     got = exchange.dispatch(x, torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
    ...     got.expert_offsets.tolist(), got.expert_counts.tolist(), got.x[[0, 4, 5], 0].tolist()
    ([0, 4, 8], [1, 2], [1.0, 0.0, 2.0])
    """

    x: torch.Tensor
    weights: torch.Tensor  # float32[C], zero in gaps
    expert_offsets: torch.Tensor  # int32[L + 1], multiples of the alignment; [1:] is what a grouped GEMM takes
    expert_counts: torch.Tensor  # int32[L]
    index: torch.Tensor | None  # int64[C] with layout `rank`
    tokens: int  # T' of the dispatch: the rows of y

    _home: object
    """What the backend that made this needs in order to send rows home."""
    _owner: object
    """That backend."""

    scales: torch.Tensor | None = None
    """float32[C, ceil(H / 128)] with output `raw`, strides (1, C rounded up to 4)."""
