"""Backends `allgather` and `collective` on GPUs: NCCL moves rows, kernels of ours number, place and sum them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.device.current import capturing, on
from raymoe.errors import PeerTimeout, RaymoeError
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.nccl_kernels import Kept, Lagging, Launcher, RoundKernels, Rounds
from raymoe.exchange.refusal import NO_REFUSAL, Refusal, raise_first, status_of
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import Layout, Region
from raymoe.memory.world import CLOSING_S, World
from raymoe.net.nccl import BackgroundWait, NcclGroup

# Memory of what a captured call allocates.

_cuda: Any = torch.cuda  # has no annotations


class CapturedMemory:
    """What is allocated inside, while a stream is captured, is given to nothing outside, since a replay writes to it
    again. Captured calls of one exchange share it: they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with on(device):  # a pool belongs to the device that is current when it is made
            self._pool: Any = _cuda.MemPool() if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[object]:
        return _cuda.use_mem_pool(self._pool, self._device) if capturing(self._device) else nullcontext()

    def close(self) -> None:
        """Let go of the pool now, and not when a collection of garbage finds it: torch ends the process if that is
        while any stream is captured. What was allocated stays until its tensors go."""
        self._pool = None


# Rounds of all ranks over NCCL, and waits of the host that end.
#
# NCCL's own waits do not: a peer that is gone is found out by the host, which then aborts the group.

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
        self._until(op, BackgroundWait(self._world.gpu.synchronise).done, self._group_lags)

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


# Everything to everyone, by NCCL: the yardstick of a small world.
#
# A dispatch is two all-gathers: of ids and weights, and of all rows, from which every rank picks its own. A combine
# hands every rank a block of T sums, of which those are read whose tokens have an expert there; the source adds the
# blocks in rank order. That is a reduce-scatter whose sum the source takes itself, because NCCL rounds at every hop and
# in an order of its own.
#
# Nothing depends on a number that only the device knows, so all of it can be captured.


class NcclAllgather:
    """Row t of source s arrives as row s*T + t of the table."""

    capturable = True
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, rounds: Rounds, launcher: Launcher) -> None:
        self._spec, self._rounds, self._launcher = spec, rounds, launcher
        self._kernels = RoundKernels(world, spec, launcher, compact=False)
        self._memory = CapturedMemory(world.device)
        blocks = self._kernels.blocks
        self._arriving, first = blocks.table[:-1], world.rank * spec.tokens
        self._own = blocks.table[first : first + spec.tokens]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._own_rows = self._own.view(dtype)
        peers = [rank for rank in range(world.size) if rank != world.rank]
        crossing = spec.tokens * spec.home_row_bytes + Refusal.NBYTES
        self._sends, self._receives = (
            {rank: block[rank].view(-1)[:crossing] for rank in peers} for block in (blocks.leaving, blocks.returned)
        )

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._launcher.ordered("dispatch") as stream, self._memory():
            return self._dispatch(stream, tokens, out)

    def _dispatch(self, stream: int, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        kernels = self._kernels
        kept = kernels.new_memory()
        kernels.tell(stream, tokens, kept)
        self._rounds.all_gather(*kernels.told(kept))
        got = kernels.new(tokens, out, self)
        got._home = Kept(kept, stream)
        given = len(tokens.x)
        if given < self._spec.tokens:
            self._own_rows[:given].copy_(tokens.x)
        self._rounds.all_gather(self._arriving, self._own if given < self._spec.tokens else tokens.x.view(torch.uint8))
        kernels.number(stream, got, kept)
        if out is not None:
            kernels.place(stream, got, kept)
        return got

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, Kept)
        with self._launcher.ordered("combine") as stream:
            kept = home.used_on(stream)
            self._kernels.sum_entries(stream, rows, kept, weighted)
            if self._sends:
                self._rounds.exchange(self._receives, self._sends)
            self._kernels.sum_ranks(stream, kept, out)

    def check(self) -> None:
        """Wait for the device, then raise for the first refused step, the same on all ranks."""
        self._rounds.wait_for_all("check")
        if statuses := self._kernels.take_refused():
            raise_first(statuses, self._spec)

    def close(self, together: bool) -> None:
        """The rounds are the world's, and stay. Device memory is torch's, which does not wait for other streams."""
        if together:
            with suppress(RaymoeError):  # it is `check` that tells; a wait that failed has ended what the device did
                self._rounds.wait_for_all("close")
        self._memory.close()


# Dispatch and combine over NCCL all-to-alls, as a careful user of torch.distributed would write them.
#
# A dispatch tells all ranks the ids and weights of its tokens, by an all-gather of a fixed size. From what it hears
# each rank works out on the device how many rows go where; the host waits for these numbers, once, while rows are
# packed. They follow, each once for each (token, destination rank). The numbers of a combine are known.
#
# Because of that wait it cannot be captured.

_NUMBER_BITS = 32


@dataclass(frozen=True)
class _WayHome:
    kept: Kept
    number: int
    """Of the dispatch."""
    giving: Sequence[int]  # rows to each rank
    taking: Sequence[int]  # rows from each rank


