"""Rounds of all ranks over NCCL, and waits of the host that end.

NCCL's own waits do not: a peer that is gone is found out by the host, which then aborts the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from raymoe.exchange.rounds import Lagging
from raymoe.job.errors import PeerTimeout, RaymoeError
from raymoe.memory.world import CLOSING_S, World
from raymoe.transport.nccl_group import NcclGroup, OtherThread

_SPIN_S = 2e-3  # a round is mostly over by then; who waits longer sleeps between looks


class NcclRounds:
    """A group and its waits. All exchanges of a world share one (`World.shared`): a communicator takes a second to make
    and memory to keep. After a failed wait it is of no further use."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = NcclGroup(world)
        once = torch.zeros(world.size + 1, dtype=torch.uint8, device=world.device)
        self._group.all_gather(once[1:], once[:1])  # connects what the first one needs, which may be captured
        self._spare = torch.zeros(2, 1, dtype=torch.uint8, device=world.device).unbind()
        # A wait of the user's own, for a stream, ends too when this rank is told to stop.
        self._forget = world.waiter.on_abort(lambda _: self._group.abort())

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`mine` of all ranks, in rank order, into `out`."""
        self._group.all_gather(out, mine)

    def exchange(self, receives: Mapping[int, torch.Tensor], sends: Mapping[int, torch.Tensor]) -> None:
        """Bytes to and from each other rank.

        A byte goes where there is nothing to send: NCCL may stand still where pairs stay away (see `NcclGroup`).
        """
        spare, into = self._spare
        self._group.exchange(
            {rank: rows if rows.numel() else spare for rank, rows in sends.items()},
            {rank: rows if rows.numel() else into for rank, rows in receives.items()},
        )

    def reduce_scatter(self, out: torch.Tensor, blocks: torch.Tensor) -> None:
        """The sum over ranks of block r of `blocks` into `out` of rank r, added and rounded as NCCL does it."""
        self._group.reduce_scatter(out, blocks)

    def wait(self, op: str, over: Callable[[], bool], lagging: Lagging | None = None) -> None:
        """Until `over`; where that takes too long, names the peer that `lagging` tells of, or that NCCL waits for."""
        self._until(op, over, lagging or self._group_lags)

    def wait_for_all(self, op: str) -> None:
        """Until the device is done, also with replays on other streams."""
        self._until(op, OtherThread(self._world.gpu.synchronise).over, self._group_lags)

    def close(self, together: bool) -> None:
        """With the world; `together` if all ranks close now. A rank that has left already delays it by 2 s."""
        self._forget()
        if not together:
            self._group.abort()
        try:
            self._group.close(min(self._world.timeout_s, CLOSING_S))
        except RaymoeError:
            self._group.abort()
            raise

    def _group_lags(self) -> tuple[int, int, int]:
        others = [rank for rank in range(self._world.size) if rank != self._world.rank] or [self._world.rank]
        return self._group.lagging(others)

    def _until(self, op: str, over: Callable[[], bool], lagging: Lagging) -> None:
        start = time.monotonic()
        while time.monotonic() - start < _SPIN_S:
            if over():
                return
        try:
            if self._world.waiter.until(op, lagging()[0], over, self._world.timeout_s):
                return
            peer, seen, mine = lagging()
            raise PeerTimeout(op, mine, peer, mine, seen, time.monotonic() - start, self._world.rank)
        except RaymoeError:
            self._group.abort()  # ends what waits on the device
            raise
