"""DeepEP V2: its elastic buffer inside an NVLink domain, without a wait of the host.

With `layout: expert` it runs in its expanding mode, so rows come expert by expert, each expert's at a multiple of the
alignment. With `layout: rank` a token comes once for a rank, with the ids of its experts there.

A combine adds rows. The weights are applied where rows are computed, off the clock. With `layout: rank` that holds for
the sum of a rank's rows of a token too. Rows that cross as fp8 are quantised before the clock starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8, quantise
from raymoe.memory.world import World
from raymoe.workload.compare.nvshmem import join_default_group
from raymoe.workload.exchange.received import dequantised
from raymoe.workload.inputs import Batch, Inputs
from raymoe.workload.measure import Line
from raymoe.workload.oracle import AffineExperts, wrong_result


@dataclass(frozen=True)
class ReceivedRows:
    """The result of a dispatch: rows, their scales if they are 8-bit floats, their weights, and its handle."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor
    """float32[slots] by expert; float32[rows, K] by rank."""
    handle: Any

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """Return some rows, multiplied by their scales."""
        return self.x[places] if self.scales is None else dequantised(self.x[places], self.scales[places])


@dataclass(frozen=True)
class SourceRows:
    """The rows that came from one rank."""

    rank: int
    places: torch.Tensor
    """int64[n]: the place of each row in the list of what came, a token once."""
    tokens: torch.Tensor
    """int64[n]: the token of each row, as the source numbers it."""