class NcclCollective:
    """Rows that arrive lie one behind the other in their source's block of the table.

    Ranks that combine different dispatches would send one another blocks of other sizes than are received, and NCCL
    would stand still. So each rank's host says in shared memory what it combines, and looks, while the device sums,
    whether all say the same. Word (rank, parity) of a rank is {combines so far, dispatch, weighted}; the writer is that
    rank, which stores it at every peer; two words, because a peer may be one combine ahead.
    """

    capturable = False
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, rounds: Rounds, launcher: Launcher) -> None:
        self._world, self._spec, self._rounds, self._launcher = world, spec, rounds, launcher
        self._kernels = RoundKernels(world, spec, launcher, compact=True)
        blocks, size = self._kernels.blocks, world.size
        self._peers = [rank for rank in range(size) if rank != world.rank]
        self._arriving = blocks.table[:-1].view(size, spec.tokens, -1).unbind()
        self._packed = blocks.packed.unbind()
        self._sums, self._returned = (each.view(size, -1).unbind() for each in (blocks.leaving, blocks.returned))
        self._heard = launcher.words(1 + 2 * size)
        self._dispatches = self._combines = 0
        self._heap = world.allocate(Layout.of([Region.words("combines", 2 * size)]), "collective: combines")
        self._words = [self._heap.words("combines", peer) for peer in range(size)]
        self._unlike: list[Refusal] = []

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._launcher.ordered("dispatch") as stream:
            return self._dispatch(stream, tokens, out)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, _WayHome)
        self._say(home.number, weighted)
        with self._launcher.ordered("combine") as stream:
            self._combine(stream, rows, home, weighted, out)

    def check(self) -> None:
        """Wait for the device, then raise for the first refused step, the same on all ranks."""
        self._rounds.wait_for_all("check")
        refused, unlike = self._kernels.take_refused(), self._unlike
        self._unlike = []
        for statuses in (refused, unlike):
            if statuses:
                raise_first(statuses, self._spec)

    def close(self, together: bool) -> None:
        """The rounds are the world's, and stay. Device memory is torch's, which does not wait for other streams."""
        if together:
            with suppress(RaymoeError):  # it is `check` that tells; a wait that failed has ended what the device did
                self._rounds.wait_for_all("close")
        self._heap.close()

    def _dispatch(self, stream: int, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        kernels = self._kernels
        kept = kernels.new_memory()
        self._dispatches += 1
        kernels.tell(stream, tokens, kept)
        self._rounds.all_gather(*kernels.told(kept))
        got = kernels.new(tokens, out, self)  # while the device is busy
        kernels.number(stream, got, kept, self._heard)
        kernels.pack(stream, tokens, kept, own=out is None)
        self._rounds.wait("dispatch", self._has_heard)
        self._world.waiter.fence()  # orders the load of the number before the loads of what it announced
        numbers, size = self._heard.read(1, 2 * self._world.size), self._world.size
        giving, taking = numbers[:size], numbers[size:]
        if self._peers:
            self._rounds.exchange(
                {rank: self._arriving[rank][: taking[rank]] for rank in self._peers},
                {rank: self._packed[rank][: giving[rank]] for rank in self._peers},
            )
        if out is not None:
            kernels.place(stream, got, kept, own=tokens.x)
        got._home = _WayHome(Kept(kept, stream), self._dispatches, giving, taking)
        return got

    def _combine(self, stream: int, rows: torch.Tensor, home: _WayHome, weighted: bool, out: torch.Tensor) -> None:
        kept = home.kept.used_on(stream)
        self._kernels.sum_entries(stream, rows, kept, weighted)
        if not self._all_alike():
            out.fill_(torch.nan)
            return
        if self._peers:
            row, status = self._spec.home_row_bytes, Refusal.NBYTES
            self._rounds.exchange(
                {rank: self._returned[rank][: home.giving[rank] * row + status] for rank in self._peers},
                {rank: self._sums[rank][: home.taking[rank] * row + status] for rank in self._peers},
            )
        self._kernels.sum_ranks(stream, kept, out)

    def _has_heard(self) -> bool:
        return self._heard.read(0, 1)[0] >= self._dispatches

    def _say(self, number: int, weighted: bool) -> None:
        """Tell all ranks what this one combines."""
        self._combines += 1
        word = (self._combines << _NUMBER_BITS | number % (1 << _NUMBER_BITS)) << 1 | weighted
        at = 2 * self._world.rank + self._combines % 2
        for words in self._words:
            words[at] = word

    def _all_said(self) -> list[int]:
        """The words of all ranks for this combine."""
        words, turn = self._words[self._world.rank], self._combines % 2
        return [words[2 * rank + turn] for rank in range(self._world.size)]

    def _combined(self) -> list[int]:
        """How many combines each rank has come to, as far as these words say."""
        return [word >> _NUMBER_BITS + 1 for word in self._all_said()]

    def _lagging(self) -> tuple[int, int, int]:
        combined = self._combined()
        seen = min(combined)
        return combined.index(seen), seen, self._combines

    def _all_alike(self) -> bool:
        """Whether all ranks combine the same, which is asked of their hosts; the same answer on all ranks."""
        self._rounds.wait("combine", lambda: min(self._combined()) >= self._combines, self._lagging)
        found = self._all_said()
        if len(set(found)) == 1:
            return True
        last = (1 << _NUMBER_BITS) - 1
        self._unlike = self._unlike or [status_of(NO_REFUSAL, word >> 1 & last, bool(word & 1)) for word in found]
        return False
