"""Everything to everyone, by NCCL: the yardstick of a small world.

A dispatch is two all-gathers: of ids and weights, and of all rows, from which every rank picks its own. A combine hands
every rank a block of T sums, of which those are read whose tokens have an expert there; the source adds the blocks in
rank order. That is a reduce-scatter whose sum the source takes itself, because NCCL rounds at every hop and in an order
of its own.

Nothing depends on a number that only the device knows, so all of it can be captured.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.captured_memory import CapturedMemory
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.refusal import Refusal, raise_first
from raymoe.exchange.round_kernels import Kept, RoundKernels
from raymoe.exchange.rounds import Launcher, Rounds
from raymoe.exchange.spec import ExchangeSpec
from raymoe.job.errors import RaymoeError
from raymoe.memory.world import World


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
