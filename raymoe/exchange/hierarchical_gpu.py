"""Dispatch and combine between GPU ranks in several domains: over the rail first, then inside the domain.

`hierarchical.py` explains the idea, for CPU ranks. Here all work is on the device and on one stream, and the host reads
nothing. So a CUDA graph holds an operation if it can hold that of the exchange inside the domain, which is one of the
backends `fused`, `staged` and `allgather`, with N*T tokens a rank. The parts between the rail and that
exchange are torch operations on small tensors (`hierarchical_tensors.py`): they are few beside the rows, and need no
kernel of their own.

Dispatch: gather ids and weights over the rail, rewrite the ids, gather rows, dispatch inside. Many rows cross in chunks
of tokens, and the dispatch inside waits for each chunk by itself (`rail_rows.py`). Each expert has N ids inside, one
for each source domain, and they are neighbours. So rows arrive in the order of the contract. Only gaps are missing:
with an `alignment` above 1 rows are copied once more, to their places (layout `rank`: only their index).

Where rows cross as fp8, each rank quantises its own once, before the rail. They go on as values and scales, which the
exchange inside takes as they are. So the network carries half of the bytes, and the rows are those of one domain.

Combine: combine inside, which sums the rows of this domain's ranks for each token of the rail. To each domain go back
T sums in the combine wire dtype, and a status for each rank of this domain (`rail_sums.py`). The source adds the
domains' sums in float32, in domain order, and rounds once. The sums inside are rounded to the dtype of rows before.

Gradients: the backward of dispatch is a combine without weights, which also takes one float32 home for each entry
(token, k). They cross with the sums. An entry has its expert in one domain, and the others send zero. So
their sum is exact. The backward of combine is a dispatch of dy. Where the exchange inside keeps places, only rows cross
the rail.

Refused data: ids out of range stay out of range inside, so the exchanges of all domains refuse them. A combine inside
writes the statuses of its ranks to the device, and they cross with the sums. So all ranks give NaN in the
same step, and `check` raises the same sentence on each. A wait that fails is no refusal: where it fails inside one
domain in the last combine before a `check`, ranks of other domains find NaN in y, and their next operation fails.

There is no agreement on the operation: ranks that call different operations wait for one another until the world's
timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from raymoe.device import rounds
from raymoe.device.kernels import Shape as LaunchShape
from raymoe.errors import Aborted, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Backend, Dispatched, Ids, Tokens
from raymoe.exchange.build import SCALES_ALIGNMENT
from raymoe.exchange.fused_chunks import RAIL_OP
from raymoe.exchange.hierarchical_tensors import (
    DomainShape,
    Places,
    ids_inside,
    refusals_of_ranks,
    told_ids,
)
from raymoe.exchange.kernel_result import keep_for_current_stream
from raymoe.exchange.nccl import CapturedMemory
from raymoe.exchange.nccl_kernels import Launcher, ReadyKernel
from raymoe.exchange.quantising import quantise
from raymoe.exchange.rail_rows import RailRows
from raymoe.exchange.rail_sums import RailSums
from raymoe.exchange.refusal import raise_first
from raymoe.exchange.spec import FP8, ExchangeSpec
from raymoe.memory.wait import named_by_world
from raymoe.memory.world import World
from raymoe.net.rail import DeviceRail

_NUMBER_WORDS = 2
_WORDS_AN_ENTRY = 3  # int32 words of an entry (token, k) on the rail: the id has two, the weight one


@runtime_checkable
class InsideBackend(Backend, Protocol):
    """A backend inside a domain, which also tells on the device why a combine is refused."""

    def refusal_record(self) -> torch.Tensor:
        """Return int64 words on the device: not 0 after a refused combine, a spare one, then each rank's status.

        A refused combine writes them. Their user sets the first one to 0 when it has read them, and `check` then leaves
        refused data to that user.
        """

    def check_waits(self) -> None:
        """Raise if a wait of the kernels has failed so far. Waits for nothing."""


@runtime_checkable
class AwaitsChunks(Protocol):
    """A backend inside a domain whose dispatch may begin before its rows are there."""

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        """Wait for chunks of so many tokens from now on, by the words of `RailRows`."""


@dataclass(frozen=True)
class RailParts:
    """The parts of an exchange between domains: the order of its operations, the rail, and the exchange inside."""

    launcher: Launcher
    rail: DeviceRail
    inside: InsideBackend
    chunk: int = 0
    """Tokens of a chunk in which rows cross; 0: all at once. Else the exchange inside `AwaitsChunks`."""


@dataclass(frozen=True)
class _Home:
    """The state of a dispatch that its combine needs."""

    inside: Dispatched
    moves: torch.Tensor | None
    number: torch.Tensor
    """int32[2], a word of 64 bits: the dispatch, counted from 1 on the device, because replays count too."""
    stream: int | None
    """None: not known, because the result was made again from its metadata."""

    def used_on(self, stream: int) -> None:
        """Keep the memory for work on `stream`, which must be the current one."""
        if stream != self.stream and self.number.device.type == "cuda":
            keep_for_current_stream(self.moves, self.number)


class HierarchicalGpu:
    """The backend between domains. It owns the exchange inside its domain, and shares the rail of its world."""

    def __init__(self, world: World, spec: ExchangeSpec, parts: RailParts) -> None:
        N, L, T, K = world.domains, world.domain.size, spec.tokens, spec.topk
        self._world, self._spec = world, spec
        self._launcher, self._rail, self._inside = parts.launcher, parts.rail, parts.inside
        self._shape = DomainShape(N, L, world.rank // L, T, spec.local_experts(world.size), parts.chunk)
        self._index = self._shape.index
        self._memory = CapturedMemory(world.device)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        device = world.device

        def zeros(*shape: int, of: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        self._fp8 = spec.dispatch_wire == FP8
        # Values of fp8 are bytes here, because not every rail knows the dtype.
        rows = zeros(N * T, spec.hidden, of=torch.uint8 if self._fp8 else dtype)
        self._rail_rows = RailRows(self._shape, rows, self._rail, self._launcher)
        self._rows = rows.view(torch.float8_e4m3fn) if self._fp8 else rows
        # For each domain T*K ids of two words, then T*K weights of one, then the scales of T rows of fp8, then words
        # that make the sum a multiple of 4.
        entries = T * K
        scales = T * spec.scales if self._fp8 else 0
        words = _WORDS_AN_ENTRY * entries + scales
        self._told = zeros(N, -(-words // 4) * 4, of=torch.int32)
        self._ids = self._told[:, : 2 * entries].view(torch.int64).view(N, T, K)
        self._weights = self._told[:, 2 * entries : 3 * entries].view(torch.float32).view(N, T, K)
        self._scales = self._told[:, 3 * entries : words].view(torch.float32).view(N, T, spec.scales if scales else 0)
        # All rows inside, where they are not at the places of the contract.
        inside_rows = spec.inside(N, world.size).rows(L) if spec.alignment > 1 else 0
        self._inside_rows = torch.empty(inside_rows, spec.hidden, dtype=dtype, device=device)
        # The rows of a dispatch, which may be narrower than those of a combine, lie in the same memory.
        output: torch.dtype = getattr(torch, spec.output_dtype)
        self._inside_given = self._inside_rows.flatten().view(output)[: inside_rows * spec.hidden].view(-1, spec.hidden)
        self._move = self._make_move(inside_rows, spec.row_bytes) if inside_rows else None
        self._place = self._make_move(inside_rows, spec.hidden * output.itemsize) if inside_rows else None
        record = self._inside.refusal_record()
        self._rail_sums = RailSums(self._shape, spec, self._rail, self._launcher, record)
        self._dispatches = zeros(1)
        self.capturable = self._rail.capturable and self._inside.capturable
        # One domain may have the LL path and another not: all must send the same blocks.
        self._keeps_places = all(world.swap(self._inside.keeps_places, "exchange: places"))
        if parts.chunk:
            assert isinstance(self._inside, AwaitsChunks), "a chunk is asked for only with such a backend"
            self._inside.await_chunks(self._rail_rows.words, N * parts.chunk)
        self._connect()

    @property
    def sms(self) -> int | None:
        return self._inside.sms

    @property
    def keeps_places(self) -> bool:
        return self._keeps_places

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        with self._launcher.ordered("dispatch") as stream, self._memory():
            given, me = len(tokens.x), self._index
            told_ids(tokens.topk_idx, tokens.num_tokens, self._ids[me])
            self._weights[me, :given].copy_(tokens.topk_weights)
            if self._fp8:
                values, scales = quantise(tokens.x) if tokens.scales is None else (tokens.x, tokens.scales)
                self._rail_rows.put(values.view(torch.uint8))
                self._scales[me, :given].copy_(scales)
            else:
                self._rail_rows.put(tokens.x)
            self._gather("dispatch", self._told)()
            # The rows begin to cross here, so the operations below run beside them.
            with self._rail_rows.crossing("dispatch"), self._named_by_world():
                inside = self._inside.dispatch(self._arriving(), self._inside_out(out))
            self._dispatches += 1
            return self._placed(inside, given, out, stream)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, _Home)
        with self._launcher.ordered("combine") as stream, self._memory():
            home.used_on(stream)
            if home.moves is not None:
                self._move_rows(stream, home, rows)
                rows = self._inside_rows
            with self._named_by_world():
                self._inside.combine(rows, home.inside, weighted, self._rail_sums.sums)
            self._rail_sums.cross(stream, home.number, weighted)
            self._rail_sums.add(stream, out)

    @property
    def metadata_words(self) -> int:
        moves = 2 * len(self._inside_rows)
        return self._inside.metadata_words + _NUMBER_WORDS + 2 * self._shape.local + 1 + moves

    def pack(self, got: Dispatched) -> torch.Tensor:
        """Join the metadata of the dispatch inside, this one's number, offsets and counts, and the moves of rows."""
        home = got._home
        assert isinstance(home, _Home)
        moves = [] if home.moves is None else [home.moves.flatten()]
        inside = self._inside.pack(home.inside)
        return torch.cat((inside, home.number, got.expert_offsets, got.expert_counts, *moves))

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        if metadata.device.type == "cuda":
            keep_for_current_stream(metadata)
        words, local = self._inside.metadata_words, self._shape.local
        sizes = [words, _NUMBER_WORDS, local + 1, local, 2 * len(self._inside_rows)]
        inside, number, offsets, counts, moves = torch.split(metadata, sizes)
        # The dispatch inside always has the tokens of a whole rail. Of their ids only the number is used.
        its_ids = Ids(self._ids.flatten(0, 1))
        home = _Home(
            self._inside.unpack(inside, rows, weights, its_ids),
            moves.view(2, -1) if len(moves) else None,
            number,
            None,
        )
        return Dispatched(rows, weights, offsets, counts, None, len(ids.topk_idx), home, self)

    @torch.no_grad()
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        home = got._home
        assert isinstance(home, _Home)
        with self._launcher.ordered("combine") as stream, self._memory():
            home.used_on(stream)
            if home.moves is not None:
                self._move_rows(stream, home, rows)
                # Behind the last row a place means nothing, and no combine reads its weight.
                rows, weights = self._inside_rows, weights.index_select(0, home.moves[1].clamp(min=0))
            with self._named_by_world():
                sums = self._rail_sums
                self._inside.combine_gradients(rows, weights, home.inside, sums.sums, sums.entries)
            sums.cross(stream, home.number, weighted=False, entries=True)
            sums.add(stream, out, out_weights)

    @torch.no_grad()
    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        home = got._home
        assert isinstance(home, _Home)
        with self._launcher.ordered("dispatch") as stream, self._memory():
            home.used_on(stream)
            self._rail_rows.put(x)
            into = out if home.moves is None else self._inside_given
            with self._rail_rows.crossing("dispatch"), self._named_by_world():
                self._inside.dispatch_known(self._rows, home.inside, into)
            if home.moves is not None:
                self._place_rows(stream, home.inside, home.moves, got, out)

    def check(self) -> None:
        self._settle("check")
        with self._named_by_world():
            self._inside.check()
        if words := self._rail_sums.take_refused():
            raise_first(refusals_of_ranks(words, self._shape, self._spec.gaps(self._world.size)), self._spec)

    def close(self, together: bool) -> None:
        """Wait for the device first: a kernel of NCCL that waits for a rank that is gone would never end."""
        try:
            self._settle("close")
        except RaymoeError:  # the rail is aborted now, so the device's work ends; `check` reports failures
            together = False
        self._inside.close(together)
        self._memory.close()

    def _arriving(self) -> Tokens:
        """Return the tokens inside. Their rows may still be on the way."""
        ids, weights = ids_inside(self._ids, self._shape), self._shape.inside(self._weights).contiguous()
        scales = self._shape.inside(self._scales).contiguous() if self._fp8 else None
        return Tokens(self._rows, ids, weights, None, scales)

    @contextmanager
    def _named_by_world(self) -> Iterator[None]:
        """Let errors inside the domain name ranks of the world: of the rail, where a chunk of rows did not come."""
        try:
            with named_by_world(self._world.waiter, self._index * self._shape.per_domain):
                yield
        except PeerTimeout as error:
            if error.op != RAIL_OP:
                raise
            peer, rank = self._rail.lagging(), self._world.rank
            raise PeerTimeout(RAIL_OP, error.epoch, peer, error.expected, error.seen, error.waited_s, rank) from error
        except Aborted as error:
            if error.peer != self._world.rank:  # the kernel names this rank where it waits for the rail
                raise
            raise Aborted(str(error), self._rail.lagging()) from error

    def _gather(self, op: str, blocks: torch.Tensor) -> Callable[[], None]:
        """Gather the rail's blocks. This rank's own is there already."""
        return self._rail.gather(op, blocks.flatten(0, 1), blocks[self._index])

    def _settle(self, op: str) -> None:
        """Wait for the device.

        Where the rail waited in vain for a peer that is there, the rank that is late is one of this domain, and a
        kernel names it. If a peer of the rail is late, ranks of the domain that wait for this one may have given up, so
        its kernels would name them.
        """
        try:
            self._rail.settle(op)
        except PeerTimeout as timeout:
            on_rail = (timeout.peer - self._world.rank) % self._shape.per_domain == 0
            if not (on_rail and timeout.seen < timeout.expected):
                with self._named_by_world():
                    self._inside.check_waits()
            raise

    def _inside_out(self, out: torch.Tensor | None) -> torch.Tensor | None:
        """The memory for the rows of the dispatch inside: the caller's where no gaps are needed."""
        return out if out is None or self._spec.alignment == 1 else self._inside_given

    def _placed(self, inside: Dispatched, given: int, out: torch.Tensor | None, stream: int) -> Dispatched:
        """Return the result of a dispatch whose rows are there inside."""
        places = Places.of(
            inside.expert_offsets, inside.expert_counts, self._spec, self._shape.domains, self._world.size
        )
        x, weights, index, sources = inside.x, inside.weights, inside.index, places.sources
        scales = inside.scales
        if sources is not None:
            weights = _selected(weights, sources, 0)
            if index is not None:
                index = _selected(index, sources, len(x) - 1)  # the last slot is a row of zeros
            elif out is not None:
                x = out
                scales = None if scales is None else _selected_scales(scales, sources)
        got = Dispatched(
            x=x,
            weights=weights,
            expert_offsets=places.offsets,
            expert_counts=places.counts,
            index=index,
            tokens=given,
            _home=_Home(inside, places.moves, self._dispatches.clone().view(torch.int32), stream),
            _owner=self,
            scales=scales,
        )
        if x is not inside.x:
            assert places.moves is not None
            self._place_rows(stream, inside, places.moves, got, x)
        return got

    def _make_move(self, rows: int, row_bytes: int) -> ReadyKernel:
        """Prepare a copy of rows between their places inside and those of the contract. It skips rows that are not."""
        pieces = -(-row_bytes // (rounds.VECTOR_BYTES * rounds.SPREAD_VECTORS))
        params = rounds.SpreadParams(
            row_bytes=row_bytes, pieces=pieces, count=rows, stride=1, width=1, experts=self._shape.local
        )
        threads = self._launcher.threads
        most = self._launcher.resident(rounds.SPREAD, LaunchShape(1, threads))
        blocks = max(1, min(most, rows * pieces * 32 // threads + 1))
        return self._launcher.ready(rounds.SPREAD, LaunchShape(blocks, threads), params)

    def _place_rows(
        self, stream: int, inside: Dispatched, moves: torch.Tensor, got: Dispatched, out: torch.Tensor
    ) -> None:
        """Copy the rows inside to their places in `out`, which are those of `got`."""
        assert self._place is not None
        zeros = self._spec.padding == "zero"
        self._place(
            stream,
            rows=self._inside_given,
            out=out,
            kept=moves,
            source=0,
            to=moves[0].nbytes,
            used=inside.expert_offsets[-1:],
            expert_offsets=got.expert_offsets if zeros else None,
            expert_counts=got.expert_counts if zeros else None,
        )

    def _move_rows(self, stream: int, home: _Home, rows: torch.Tensor) -> None:
        """Copy the experts' rows to their places inside."""
        assert self._move is not None and home.moves is not None
        self._move(
            stream,
            rows=rows,
            out=self._inside_rows,
            kept=home.moves,
            source=home.moves[0].nbytes,
            to=0,
            used=home.inside.expert_offsets[-1:],
            expert_offsets=None,
            expert_counts=None,
        )

    def _connect(self) -> None:
        """Send each block once: the first call may be inside a capture, where nothing can be connected or loaded."""
        self._gather("connect", self._told)()
        with self._rail_rows.crossing("connect"):
            self._arriving()
        local, N = self._shape.local, self._shape.domains
        nothing = torch.zeros(local * N + 1, dtype=torch.int32, device=self._world.device)
        places = Places.of(nothing, nothing[1:], self._spec, N, self._world.size)
        if self._fp8:
            quantise(self._rail_sums.sums[: self._shape.tokens])
        told_ids(self._ids[0], nothing[:1], self._ids[0])
        if places.sources is not None and places.moves is not None:
            _selected(self._weights.flatten(), places.sources, 0)
            _selected_scales(self._scales[0], places.sources)
            self._weights.flatten().index_select(0, places.moves[1].clamp(min=0).zero_())
        with self._launcher.ordered("connect") as stream:
            self._rail_sums.cross(stream, self._dispatches.view(torch.int32), weighted=False, entries=True)
            self._rail_sums.add(stream, self._rail_sums.sums[:0])
        self._told.zero_()
        self._settle("connect")


def _selected(values: torch.Tensor, sources: torch.Tensor, missing: int) -> torch.Tensor:
    """Return the values at `sources`, and `missing` where a source is behind the last value."""
    found = values.index_select(0, sources.clamp(max=len(values) - 1))
    return found.masked_fill_(sources >= len(values), missing)


def _selected_scales(scales: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Return the scales of rows at `sources`, zero where there is none. A column of blocks is whole in memory."""
    stride = -(-len(sources) // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
    found = scales.new_empty(scales.shape[1], stride).T[: len(sources)]
    return found.copy_(scales.index_select(0, sources.clamp(max=len(scales) - 1))).masked_fill_(
        (sources >= len(scales))[:, None], 0.0
    )
