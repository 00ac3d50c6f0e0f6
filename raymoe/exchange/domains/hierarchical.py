"""Dispatch and combine between CPU ranks in several domains: over the rail first, then inside the domain.

N domains of L ranks, T tokens, E experts, of which domain d has those from d*E/N on. A *rail* is the ranks with one
place in each domain. The carrier inside a domain (`host.py`, `gloo.py`) is used unchanged, with N*T tokens a rank.

Dispatch:

1. All ranks agree on the operation, first in each domain, then between domains.
2. Each rank gathers the rows, ids and weights of its rail: N blocks of T tokens, its own among them. Blocks have one
   size, so no counts go ahead. Every row goes to every domain. With top-8 of 256 experts and two domains that is 0.4 %
   more rows than are needed, with four domains 11 %.
3. The carrier inside sends these N*T tokens on. Experts of other domains have id -1.

The contract orders an expert's rows by (source domain, place, token, k). The carrier inside knows the domain of a row
only by its ids. So each expert has N ids there, one for each source domain: id s*local + j of a rank means row from
domain s for its expert j. Rows are then sorted by s; the sort keeps the order (place, token) of the carrier inside.

Combine:

1. All ranks agree on the operation, as above.
2. The carrier inside takes each rank's sums to the rank of their rail, with the ranks' statuses.
3. That rank adds the sums of its domain in float32, in rank order, and rounds once to the combine wire dtype. One block
   for each domain goes back over the rail: T sums, then the statuses of its L ranks.
4. The source adds the domains' sums in float32, in domain order. All ranks have all statuses, so all refuse one step.

The combine of a backward pass also carries the gradients of weights: T*K float32 in a second block for each domain. Its
combine knows the ids that the dispatch gathered, which the metadata of the dispatch keep.

A step with ranks that differ raises on all ranks before any block moves, and the next operation works. A failed wait
poisons the exchange and the rail. So does any error after the ranks have agreed, and the other ranks learn the reason
(`rail_operation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from raymoe.errors import ConfigError
from raymoe.exchange.backend import HARMLESS_ERRORS
from raymoe.exchange.cpu.cpu_backend import (
    ORDER_RULE,
    Call,
    Carrier,
    OperationOrder,
    OutgoingSums,
    ReturnedSums,
    describe_difference,
    words_of,
)
from raymoe.exchange.cpu.cpu_rows import (
    Array,
    ArrivedRows,
    RoutesInside,
    RowSums,
    SavedRoutes,
    SendPlan,
    places_in_runs,
    starts_of,
)
from raymoe.exchange.domains.rail_operation import publish_failures
from raymoe.exchange.refusal import Refusal, judge_statuses
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.wait import named_by_world
from raymoe.memory.world import World
from raymoe.net.gloo_rail import GlooRail
from raymoe.net.rail import Rail

CarrierMaker: TypeAlias = Callable[[World, ExchangeSpec], Carrier]
_DISAGREED = 4  # the word of a head that says whether the ranks of a domain are in different operations


class HierarchicalRows(Carrier):
    """The carrier between domains. It owns a carrier inside the domain, and shares the rail of its world."""

    def __init__(self, world: World, spec: ExchangeSpec, make_carrier: CarrierMaker) -> None:
        domain, T, K = world.domain, spec.tokens, spec.topk
        self._world, self._domains, self._per_domain = world, world.domains, domain.size
        self._index, self._spec = world.rank // domain.size, spec
        self._local = spec.local_experts(world.size)
        # All E experts are ids inside: E/N experts for each of N source domains.
        self._inside_spec = replace(spec, tokens=world.domains * T, alignment=1, capacity="worst")
        self._order = domain.shared(OperationOrder)
        self._number = self._order.register()
        self._named_by_world = partial(named_by_world, world.waiter, self._index * domain.size)
        self._rail: Rail = world.shared(GlooRail)
        self._inside = make_carrier(domain, self._inside_spec)
        self._dispatches = 0
        # {operation, exchange, call site, forward dispatch, 1 if the domain's ranks differ}
        self._head = torch.zeros(5, dtype=torch.int64, device="cpu")
        self._heads = torch.zeros(self._domains * 5, dtype=torch.int64, device="cpu")
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._padded = torch.zeros(T, spec.hidden, dtype=dtype, device="cpu")
        self._rows = torch.zeros(self._domains * T, spec.hidden, dtype=dtype, device="cpu")
        # T*K global ids, -1 where a token is absent or has no expert, and the bits of T*K weights.
        self._metadata_out = torch.empty(2, T, K, dtype=torch.int32, device="cpu")
        self._metadata_in = torch.empty(self._domains, 2, T, K, dtype=torch.int32, device="cpu")
        # For each domain the sums of T tokens, then a row for the status of each of L ranks.
        wire: torch.dtype = getattr(torch, spec.combine_wire)
        self._sums_out = torch.zeros(self._domains, T + domain.size, spec.combine_width, dtype=wire, device="cpu")
        self._sums_in = torch.empty_like(self._sums_out)
        self.inside_words = world.domains * T * K  # the ids inside

    def dispatch(self, x: torch.Tensor, plan: SendPlan, call: Call) -> ArrivedRows:
        with self._operation():
            self._agree(call)
            with publish_failures(self._rail, call.op, self._world.rank):
                return self._dispatch(x, plan, call)

    def combine(self, outgoing: OutgoingSums, routes: SavedRoutes, status: Refusal) -> ReturnedSums:
        with self._operation():
            self._agree(outgoing.call)
            with publish_failures(self._rail, outgoing.call.op, self._world.rank):
                return self._combine(outgoing, routes, status)

    def pack_inside(self, routes: SavedRoutes) -> Array:
        assert routes.inside is not None
        return routes.inside.routes.plan.topk_idx.ravel()

    def unpack_inside(self, routes: SavedRoutes, words: Array) -> RoutesInside:
        N, L, K = self._domains, self._per_domain, self._spec.topk
        ids = words.reshape(-1, K)
        plan = SendPlan.of(ids, np.zeros(ids.shape, np.float32), L, self._spec.experts)
        counts = routes.counts.reshape(N, L)
        # Rows are in runs: (domain, place) in the contract, (place, domain) inside.
        begins = starts_of(routes.counts)[:-1].reshape(N, L)
        places = places_in_runs(counts.T.ravel(), begins.T.ravel())
        return RoutesInside(SavedRoutes(plan, counts.sum(axis=0), routes.where.take(places), routes.number), places)

    def close(self, together: bool) -> None:
        self._inside.close(together)

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Let waits inside the domain end where a rank of any domain has failed. An error leaves no rail in use."""
        waiter = self._world.domain.waiter
        before, waiter.watch = waiter.watch, self._rail.check_failed
        try:
            yield
        except HARMLESS_ERRORS:
            raise
        except BaseException:
            self._rail.abort()  # other ranks may be in another operation of it
            raise
        finally:
            waiter.watch = before

    def _dispatch(self, x: torch.Tensor, plan: SendPlan, call: Call) -> ArrivedRows:
        own_rows = x
        if len(x) < self._spec.tokens:
            self._padded[: len(x)].copy_(x)
            own_rows = self._padded
        wait_rows = self._rail.gather("dispatch", self._rows, own_rows)
        ids, weights = self._metadata_out.numpy()
        ids.fill(-1)
        ids[: len(plan.topk_idx)] = plan.topk_idx
        weights[: len(plan.topk_idx)] = plan.topk_weights.view(np.int32)
        self._rail.gather("dispatch", self._metadata_in.flatten(0, 1), self._metadata_out)()
        inside = self._plan_inside()
        wait_rows()
        with self._named_by_world():
            arrived = self._inside.dispatch(self._rows, inside, call)
        self._dispatches += 1
        return self._in_contract_order(arrived, inside)

    def _combine(self, outgoing: OutgoingSums, routes: SavedRoutes, status: Refusal) -> ReturnedSums:
        T, L = self._spec.tokens, self._per_domain
        assert routes.inside is not None
        inside, places = routes.inside.routes, routes.inside.places
        outgoing_inside = OutgoingSums(outgoing.rows, outgoing.bags.take(places), site=outgoing.site)
        if outgoing.entries is not None:
            outgoing_inside.entries = outgoing.entries[torch.from_numpy(places)]
        with self._named_by_world():
            returned = self._inside.combine(outgoing_inside, inside, status)
        # In a refused step rows may be missing, and no rank reads the sums.
        if judge_statuses(returned.statuses, self._spec) is None:
            self._add_inside(returned, inside.plan)
        packed = self._sums_out.view(torch.uint8)[:, T:, : Refusal.NBYTES]
        for place, status_inside in enumerate(returned.statuses):
            packed[:, place] = torch.frombuffer(bytearray(status_inside.pack()), dtype=torch.uint8)
        self._rail.swap("combine", self._sums_in, self._sums_out)()
        packed = self._sums_in.view(torch.uint8)[:, T:, : Refusal.NBYTES]
        statuses = [Refusal.unpack(words.numpy().tobytes()) for block in packed for words in block]
        domains, tokens = routes.plan.ranks, routes.plan.tokens  # a row's `rank` is its domain
        entries = None
        if outgoing.entries is not None:
            entries = self._swap_entries(returned, inside.plan)[domains, tokens]
        where = domains * (T + L) + tokens
        return ReturnedSums(self._sums_in.flatten(0, 1)[:, : self._spec.hidden], where, statuses, entries)

    def _agree(self, call: Call) -> None:
        """Raise on all ranks of all domains unless all are in the same operation of the same exchange."""
        problem: ConfigError | None = None
        try:
            self._order.enter(call, self._number)
            with self._named_by_world():
                self._order.agree()
        except ConfigError as error:
            problem = error
        own_head = (*words_of(call, self._number), int(problem is not None))
        self._head.copy_(torch.tensor(own_head))
        self._rail.gather(call.op, self._heads, self._head)()
        if problem is not None:
            raise problem
        for domain, head in enumerate(self._heads.view(self._domains, 5).tolist()):
            if head[_DISAGREED]:
                raise ConfigError(
                    f"rank {self._world.rank} is in {call.op} while ranks of domain {domain} are in different "
                    f"operations; {ORDER_RULE}"
                )
            if tuple(head) != own_head:
                difference = describe_difference(own_head[:_DISAGREED], head[:_DISAGREED], f"domain {domain}")
                raise ConfigError(f"rank {self._world.rank} is in {difference}; {ORDER_RULE}")

    def _plan_inside(self) -> SendPlan:
        """Make the rows that this rank sends inside its domain: those of all domains' tokens for experts here."""
        N, K, local = self._domains, self._spec.topk, self._local
        metadata: Array = self._metadata_in.numpy()
        expert = metadata[:, 0] - self._index * self._per_domain * local
        here = (expert >= 0) & (expert < self._per_domain * local)
        source = np.arange(N, dtype=np.int32)[:, None, None]
        ids = np.where(here, expert // local * (N * local) + source * local + expert % local, -1).reshape(-1, K)
        weights = metadata[:, 1].reshape(-1, K).view(np.float32)
        return SendPlan.of(ids, weights, self._per_domain, self._spec.experts)

    def _in_contract_order(self, arrived: ArrivedRows, plan: SendPlan) -> ArrivedRows:
        N, L, local = self._domains, self._per_domain, self._local
        known = arrived.ids < N * local  # other ids are a peer's fault; they stay too large, and are refused
        source = np.where(known, arrived.ids, 0).max(axis=1) // local
        order = np.argsort(source, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        counts = np.bincount(source * L + np.repeat(np.arange(L), arrived.counts), minlength=N * L)
        ids = np.where(known & (arrived.ids >= 0), arrived.ids % local, arrived.ids)
        refusal = arrived.refusal
        if refusal:  # it names a rank of this domain
            refusal = replace(refusal, other=self._index * L + refusal.other)
        inside = SavedRoutes(plan, arrived.counts, arrived.where, self._dispatches)
        return ArrivedRows(
            arrived.table,
            arrived.where.take(order),
            ids.take(order, axis=0),
            arrived.weights.take(order, axis=0),
            counts,
            arrived.zero_row,
            refusal,
            RoutesInside(inside, places),
        )

    def _swap_entries(self, returned: ReturnedSums, plan: SendPlan) -> torch.Tensor:
        """Bring the gradients of weights from the domains to their sources: float32[N, T, K]."""
        N, T, K = self._domains, self._spec.tokens, self._spec.topk
        entries_out = torch.zeros(N * T, K, device="cpu")
        if returned.entries is not None:  # None where the step is refused
            # An entry comes from one rank, and from the others as zero. So the sum is exact.
            entries_out.index_add_(0, torch.from_numpy(plan.tokens), returned.entries)
        entries_in = torch.empty(N, T, K, device="cpu")
        self._rail.swap("combine of gradients", entries_in, entries_out.view(N, T, K))()
        return entries_in

    def _add_inside(self, returned: ReturnedSums, plan: SendPlan) -> None:
        """Add the sums of this domain's ranks for the tokens of each domain, into the blocks to send."""
        T, H = self._spec.tokens, self._spec.hidden
        bags = plan.sums_to_add(returned.where, self._domains * T)
        sums = RowSums(returned.table, bags, self._sums_out.dtype)
        for domain in range(self._domains):
            sums.write(domain * T, (domain + 1) * T, self._sums_out[domain, :T, :H])
