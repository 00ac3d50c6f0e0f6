"""Dispatch and combine between CPU ranks. The arithmetic is here; carriers (`host.py`, `gloo.py`) move the rows."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from raymoe.errors import ConfigError, DataRefused, RaymoeError, WiringError
from raymoe.exchange.backend import Dispatched, EntryPlaces, Ids, Tokens
from raymoe.exchange.cpu.cpu_rows import (
    Array,
    ArrivedRows,
    Bags,
    Placement,
    RoutesInside,
    RowSums,
    SavedRoutes,
    SendPlan,
)
from raymoe.exchange.refusal import NO_REFUSAL, Cause, Refusal, judge_statuses, marked_number, status_of
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.layout import WORD_STRIDE, Layout, Region
from raymoe.memory.world import World

# Carriers, and the input and the result of a carrier's combine.


@dataclass
class ReturnedSums:
    """The sums that came back: row `where[i]` of `table` belongs to row i of the plan.

    `statuses` has one of each rank. Where they refuse the step, the rows may be missing.
    """

    table: torch.Tensor  # in the combine wire dtype
    where: Array
    statuses: Sequence[Refusal]
    entries: torch.Tensor | None = None
    """float32[P, K]: the entries of row i of the plan; None where the combine has none."""


@dataclass(frozen=True)
class Call:
    """The operation that a rank announces. It must be the same on all ranks."""

    op: str
    site: int = 0
    """The number of the call site, such as a layer; 0: none."""
    forward: int = 0
    """The number of the dispatch to whose rows the gradients belong; 0 unless this is a dispatch of gradients."""


@dataclass
class OutgoingSums:
    """The input of a carrier's combine: for arrived row i, bag i's sum of `rows` and `entries[i]` are returned."""

    rows: torch.Tensor
    bags: Bags
    entries: torch.Tensor | None = None
    """float32[N, K]: a number for each entry (arrived row, k)."""
    site: int = 0

    @property
    def call(self) -> Call:
        """The operation that ranks announce."""
        return Call("combine" if self.entries is None else "combine of gradients", self.site)


class Carrier(ABC):
    """Moves rows and their metadata between CPU ranks.

    Both operations are collective. They raise `PeerTimeout` or `Aborted` when a peer does not take part in time.
    """

    inside_words = 0
    """Numbers in `pack_inside`. 0 for a carrier inside one domain."""

    @abstractmethod
    def dispatch(self, x: torch.Tensor, plan: SendPlan, call: Call) -> ArrivedRows:
        """Send rows `plan.tokens` of `x`, and return the rows that arrive here. `call` is announced."""

    @abstractmethod
    def combine(self, outgoing: OutgoingSums, routes: SavedRoutes, status: Refusal) -> ReturnedSums:
        """Return the sums to the sources of the rows, with this rank's status. Return the sums that arrive here.

        Each sum is rounded once, to the combine wire dtype.
        """

    def pack_inside(self, routes: SavedRoutes) -> Array:  # noqa: ARG002
        """Return `routes.inside` as int32 numbers, so that a backward pass can combine."""
        return np.zeros(0, np.int32)

    def unpack_inside(self, routes: SavedRoutes, words: Array) -> RoutesInside | None:  # noqa: ARG002
        """Return `routes.inside` from its numbers. `routes` has all other fields."""
        return None

    @abstractmethod
    def close(self, together: bool) -> None:
        """Release memory and connections; `together` if all ranks close now."""


# The order of operations of CPU ranks: all ranks of a world must be in the same one before any data is exchanged.
#
# Gloo matches messages by their order alone. Ranks in different operations give it buffers of different sizes, and it
# ends the process. So each rank first announces the operation that it enters, waits until all ranks have entered one,
# and compares. Where they differ, all ranks raise before any message or flag is sent, and the next operation works.
#
# Memory map (a heap on every rank; R ranks; the first index of `records` is the parity of the operation's number):
#
# - `records [2][R]`: {number, operation, exchange, call site, forward dispatch, status}, written by rank r, at all
#   ranks, and read by the owner.
# - `entered [R]`: word r is the number of the last operation that rank r has entered. It only grows.
#
# Order: record, fence, word. A reader loads the word, fences, loads the record. No record is overwritten before all
# ranks have read it: a rank enters operation n + 2 after all have entered n + 1, so after they have read those of n.

_OPERATIONS = ("dispatch", "dispatch of gradients", "combine", "combine of gradients")
_SAME, _RECORD = 5, 5 + Refusal.NBYTES // 8
"""Words of a record that must be equal on all ranks, and all words of a record."""


def words_of(call: Call, exchange: int) -> tuple[int, int, int, int]:
    """Return the numbers of an announcement: operation, exchange, call site, forward dispatch."""
    return _OPERATIONS.index(call.op), exchange, call.site, call.forward


def describe_difference(own: Sequence[int], theirs: Sequence[int], other: str) -> str:
    """Say where this rank is and where `other` is, of two different announcements.

    >>> describe_difference((0, 1, 0, 0), (2, 1, 0, 0), "rank 1")
    'dispatch while rank 1 is in combine of the same exchange'
    >>> describe_difference((0, 1, 0, 0), (0, 2, 0, 0), "rank 1")
    'dispatch of exchange 1 while rank 1 is in dispatch of exchange 2'
    >>> describe_difference((0, 1, 3, 0), (0, 1, 4, 0), "rank 1")
    'dispatch of call site 3 while rank 1 is in dispatch of call site 4'
    >>> describe_difference((1, 1, 3, 7), (1, 1, 3, 8), "rank 1")
    'the backward pass of dispatch 7 while rank 1 is in that of dispatch 8'
    """
    (op, exchange, site, forward), (other_op, other_exchange, other_site, other_forward) = own, theirs
    here, there = _OPERATIONS[op], _OPERATIONS[other_op]
    if exchange != other_exchange:
        return f"{here} of exchange {exchange} while {other} is in {there} of exchange {other_exchange}"
    if op != other_op:
        return f"{here} while {other} is in {there} of the same exchange"
    if site != other_site:
        return f"{here} of call site {site} while {other} is in {there} of call site {other_site}"
    return f"the backward pass of dispatch {forward} while {other} is in that of dispatch {other_forward}"


ORDER_RULE = "call the same operations in one order on all ranks (exchanges and layers are numbered as they were made)"


class OperationOrder:
    """Checks that all ranks enter the same operation. All exchanges of a world share one (`World.shared`).

    After a failed wait every later call raises.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._size, self._waiter = world.rank, world.size, world.waiter
        records = Region("records", (2, world.size, WORD_STRIDE), "int64")
        layout = Layout.of([Region.words("entered", world.size), records])
        self._heap = world.allocate(layout, "order of operations")
        self._records: Array = self._heap.tensor("records").numpy()
        self._entered = self._heap.words("entered")
        self._everywhere = [
            (self._heap.tensor("records", peer).numpy(), self._heap.words("entered", peer))
            for peer in range(world.size)
        ]
        self._exchanges = 0
        self._number = 0
        self._failure: RaymoeError | None = None

    def register(self) -> int:
        """Number a new exchange. All ranks make exchanges in one order, so the number is the same everywhere."""
        self._exchanges += 1
        return self._exchanges

    def enter(self, call: Call, exchange: int, status: Refusal = NO_REFUSAL) -> None:
        """Announce the next operation, with a status for all ranks, which `agree` returns."""
        self._waiter.check()
        if self._failure is not None:
            raise copy.copy(self._failure)
        self._number += 1
        words = np.frombuffer(status.pack(), np.int64).tolist()
        record = (self._number, *words_of(call, exchange), *words)
        for records, _ in self._everywhere:
            records[self._number % 2, self._rank, : len(record)] = record
        self._waiter.fence()  # orders the records before the words
        for _, entered in self._everywhere:
            entered[self._rank] = self._number

    def agree(self) -> list[Refusal]:
        """Wait until all ranks have entered an operation, and raise on all of them unless it is the same one.

        Returns the statuses of all ranks.
        """
        records = self._records[self._number % 2]
        own: list[int] = records[self._rank, :_SAME].tolist()
        try:
            for peer in range(self._size):
                self._waiter.for_epoch(_OPERATIONS[own[1]], self._entered, peer, self._number)
        except RaymoeError as error:
            self._failure = copy.copy(error)
            raise
        for peer in range(self._size):
            theirs = records[peer, :_SAME].tolist()
            if theirs[0] != own[0]:
                self._failure = WiringError(
                    f"rank {peer} announced operation {own[0]} to rank {self._rank}, but its record is of {theirs[0]}"
                )
                raise copy.copy(self._failure)
            if theirs != own:
                difference = describe_difference(own[1:], theirs[1:], f"rank {peer}")
                raise ConfigError(f"rank {self._rank} is in {difference}; {ORDER_RULE}")
        return [Refusal.unpack(records[peer, _SAME:_RECORD].tobytes()) for peer in range(self._size)]

    def close(self, together: bool) -> None:  # noqa: ARG002
        """Release the heap; called with the world's close."""
        self._heap.close()


