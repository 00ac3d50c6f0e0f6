"""What moves rows, and what is told about them, between CPU ranks. All arithmetic is `on_cpu.py`'s.

Both operations are collective and raise `PeerTimeout` or `Aborted` when a peer does not take part in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from raymoe.exchange.arrays import Array, Bags
from raymoe.exchange.placing import Arrived
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.sending import Sending


@dataclass
class Home:
    """What came back: row `where[i]` of `table` belongs to row i of the sending; `statuses` are what all ranks said.
    Where they say that the step is refused, no row need be there."""

    table: torch.Tensor  # of the dtype in which sums cross
    where: Array
    statuses: Sequence[Refusal]


@dataclass
class Visit:
    """What one rank keeps of a dispatch in order to send its rows home."""

    sending: Sending
    counts: Array  # [R] rows that arrived from each source
    where: Array  # [N] the row of the carrier's table in which each came
    number: int
    """Which of the exchange's dispatches it is, the same on all ranks."""


class Carrier(Protocol):
    def dispatch(self, x: torch.Tensor, sending: Sending) -> Arrived:
        """Send rows `sending.tokens` of `x` and bring what the others send here."""

    def combine(self, rows: torch.Tensor, bags: Bags, visit: Visit, status: Refusal) -> Home:
        """Send home bag i's sum of `rows` for arrived row i, rounded once to the dtype in which sums cross, and this
        rank's status; bring what the others send."""

    def close(self, together: bool) -> None:
        """Give up memory and connections; `together` if all ranks close now."""
