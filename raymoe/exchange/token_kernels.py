"""The kernels of layout `token`: what both parts of a dispatch get, and what came with the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.cuda.jit import KernelSource
from raymoe.cuda.launch import Launch, Shape
from raymoe.cuda.launcher import Launcher
from raymoe.cuda.params import U32, Address, Params


@dataclass(frozen=True)
class PackChoicesParams(Params):
    """Twin of the struct in kernels/token_rows/pack_choices.cu, which describes the fields."""

    topk_idx: Address = 0
    topk_weights: Address = 0
    rows_idx: Address = 0
    homes: Address = 0
    choices: Address = 0
    wide_topk_idx: U32 = 0
    entries: U32 = 0
    topk: U32 = 0
    width: U32 = 0
    experts: U32 = 0
    local: U32 = 0
    rank: U32 = 0
    unused: U32 = 0


@dataclass(frozen=True)
class TakeChoicesParams(Params):
    """Twin of the struct in kernels/token_rows/take_choices.cu, which describes the fields."""

    brought: Address = 0
    expert_offsets: Address = 0
    topk_idx: Address = 0
    weights: Address = 0
    sources: Address = 0
    counts: Address = 0
    entries: U32 = 0
    topk: U32 = 0
    width: U32 = 0
    first: U32 = 0
    local: U32 = 0
    unused: U32 = 0


PACK_CHOICES = KernelSource("token_rows/pack_choices", (PackChoicesParams,))
TAKE_CHOICES = KernelSource("token_rows/take_choices", (TakeChoicesParams,))


@dataclass(frozen=True)
class Sizes:
    """Of an exchange with layout `token`."""

    tokens: int
    topk: int
    experts: int
    local: int
    """Experts of a rank."""
    capacity: int
    """Rows for which this rank has memory."""
    width: int
    """Numbers of a row of choices."""
    rank: int


class TokenKernels:
    """Both launches of one exchange."""

    def __init__(self, launcher: Launcher, sizes: Sizes) -> None:
        self._launcher, self._sizes = launcher, sizes
        sent, taken = sizes.tokens * sizes.topk, sizes.capacity * sizes.topk
        common = {"topk": sizes.topk, "width": sizes.width, "local": sizes.local}
        self._pack = self._launch(
            PACK_CHOICES, sent, PackChoicesParams(experts=sizes.experts, rank=sizes.rank, **common)
        )
        first = sizes.rank * sizes.local
        self._take = self._launch(TAKE_CHOICES, taken, TakeChoicesParams(entries=taken, first=first, **common))

    def _launch(self, source: KernelSource, entries: int, params: Params) -> Launch:
        shape = Shape(1, self._launcher.threads)
        blocks = min(-(-entries // self._launcher.threads), self._launcher.resident(source, shape))
        return self._launcher.ready(source, Shape(blocks, self._launcher.threads), params)

    def pack(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the ids of the rows' part, the homes of all entries, and the rows of the choices' part."""
        rows_idx, homes = torch.empty_like(topk_idx), torch.empty_like(topk_idx)
        choices = torch.empty(len(topk_idx), self._sizes.width, dtype=torch.float32, device=topk_idx.device)
        with self._launcher.ordered("dispatch") as stream:
            self._pack(
                stream,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                rows_idx=rows_idx,
                homes=homes,
                choices=choices,
                wide_topk_idx=int(topk_idx.dtype == torch.int64),
                entries=topk_idx.numel(),
            )
        return rows_idx, homes, choices

    def take(self, brought: torch.Tensor, expert_offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `topk_idx`, `weights` and `sources` of the rows, and the entries of each expert."""
        size, device = (self._sizes.capacity, self._sizes.topk), brought.device
        topk_idx, weights = (torch.empty(size, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
        sources = torch.empty(size[0], 2, dtype=torch.int32, device=device)
        counts = torch.zeros(self._sizes.local, dtype=torch.int32, device=device)
        with self._launcher.ordered("dispatch") as stream:
            self._take(
                stream,
                brought=brought,
                expert_offsets=expert_offsets,
                topk_idx=topk_idx,
                weights=weights,
                sources=sources,
                counts=counts,
            )
        return topk_idx, weights, sources, counts
