"""What other systems hold of a GPU's memory, known before they start. No torch in here."""

from __future__ import annotations

from raymoe.exchange.spec import ExchangeSpec

MOST_GROUPS = 15
"""all_to_all_vdev_2d takes that many groups of rows from a rank to a rank (torch 2.11)."""

SLACK_BYTES = 64 << 20
"""Of a heap: words, pads for signals, and what allocations are rounded up to."""

PROCESS_BYTES = 3 << 29
"""Of the GPU, for the process itself: its CUDA context, kernels and communicators."""


def groups_of(local: int) -> int:
    """How many groups the experts of a rank are sent to: as many as there may be, each of as many experts.

    >>> groups_of(64), groups_of(12), groups_of(17)
    (8, 12, 1)
    """
    return max(groups for groups in range(1, MOST_GROUPS + 1) if local % groups == 0)


def rows_there(spec: ExchangeSpec, ranks: int) -> int:
    """Rows that a rank receives at most, each group aligned; an empty one takes `alignment` rows.

    >>> rows_there(ExchangeSpec(tokens=4, hidden=64, experts=8, topk=2, alignment=16), ranks=2)
    80
    """
    return ranks * spec.tokens * spec.topk + groups_of(spec.local_experts(ranks)) * spec.alignment


def heap_bytes(spec: ExchangeSpec, ranks: int) -> int:
    """Of a symmetric heap: rows that leave, rows that arrive at worst, rows that come back."""
    return (2 * spec.tokens * spec.topk + rows_there(spec, ranks)) * spec.row_bytes + SLACK_BYTES
