"""Rounds (collectives of all ranks) over NCCL, and bounded waits of the host.

NCCL's own waits are not bounded. The host notices a missing peer, and aborts the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from raymoe.errors import PeerTimeout, RaymoeError
from raymoe.memory.world import CLOSING_S, World
from raymoe.net.nccl import BackgroundWait, NcclGroup

Lagging: TypeAlias = Callable[[], tuple[int, int, int]]
"""Names a peer that is late, or any peer if none is: the peer, its count of operations, and this rank's count."""

_cuda: Any = torch.cuda  # torch.cuda lacks annotations
_SPIN_S = 2e-3  # most rounds are done by then; a longer wait sleeps between polls


class NcclRounds:
    """An NCCL group and bounded waits for it.

    All exchanges of a world share one (`World.shared`), because a communicator costs memory and takes a second to make.
    After a failed wait the group is aborted.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = NcclGroup(world)
        once = torch.zeros(world.size + 1, dtype=torch.uint8, device=world.device)
        self._group.all_gather(once[1:], once[:1])  # connects the ranks now: the first real one may be captured
        self._spare = torch.zeros(2, 1, dtype=torch.uint8, device=world.device).unbind()
        # On an abort this also ends a user's own wait for a stream.
        self._forget = world.waiter.on_abort(lambda _: self._group.abort())

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Gather `own` of all ranks into `out`, in rank order. `own` may be this rank's part of `out`."""
        self._group.all_gather(out, own)

    def exchange(self, receives: Mapping[int, torch.Tensor], sends: Mapping[int, torch.Tensor]) -> None:
        """Send bytes to, and receive bytes from, each other rank. An empty tensor means no bytes.

        An empty message is sent as one byte: NCCL may hang where a pair of ranks exchanges nothing (see `NcclGroup`).
        """
        spare, into = self._spare
        self._group.exchange(
            {rank: rows if rows.numel() else spare for rank, rows in sends.items()},
            {rank: rows if rows.numel() else into for rank, rows in receives.items()},
        )

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor) -> None:
        """Sum block r of `blocks` over all ranks into `out` of rank r, added and rounded as NCCL does it."""
        self._group.reduce_scatter(out, blocks)

    def wait(self, op: str, is_done: Callable[[], bool], lagging: Lagging | None = None) -> None:
        """Wait until `is_done`, or raise `PeerTimeout` of the peer from `lagging`; by default NCCL's own report."""
        self._wait_until(op, is_done, lagging or self._lagging_in_group)

    def wait_for_all(self, op: str) -> None:
        """Wait for the device, replays on other streams included."""
        self._wait_until(op, BackgroundWait(self._world.gpu.synchronise).done, self._lagging_in_group)

    def read(self, op: str, memory: torch.Tensor) -> torch.Tensor:
        """Copy some bytes to the host after the work of the current stream, and wait for that with a limit."""
        copied = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)  # else the copy itself would wait
        copied.copy_(memory, non_blocking=True)
        done: Any = _cuda.Event()
        done.record(_cuda.current_stream(memory.device))
        self._wait_until(op, done.query, self._lagging_in_group)
        return copied

    def close(self, together: bool) -> None:
        """Close with the world; `together` if all ranks close now. A rank that has left already delays it by 2 s."""
        self._forget()
        if not together:
            self._group.abort()
        try:
            if together:
                self.wait_for_all("close")  # with a limit, which the group's own wait for the device has not
            self._group.close(min(self._world.timeout_s, CLOSING_S))
        except RaymoeError:
            self._group.abort()
            raise

    def _lagging_in_group(self) -> tuple[int, int, int]:
        others = [rank for rank in range(self._world.size) if rank != self._world.rank] or [self._world.rank]
        return self._group.lagging(others)

    def _wait_until(self, op: str, is_done: Callable[[], bool], lagging: Lagging) -> None:
        start = time.monotonic()
        while time.monotonic() - start < _SPIN_S:
            if is_done():
                return
        try:
            if self._world.waiter.until(op, lagging()[0], is_done, self._world.timeout_s):
                return
            peer, seen, expected = lagging()
            raise PeerTimeout(op, expected, peer, expected, seen, time.monotonic() - start, self._world.rank)
        except RaymoeError:
            self._group.abort()  # ends NCCL's waits on the device
            raise
