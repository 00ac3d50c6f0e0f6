"""Rows that a layer keeps once for each token, and expands into the experts' rows again in the backward pass.

A token has a row for each of its experts here. The gradient of the first product's weights needs these rows.
`RowSources.keep` copies one of them for each token of another rank; the rows of this rank's own tokens are the input of
the dispatch. `rows_again` writes the experts' rows, which are copies, so all gradients have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.params import U32, Address, Params
from raymoe.errors import ConfigError
from raymoe.exchange.backend import EntryPlaces
from raymoe.exchange.exchange import Exchange
from raymoe.moe.expert_kernels import BLOCKS_OF_SM, WARPS, ExpertKernel, ExpertLayout, Places
from raymoe.moe.expert_rows import Groups
from raymoe.rows import row_launch
from raymoe.rows.operator_definitions import define
from raymoe.rows.pipe_tensors import ALIGNMENT, as_dense
from raymoe.rows.row_launch import KernelCall


@dataclass(frozen=True)
class KeptRows:
    """The rows of tokens with experts on this rank, and what says where they lie among the experts' rows."""

    own: Tensor  # [T', H]: the input of the dispatch
    others: Tensor  # [(R - 1) * T, H]: a row for each token of another rank, unspecified without an expert here
    metadata: Tensor
    topk_idx: Tensor
    numbers: list[int]
    """Those of the exchange."""


@dataclass(frozen=True)
class RowSources:
    """A dispatch, for experts that keep the rows of its tokens."""

    exchange: Exchange
    x: Tensor
    metadata: Tensor
    topk_idx: Tensor

    def keep(self, rows: Tensor, groups: Groups) -> KeptRows:
        """Copy a row of each token of another rank. `rows` has the rows of the experts."""
        numbers, spec = self.exchange.numbers, self.exchange.spec
        dispatched = self.metadata, self.topk_idx
        count = (self.exchange.world.size - 1) * spec.tokens
        places = groups.offsets, groups.counts
        if count:
            others = _ops.keep_rows(numbers, rows.detach(), *dispatched, *places, count)
        else:
            others = rows.new_empty(0, rows.shape[1])
        return KeptRows(self.x.detach(), others, *dispatched, numbers)


def saves_memory(exchange: Exchange) -> bool:
    """Whether the rows of other ranks' tokens take at most half of the memory of the experts' rows.

    The exchange must know the places of entries. All ranks get the same answer.
    """
    spec, ranks = exchange.spec, exchange.world.size
    return exchange.entry_places is not None and 2 * (ranks - 1) * spec.tokens <= spec.rows(ranks)


def rows_again(dy: Tensor, kept: KeptRows, groups: Groups) -> Tensor:
    """Write the experts' rows that a dispatch brought, as many as `dy` has, zero in gaps.

    Rows from the last offset on are unspecified.
    """
    tensors = kept.own, kept.others, kept.metadata, kept.topk_idx
    rows: Tensor = _ops.rows_again(kept.numbers, dy, *tensors, groups.offsets, groups.counts)
    return rows


# The kernel.


@dataclass(frozen=True)
class KeptRowsParams(Params):
    """The parameters of kernels/moe/kept_rows.cu."""

    entries: Address
    tokens: Address
    own: Address
    others: Address
    rows: Address
    layout: ExpertLayout
    ranks: U32
    rank: U32
    own_tokens: U32
    slot_tokens: U32
    topk: U32
    width: U32
    gap_rows: U32
    unused: U32 = 0


@dataclass(frozen=True)
class KeptRowsCopy(ExpertKernel):
    """Copies rows[C, H] of experts from `own` and `others`, with `again`; else `others` from rows."""

    entries: EntryPlaces
    rank: int
    own: Tensor
    others: Tensor
    rows: Tensor
    places: Places
    gap_rows: int
    again: bool

    def kernel_call(self) -> KernelCall:
        entries, tokens = self.entries.places, self.entries.tokens
        ranks, slot_tokens, topk = entries.shape
        if entries.stride() != (2 * slot_tokens * topk, 2 * topk, 2) or not tokens.is_contiguous():
            raise ConfigError(f"places with strides {entries.stride()}; each lies beside its weight, densely")
        capacity, columns = self.rows.shape
        for name, rows in (("own", self.own), ("others", self.others), ("rows", self.rows)):
            fits = rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0 and rows.dtype == self.rows.dtype
            if rows.shape[1:] != (columns,) or not fits:
                raise ConfigError(f"{name} is {rows.dtype} {tuple(rows.shape)}; dense rows of {columns} are needed")
        nbytes = columns * self.rows.element_size()
        if nbytes % ALIGNMENT or len(self.others) != (ranks - 1) * slot_tokens:
            raise ConfigError(f"{len(self.others)} rows of {nbytes} bytes for {ranks - 1} other ranks' {slot_tokens}")
        layout = ExpertLayout.of(self.places, capacity)
        params = KeptRowsParams(
            entries=entries.data_ptr(),
            tokens=tokens.data_ptr(),
            own=self.own.data_ptr(),
            others=self.others.data_ptr(),
            rows=self.rows.data_ptr(),
            layout=layout,
            ranks=ranks,
            rank=self.rank,
            own_tokens=len(self.own),
            slot_tokens=slot_tokens,
            topk=topk,
            width=nbytes // ALIGNMENT,
            gap_rows=self.gap_rows,
        )
        defines = (("AGAIN_ROWS", "1"),) if self.again else ()
        source = KernelSource("moe/kept_rows", (KeptRowsParams, ExpertLayout), defines)
        warps = ranks * slot_tokens + layout.experts * self.gap_rows if self.again else len(self.others)
        return KernelCall(source, 32 * WARPS, 0, params, warps, WARPS, BLOCKS_OF_SM)


