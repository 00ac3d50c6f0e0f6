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