# The backend: arithmetic that is the same for all carriers.


@dataclass(frozen=True)
class SavedPlacement:
    """The state that a dispatch saves for its combine: the places of rows and their routes."""

    placement: Placement
    routes: SavedRoutes

    @property
    def refusal(self) -> Refusal:
        return self.routes.plan.refusal or self.placement.refusal


class CpuBackend:
    """A backend for CPU ranks. It owns its carrier."""

    capturable = False
    keeps_places = False
    sms: int | None = None

    def __init__(self, world: World, spec: ExchangeSpec, carrier: Carrier) -> None:
        self._rank, self._size, self._spec = world.rank, world.size, spec
        # A row is sent once for each (token, rank). Where there are several domains, it is sent once for each (token,
        # domain).
        self._destinations = world.domains if world.domains > 1 else world.size
        self._carrier = carrier
        self._own_refusal: DataRefused | None = None
        self._dispatches = 0

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, out: torch.Tensor | None) -> Dispatched:
        return self._dispatch(tokens, out, Call("dispatch", tokens.site))

    @torch.no_grad()
    def dispatch_again(self, tokens: Tokens, out: torch.Tensor | None, forward: Dispatched) -> Dispatched:
        number = forward.saved(SavedPlacement).routes.number
        return self._dispatch(tokens, out, Call("dispatch of gradients", forward.site, number))

    def _dispatch(self, tokens: Tokens, out: torch.Tensor | None, call: Call) -> Dispatched:
        plan = self._send_plan(tokens.topk_idx.numpy(), tokens.topk_weights.numpy(), tokens.num_tokens)
        arrived = self._carrier.dispatch(tokens.x, plan, call)
        local, capacity = self._spec.local_experts(self._size), self._spec.rows(self._size)
        placement = Placement.of(arrived, local, self._spec.alignment, capacity)
        self._dispatches += 1
        routes = SavedRoutes(plan, arrived.counts, arrived.where, self._dispatches, arrived.inside)
        state = SavedPlacement(placement, routes)
        refusal = state.refusal
        self._own_refusal = refusal.error(self._rank, self._spec, self._size) if refusal else None
        x, index = (arrived.table, self._index(arrived, placement)) if out is None else (out, None)
        if out is not None and len(placement.index):
            rows = out[: len(placement.index)]
            torch.index_select(arrived.table, 0, torch.from_numpy(placement.index), out=rows)
        return Dispatched(
            x=x,
            weights=torch.from_numpy(placement.weights),
            expert_offsets=torch.from_numpy(placement.offsets.astype(np.int32)),
            expert_counts=torch.from_numpy(placement.counts.astype(np.int32)),
            index=index,
            tokens=len(tokens.x),
            _saved=state,
            _owner=self,
            site=call.site,
        )

    def refusal_words(self, got: Dispatched) -> torch.Tensor:
        return torch.frombuffer(bytearray(got.saved(SavedPlacement).placement.refusal.pack()), dtype=torch.int32)

    def mark(self, got: Dispatched, digest: torch.Tensor) -> None:
        got.saved(SavedPlacement).routes.digest = int(digest)

    @torch.no_grad()
    def combine(self, rows: torch.Tensor, got: Dispatched, weighted: bool, out: torch.Tensor) -> None:
        state = got.saved(SavedPlacement)
        outgoing = OutgoingSums(rows, state.placement.sums_to_send(weighted), site=got.site)
        self._return_sums(outgoing, state, weighted, out)

    @torch.no_grad()
    def refuse(self, got: Dispatched) -> None:
        """Take part in the combine of a dispatch, and let all ranks refuse it. Raises what they raise."""
        state, spec = got.saved(SavedPlacement), self._spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        rows = torch.zeros(spec.rows(self._size), spec.hidden, dtype=dtype, device="cpu")
        y = torch.empty(got.tokens, spec.hidden, dtype=dtype, device="cpu")
        placement = replace(state.placement, refusal=state.refusal or Refusal(Cause.EXPERTS))
        outgoing = OutgoingSums(rows, state.placement.sums_to_send(False), site=got.site)
        self._return_sums(outgoing, SavedPlacement(placement, state.routes), False, y)

    @torch.no_grad()
    def combine_gradients(
        self, rows: torch.Tensor, weights: torch.Tensor, got: Dispatched, out: torch.Tensor, out_weights: torch.Tensor
    ) -> None:
        state = got.saved(SavedPlacement)
        places = state.placement.entries(self._spec.topk)
        # The place of an entry whose expert is elsewhere is -1: the zero after the last weight.
        entries = torch.cat((weights, weights.new_zeros(1)))[torch.from_numpy(places)]
        outgoing = OutgoingSums(rows, state.placement.sums_to_send(False), entries, got.site)
        returned = self._return_sums(outgoing, state, False, out)
        assert returned.entries is not None
        # An entry comes from one rank, and from the others as zero. So the sum is exact.
        out_weights.zero_().index_add_(0, torch.from_numpy(state.routes.plan.tokens), returned.entries)

    def _send_plan(self, topk_idx: Array, topk_weights: Array, num_tokens: torch.Tensor | None) -> SendPlan:
        """Return the plan of the first `num_tokens` tokens' rows. It sends none where the data are refused."""
        rows = len(topk_idx)
        n = rows if num_tokens is None else int(num_tokens.item())
        refusal = NO_REFUSAL if 0 <= n <= rows else Refusal(Cause.TOKENS, rows, n)
        n = 0 if refusal else n
        plan = SendPlan.of(topk_idx[:n], topk_weights[:n], self._destinations, self._spec.experts)
        return replace(plan, refusal=refusal) if refusal else plan

    def _return_sums(
        self, outgoing: OutgoingSums, state: SavedPlacement, weighted: bool, out: torch.Tensor
    ) -> ReturnedSums:
        routes, tokens = state.routes, len(out)
        returned = self._carrier.combine(
            outgoing, routes, status_of(state.refusal, marked_number(routes.number, routes.digest), weighted)
        )
        if (refused := judge_statuses(returned.statuses, self._spec)) is not None:
            self._own_refusal = None
            out.fill_(torch.nan)
            raise refused
        sums = RowSums(returned.table, routes.plan.sums_to_add(returned.where, tokens), out.dtype)
        sums.write(0, tokens, out)
        return returned

    # The metadata of a dispatch is one int32 tensor: the dispatch's number, the placement's digest, its refusal, the
    # local experts' offsets and counts, and the rows from each source. Then each row that arrived has its position and
    # the places of its entries. The numbers of the carrier come last.

    @property
    def metadata_words(self) -> int:
        spec, local, arriving = self._spec, self._spec.local_experts(self._size), self._size * self._spec.tokens
        words = 2 + Refusal.NBYTES // 4 + 2 * local + 1 + self._size + arriving * (1 + spec.topk)
        return words + self._carrier.inside_words

    def pack(self, got: Dispatched) -> torch.Tensor:
        state, K = got.saved(SavedPlacement), self._spec.topk
        placement, routes = state.placement, state.routes
        refusal = np.frombuffer(placement.refusal.pack(), np.int32)
        arrived = len(routes.where)
        where = np.full(self._size * self._spec.tokens, -1)
        where[:arrived] = routes.where % len(where)  # without the parity of slots: no combine reads it
        entries = np.full((len(where), K), -1)
        entries[:arrived] = placement.entries(K)
        numbers = np.array([routes.number, routes.digest])
        inside = self._carrier.pack_inside(routes)
        parts = (numbers, refusal, placement.offsets, placement.counts, routes.counts, where, entries.ravel(), inside)
        return torch.from_numpy(np.concatenate(parts).astype(np.int32))

    def unpack(self, metadata: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: Ids) -> Dispatched:
        topk_idx = ids.topk_idx.numpy()
        # A combine sends no weights of the source.
        plan = self._send_plan(topk_idx, np.zeros(topk_idx.shape, np.float32), ids.num_tokens)
        number, refusal, offsets, counts, sources, where, entries, inside = self._split(metadata)
        arrived = int(sources.sum())
        places = entries.reshape(-1, self._spec.topk)[:arrived].astype(np.int64)
        refused = Refusal.unpack(refusal.tobytes())
        placement = Placement.restored(counts, offsets, places, weights.numpy(), refused)
        routes = SavedRoutes(plan, sources.astype(np.int64), where[:arrived].astype(np.int64), int(number[0]))
        routes.inside, routes.digest = self._carrier.unpack_inside(routes, inside), int(number[1])
        return Dispatched(
            x=rows,
            weights=weights,
            expert_offsets=torch.from_numpy(offsets),
            expert_counts=torch.from_numpy(counts),
            index=None,
            tokens=len(ids.topk_idx),
            _saved=SavedPlacement(placement, routes),
            _owner=self,
        )

    def _split(self, metadata: torch.Tensor) -> list[Array]:
        local, arriving = self._spec.local_experts(self._size), self._size * self._spec.tokens
        words = Refusal.NBYTES // 4
        sizes = (2, words, local + 1, local, self._size, arriving, arriving * self._spec.topk)
        return np.split(metadata.numpy(), np.cumsum(sizes))

    def entry_places(self, metadata: torch.Tensor, topk_idx: torch.Tensor) -> EntryPlaces:
        *_, sources, _, entries, _ = self._split(metadata)
        ranks, tokens, K = self._size, self._spec.tokens, self._spec.topk
        places, ends = np.full((ranks, tokens, K), -1, np.int32), np.cumsum(sources)
        arrived = entries.reshape(-1, K)
        for source, (end, count) in enumerate(zip(ends.tolist(), sources.tolist(), strict=True)):
            places[source, :count] = arrived[end - count : end]
        own = places[self._rank, : sources[self._rank]].copy()
        places[self._rank] = -1  # the rows of its own tokens that arrived are those with an expert here, in order
        here = topk_idx.numpy() // self._spec.local_experts(ranks) == self._rank
        places[self._rank, np.flatnonzero(here.any(axis=1))[: len(own)]] = own
        return EntryPlaces(torch.from_numpy(places), torch.full((ranks,), tokens, dtype=torch.int32, device="cpu"))

    def dispatch_known(self, x: torch.Tensor, got: Dispatched, out: torch.Tensor) -> None:  # noqa: ARG002
        raise ConfigError("dispatch_known on CPU ranks, whose carriers send ids with the rows; call dispatch again")

    def check(self) -> None:
        """Raise once if this rank refuses the data of the last dispatch. Combine raises what other ranks refuse."""
        if self._own_refusal is not None:
            refused, self._own_refusal = self._own_refusal, None
            raise refused

    def close(self, together: bool) -> None:
        self._carrier.close(together)

    def _index(self, arrived: ArrivedRows, placement: Placement) -> torch.Tensor:
        index = torch.full((self._spec.rows(self._size),), arrived.zero_row, device="cpu")
        index[: len(placement.index)] = torch.from_numpy(placement.index)
        return index
