"""The kernels that backends `allgather` and `collective` run around NCCL's collectives: numbering, placing, sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from raymoe.cuda.current import keep_for_current_stream
from raymoe.cuda.gpu import HostWords
from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Launch, Shape
from raymoe.cuda.launcher import Launcher
from raymoe.exchange.backend import Backend, Dispatched, Ids, Tokens
from raymoe.exchange.nccl import rounds
from raymoe.exchange.nccl.rounds import DispatchMemory, Sizes
from raymoe.exchange.refusal import DIGEST_SHIFT, Refusal
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import ITEM_BYTES, round_up
from raymoe.memory.world import CLOSING_S, World
from raymoe.net.nccl import BackgroundWait


class SharedLauncher(Launcher):
    """The launcher of all exchanges of a world, which share one (`World.shared`). It orders their NCCL operations."""

    def __init__(self, world: World) -> None:
        super().__init__(world.gpu)

    def close(self, together: bool = True) -> None:  # noqa: ARG002
        """Close with the world, after all work on its GPU. Where the GPU does not get idle, its memory stays."""
        if BackgroundWait(self._gpu.synchronise).done(CLOSING_S):
            super().close()


# The kernels of an exchange.
#
# The memory of an exchange is allocated once. A dispatch allocates its results, and one block that its combine reads
# again (`DispatchMemory`). Every launch is packed once, and a call changes addresses in it.

ENTRIES_A_RUN = 256  # the fewest entries (token, k) that a block counts
NUMBER_BYTES = 4


@dataclass(frozen=True)
class Blocks:
    """The memory of an exchange, as rows of bytes.

    A block of a dispatch, or of a combine of compact rows, has T + 1 rows: the extra row makes space for a status
    after the rows. Without compact rows, a block of a combine has T rows, a status and the numbers of entries, so
    that it is one message. Combines without numbers send it whole too: all ranks send the same sizes, whichever
    combine they run.
    """

    table: torch.Tensor  # [R * T + 1, row_bytes]: rows that arrive, source after source; the last row stays zero
    packed: torch.Tensor  # [R, T + 1, row_bytes]: rows that a dispatch sends
    outgoing: torch.Tensor  # [R, bytes of a block]: sums that a combine sends
    returned: torch.Tensor  # [R, bytes of a block]: sums that arrive
    outgoing_numbers: torch.Tensor  # [R, T * K * 4]: a float32 of each entry, that a combine for gradients sends
    returned_numbers: torch.Tensor  # [R, T * K * 4]: those that arrive
    skew: int  # bytes that a block of a combine has besides T + 1 rows; below 0: fewer

    @classmethod
    def of(cls, spec: ExchangeSpec, sizes: Sizes, device: torch.device) -> Blocks:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=device)

        rows = sizes.ranks * (spec.tokens + 1)
        table = torch.zeros(sizes.ranks * spec.tokens + 1, spec.row_bytes, dtype=torch.uint8, device=device)
        # The rows that a dispatch sends and the sums that a combine sends share memory: they never overlap in time.
        number_bytes = spec.tokens * spec.topk * NUMBER_BYTES
        if not sizes.compact:
            sums = spec.tokens * spec.combine_row_bytes + Refusal.NBYTES
            outgoing, returned = (empty(sizes.ranks, sums + round_up(number_bytes, 16)) for _ in range(2))
            outgoing_numbers, returned_numbers = (
                blocks[:, sums : sums + number_bytes] for blocks in (outgoing, returned)
            )
            skew = outgoing.shape[1] - (spec.tokens + 1) * spec.combine_row_bytes
            return cls(table, outgoing[:0], outgoing, returned, outgoing_numbers, returned_numbers, skew)
        memory = empty(rows * max(spec.row_bytes, spec.combine_row_bytes))
        packed = memory[: rows * spec.row_bytes].view(sizes.ranks, spec.tokens + 1, -1)
        outgoing = memory[: rows * spec.combine_row_bytes].view(sizes.ranks, -1)
        outgoing_numbers, returned_numbers = (empty(sizes.ranks, number_bytes) for _ in range(2))
        return cls(table, packed, outgoing, torch.empty_like(outgoing), outgoing_numbers, returned_numbers, skew=0)


@dataclass(frozen=True)
class SavedMemory:
    """The memory that a dispatch saves for its combine, and the driver's number of the dispatch's stream."""

    memory: torch.Tensor
    stream: int | None
    """None: the memory is kept for the current stream already."""

    def used_on(self, stream: int) -> torch.Tensor:
        """Return the memory for work on `stream`, which must be the current one."""
        if self.stream is not None and stream != self.stream:
            keep_for_current_stream(self.memory)
        return self.memory


class RoundKernels:
    """The kernels of one exchange. `compact`: a rank gets only the rows for its experts, one after the other."""

    def __init__(self, world: World, spec: ExchangeSpec, launcher: Launcher, *, compact: bool) -> None:
        self._spec, self._device, self._launcher = spec, world.device, launcher
        self._rank, self._size = world.rank, world.size
        self._capacity = spec.rows(world.size)
        self._sizes = Sizes(world.size, spec.tokens, spec.topk, spec.local_experts(world.size), compact)
        self._memory = DispatchMemory.of(self._sizes, world.rank)
        self._mark: torch.Tensor | None = None
        with launcher.ordered("exchange"):  # the first operation may be on another stream than the first values
            self.blocks = Blocks.of(spec, self._sizes, world.device)
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self._table = self.blocks.table.view(dtype)
            self._refused, self._refused_passes = torch.zeros(
                2, rounds.REFUSED_BYTES, dtype=torch.uint8, device=world.device
            ).unbind()
            self._make_numbering()
            self._make_moving()
            self._make_sums()
            self._make_passes()

    def new_memory(self) -> torch.Tensor:
        """Allocate the memory that a dispatch saves for its combine."""
        return self._empty(self._sizes.memory_bytes, torch.uint8)

    def new(self, tokens: Tokens, out: torch.Tensor | None, owner: Backend) -> Dispatched:
        """Allocate the result of a dispatch, uninitialised."""
        return Dispatched(
            x=self._table if out is None else out,
            weights=self._empty(self._capacity, torch.float32),
            expert_offsets=self._empty(self._sizes.local + 1, torch.int32),
            expert_counts=self._empty(self._sizes.local, torch.int32),
            index=self._empty(self._capacity, torch.int64) if out is None else None,
            tokens=tokens.x.shape[0],
            _saved=None,
            _owner=owner,
        )

    def rows_of(self, got: Dispatched) -> torch.Tensor:
        """Return the rows of a dispatch: with layout rank the table, without its row of zeros."""
        return got.x if got.index is None else self._table[:-1]

    def metadata(self, saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory for all ranks' ids and weights, and this rank's part of it."""
        nbytes = self._sizes.metadata_bytes
        return saved[: self._size * nbytes], saved[self._rank * nbytes : (self._rank + 1) * nbytes]

    def write_metadata(
        self, stream: int, tokens: Tokens, saved: torch.Tensor, forward: torch.Tensor | None = None, site: int = 0
    ) -> None:
        """Write this rank's ids and weights into its part of `metadata`.

        In a backward pass `forward` is the memory of the dispatch to which it belongs, and `site` its call site.
        """
        self._publish_routing(
            stream,
            saved=saved,
            topk_idx=tokens.topk_idx,
            topk_weights=tokens.topk_weights,
            num_tokens=tokens.num_tokens,
            wide_topk_idx=int(tokens.topk_idx.dtype == torch.int64),
            x_rows=tokens.x.shape[0],
            forward=None if forward is None else self._number_of(forward),
            site=site,
            mark=self._mark,
        )

    def mark_passes(self, word: torch.Tensor) -> None:
        """Invert the bits of `word`, int64[1], in the passes of this rank from now on: see `InsideBackend`."""
        self._mark = word

    def write_pass(self, stream: int, forward: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return metadata of a backward pass of known routing, to be gathered: no ids, and the pass of this rank."""
        self._publish_pass(stream, number=self._number_of(forward), site=site, mark=self._mark)
        return self._pass_metadata, self._own_pass_metadata

    def compare_passes(self, stream: int, rows: torch.Tensor, saved: torch.Tensor | None = None) -> None:
        """Fill `rows` with NaN if the ranks' passes differ: those in `saved`, by default those of `write_pass`."""
        passes = (self._pass_metadata if saved is None else saved)[self._sizes.metadata_bytes - Refusal.NBYTES :]
        self._compare_passes(stream, passes=passes, rows=rows, bytes=rows.nbytes)

    def number(self, stream: int, got: Dispatched, saved: torch.Tensor, host_counts: HostWords | None = None) -> None:
        """Compute places, counts, offsets, weights and index from all ranks' ids and weights.

        With `host_counts`, also write the number of rows to and from each rank there.
        """
        self._count(stream, saved=saved)
        self._number(
            stream,
            saved=saved,
            out_weights=got.weights,
            expert_offsets=got.expert_offsets,
            expert_counts=got.expert_counts,
            index=got.index,
            host_counts=None if host_counts is None else host_counts.memory,
            x_rows=got.tokens,
        )

    def pack(self, stream: int, tokens: Tokens, saved: torch.Tensor, *, own: bool) -> None:
        """Copy rows of `x` into the blocks for the other ranks; with `own` also into this rank's block of the table."""
        self._pack(stream, rows=tokens.x, saved=saved, count=tokens.x.shape[0])
        if own:
            self._pack_own(stream, rows=tokens.x, saved=saved, count=tokens.x.shape[0])

    def place(self, stream: int, got: Dispatched, saved: torch.Tensor, own: torch.Tensor | None = None) -> None:
        """Copy rows of the table to their places. This rank's rows come from `own` if that is given."""
        zeros = self._spec.padding == "zero"
        self._place(
            stream,
            own=own,
            own_count=0 if own is None else own.shape[0],
            saved=saved,
            out=got.x,
            expert_offsets=got.expert_offsets if zeros else None,
            expert_counts=got.expert_counts if zeros else None,
        )

    def sum_entries(
        self,
        stream: int,
        rows: torch.Tensor,
        saved: torch.Tensor,
        weighted: bool,
        numbers: torch.Tensor | None = None,
        site: int = 0,
    ) -> None:
        """Sum the experts' results of each token into the blocks to send, with this rank's status after each.

        With `numbers`, float32[C], also write the number of each entry into the blocks of numbers.
        """
        self._sum_entries(stream, saved=saved, rows=rows, weighted=int(weighted), numbers=numbers, site=site)

    def sum_ranks(
        self, stream: int, saved: torch.Tensor, y: torch.Tensor, out_numbers: torch.Tensor | None = None
    ) -> None:
        """Add the sums that arrived into y, and write the numbers of entries, [T', K]; NaN if the step is refused."""
        self._sum_ranks(stream, saved=saved, y=y, y_rows=y.shape[0], out_numbers=out_numbers)

    # For gradients: the metadata of a dispatch as one tensor.

    @property
    def metadata_words(self) -> int:
        return self._sizes.memory_bytes // 4 + 2 * self._sizes.local + 1

    def packed(self, saved: torch.Tensor, got: Dispatched) -> torch.Tensor:
        """Join the memory of a dispatch and the offsets and counts of its result."""
        return torch.cat((saved.view(torch.int32), got.expert_offsets, got.expert_counts))

    def unpacked(self, metadata: torch.Tensor, weights: torch.Tensor, ids: Ids, owner: Backend) -> Dispatched:
        """Make the result of a dispatch again, without rows. It saves memory."""
        keep_for_current_stream(metadata)
        local = self._sizes.local
        return Dispatched(
            x=self._table,
            weights=weights,
            expert_offsets=metadata[-2 * local - 1 : -local],
            expert_counts=metadata[-local:],
            index=None,
            tokens=len(ids.topk_idx),
            _saved=SavedMemory(metadata[: self._sizes.memory_bytes // 4].view(torch.uint8), None),
            _owner=owner,
        )

    @property
    def refused_words(self) -> torch.Tensor:
        """int64 words on the device: 1 where a combine was refused, a spare one, and each rank's status."""
        return self._refused.view(torch.int64)

    def record_of(self, saved: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a dispatch's `DispatchRecord` in its memory."""
        return saved[self._memory.record :][: rounds.DispatchRecord.nbytes()]

    def refusal_words(self, saved: torch.Tensor) -> torch.Tensor:
        """Return why this rank refuses the data of a dispatch: int32[4] in its memory."""
        begin = rounds.DispatchRecord.offsets()["refusal"]
        return self.record_of(saved)[begin : begin + Refusal.NBYTES].view(torch.int32)

    @property
    def refused_passes(self) -> torch.Tensor:
        """int64 words on the device: 1 where a dispatch in a backward pass was refused, a spare one, the statuses."""
        return self._refused_passes.view(torch.int64)

    def take_refused(self, read: Callable[[str, torch.Tensor], torch.Tensor]) -> list[Refusal]:
        """Take the statuses of all ranks in the first refused combine since the last call; empty if there is none.

        `read` copies them to the host, after the work of the stream, as `NcclRounds.read` does.
        """
        return self._take(read, self._refused)

    def take_refused_passes(self, read: Callable[[str, torch.Tensor], torch.Tensor]) -> list[Refusal]:
        """Take the statuses of all ranks in the first refused dispatch in a backward pass since the last call."""
        return self._take(read, self._refused_passes)

    def _take(self, read: Callable[[str, torch.Tensor], torch.Tensor], refused: torch.Tensor) -> list[Refusal]:
        record = read("check", refused).numpy().tobytes()
        if not any(record[:8]):
            return []
        refused.zero_()
        begin, size = 16, Refusal.NBYTES
        return [Refusal.unpack(record[begin + rank * size :][:size]) for rank in range(self._size)]

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def _make_numbering(self) -> None:
        spec, sizes, launcher = self._spec, self._sizes, self._launcher
        # The words stay between dispatches, and begin with the first values of PublishScratch. They are filled on the
        # device: a copy from the host would wait for the stream without a limit.
        self._publish_scratch = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._publish_scratch[:1].fill_(-1)
        entries = sizes.tokens * sizes.topk
        shape = self._shape(rounds.PUBLISH_ROUTING, -(-entries // launcher.threads))
        self._publish_routing: Launch = launcher.ready(
            rounds.PUBLISH_ROUTING,
            shape,
            rounds.PublishRoutingParams(self._memory, experts=spec.experts),
            scratch=self._publish_scratch,
        )
        runs = max(1, min(launcher.sms // sizes.ranks, -(-entries // ENTRIES_A_RUN), sizes.tokens))
        warps = sizes.numbering_warps(launcher.threads // 32)
        stats = self._empty(sizes.ranks * runs * sizes.stats_words, torch.int32)
        blocks, threads = sizes.ranks * runs, warps * 32
        self._count: Launch = launcher.ready(
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
            group=spec.expert_group,
        )
        shape = Shape(blocks, threads, sizes.numbering_bytes(warps))
        self._number: Launch = launcher.ready(rounds.NUMBER, shape, params, stats=stats)

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
        self._place: Launch = ready(rounds.SPREAD, shape, place, rows=self.blocks.table)
        shape = self._shape(rounds.SPREAD, sizes.tokens * pieces * 32 // self._launcher.threads + 1)
        returned_rows = self._memory.returned_rows
        pack = replace(base, to=returned_rows, stride=sizes.ranks, width=sizes.ranks, skip=self._rank)
        self._pack: Launch = ready(rounds.SPREAD, shape, pack, out=self.blocks.packed)
        # `returned_rows` counts rows in blocks of T + 1 rows; the table's blocks have T.
        own = replace(base, to=returned_rows + 4 * self._rank, stride=sizes.ranks, width=1, first_row=self._rank)
        self._pack_own: Launch = ready(rounds.SPREAD, shape, own, out=self.blocks.table)

    def _make_sums(self) -> None:
        spec, sizes, ready = self._spec, self._sizes, self._launcher.ready
        entries, ranks = rounds.sum_sources(spec.dtype, spec.combine_wire)
        pieces = rounds.sum_pieces(spec.row_bytes, ITEM_BYTES[spec.dtype], ITEM_BYTES[spec.combine_wire])
        row, wire = spec.row_bytes, spec.combine_row_bytes
        units = sizes.tokens * pieces * 32 // self._launcher.threads + 1
        blocks = {"skew": self.blocks.skew % 2**32, "number_stride": self.blocks.outgoing_numbers.stride(0)}
        self._sum_entries: Launch = ready(
            entries,
            self._shape(entries, units * sizes.ranks),
            rounds.SumEntriesParams(self._memory, row_bytes=row, wire_row_bytes=wire, pieces=pieces),
            outgoing=self.blocks.outgoing,
            outgoing_numbers=self.blocks.outgoing_numbers,
            **blocks,
        )
        self._sum_ranks: Launch = ready(
            ranks,
            self._shape(ranks, units),
            rounds.SumRanksParams(self._memory, row_bytes=row, wire_row_bytes=wire, pieces=pieces),
            outgoing=self.blocks.outgoing,
            returned=self.blocks.returned,
            refused=self._refused,
            outgoing_numbers=self.blocks.outgoing_numbers,
            returned_numbers=self.blocks.returned_numbers,
            **blocks,
        )

    def _make_passes(self) -> None:
        sizes, ready = self._sizes, self._launcher.ready
        nbytes = sizes.metadata_bytes
        # Ids of NOWHERE: a rank that routes while this one's routing is known gets no row from it.
        self._pass_metadata = torch.full((sizes.ranks * nbytes,), 0xFF, dtype=torch.uint8, device=self._device)
        self._own_pass_metadata = self._pass_metadata[self._rank * nbytes : (self._rank + 1) * nbytes]
        own = self._own_pass_metadata[-Refusal.NBYTES :]
        begin = rounds.PublishScratch.offsets()["number"] // 8
        self._publish_pass: Launch = ready(
            rounds.PUBLISH_PASS,
            Shape(1, 32),
            rounds.PublishPassParams(),
            into=own,
            dispatches=self._publish_scratch[begin : begin + 1],
        )
        params = rounds.ComparePassesParams(stride=nbytes, ranks=sizes.ranks)
        shape = self._shape(rounds.COMPARE_PASSES, self._launcher.sms)
        refused = self._refused_passes
        self._compare_passes: Launch = ready(rounds.COMPARE_PASSES, shape, params, refused=refused)

    def mark(self, saved: torch.Tensor, digest: torch.Tensor) -> None:
        """Copy the digest into the upper half of a dispatch's number, which its combine sends."""
        self._number_of(saved).view(torch.int32)[DIGEST_SHIFT // 32 :].copy_(digest)

    def _number_of(self, saved: torch.Tensor) -> torch.Tensor:
        """Return the number of a dispatch, in its memory."""
        begin = self._memory.record + rounds.DispatchRecord.offsets()["number"]
        return saved[begin : begin + 8]

    def _shape(self, source: KernelSource, blocks: int) -> Shape:
        """Return a shape with as many blocks as there is work for, limited to those that can be resident at once."""
        shape = Shape(1, self._launcher.threads)
        return replace(shape, blocks=max(1, min(blocks, self._launcher.resident(source, shape))))
