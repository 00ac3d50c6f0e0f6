"""Rails: the ranks with one place in each domain of a world, connected by an engine of others.

A row crosses the network on the rail of its source, and NVLink or shared memory from there on. So each rank talks over
the network to one rank of each other domain, and all rails of a world work side by side.

There are two engines: Gloo between CPU ranks (`raymoe.net.gloo_rail`) and NCCL between GPU ranks
(`raymoe.net.nccl_rail`). Both keep these promises:

- Blocks have sizes that are known when an operation starts, so it needs no counts from the device.
- Operations are in one order on all ranks of the rail. An engine may match messages by that order alone.
- A wait ends by data, by the deadline of the world (`PeerTimeout`, which names a rank of the world), or by
  `World.abort` (`Aborted`).
- After a failed wait, or `abort`, the rail raises in every call, and does not touch the caller's tensors any more.

Between GPU ranks an operation is enqueued on the current stream, and later work of the stream sees its result. The
function that waits for its end then does nothing. `settle` is the wait of the host, which has a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

RAIL_BLOCKS = 8
"""The most blocks of NCCL's kernels on a rail. Each may hold an SM of its own while a dispatch runs. Not timed."""


class Rail(Protocol):
    """One rank's end of its rail. Blocks are in the order of the domains; this rank's own block is one of them."""

    capturable: bool
    """Whether operations can be captured in a CUDA graph."""

    def gather(self, op: str, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        """Start to gather the blocks `own` of all domains into `out`, whose first dimension is N times as long.

        Returns a function that waits for the end. Until then both tensors belong to the rail.
        """

    def swap(self, op: str, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        """Start to send `sent[d]` to the rank in domain d, and to receive its block for this rank as `received[d]`.

        Returns a function that waits for the end. Until then both tensors belong to the rail.
        """

    def settle(self, op: str) -> None:
        """Wait until the device has done all work enqueued so far, replays of graphs included. No-op on CPU ranks."""

    def lagging(self) -> int:
        """Return the rank, by its number in the world, that holds up the operation which this rank waits for.

        It may ask the network. Call it during a wait only: ranks need not publish how far they are before.
        """

    def fail(self, reason: str) -> None:
        """Publish to the ranks of all rails why this rank leaves an operation that they are in, then `abort`.

        Their waits end early, with an error that says `reason`. Ranks that the reason does not reach wait until their
        deadlines.
        """

    def check_failed(self) -> None:
        """Raise the reason of a rank that has failed, on any rail. For a long wait: it may ask the network."""

    def abort(self) -> None:
        """End this rank's operations, also those that wait, without their data. Any thread may call it, also twice.

        Later calls raise. Peers get no message: their waits for this rank end by their own deadlines or aborts.
        """

    def close(self, together: bool) -> None:
        """Disconnect. `together` if all ranks close now."""
