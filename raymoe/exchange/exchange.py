"""Dispatch and combine for one fixed spec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Self

import numpy as np
import torch

from raymoe.exchange.arguments import check_combine, check_dispatch, check_out
from raymoe.exchange.arrays import Array
from raymoe.exchange.backend import Backend, Visit
from raymoe.exchange.dispatched import Dispatched
from raymoe.exchange.placing import Arrived, Placement
from raymoe.exchange.refusal import Refusal, raise_first
from raymoe.exchange.sending import Sending
from raymoe.exchange.spec import ExchangeSpec
from raymoe.exchange.summing import RowSums
from raymoe.job.errors import ConfigError, DataRefused, RaymoeError
from raymoe.memory.world import World

BACKENDS = ("auto", "host", "collective", "allgather")


class Exchange:
    """Sends each token's row to the ranks of its experts, and brings the weighted sum of their results back.

    Making one is collective: all ranks of the world, the same spec, the same backend. So are `dispatch` and `combine`,
    in one order on all ranks. Data that is refused makes every rank raise `DataRefused` in the same combine, and the
    next step works; a peer that does not answer makes the exchange unusable.
    """

    def __init__(self, world: World, spec: ExchangeSpec, backend: str = "auto") -> None:
        self.world, self.spec = world, spec
        self.backend = _agree(world, spec, backend)
        self._backend = _make(self.backend, world, spec)
        self._capacity = spec.rows(world.size)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        rows = self._capacity if spec.layout == "expert" else 0
        self._rows = torch.empty(rows, spec.hidden, dtype=self._dtype)
        self._poison: RaymoeError | None = None
        self._known: DataRefused | None = None
        self._crossed = [0, 0]
        self._closed = False

    @torch.no_grad()
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Dispatched:
        """Send the first `num_tokens` rows of `x[T', H]` (all of them unless said) to the ranks of their experts."""
        self._ready("dispatch")
        n = check_dispatch(self.spec, x, topk_idx, topk_weights, num_tokens)
        if out is not None:
            check_out(self.spec, out, self._capacity)
        ids, weights = topk_idx.numpy()[:n], topk_weights.detach().numpy()[:n]
        sending = Sending.of(ids, weights, self.world.size, self.spec.experts)
        with self._poisoning():
            arrived = self._backend.dispatch(x, sending)
        local = self.spec.local_experts(self.world.size)
        placement = Placement.of(arrived, local, self.spec.alignment, self._capacity)
        self._crossed[0] = self._bytes(sending.counts)
        self._know(sending.refusal or placement.refusal)
        return self._got(arrived, placement, sending, out, len(x))

    @torch.no_grad()
    def combine(
        self, rows: torch.Tensor, got: Dispatched, weighted: bool = True, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum what the experts made of each token, times the router's weights if `weighted`, into `y[T', H]`."""
        self._ready("combine")
        check_combine(self.spec, rows, got, self, self._capacity)
        if out is not None:
            check_out(self.spec, out, got.tokens)
        visit = got._visit
        refusal = visit.sending.refusal or got._placement.refusal
        bags = got._placement.going_home(weighted)
        with self._poisoning():
            home = self._backend.combine(rows, bags, visit, refusal)
        self._crossed[1] = self._bytes(visit.counts)
        y = torch.empty(got.tokens, self.spec.hidden, dtype=self._dtype) if out is None else out
        if any(home.refusals):
            self._known = None
            y.fill_(torch.nan)
            raise_first(home.refusals, self.spec)
        RowSums(home.table, visit.sending.coming_home(home.where, got.tokens)).write(0, got.tokens, y)
        return y

    def check(self) -> None:
        """Raise what this rank knows to be wrong: a failed wait, or the data of its last dispatch."""
        self._ready("check")
        if self._known is not None:
            known, self._known = self._known, None
            raise known

    def bytes_wire(self) -> tuple[int, int]:
        """Bytes of rows that this rank's last dispatch and its last combine had to send to other ranks.

        Each (token, destination rank) counts once, whatever a backend really moves, so that times of different backends
        are for the same work.
        """
        return self._crossed[0], self._crossed[1]

    def close(self, together: bool = True) -> None:
        """Give up memory and connections. What was dispatched stays valid."""
        if not self._closed:
            self._closed = True
            self._backend.close(together and self._poison is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    def _ready(self, op: str) -> None:
        if self._closed:
            raise ConfigError(f"{op} on rank {self.world.rank}: this exchange is closed; make a new one")
        if self._poison is not None:
            raise self._poison

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Whatever ends a movement early leaves peers in the middle of it: this rank must not write to them again."""
        try:
            yield
        except RaymoeError as error:
            self._poison = error
            raise
        except BaseException as error:
            self._poison = RaymoeError(f"this exchange is unusable: {type(error).__name__} ended an operation early")
            raise

    def _know(self, refusal: Refusal) -> None:
        self._known = None
        if refusal:
            self._known = DataRefused(refusal.sentence(self.world.rank, self.spec, self.world.size))

    def _bytes(self, counts: Array) -> int:
        return int(counts.sum() - counts[self.world.rank]) * self.spec.row_bytes

    def _got(
        self, arrived: Arrived, placement: Placement, sending: Sending, out: torch.Tensor | None, tokens: int
    ) -> Dispatched:
        offsets = placement.offsets
        if self.spec.layout == "rank":
            x = arrived.table
            index = torch.full((self._capacity,), arrived.zero_row)
            index[: len(placement.index)] = torch.from_numpy(placement.index)
        else:
            x, index = self._rows if out is None else out, None
            if len(placement.index):
                torch.index_select(arrived.table, 0, torch.from_numpy(placement.index), out=x[: len(placement.index)])
        return Dispatched(
            x=x,
            weights=torch.from_numpy(placement.weights),
            expert_offsets=torch.from_numpy(offsets.astype(np.int32)),
            expert_counts=torch.from_numpy(placement.counts.astype(np.int32)),
            index=index,
            tokens=tokens,
            _placement=placement,
            _visit=Visit(sending, arrived.counts, arrived.where),
            _owner=self,
        )


def _agree(world: World, spec: ExchangeSpec, backend: str) -> str:
    """The backend to use, after making sure that all ranks asked for the same."""
    problem: ConfigError | None = None
    if backend not in BACKENDS:
        problem = ConfigError(f"backend is {backend!r}; CPU ranks have {', '.join(BACKENDS)}")
    else:
        try:
            spec.check(world.size)
        except ConfigError as error:
            problem = error
    asked = asdict(spec) | {"backend": backend}
    for rank, other in enumerate(world.swap((asked, problem), "exchange: spec")):
        assert isinstance(other, tuple)
        theirs, their_problem = other
        if problem is None and their_problem is not None:
            raise ConfigError(f"rank {rank}: {their_problem}")
        for key, value in asked.items():
            if problem is None and theirs[key] != value:
                here = f"{value!r} on rank {world.rank}"
                raise ConfigError(f"{key} is {theirs[key]!r} on rank {rank} and {here}; an exchange has one spec")
    if problem is not None:
        raise problem
    return "host" if backend == "auto" else backend


def _make(name: str, world: World, spec: ExchangeSpec) -> Backend:
    # Imported here: torch.distributed is not loaded for a job that does not use it.
    if name == "collective":
        from raymoe.exchange.collective import CollectiveBackend

        return CollectiveBackend(world, spec)
    if name == "allgather":
        from raymoe.exchange.allgather import AllgatherBackend

        return AllgatherBackend(world, spec)
    from raymoe.exchange.host import HostBackend

    return HostBackend(world, spec)