# The operators.

_DISPATCHED = "Tensor metadata, Tensor topk_idx"
_GROUPS = "Tensor offsets, Tensor counts"
_SCHEMAS = {
    "keep_rows": f"(SymInt[] exchange, Tensor rows, {_DISPATCHED}, {_GROUPS}, SymInt count) -> Tensor",
    # With dy as an argument no compiler computes it in the forward pass, to keep it.
    "rows_again": f"(SymInt[] exchange, Tensor dy, Tensor own, Tensor others, {_DISPATCHED}, {_GROUPS}) -> Tensor",
}
define(_SCHEMAS)
_ops: Any = torch.ops.raymoe
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class _Places:
    """A dispatch as operators take it."""

    exchange: Exchange
    entries: EntryPlaces
    groups: Groups

    @classmethod
    def of(cls, numbers: list[int], metadata: Tensor, topk_idx: Tensor, offsets: Tensor, counts: Tensor) -> _Places:
        exchange = Exchange.of_handle(numbers[0])
        assert exchange.entry_places is not None, exchange.backend
        return cls(exchange, exchange.entry_places(metadata, topk_idx), Groups(offsets, counts))

    def copy(self, own: Tensor, others: Tensor, rows: Tensor, *, again: bool) -> None:
        """Launch the kernel."""
        places, rank = Places(self.groups.offsets, self.groups.counts), self.exchange.world.rank
        gap_rows = self.exchange.spec.alignment
        KeptRowsCopy(self.entries, rank, own, others, rows, places, gap_rows, again).launch()

    def by_token(self) -> tuple[Tensor, Tensor]:
        """Return the places of this rank's tokens, int64[T, K], and of the other ranks', [(R - 1) * T, K]; -1: none."""
        places, rank = self.entries.of_sent(int(self.groups.offsets[-1])), self.exchange.world.rank
        return places[rank], torch.cat((places[:rank], places[rank + 1 :])).flatten(0, 1)


@torch.library.impl("raymoe::keep_rows", _DEVICES)
def _keep_rows(numbers: list[int], rows: Tensor, *dispatched: Any) -> Tensor:
    *tensors, count = dispatched
    places = _Places.of(numbers, *tensors)
    if row_launch.takes(rows):
        others = rows.new_empty(count, rows.shape[1])
        places.copy(others[:0], others, as_dense(rows), again=False)
        return others
    first, others = places.by_token()[1].amax(dim=1), rows.new_zeros(count, rows.shape[1])
    there = first >= 0
    others[there] = rows[first[there]]
    return others


@torch.library.impl("raymoe::rows_again", _DEVICES)
def _rows_again(numbers: list[int], dy: Tensor, own: Tensor, others: Tensor, *dispatched: Any) -> Tensor:
    places = _Places.of(numbers, *dispatched)
    if row_launch.takes(own):
        rows = own.new_empty(len(dy), own.shape[1])
        places.copy(as_dense(own), others, rows, again=True)
        return rows
    rows, (of_own, of_others) = own.new_zeros(len(dy), own.shape[1]), places.by_token()
    for source, into in ((own, of_own), (others, of_others)):
        token, k = torch.nonzero(into >= 0, as_tuple=True)
        rows[into[token, k]] = source[token]
    return rows


def _fake_keep_rows(_numbers: list[int], rows: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(others[-1], rows.shape[1])


def _fake_rows_again(_numbers: list[int], dy: Tensor, own: Tensor, *_: object) -> Tensor:
    return own.new_empty(dy.shape[0], own.shape[1])


torch.library.register_fake("raymoe::keep_rows", _fake_keep_rows)
torch.library.register_fake("raymoe::rows_again", _fake_rows_again)
