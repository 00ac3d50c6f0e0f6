"""What ranks do with their own memory around NCCL's collectives: numbering, placing and sums, by kernels of ours.

The memory of an exchange is made once; a dispatch allocates what it gives back and one block of what its combine reads
again (`DispatchMemory`). Every launch is packed once, and a call changes addresses in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from raymoe.device import rounds
from raymoe.device.jit import KernelSource
from raymoe.device.launch import Shape
from raymoe.device.rounds import DispatchMemory, Sizes
from raymoe.exchange.backend import Tokens
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.kernel_result import lend
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.rounds import Launcher, Ready, Words
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.heap import ITEM_BYTES
from raymoe.memory.world import World

ENTRIES_A_RUN = 256  # of (token, k), at least, that a block counts


@dataclass(frozen=True)
class Blocks:
    """The memory of an exchange, bytes in rows. Blocks of rows that cross have one row more than there are tokens, so
    that a status finds room behind them."""

    table: torch.Tensor  # [R * T + 1, row_bytes]: what arrives, source after source; the last row stays zero
    packed: torch.Tensor  # [R, T + 1, row_bytes]: what leaves with a dispatch
    leaving: torch.Tensor  # [R, T + 1, home_row_bytes]: what leaves with a combine
    returned: torch.Tensor  # likewise, what comes home

    @classmethod
    def of(cls, spec: ExchangeSpec, sizes: Sizes, device: torch.device) -> Blocks:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=device)

        rows = sizes.ranks * (spec.tokens + 1)
        table = torch.zeros(sizes.ranks * spec.tokens + 1, spec.row_bytes, dtype=torch.uint8, device=device)
        # Rows that leave with a dispatch and sums that leave with a combine take turns in one place.
        memory = empty(rows * max(spec.row_bytes if sizes.compact else 0, spec.home_row_bytes))
        shape = (sizes.ranks, spec.tokens + 1, -1)
        packed = memory[: rows * spec.row_bytes].view(shape) if sizes.compact else memory[:0]
        leaving = memory[: rows * spec.home_row_bytes].view(shape)
        return cls(table, packed, leaving, torch.empty_like(leaving))


@dataclass(frozen=True)
class Kept:
    """What a dispatch found out, and the stream that it was enqueued on, by the driver's number."""

    memory: torch.Tensor
    stream: int

    def used_on(self, stream: int) -> torch.Tensor:
        """The memory, for work on this stream, which is the current one."""
        if stream != self.stream:
            lend(self.memory)
        return self.memory


