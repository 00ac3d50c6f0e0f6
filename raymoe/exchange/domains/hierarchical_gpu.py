"""Dispatch and combine between GPU ranks in several domains: over the rail first, then inside the domain.

`hierarchical.py` explains the idea, for CPU ranks. Here all work is on the device and on one stream, and the host reads
nothing. So a CUDA graph can hold an operation. The exchange inside the domain is one of the backends `fused`, `staged`
and `allgather`, with N*T tokens a rank (`domain_shape.py`). Between the rail and that exchange are five small kernels
(`rail_entries.py`, `rail_sums.py`).

Dispatch: gather ids and weights over the rail, rewrite the ids, gather rows, dispatch inside. Many rows cross in chunks
of tokens, and the dispatch inside waits for each chunk by itself (`rail_rows.py`). Each expert has N ids inside, one
for each source domain, and they are neighbours. The exchange inside aligns only the first of them
(`ExchangeSpec.expert_group`). So rows arrive at the places of the contract, gaps included.

Where rows cross as fp8, each rank quantises its own once, before the rail. They go on as values and scales, which the
exchange inside takes as they are. So the network carries half of the bytes, and the rows are those of one domain.

A dispatch in a backward pass begins when all chunks have come, because other kernels of NCCL run beside such passes. A
combine waits for nothing that crosses the rail, so its chunks cross beside it in both passes.

Combine: combine inside, which sums the rows of this domain's ranks for each token of the rail. To each domain go back
T sums in the combine wire dtype, and a status for each rank of this domain (`rail_sums.py`). The source adds the
domains' sums in float32, in domain order, and rounds once. The sums inside are rounded to the dtype of rows before.
Many sums cross in chunks of tokens, each while the combine inside works on the next; those of gradients cross at once.

Gradients: the backward of dispatch is a combine without weights, which also returns one float32 for each entry
(token, k). They cross with the sums. An entry has its expert in one domain, and the others send zero. So their sum is
exact. The backward of combine is a dispatch of dy. Where the exchange inside keeps places, only rows cross the rail.

Refused data: ids out of range stay out of range inside, so the exchanges of all domains refuse them. A combine inside
writes the statuses of its ranks to the device, and they cross with the sums. So all ranks give NaN in the same step,
and `check` raises the same sentence on each. A wait that fails is no refusal: where it fails inside one domain in the
last combine before a `check`, ranks of other domains find NaN in y, and their next operation fails.

An error of one rank after its first block has crossed, also a mistake such as too few SMs for the dispatch inside, ends
the exchange on that rank. The others raise the same reason where they wait for a rail (`rail_operation.py`).

There is no agreement on the operation: ranks that call different operations wait for one another until the world's
timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from raymoe.cuda.current import CapturedMemory, capturing, keep_for_current_stream
from raymoe.cuda.launcher import Launcher
from raymoe.errors import Aborted, PeerTimeout, RaymoeError
from raymoe.exchange.backend import Backend, Dispatched, Ids, Tokens
from raymoe.exchange.domains.domain_shape import DomainShape, refusals_of_ranks
from raymoe.exchange.domains.rail_entries import RailEntries, RailTokens
from raymoe.exchange.domains.rail_operation import publish_failures
from raymoe.exchange.domains.rail_rows import RailRows
from raymoe.exchange.domains.rail_sums import CombineStatus, RailSums
from raymoe.exchange.peer.fused_chunks import RAIL_OP
from raymoe.exchange.refusal import DIGEST_SHIFT, raise_first
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, quantise
from raymoe.memory.wait import named_by_world
from raymoe.memory.world import World
from raymoe.net.nccl_rail import NcclRail

_NUMBER_WORDS = 2
_autograd: Any = torch._C  # torch's type stubs lack some of its names


@runtime_checkable
class InsideBackend(Backend, Protocol):
    """A backend inside a domain. It also records on the device why a combine is refused."""

    def refusal_record(self) -> torch.Tensor:
        """Return int64 words on the device: not 0 after a refused combine, a spare one, then each rank's status.

        A refused combine writes them. Their user sets the first one to 0 when it has read them, and `check` then leaves
        refused data to that user.
        """

    def backward_record(self) -> torch.Tensor:
        """Return such words for dispatches in backward passes. Call it after `refusal_record`."""

    def mark_passes(self, word: torch.Tensor) -> None:
        """Let the whole domain refuse a backward pass that begins while `word`, int64[1], is not 0 on some ranks.

        This rank then publishes a pass with these bits inverted. So a domain whose ranks all do so refuses nothing.
        """

    def check_waits(self) -> None:
        """Raise if a wait of the kernels has failed so far. Do not wait."""


@runtime_checkable
class ChunkedBackend(Protocol):
    """A backend inside a domain that takes the tokens of the rail in chunks.

    Its dispatch may begin before its rows are there, and its combine may be of some tokens only.
    """

    def await_chunks(self, words: torch.Tensor, tokens: int) -> None:
        """Wait for chunks of `tokens` tokens from now on, by the words of `RailRows`."""

    def combine_tokens(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor, tokens: tuple[int, int]
    ) -> None:
        """Combine the tokens from `tokens[0]` on, to `tokens[1]`, of each rank, and write their rows of `out`."""


@dataclass(frozen=True)
class RailParts:
    """The parts of an exchange between domains: the order of its operations, the rail, and the exchange inside."""

    launcher: Launcher
    rail: NcclRail
    inside: InsideBackend
    chunk: int = 0
    """Tokens of a chunk in which rows cross; 0: all at once. Else the exchange inside is a `ChunkedBackend`."""


@dataclass(frozen=True)
class SavedInside:
    """The state that a dispatch saves for its combine."""

    inside: Dispatched
    number: torch.Tensor
    """int32[2], a word of 64 bits: the dispatch, counted from 1 on the device, because replays count too."""
    stream: int | None
    """None: not known, because the result was made again from its metadata."""

    def used_on(self, stream: int, site: int) -> None:
        """Keep the memory for work on `stream`, which must be the current one. Ranks inside compare the site too."""
        self.inside.site = site
        if stream != self.stream:
            keep_for_current_stream(self.number)


def _in_backward_pass() -> bool:
    """Whether autograd runs this: for gradients, or a forward pass again, as activation checkpointing does."""
    task: int = _autograd._current_graph_task_id()
    return task != -1


class HierarchicalGpu:
    """The backend between domains. It owns the exchange inside its domain, and shares the rail of its world."""

    def __init__(self, world: World, spec: ExchangeSpec, parts: RailParts) -> None:
        N, L, T = world.domains, world.domain.size, spec.tokens
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
        self._rail_entries = RailEntries(self._shape, spec, self._rail, self._launcher, device)
        record = self._inside.refusal_record()
        self._inside_passes = self._inside.backward_record()
        self._inside.mark_passes(self._rail_entries.passes.mark)
        self._rail_sums = RailSums(self._shape, spec, self._rail, self._launcher, record)
        self.capturable = self._rail.capturable and self._inside.capturable
        # One domain may have the LL path and another not: all must send the same blocks.
        self._keeps_places = all(world.swap(self._inside.keeps_places, "exchange: places"))
        if parts.chunk:
            assert isinstance(self._inside, ChunkedBackend), "a chunk is asked for only with such a backend"
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
        return self._dispatch(tokens, out, None)

    @torch.no_grad()
    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        return self._dispatch(tokens, out, forward)

    def _dispatch(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched | None) -> Dispatched:
        """Dispatch; in the backward pass of `forward` if it is given."""
        with self._launcher.ordered("dispatch") as stream, self._memory():
            entries, x, scales = self._rail_entries, tokens.x, tokens.scales
            if self._fp8:
                values, scales = quantise(x) if scales is None else (x, scales)
                x = values.view(torch.uint8)
            self._rail_rows.put(x)
            before = None if forward is None else self._begin_pass(stream, forward)
            with self._publish_failures("dispatch"):
                entries.cross("dispatch", stream, tokens, scales)
                if before is not None:
                    entries.passes.read_with_ids(stream)
                # The rows begin to cross here, so the operations below run beside them.
                with self._rail_rows.crossing("dispatch", beside=not _in_backward_pass()), self._named_by_world():
                    arriving = entries.arriving(stream)
                    if before is None:
                        inside = self._inside.dispatch(self._tokens_inside(arriving), out)
                    else:
                        inside = self._inside.dispatch_again(self._tokens_inside(arriving), out, before)
                x = inside.x if before is None else entries.passes.refuse(stream, inside.x, whole=out is not None)
                offsets, counts = entries.joined(stream, inside.expert_offsets, inside.expert_counts)
            saved = SavedInside(inside, arriving.number, stream)
            return Dispatched(
                x, inside.weights, offsets, counts, inside.index, len(tokens.x), saved, self, inside.scales
            )

    def _begin_pass(self, stream: int, forward: Dispatched) -> Dispatched:
        """Publish with the next ids that this is the backward pass of `forward`. Return the dispatch inside."""
        saved = forward.saved(SavedInside)
        saved.used_on(stream, forward.site)
        self._rail_entries.passes.publish_with_ids(stream, saved.number, forward.site)
        return saved.inside

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        """Return why the exchange inside refuses the data: its rows and gaps are those of this one."""
        return self._inside.refusal_words(got.saved(SavedInside).inside)

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        """Copy the digest into the upper half of the number that all domains compare. Ranks inside compare theirs."""
        saved = got.saved(SavedInside)
        with self._named_by_world():
            self._inside.mark(saved.inside, digest)
        with self._launcher.ordered("dispatch") as stream:
            saved.used_on(stream, got.site)
            saved.number[DIGEST_SHIFT // 32 :].copy_(digest)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        saved = got.saved(SavedInside)
        with self._launcher.ordered("combine") as stream, self._memory():
            saved.used_on(stream, got.site)
            status = CombineStatus(saved.number, weighted, got.site)
            if self._shape.chunk:
                combine = self._combine_tokens(rows, saved.inside, weighted)
                publish_failures = partial(self._publish_failures, "combine")
                self._rail_sums.combine_in_chunks(stream, status, out, combine, publish_failures)
                return
            with self._named_by_world():
                self._inside.combine(rows, saved.inside, weighted, self._rail_sums.sums)
            with self._publish_failures("combine"):
                self._rail_sums.cross(stream, status)
                self._rail_sums.add(stream, out)

    @property
    def metadata_words(self) -> int:
        return self._inside.metadata_words + _NUMBER_WORDS + 2 * self._shape.local + 1

    def pack(self, got: Dispatched) -> torch.Tensor:
        """Join the metadata of the dispatch inside, this one's number, offsets and counts."""
        saved = got.saved(SavedInside)
        inside = self._inside.pack(saved.inside)
        return torch.cat((inside, saved.number, got.expert_offsets, got.expert_counts))

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        words, local = self._inside.metadata_words, self._shape.local
        inside, number, offsets, counts = torch.split(metadata, [words, _NUMBER_WORDS, local + 1, local])
        # The dispatch inside always has the tokens of a whole rail. Only the number of their ids is used. Its `unpack`
        # keeps all of `metadata` for the current stream: the four are views of one allocation.
        its_ids = Ids(self._rail_entries.ids.flatten(0, 1))
        saved = SavedInside(self._inside.unpack(inside, rows, weights, its_ids), number, None)
        return Dispatched(rows, weights, offsets, counts, None, len(ids.topk_idx), saved, self)

    @torch.no_grad()
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        saved = got.saved(SavedInside)
        with self._launcher.ordered("combine") as stream, self._memory():
            saved.used_on(stream, got.site)
            with self._named_by_world():
                sums = self._rail_sums
                self._inside.combine_gradients(rows, weights, saved.inside, sums.sums, sums.entries)
            with self._publish_failures("combine"):
                sums.cross(stream, CombineStatus(saved.number, False, got.site), entries=True)
                sums.add(stream, out, out_weights)

    @torch.no_grad()
    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:
        saved = got.saved(SavedInside)
        with self._launcher.ordered("dispatch") as stream, self._memory():
            saved.used_on(stream, got.site)
            self._rail_rows.put(x)
            passes, crossing = self._rail_entries.passes, self._rail_rows.crossing("dispatch", beside=False)
            with self._publish_failures("dispatch"):
                # Ranks that dispatch gather their ids and weights here.
                passes.gather_alone(stream, saved.number, got.site)
                with crossing, self._named_by_world():
                    self._inside.dispatch_known(self._rows, saved.inside, out)
                passes.refuse(stream, out)

    def check(self) -> None:
        self._settle("check")
        with self._named_by_world():
            self._inside.check_waits()
        words = self._rail_sums.take_refused()
        self._rail_entries.passes.check(self._inside_passes)
        with self._named_by_world():
            self._inside.check()
        if words:
            raise_first(refusals_of_ranks(words, self._shape), self._spec)

    def close(self, together: bool) -> None:
        """Wait for the device first: a kernel of NCCL that waits for a rank that is gone would never end."""
        try:
            self._settle("close")
        except RaymoeError:  # the rail is aborted now, so the device's work ends; `check` reports failures
            together = False
        self._inside.close(together)
        self._memory.close()

    def _combine_tokens(
        self, rows: torch.Tensor, inside: Dispatched, weighted: bool
    ) -> Callable[[tuple[int, int]], None]:
        """Return a function that combines some tokens inside the domain."""
        backend = self._inside
        assert isinstance(backend, ChunkedBackend)

        def combine(tokens: tuple[int, int]) -> None:
            with self._named_by_world():
                backend.combine_tokens(rows, inside, weighted, self._rail_sums.sums, tokens)

        return combine

    def _tokens_inside(self, arriving: RailTokens) -> Tokens:
        """Return the tokens inside. Their rows may still be on the way."""
        return Tokens(self._rows, arriving.ids, arriving.weights, None, arriving.scales)

    @contextmanager
    def _publish_failures(self, op: str) -> Iterator[None]:
        """Let errors after the first block that crosses end the exchange on all ranks. A capture sends nothing yet."""
        if capturing(self._world.device):
            yield
            return
        with publish_failures(self._rail, op, self._world.rank):
            yield

    @contextmanager
    def _named_by_world(self) -> Iterator[None]:
        """Let errors inside the domain name ranks of the world: of the rail, where a chunk of rows did not come."""
        try:
            with named_by_world(self._world.waiter, self._index * self._shape.per_domain):
                yield
        except PeerTimeout as error:
            if error.op != RAIL_OP or error.told_by >= 0:
                raise
            peer, rank = self._rail.lagging(), self._world.rank
            raise PeerTimeout(RAIL_OP, error.epoch, peer, error.expected, error.seen, error.waited_s, rank) from error
        except Aborted as error:
            if error.peer != self._world.rank:  # the kernel names this rank where it waits for the rail
                raise
            raise Aborted(str(error), self._rail.lagging()) from error

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

    def _connect(self) -> None:
        """Send each block once: the first call may be inside a capture, where nothing can be connected or loaded."""
        device, shape, sums = self._world.device, self._shape, self._rail_sums
        nothing = torch.zeros(shape.local * shape.domains + 1, dtype=torch.int32, device=device)
        no_tokens = torch.empty(0, self._spec.topk, dtype=torch.int64, device=device)
        with self._launcher.ordered("connect") as stream:
            tokens = Tokens(self._rows[:0], no_tokens, no_tokens.float(), None)
            self._rail_entries.cross("connect", stream, tokens, None)
            with self._rail_rows.crossing("connect", beside=True):
                arriving = self._rail_entries.arriving(stream)
            self._rail_entries.forget_dispatches()
            self._rail_entries.joined(stream, nothing, nothing[1:])
            if self._fp8:
                quantise(sums.sums[: shape.tokens])
            sums.cross(stream, CombineStatus(arriving.number, False, 0), entries=True)
            sums.add(stream, sums.sums[:0])
        self._settle("connect")
