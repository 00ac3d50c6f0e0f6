"""Dispatch and combine over NCCL all-to-alls, as a careful user of torch.distributed would write them.

A dispatch tells all ranks the ids and weights of its tokens, by an all-gather of a fixed size. From what it hears each
rank works out on the device how many rows go where; the host waits for these numbers, once, while rows are packed. They
follow, each once for each (token, destination rank). The numbers of a combine are known.

Because of that wait it cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.refusal import NO_REFUSAL, Refusal, raise_first, status_of
from raymoe.exchange.round_kernels import Kept, RoundKernels
from raymoe.exchange.rounds import Launcher, Rounds
from raymoe.exchange.spec import ExchangeSpec
from raymoe.job.errors import RaymoeError
from raymoe.memory.heap import Layout, Region
from raymoe.memory.world import World

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
