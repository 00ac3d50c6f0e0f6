"""Rounds of all ranks over NCCL, and waits of the host that end.

NCCL's own waits do not: a peer that is gone is found out by the host, which then aborts the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raymoe.job.errors import PeerTimeout, RaymoeError
from raymoe.memory.world import World
from raymoe.transport.nccl_group import NcclGroup

_SPIN_S = 2e-3  # a round is mostly over by then; who waits longer sleeps between looks
_cuda: Any = torch.cuda  # has no annotations


class NcclRounds:
    """A group and its waits. All exchanges of a world share one (`World.shared`): a communicator takes a second to make
    and memory to keep. After a failed wait it is of no further use."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = NcclGroup(world)
        once = torch.zeros(world.size + 1, dtype=torch.uint8, device=world.device)
        self._group.all_gather(once[1:], once[:1])  # connects what the first one needs, which may be captured
        self._spare = torch.zeros(2, 1, dtype=torch.uint8, device=world.device)
        # A wait of the user's own, for a stream, ends too when this rank is told to stop.
        self._forget = world.waiter.on_abort(lambda _: self._group.abort())

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`mine` of all ranks, in rank order, into `out`."""
        self._group.all_gather(out, mine)

    def all_to_all(self, out: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None:
        """Block r goes to rank r; what comes from rank r goes into `out[r]`.

        A byte goes where there is nothing to send: NCCL may stand still where pairs stay away (see `NcclGroup`).
        """
        sends, receives = (
            {rank: rows.view(torch.uint8) if rows.numel() else spare for rank, rows in enumerate(each)}
            for each, spare in ((blocks, self._spare[0]), (out, self._spare[1]))
        )
        receives.pop(self._world.rank).copy_(sends.pop(self._world.rank))
        if sends:
            self._group.exchange(sends, receives)

    def wait(self, op: str) -> None:
        """Until what was enqueued on the current stream is done."""
        over = _cuda.Event()
        over.record(torch.cuda.current_stream(self._world.device))
        self._until(op, over.query)

    def wait_for_all(self, op: str) -> None:
        """Until the device is done, also with replays on other streams."""
        self._until(op, _OtherThread(self._world.gpu.synchronise).over)

    def close(self, together: bool) -> None:
        """With the world; `together` if all ranks close now."""
        self._forget()
        if not together:
            self._group.abort()
        try:
            self._group.close()
        except RaymoeError:
            self._group.abort()
            raise

    def _until(self, op: str, over: Callable[[], bool]) -> None:
        start = time.monotonic()
        while time.monotonic() - start < _SPIN_S:
            if over():
                return
        size, timeout_s = self._world.size, self._world.timeout_s
        others = [rank for rank in range(size) if rank != self._world.rank] or [self._world.rank]
        try:
            if self._world.waiter.until(op, self._group.lagging(others)[0], over, timeout_s):
                return
            peer, seen, mine = self._group.lagging(others)
            raise PeerTimeout(op, mine, peer, mine, seen, time.monotonic() - start, self._world.rank)
        except RaymoeError:
            self._group.abort()  # ends what waits on the device
            raise


class _OtherThread:
    """A wait that nothing can bound, made where it holds nobody up."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._error: RaymoeError | None = None
        self._thread = threading.Thread(target=self._run, name="raymoe device wait", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        """Whether it has ended; raises what it ended with."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._wait()
        except RaymoeError as error:
            self._error = error
