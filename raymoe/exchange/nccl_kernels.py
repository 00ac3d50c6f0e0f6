"""The kernels of backends `allgather` and `collective`, around NCCL's collectives: numbering, placing and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from raymoe.device import rounds
from raymoe.device.gpu import HostWords
from raymoe.device.jit import KernelSource
from raymoe.device.kernels import Function, Kernels, Launch, Shape
from raymoe.device.params import Params
from raymoe.device.rounds import DispatchMemory, Sizes
from raymoe.device.stream_order import StreamOrder
from raymoe.exchange.backend import Dispatched, Tokens
from raymoe.exchange.kernel_result import keep_for_current_stream
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import ITEM_BYTES
from raymoe.memory.world import World

# What the NCCL backends ask of those who move bytes between ranks and of those who launch kernels.

Field: TypeAlias = int | torch.Tensor | None
"""A number, memory whose address is meant, or no memory."""


Lagging: TypeAlias = Callable[[], tuple[int, int, int]]
"""A peer that has not come, or any; how many times it has come, and how many times this rank has."""


class Rounds(Protocol):
    """Bytes between all ranks of a world, on the current stream; `NcclRounds` has them by NCCL."""

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """`mine` of all ranks, in rank order, into `out`, of which it may be this rank's part."""

    def exchange(self, receives: Mapping[int, torch.Tensor], sends: Mapping[int, torch.Tensor]) -> None:
        """Bytes to and from each other rank; an empty tensor where there are none."""

    def wait(self, op: str, over: Callable[[], bool], lagging: Lagging | None = None) -> None:
        """Until `over`; where that takes too long, raises `PeerTimeout` of the peer that `lagging` tells of."""

    def wait_for_all(self, op: str) -> None:
        """Until the device is done, also with replays on other streams."""


class ReadyKernel(Protocol):
    """A kernel that is ready to be launched: only what changes between calls is given."""

    def __call__(self, stream: int, **changed: Field) -> None: ...


class KernelWords(Protocol):
    """Words of the host that kernels write."""

    @property
    def memory(self) -> Field:
        """Where kernels find them."""

    def read(self, first: int, count: int) -> Sequence[int]: ...


class Launcher(Protocol):
    """Launches kernels; `GpuLauncher` does it on a GPU."""

    threads: int
    """Of a block."""
    sms: int

    def ordered(self, op: str) -> AbstractContextManager[int]:
        """Whatever is enqueued inside runs behind the last operation; gives the current stream."""

    def resident(self, source: KernelSource, shape: Shape) -> int:
        """How many blocks of this shape there can be at once."""

    def ready(self, source: KernelSource, shape: Shape, params: Params, **memory: Field) -> ReadyKernel:
        """A launch with these parameters, and with these addresses in place of those that `params` has."""

    def words(self, count: int) -> KernelWords:
        """Of 64 bits, zero at first; as long as the launcher lives."""


# Launches of kernels that take tensors, with nothing made anew between calls.


def address(field: Field) -> int:
    """
    >>> address(None), address(7)
    (0, 7)
    """
    return field.data_ptr() if isinstance(field, torch.Tensor) else field or 0


class GpuLauncher:
    """The kernels of a world's GPU, and the order of operations that NCCL has a part in, on whichever streams they are
    enqueued. All exchanges of a world share one (`World.shared`)."""

    threads = 256

    def __init__(self, world: World) -> None:
        self._gpu, self._order = world.gpu, StreamOrder(world.gpu)
        self._kernels = Kernels(world.gpu)
        self.sms = world.gpu.sms
        self._words: list[GpuWords] = []

    @contextmanager
    def ordered(self, op: str) -> Iterator[int]:
        """An operation that fails inside is no longer waited for: its exchange is of no further use."""
        # Kernels of ours wait for nobody here, and NCCL's take what NCCL takes: no SMs are asked for.
        stream, capture = self._order.enter(op, 0)
        yield stream
        self._order.leave(stream, capture)

    def resident(self, source: KernelSource, shape: Shape) -> int:
        return self._kernels.function(source).resident_blocks(shape.threads, shape.shared_bytes)

    def ready(self, source: KernelSource, shape: Shape, params: Params, **memory: Field) -> ReadyLaunch:
        return ReadyLaunch(self._kernels.function(source), shape, params, memory)

    def words(self, count: int) -> GpuWords:
        self._words.append(GpuWords(HostWords(self._gpu, count)))
        return self._words[-1]

    def close(self, together: bool) -> None:  # noqa: ARG002
        """With the world, behind whoever enqueued on its GPU."""
        self._gpu.synchronise()
        for words in self._words:
            words.close()
        self._order.close()
        self._kernels.close()