class RoundKernels:
    """The kernels of one exchange. `compact`: rows cross only where they are wanted, one behind the other."""

    def __init__(self, world: World, spec: ExchangeSpec, launcher: Launcher, *, compact: bool) -> None:
        self._spec, self._device, self._launcher = spec, world.device, launcher
        self._rank, self._size = world.rank, world.size
        self._capacity = spec.rows(world.size)
        self._sizes = Sizes(world.size, spec.tokens, spec.topk, spec.local_experts(world.size), compact)
        self._memory = DispatchMemory.of(self._sizes, world.rank)
        self.blocks = Blocks.of(spec, self._sizes, world.device)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._table = self.blocks.table.view(dtype)
        self._refused = torch.zeros(rounds.REFUSED_BYTES, dtype=torch.uint8, device=world.device)
        self._make_numbering()
        self._make_moving()
        self._make_sums()

    def new_memory(self) -> torch.Tensor:
        """What a dispatch finds out, for its combine to read."""
        return self._empty(self._sizes.memory_bytes, torch.uint8)

    def new(self, tokens: Tokens, out: torch.Tensor | None, owner: object) -> Dispatched:
        """What a dispatch gives; nothing stands in it yet."""
        return Dispatched(
            x=self._table if out is None else out,
            weights=self._empty(self._capacity, torch.float32),
            expert_offsets=self._empty(self._sizes.local + 1, torch.int32),
            expert_counts=self._empty(self._sizes.local, torch.int32),
            index=self._empty(self._capacity, torch.int64) if out is None else None,
            tokens=tokens.x.shape[0],
            _home=None,
            _owner=owner,
        )

    def told(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where all ranks' ids and weights go, and this rank's part of it."""
        each = self._sizes.told_bytes
        return kept[: self._size * each], kept[self._rank * each : (self._rank + 1) * each]

    def tell(self, stream: int, tokens: Tokens, kept: torch.Tensor) -> None:
        """Ids and weights of this rank into its part of `told`."""
        self._tell(
            stream,
            kept=kept,
            ids=tokens.ids,
            weights=tokens.weights,
            num_tokens=tokens.num_tokens,
            wide_ids=int(tokens.ids.dtype == torch.int64),
            given=tokens.x.shape[0],
        )

    def number(self, stream: int, got: Dispatched, kept: torch.Tensor, heard: Words | None = None) -> None:
        """From what all told: places, counts, offsets, weights, index; with `heard`, rows to and from each rank too."""
        self._count(stream, kept=kept)
        self._number(
            stream,
            kept=kept,
            out_weights=got.weights,
            expert_offsets=got.expert_offsets,
            expert_counts=got.expert_counts,
            index=got.index,
            heard=None if heard is None else heard.memory,
            given=got.tokens,
        )

    def pack(self, stream: int, tokens: Tokens, kept: torch.Tensor, *, own: bool) -> None:
        """Rows of `x` into the blocks that leave for the other ranks; with `own` also into this rank's of the table."""
        self._pack(stream, rows=tokens.x, kept=kept, count=tokens.x.shape[0])
        if own:
            self._pack_own(stream, rows=tokens.x, kept=kept, count=tokens.x.shape[0])

    def place(self, stream: int, got: Dispatched, kept: torch.Tensor, own: torch.Tensor | None = None) -> None:
        """Rows of the table to their places, those of this rank out of `own` if that is given."""
        zeros = self._spec.padding == "zero"
        self._place(
            stream,
            own=own,
            own_count=0 if own is None else own.shape[0],
            kept=kept,
            out=got.x,
            expert_offsets=got.expert_offsets if zeros else None,
            expert_counts=got.expert_counts if zeros else None,
        )

    def sum_entries(self, stream: int, rows: torch.Tensor, kept: torch.Tensor, weighted: bool) -> None:
        """What the experts made of each token, into the blocks that leave, with this rank's status behind each."""
        self._sum_entries(stream, kept=kept, rows=rows, weighted=int(weighted))

    def sum_ranks(self, stream: int, kept: torch.Tensor, y: torch.Tensor) -> None:
        """y, out of what has come home; NaN where the step is refused."""
        self._sum_ranks(stream, kept=kept, y=y, given=y.shape[0])

    def take_refused(self) -> list[Refusal]:
        """The statuses of all ranks in the first combine that was refused since this was called last; else nothing.
        Waits for the stream."""
        found = self._refused.cpu().numpy().tobytes()
        if not any(found[:8]):
            return []
        self._refused.zero_()
        begin, size = 16, Refusal.NBYTES
        return [Refusal.unpack(found[begin + rank * size :][:size]) for rank in range(self._size)]

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def _make_numbering(self) -> None:
        spec, sizes, launcher = self._spec, self._sizes, self._launcher
        # Between dispatches only these words are kept: see TellScratch.
        scratch = torch.tensor([-1, 0, 0], dtype=torch.int64, device=self._device)
        entries = sizes.tokens * sizes.topk
        told = self._shape(rounds.TELL, -(-entries // launcher.threads))
        self._tell: Ready = launcher.ready(
            rounds.TELL, told, rounds.TellParams(self._memory, experts=spec.experts), scratch=scratch
        )
        runs = max(1, min(launcher.sms // sizes.ranks, -(-entries // ENTRIES_A_RUN), sizes.tokens))
        warps = sizes.numbering_warps(launcher.threads // 32)
        stats = self._empty(sizes.ranks * runs * sizes.stats_words, torch.int32)
        blocks, threads = sizes.ranks * runs, warps * 32
        self._count: Ready = launcher.ready(
            rounds.COUNT,
            Shape(blocks, threads, 4 * sizes.stats_words),
            rounds.CountParams(self._memory, runs=runs),
            stats=stats,
        )
        params = rounds.NumberParams(
            self._memory,
            runs=runs,
            capacity=self._capacity,
            alignment=spec.alignment,
            zero_row=sizes.ranks * sizes.tokens,
        )
        shape = Shape(blocks, threads, sizes.numbering_bytes(warps))
        self._number: Ready = launcher.ready(rounds.NUMBER, shape, params, stats=stats)

    def _make_moving(self) -> None:
        spec, sizes, ready = self._spec, self._sizes, self._launcher.ready
        pieces = -(-spec.row_bytes // (rounds.VECTOR_BYTES * rounds.SPREAD_VECTORS))
        base = rounds.SpreadParams(row_bytes=spec.row_bytes, pieces=pieces, experts=sizes.local)
        tokens = sizes.ranks * sizes.tokens
        shape = self._shape(rounds.SPREAD, tokens * pieces * 32 // self._launcher.threads + 1)
        width = sizes.topk
        place = replace(
            base,
            source=self._memory.row_of,
            to=self._memory.places,
            count=tokens,
            stride=width,
            width=width,
            own_first=self._rank * sizes.tokens,
        )
        self._place: Ready = ready(rounds.SPREAD, shape, place, rows=self.blocks.table)
        shape = self._shape(rounds.SPREAD, sizes.tokens * pieces * 32 // self._launcher.threads + 1)
        home = self._memory.home
        pack = replace(base, to=home, stride=sizes.ranks, width=sizes.ranks, skip=self._rank)
        self._pack: Ready = ready(rounds.SPREAD, shape, pack, out=self.blocks.packed)
        # `home` counts in blocks that are a row longer than those of the table.
        own = replace(base, to=home + 4 * self._rank, stride=sizes.ranks, width=1, first_row=self._rank)
        self._pack_own: Ready = ready(rounds.SPREAD, shape, own, out=self.blocks.table)

    def _make_sums(self) -> None:
        spec, sizes, ready = self._spec, self._sizes, self._launcher.ready
        entries, ranks = rounds.sum_sources(spec.dtype, spec.combine_wire)
        pieces = rounds.sum_pieces(spec.row_bytes, ITEM_BYTES[spec.dtype], ITEM_BYTES[spec.combine_wire])
        row, wire = spec.row_bytes, spec.home_row_bytes
        units = sizes.tokens * pieces * 32 // self._launcher.threads + 1
        self._sum_entries: Ready = ready(
            entries,
            self._shape(entries, units * sizes.ranks),
            rounds.SumEntriesParams(self._memory, row_bytes=row, wire_row_bytes=wire, pieces=pieces),
            leaving=self.blocks.leaving,
        )
        self._sum_ranks: Ready = ready(
            ranks,
            self._shape(ranks, units),
            rounds.SumRanksParams(self._memory, row_bytes=row, wire_row_bytes=wire, pieces=pieces),
            leaving=self.blocks.leaving,
            returned=self.blocks.returned,
            refused=self._refused,
        )

    def _shape(self, source: KernelSource, blocks: int) -> Shape:
        """As many blocks as there is work for, or as there can be at once."""
        shape = Shape(1, self._launcher.threads)
        return replace(shape, blocks=max(1, min(blocks, self._launcher.resident(source, shape))))
