"""The rows that a layer's experts got, counted on the device by each forward pass.

A count only grows. A reader keeps a copy of the last count that it read, and takes the difference. So several readers
share one count, and neither a captured pass nor a compiled one has to reset anything.
"""

from __future__ import annotations

from typing import Any

import torch

from raymoe.rows.operator_definitions import define


class RowCounts:
    """The counts of one layer on this rank. Forward passes that activation checkpointing repeats are left out.

    `total[L]` has the rows of each local expert since the layer was made, `most[1]` the most rows of one pass since
    `take_most`, gaps included. They are plain tensors, because DDP would overwrite buffers by those of rank 0.

    With `by_expert`, `total` has the rows of each of E experts in this rank's slots, and one more element for empty
    slots.
    """

    def __init__(self, experts: int, device: torch.device, *, by_expert: bool = False) -> None:
        self.by_expert = by_expert
        self._held: torch.Tensor | None = None
        self.total = _static(torch.zeros(experts, dtype=torch.int64, device=device))
        self.most = _static(torch.zeros(1, dtype=torch.int32, device=device))
        self._read: dict[str, torch.Tensor] = {}

    def add(self, expert_offsets: torch.Tensor, expert_counts: torch.Tensor) -> None:
        """Add the rows of a dispatch, without a wait."""
        if self._held is not None:
            expert_counts = torch.zeros_like(self.total).index_add_(0, self._held, expert_counts.long())
        _ops.count_rows(self.total, self.most, expert_offsets, expert_counts)

    def write_experts(self, held: torch.Tensor) -> None:
        """Count rows of slots for these experts from now on, int32[S]; -1: the slot is empty."""
        experts = torch.where(held < 0, len(self.total) - 1, held).long()
        if self._held is None:
            self._held = _static(torch.empty_like(experts, device=self.total.device))
        self._held.copy_(experts)

    def take_new(self, reader: str) -> torch.Tensor:
        """Return the rows of each local expert, int64[L], or of each of E experts, since this reader's last call.

        Nothing waits.
        """
        if reader not in self._read:
            self._read[reader] = torch.zeros_like(self.total)
        new = self.total - self._read[reader]
        self._read[reader].copy_(self.total)
        return new[:-1] if self.by_expert else new

    def take_most(self) -> torch.Tensor:
        """Return the most rows of one pass since the last call, int32[1], without a wait."""
        most = self.most.clone()
        self.most.zero_()
        return most


def _static(counts: torch.Tensor) -> torch.Tensor:
    """Tell CUDA graphs of torch.compile that the address stays, as `torch._dynamo.mark_static_address` does."""
    marked: Any = counts
    marked._dynamo_static_input_type = "unguarded"
    return counts


define({"count_rows": "(Tensor(a!) total, Tensor(b!) most, Tensor expert_offsets, Tensor expert_counts) -> ()"})
_ops: Any = torch.ops.raymoe


@torch.library.impl("raymoe::count_rows", ("cpu", "cuda"))
def _count_rows(
    total: torch.Tensor, most: torch.Tensor, expert_offsets: torch.Tensor, expert_counts: torch.Tensor
) -> None:
    # An operator asks at run time: a compiled layer may be inside of a checkpoint, which calls it once more.
    if torch._C._current_graph_task_id() != -1:  # inside of a backward pass
        return
    total.add_(expert_counts)
    torch.maximum(most, expert_offsets[-1:], out=most)


def _fake_count_rows(*_: torch.Tensor) -> None:
    return


torch.library.register_fake("raymoe::count_rows", _fake_count_rows)
