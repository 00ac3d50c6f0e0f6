"""Which experts a rank's tokens go to, and with what weights.

Every draw is a function of (seed, rank, step) alone: runs repeat, and any rank can tell what another one drew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from raymoe.job.errors import ConfigError
from raymoe.moe.seeds import generator
from raymoe.workload.trace import Trace, TraceShape

if TYPE_CHECKING:
    from raymoe.job import Job


@dataclass(frozen=True)
class Draw:
    """The routing of one rank's tokens at one step: `ids` int64[T', K], `weights` float32[T', K]."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """How a job's tokens are routed.

    - `uniform`: K distinct experts a token, each set equally likely.
    - `zipf`: experts drawn without replacement, the i-th most popular in proportion to (i + 1) ** -alpha; the seed says
      which experts are the popular ones.
    - `hot`: the given share of a rank's tokens has one expert (the seed says which) as first choice; all other choices
      are uniform.
    - `trace`: ids from a file (see `raymoe.workload.trace`).

    The ids of a token are distinct (a trace's are what the file says). `masked` is the share of ids that become -1
    after the draw; their weights stay as they were, so whoever uses the weight of a masked id is found out. With
    `ragged`, ranks hold different token counts: one rank none, one rank all T, the others something between.
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
        """The routing that a job asks for."""
        asked, shape = job.routing, job.shape
        return cls(
            kind=str(asked.kind),
            seed=asked.seed,
            ranks=job.world.ranks,
            tokens=shape.tokens,
            experts=shape.experts,
            topk=shape.topk,
            alpha=asked.alpha,
            share=asked.share,
            file=None if asked.file is None else str(asked.file),
            masked=asked.masked,
            ragged=asked.ragged,
        )

    def tokens_of(self, rank: int) -> int:
        """T' of a rank: T, or this rank's count where they are ragged.

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
        """The ids and weights of a rank's tokens at a step."""
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
        """How many different steps a trace holds; 0 for the kinds that are drawn."""
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