class DeepEp:
    """Its dispatch and combine, with the tokens of this rank. All ranks make one."""

    def __init__(self, world: World, spec: ExchangeSpec, inputs: Inputs, sms: int) -> None:
        """`sms`: SMs of a dispatch and of a combine; 0: its own choice."""
        self._world, self._spec, self._inputs = world, spec, inputs
        self._expands, self._fp8 = spec.layout == "expert", spec.dispatch_wire == FP8
        self.left_out: dict[str, str | None] = self._named_work()
        deep_ep: Any = importlib.import_module("deep_ep")
        join_default_group(world, connect=True)  # it ends with a segmentation fault if the group has not connected
        self._buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=spec.tokens,
            hidden=spec.hidden,
            num_topk=spec.topk,
            use_fp8_dispatch=self._fp8,
            allow_hybrid_mode=False,  # that mode is for several hosts
            explicitly_destroy=True,
        )
        self._sms = sms or self._buffer.get_theoretical_num_sms(spec.experts, spec.topk)
        first = inputs.at(0)
        self._batch = Batch(first.x.clone(), first.ids.to(deep_ep.topk_idx_t), first.weights.clone())
        self._quantised = quantise(first.x) if self._fp8 else None
        self._experts = AffineExperts(spec.hidden, inputs.dtype, inputs.routing.seed)
        self._index = 0
        self._received = self._send()
        # A combine sends these on steps that are not verified.
        self._rows = torch.zeros(len(self._received.x), spec.hidden, dtype=inputs.dtype, device=world.device)
        self._y = self._return(self._received)

    @property
    def keys(self) -> Line:
        return {"sms": self._sms}

    def take(self, index: int, *, fresh: bool) -> None:
        batch, self._index = self._inputs.at(index, fresh=fresh), index
        self._batch.copy_(batch)
        if self._quantised is not None:
            for memory, values in zip(self._quantised, quantise(batch.x), strict=True):
                memory.copy_(values)
        self._rows.uniform_(-1, 1)  # a verified step leaves NaN
        if fresh:
            for poisoned in (self._received.x, self._received.scales, self._received.weights, self._y):
                if poisoned is not None:
                    poisoned.view(torch.uint8).fill_(0xFF)  # NaN in every dtype

    def dispatch(self) -> None:
        self._received = self._send()

    def combine(self) -> None:
        self._y = self._return(self._received)

    def exchange(self) -> None:
        self._return(self._send())

    def wrong_dispatch(self) -> str | None:
        """Return what is wrong, or None; then the experts have computed the rows of the combine."""
        self._rows.fill_(torch.nan)
        count = int(self._received.handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        sources = self._received.handle.recv_src_metadata[:count, 0].long()
        for source in range(self._world.size):
            came = (sources // self._spec.tokens == source).nonzero().flatten()
            rows = SourceRows(source, came, sources[came] % self._spec.tokens)
            ids = self._ids_of(source)
            wanted = (ids >= 0).any(dim=1).nonzero().flatten()
            if not torch.equal(rows.tokens.sort().values, wanted):
                return f"{len(came)} tokens from rank {source}, {len(wanted)} were sent"
            wrong = self._wrong_rows(rows, ids)
            if wrong is not None:
                return wrong
        return None

    def wrong_combine(self) -> str | None:
        batch = Batch(self._inputs.at(self._index, fresh=True).x, self._batch.ids, self._batch.weights)
        return wrong_result(self._y, batch, self._experts, self._spec)

    def _send(self) -> ReceivedRows:
        rows, _, weights, handle, _ = self._buffer.dispatch(
            self._batch.x if self._quantised is None else self._quantised,
            topk_idx=self._batch.ids,
            topk_weights=self._batch.weights,
            num_experts=self._spec.experts,
            expert_alignment=self._spec.alignment,
            num_sms=self._sms,
            do_handle_copy=False,
            do_cpu_sync=False,
            do_expand=self._expands,
        )
        x, scales = rows if self._fp8 else (rows, None)
        return ReceivedRows(x, scales, weights, handle)

    def _return(self, received: ReceivedRows) -> torch.Tensor:
        y: torch.Tensor
        y, _, _ = self._buffer.combine(self._rows, received.handle, num_sms=self._sms)
        return y

    def _wrong_rows(self, rows: SourceRows, ids: torch.Tensor) -> str | None:
        """Compare the rows of one source with its tokens, and compute what this rank's combine sends for them."""
        x = self._inputs.fresh_of(rows.rank, self._index)[rows.tokens]
        values = dequantised(*quantise(x)) if self._fp8 else x
        weights = self._weights_of(rows.rank)[rows.tokens]
        total = torch.zeros(len(x), self._spec.hidden, dtype=torch.float64, device=x.device)
        for k, places in self._places(rows):
            experts = ids[rows.tokens, k]
            here = experts >= 0
            if not torch.equal(here, places >= 0):
                return f"rows from rank {rows.rank} are not those of its experts {k}"
            if not torch.equal(self._received.rows(places[here]), values[here]):
                return f"rows from rank {rows.rank} are not those that were sent"
            if wrong := self._wrong_places(places[here], experts[here]):
                return wrong
            for expert in sorted(set(experts[here].tolist())):
                own = experts == expert
                row = self._experts(expert, values[own]) * weights[own, k, None]
                if self._expands:
                    self._rows[places[own]] = row.to(self._rows.dtype)
                total[own] += row
        if not self._expands:
            self._rows[rows.places] = total.to(self._rows.dtype)
        return None

    def _places(self, rows: SourceRows) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each k, the row of each token in `x`; -1: its k-th expert is on another rank."""
        slots = self._received.handle.recv_src_metadata[rows.places, 2:].long()
        ids = self._ids_of(rows.rank)[rows.tokens]
        for k in range(self._spec.topk):
            yield k, slots[:, k] if self._expands else torch.where(ids[:, k] >= 0, rows.places, -1)

    def _wrong_places(self, places: torch.Tensor, experts: torch.Tensor) -> str | None:
        """Return what is wrong if some row lies outside the part of `x` that belongs to its expert."""
        if not self._expands:
            return None
        ends = self._received.handle.psum_num_recv_tokens_per_expert.long()
        begins = ends - self._received.handle.num_unaligned_recv_tokens_per_expert.long()
        local = experts - self._world.rank * self._spec.local_experts(self._world.size)
        inside = (begins[local] <= places) & (places < ends[local])
        return None if bool(inside.all()) else "a row lies outside the part of its expert"

    def _ids_of(self, rank: int) -> torch.Tensor:
        """Return the ids of a rank's tokens; -1 for experts of other ranks than this one."""
        draws = self._inputs.draws
        ids = self._inputs.routing.draw(rank, self._index % len(draws)).ids.to(self._world.device)
        local = self._spec.local_experts(self._world.size)
        return torch.where(ids // local == self._world.rank, ids, -1)

    def _weights_of(self, rank: int) -> torch.Tensor:
        draws = self._inputs.draws
        return self._inputs.routing.draw(rank, self._index % len(draws)).weights.to(self._world.device)

    def _named_work(self) -> dict[str, str | None]:
        dispatch = ["quantisation"] if self._fp8 else []
        combine = ["weights"] if self._expands else ["weights", "the sum of a rank's rows"]
        if not self._expands:
            dispatch.append("rows by expert")
        named = {"dispatch": dispatch, "combine": combine, "exchange": [*dispatch, *combine]}
        return {op: ", ".join(work) or None for op, work in named.items()}