class ReadyLaunch(Launch):
    """A launch whose parameters are packed once; a call sets those that changed."""

    def __init__(self, function: Function, shape: Shape, params: Params, memory: dict[str, Field]) -> None:
        super().__init__(function, shape, params)
        self._memory = memory  # lives as long as its addresses are used
        for name, field in memory.items():
            setattr(self.fields, name, address(field))

    def __call__(self, stream: int, **changed: Field) -> None:
        fields = self.fields
        for name, field in changed.items():  # as `address` has it, without a call for each
            setattr(fields, name, field if isinstance(field, int) else 0 if field is None else field.data_ptr())
        super().__call__(stream)


class GpuWords:
    """Page-locked words that the GPU writes and the host reads."""

    def __init__(self, words: HostWords) -> None:
        self._words = words

    @property
    def memory(self) -> int:
        return self._words.device_address()

    def read(self, first: int, count: int) -> Sequence[int]:
        found: list[int] = self._words.words[first : first + count]
        return found

    def close(self) -> None:
        self._words.close()


# What ranks do with their own memory around NCCL's collectives: numbering, placing and sums, by kernels of ours.
#
# The memory of an exchange is made once; a dispatch allocates what it gives back and one block of what its combine
# reads again (`DispatchMemory`). Every launch is packed once, and a call changes addresses in it.

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
            keep_for_current_stream(self.memory)
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
            ids=tokens.topk_idx,
            weights=tokens.topk_weights,
            num_tokens=tokens.num_tokens,
            wide_ids=int(tokens.topk_idx.dtype == torch.int64),
            given=tokens.x.shape[0],
        )

    def number(self, stream: int, got: Dispatched, kept: torch.Tensor, heard: KernelWords | None = None) -> None:
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
        self._tell: ReadyKernel = launcher.ready(
            rounds.TELL, told, rounds.TellParams(self._memory, experts=spec.experts), scratch=scratch
        )
        runs = max(1, min(launcher.sms // sizes.ranks, -(-entries // ENTRIES_A_RUN), sizes.tokens))
        warps = sizes.numbering_warps(launcher.threads // 32)
        stats = self._empty(sizes.ranks * runs * sizes.stats_words, torch.int32)
        blocks, threads = sizes.ranks * runs, warps * 32
        self._count: ReadyKernel = launcher.ready(
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
        self._number: ReadyKernel = launcher.ready(rounds.NUMBER, shape, params, stats=stats)

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
        self._place: ReadyKernel = ready(rounds.SPREAD, shape, place, rows=self.blocks.table)
        shape = self._shape(rounds.SPREAD, sizes.tokens * pieces * 32 // self._launcher.threads + 1)
        home = self._memory.home
        pack = replace(base, to=home, stride=sizes.ranks, width=sizes.ranks, skip=self._rank)
        self._pack: ReadyKernel = ready(rounds.SPREAD, shape, pack, out=self.blocks.packed)
        # `home` counts in blocks that are a row longer than those of the table.
        own = replace(base, to=home + 4 * self._rank, stride=sizes.ranks, width=1, first_row=self._rank)
        self._pack_own: ReadyKernel = ready(rounds.SPREAD, shape, own, out=self.blocks.table)

    def _make_sums(self) -> None:
        spec, sizes, ready = self._spec, self._sizes, self._launcher.ready
        entries, ranks = rounds.sum_sources(spec.dtype, spec.combine_wire)
        pieces = rounds.sum_pieces(spec.row_bytes, ITEM_BYTES[spec.dtype], ITEM_BYTES[spec.combine_wire])
        row, wire = spec.row_bytes, spec.home_row_bytes
        units = sizes.tokens * pieces * 32 // self._launcher.threads + 1
        self._sum_entries: ReadyKernel = ready(
            entries,
            self._shape(entries, units * sizes.ranks),
            rounds.SumEntriesParams(self._memory, row_bytes=row, wire_row_bytes=wire, pieces=pieces),
            leaving=self.blocks.leaving,
        )
        self._sum_ranks: ReadyKernel = ready(
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
