"""Make the tokens of a step and choose their experts, outside the clock."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy
import torch

from raymoe.errors import ConfigError
from raymoe.moe.weights import generator
from raymoe.workload.memory_needed import BATCHES, batches_of
from raymoe.workload.trace_file import TraceShape, fitting, read_ids

if TYPE_CHECKING:
    from raymoe.config import Job


@dataclass(frozen=True)
class Trace:
    """The expert ids that a real router chose, loaded from a file and checked: `table` is int64[S, N, K].

    The file is a numpy `.npy` array of integers (any integer type, 2**27 ids at most, no pickles), of shape

    - `[N, K]`: the same ids at every step, or
    - `[S, N, K]`: step i, warm-up included, takes entry i mod S.

    K is the job's top-k. N is T (every rank takes all rows) or R * T (rank r takes rows r*T to (r+1)*T). -1 means no
    expert. The weights are drawn at random, as for the other kinds of routing.
    """

    table: torch.Tensor
    shape: TraceShape

    @classmethod
    def load(cls, path: str, shape: TraceShape) -> Trace:
        """Read and check the whole file. Every rank checks all of it, so that all ranks refuse it or none does."""
        return cls(torch.from_numpy(fitting(read_ids(path), path, shape).astype(numpy.int64)), shape)

    def ids(self, rank: int, step: int) -> torch.Tensor:
        """Return the ids of a rank at a step, int64[T, K]."""
        ids = self.table[step % self.table.shape[0]]
        if ids.shape[0] == self.shape.tokens:
            return ids
        return ids[rank * self.shape.tokens : (rank + 1) * self.shape.tokens]


@dataclass(frozen=True)
class Draw:
    """The routing of one rank's tokens at one step: `ids` int64[T', K], `weights` float32[T', K]."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """How a job's tokens are routed. A draw depends on (seed, rank, step) alone: any rank can repeat any draw.

    - `uniform`: K distinct experts a token, each set equally likely.
    - `zipf`: experts drawn without replacement, the i-th most popular (from 0) in proportion to (i + 1) ** -alpha; the
      seed chooses the popular experts.
    - `hot`: the given share of a rank's tokens has one expert (the seed chooses it) as first choice; all other choices
      are uniform.
    - `trace`: ids from a file (see `Trace`).

    The ids of a token are distinct, except those of a trace, which are the file's. `masked` is the share of ids that
    become -1 after the draw. Their weights stay, so that code that uses the weight of a masked id gives a wrong result.
    With `ragged`, ranks hold different token counts: one rank none, one rank T, the others between 1 and T.
    """

    kind: str
    seed: int
    ranks: int
    tokens: int
    experts: int
    topk: int
    alpha: float = 1.0
    share: float = 0.5
    file: str | None = None
    masked: float = 0.0
    ragged: bool = False

    @classmethod
    def of(cls, job: Job) -> Routing:
        """Return the routing that a job asks for."""
        section, shape = job.routing, job.shape
        return cls(
            kind=str(section.kind),
            seed=section.seed,
            ranks=job.world.ranks,
            tokens=shape.tokens,
            experts=shape.experts,
            topk=shape.topk,
            alpha=section.alpha,
            share=section.share,
            file=None if section.file is None else str(section.file),
            masked=section.masked,
            ragged=section.ragged,
        )

    def tokens_of(self, rank: int) -> int:
        """Return T' of a rank: T, or the rank's own count if ranks are ragged.

        >>> ragged = Routing("uniform", seed=0, ranks=4, tokens=64, experts=8, topk=2, ragged=True)
        >>> sorted(ragged.tokens_of(rank) for rank in range(4))[::3]
        [0, 64]
        """
        if not self.ragged:
            return self.tokens
        source = generator("ragged", self.seed)
        counts = torch.randint(1, self.tokens + 1, (self.ranks,), generator=source)
        order = torch.randperm(self.ranks, generator=source)
        counts[order[0]] = self.tokens
        if self.ranks > 1:
            counts[order[-1]] = 0
        return int(counts[rank])

    def draw(self, rank: int, step: int) -> Draw:
        """Draw the ids and weights of a rank's tokens at a step."""
        tokens = self.tokens_of(rank)
        source = generator("routing", self.seed, rank, step)
        scores = torch.randn(tokens, self.topk, generator=source).softmax(dim=-1)
        weights = scores.sort(dim=-1, descending=True).values  # a router's first choice weighs most
        ids = self._choose(rank, step, tokens, source)
        if self.masked > 0:
            drop = torch.rand(tokens, self.topk, generator=source) < self.masked
            ids = ids.masked_fill(drop, -1)
        return Draw(ids.contiguous(), weights.contiguous())

    def _choose(self, rank: int, step: int, tokens: int, source: torch.Generator) -> torch.Tensor:
        if self.kind == "trace":
            return self._trace.ids(rank, step)[:tokens]
        # The K largest of (log popularity + Gumbel noise) are K experts drawn one after the other without replacement.
        noise = torch.rand(tokens, self.experts, generator=source).clamp_(min=1e-20).log_().neg_().log_().neg_()
        keys = noise + self._log_popularity
        if self.kind == "hot":
            chosen = torch.randperm(tokens, generator=source)[: round(self.share * tokens)]
            keys[chosen, self.hot_expert] = torch.inf
        return keys.topk(self.topk, dim=-1).indices

    @property
    def recorded(self) -> int:
        """The number of different steps in a trace; 0 for the kinds that are drawn."""
        return len(self._trace.table) if self.kind == "trace" else 0

    @cached_property
    def hot_expert(self) -> int:
        """The expert that `hot` prefers."""
        return int(torch.randint(self.experts, (), generator=generator("hot expert", self.seed)))

    @cached_property
    def _log_popularity(self) -> torch.Tensor:
        if self.kind != "zipf":
            return torch.zeros(self.experts)
        place = torch.randperm(self.experts, generator=generator("zipf", self.seed))
        return -self.alpha * (place + 1).double().log().float()

    @cached_property
    def _trace(self) -> Trace:
        if self.file is None:
            raise ConfigError("routing.kind is trace but routing.file is empty: name a .npy file of expert ids there")
        return Trace.load(self.file, TraceShape(self.ranks, self.tokens, self.topk, self.experts))


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """The tokens of one rank at one step, `x`[T', H] with |x| <= 1, and their routing."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def copy_(self, batch: Batch) -> None:
        """Copy another batch into this one's memory, which captured graphs read."""
        self.x.copy_(batch.x)
        self.ids.copy_(batch.ids)
        self.weights.copy_(batch.weights)


class Inputs:
    """One rank's batches. Timed steps take turns with a few batches that were made in advance.

    A verified step gets new tokens, so that data left over from another step cannot be right.

    >>> routing = Routing("uniform", seed=0, ranks=2, tokens=4, experts=8, topk=2)
    >>> inputs = Inputs(routing, rank=1, hidden=8, dtype=torch.bfloat16)
    >>> inputs.at(3).x is inputs.at(10).x, bool((inputs.at(3, fresh=True).x == inputs.at(3).x).all())
    (True, False)
    """

    def __init__(
        self,
        routing: Routing,
        rank: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        """Make the batches on `device`. `draws`, the source of their routing, are on the CPU."""
        self.routing, self.rank, self.hidden, self.dtype, self.device = routing, rank, hidden, dtype, device
        self.draws = draws_of(routing, rank)
        self._placed = [(draw.ids.to(device), draw.weights.to(device)) for draw in self.draws]
        batches = batches_of(routing.tokens * hidden * dtype.itemsize)
        self.rows = [self._draw("tokens", step) for step in range(batches)]

    @property
    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of no token."""
        ids, weights = self._placed[0]
        return ids[:0], weights[:0]

    def at(self, step: int, *, fresh: bool = False) -> Batch:
        """Return the batch of a step."""
        ids, weights = self._placed[step % len(self._placed)]
        x = self.fresh_of(self.rank, step) if fresh else self.rows[step % len(self.rows)]
        return Batch(x, ids, weights)

    def fresh_of(self, rank: int, step: int) -> torch.Tensor:
        """Return the fresh tokens of any rank at a step. They are the same on all devices of one kind."""
        return self._draw("fresh tokens", step, rank)

    def _draw(self, purpose: str, step: int, rank: int | None = None) -> torch.Tensor:
        rank = self.rank if rank is None else rank
        source = generator(purpose, self.routing.seed, rank, step, device=self.device)
        x = torch.empty(self.routing.tokens_of(rank), self.hidden, device=self.device)
        return x.uniform_(-1, 1, generator=source).to(self.dtype)


def draws_of(routing: Routing, rank: int) -> list[Draw]:
    """Return the draws that a rank's steps take turns with."""
    return [routing.draw(rank, step) for step in range(routing.recorded or BATCHES)]
