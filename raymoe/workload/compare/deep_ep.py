"""DeepEP as a user of it would call it: version 1 (`Buffer`), version 2 (`ElasticBuffer`) and Hybrid-EP.

All that a call does is on the clock: layout, counts and, where it has them, waits of the host. What came is judged
expert by expert (how many rows, and their sum), and what comes home by the token: rows go home as they came, no expert
works on them, so each token comes back as a multiple of itself.

Written from the signatures of versions 1.2 and 2 and of the hybrid-ep branch (2026-11); not run on a GPU yet.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from raymoe.errors import ConfigError
from raymoe.exchange.spec import ExchangeSpec
from raymoe.memory.world import World
from raymoe.workload.compare.nvshmem import join_default_group
from raymoe.workload.inputs import Inputs

BOUND = 2.0**-7
"""Of a token that comes home, relative: each of two sums rounds to bfloat16 once."""

Left = Mapping[str, str | None]
_dist: Any = dist


class _Buffered(ABC):
    """What the three have in common: tokens that stay where they are, and the judging."""

    capturable = False
    sms: int | None = None
    left_out: ClassVar[Left]
    once_a_rank = False
    """Whether a token comes home once from each rank that it went to, and else once from each expert."""

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs) -> None:
        if spec.dtype != "bfloat16":
            raise ConfigError(f"rows are {spec.dtype}; it sends bfloat16")
        self._world, self._spec, self._inputs = world, spec, inputs
        self._experts = range(spec.local_experts(world.size))
        first = inputs.at(0)
        self._x, self._ids, self._weights = first.x.clone(), first.ids.clone(), first.weights.clone()
        self._index = 0
        self._y: torch.Tensor = torch.empty(0)
        join_default_group(world)
        self._open(_dist.group.WORLD)

    def take(self, index: int, *, fresh: bool) -> None:
        batch = self._inputs.at(index, fresh=fresh)
        self._x.copy_(batch.x)
        self._ids.copy_(batch.ids)
        self._weights.copy_(batch.weights)
        self._index = index

    def wrong_dispatch(self) -> str | None:
        want = [self._want_of(source) for source in range(self._world.size)]
        for expert in self._experts:
            counts, sums = zip(*(source[expert] for source in want), strict=True)
            rows = self._rows_of(expert).double()
            if len(rows) != sum(counts):
                return f"expert {expert} of the rank has {len(rows)} rows, {sum(counts)} were sent"
            if not torch.allclose(rows.sum(0), sum(sums, torch.zeros_like(rows.sum(0))), rtol=0, atol=1e-6):
                return f"the rows of expert {expert} of the rank are not those that were sent"
        return None

    def wrong_combine(self) -> str | None:
        chosen = self._ids >= 0
        owner = torch.where(chosen, self._ids // len(self._experts), -1)
        ranks = torch.stack([(owner == rank).any(dim=1) for rank in range(self._world.size)]).sum(0)
        times = (ranks if self.once_a_rank else chosen.sum(1)).unsqueeze(1)
        want = times * self._x.float()
        wrong = (self._y.float() - want).abs() > BOUND * want.abs() + 1e-30
        return f"{int(wrong.any(dim=1).sum())} tokens came home wrong" if wrong.any() else None

    def _want_of(self, source: int) -> list[tuple[int, torch.Tensor]]:
        """For each expert of this rank, how many tokens a rank sends it, and their sum."""
        inputs, draws = self._inputs, self._inputs.draws
        ids = inputs.routing.draw(source, self._index % len(draws)).ids.to(inputs.device)
        x = inputs.fresh_of(source, self._index).double()
        first = self._world.rank * len(self._experts)
        named = [(ids == first + expert).any(dim=1) for expert in self._experts]
        return [(int(tokens.sum()), x[tokens].sum(0)) for tokens in named]

    @abstractmethod
    def _open(self, group: Any) -> None:
        """Make what sends, over this group."""

    @abstractmethod
    def _rows_of(self, expert: int) -> torch.Tensor:
        """What came for a local expert."""


class Version1(_Buffered):
    """Its throughput kernels. Rows come in the order of ranks, each once, with the experts that want it."""

    once_a_rank = True
    left_out: ClassVar[Left] = {
        "dispatch": "placement by expert",
        "combine": "weights, sum of a rank's experts",
        "exchange": "placement by expert, weights, sum of a rank's experts",
    }

    def _open(self, group: Any) -> None:
        ranks, kind = self._world.size, _kind("Buffer")
        self._configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
        hints = [config.get_nvl_buffer_size_hint(self._spec.row_bytes, ranks) for config in self._configs]
        self._buffer = kind(group, max(hints), 0)
        self.sms = int(kind.num_sms)

    def dispatch(self) -> None:
        to_rank, _, to_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._ids, self._spec.experts)
        self._came, self._wanted, _, _, self._handle, _ = self._buffer.dispatch(
            self._x,
            num_tokens_per_rank=to_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=self._ids,
            topk_weights=self._weights,
            config=self._configs[0],
        )

    def combine(self) -> None:
        self._y, _, _ = self._buffer.combine(self._came, self._handle, config=self._configs[1])

    def _rows_of(self, expert: int) -> torch.Tensor:
        rows: torch.Tensor = self._came[(self._wanted == expert).any(dim=1)]
        return rows


class Version2(_Buffered):
    """One buffer for all; expanded, so that rows lie expert by expert, and no wait on the host."""

    capturable = True
    left_out: ClassVar[Left] = {"dispatch": None, "combine": "weights", "exchange": "weights"}

    def _open(self, group: Any) -> None:
        spec = self._spec
        self._ids = self._ids.to(getattr(importlib.import_module("deep_ep"), "topk_idx_t", torch.int64))
        self._buffer = _kind("ElasticBuffer")(
            group, num_max_tokens_per_rank=spec.tokens, hidden=spec.hidden, num_topk=spec.topk
        )
        self.sms = int(self._buffer.get_theoretical_num_sms(spec.experts, spec.topk))

    def dispatch(self) -> None:
        self._came, _, _, self._handle, _ = self._buffer.dispatch(
            self._x,
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_experts=self._spec.experts,
            expert_alignment=self._spec.alignment,
            do_cpu_sync=False,
            do_expand=True,
        )

    def combine(self) -> None:
        self._y, _, _ = self._buffer.combine(self._came, self._handle)

    def _rows_of(self, expert: int) -> torch.Tensor:
        """`psum[e]` ends the rows of expert e, and the next begins at the next multiple of the alignment."""
        ends, step = self._handle.psum_num_recv_tokens_per_expert.tolist(), self._spec.alignment
        start = -(-ends[expert - 1] // step) * step if expert else 0
        rows: torch.Tensor = self._came[start : ends[expert]]
        return rows


class Hybrid(_Buffered):
    """With its own permutation, so that rows lie expert by expert, one behind the other. The host waits for counts."""

    left_out: ClassVar[Left] = {"dispatch": "alignment", "combine": "weights", "exchange": "alignment, weights"}

    def _open(self, group: Any) -> None:
        asked = self._inputs.routing
        if asked.masked > 0 or asked.ragged:
            raise ConfigError("its routing has ids of -1 or ranks of different sizes; it takes neither")
        self._buffer = _kind("HybridEPBuffer")(
            group,
            hidden_dim=self._spec.hidden,
            max_num_of_tokens_per_rank=self._spec.tokens,
            num_local_experts=len(self._experts),
        )

    def dispatch(self) -> None:
        self._came, _, _, self._counts, self._handle = self._buffer.dispatch_with_permute(
            hidden=self._x,
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_of_experts_per_rank=len(self._experts),
            num_of_experts=self._spec.experts,
        )

    def combine(self) -> None:
        self._y, _ = self._buffer.combine_with_unpermute(hidden=self._came, handle=self._handle)

    def _rows_of(self, expert: int) -> torch.Tensor:
        counts = [int(count) for count in self._counts]
        start = sum(counts[:expert])
        rows: torch.Tensor = self._came[start : start + counts[expert]]
        return rows


def _kind(name: str) -> Any:
    """A class of the package."""
    package = importlib.import_module("deep_ep")
    if hasattr(package, name):
        return getattr(package, name)
    raise ConfigError(f"the deep_ep that is installed has no {name}: it is another version")
