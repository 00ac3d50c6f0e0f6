"""The arithmetic of dispatch and combine in operations on tensors of fixed shapes: nothing here waits for a device.

Every rank tells all others its ids and weights, so each can work out alone what everybody receives and who refuses it.
Shapes: R ranks, T tokens a rank at most, T' of them given, K ids a token, L experts a rank, C rows at most; N = R*T
tokens of all ranks, one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.exchange.backend import Tokens
from raymoe.exchange.refusal import Cause, Refusal
from raymoe.exchange.spec import ExchangeSpec

_STATUS = 2  # int64 words of a refusal: cause and `other` in one, `number` in the next
_PIECE_BYTES = 128 << 20  # float32 sums that are held at a time


def told_length(spec: ExchangeSpec) -> int:
    """int32 words of what a rank tells: its refusal, T*K ids, T*K weights."""
    return 2 * _STATUS + 2 * spec.tokens * spec.topk


def tell(tokens: Tokens, spec: ExchangeSpec) -> torch.Tensor:
    """What this rank tells of its tokens. A refused step, and tokens that are not there, have no expert.

    >>> spec = ExchangeSpec(tokens=2, hidden=8, experts=4, topk=1)
    >>> tokens = Tokens(torch.zeros(1, 8), torch.tensor([[3]]), torch.ones(1, 1), num_tokens=None)
    >>> tell(tokens, spec)[4:6].tolist()  # behind the refusal: the id of one token, and of one that was not given
    [3, -1]
    """
    given, device = len(tokens.x), tokens.x.device
    told = torch.full((told_length(spec),), -1, dtype=torch.int32, device=device)
    status, ids, weights = torch.split(told, [2 * _STATUS, spec.tokens * spec.topk, spec.tokens * spec.topk])
    there = torch.ones(given, 1, dtype=torch.bool, device=device)
    if tokens.num_tokens is not None:
        there = torch.arange(given, device=device)[:, None] < tokens.num_tokens
    refusal = _own_refusal(tokens, there, spec.experts)
    status.copy_(refusal.view(torch.int32))
    kept = torch.where(there & (refusal[0] == 0), tokens.ids, -1)
    ids[: given * spec.topk].copy_(kept.flatten())
    weights[: given * spec.topk].copy_(tokens.weights.flatten().view(torch.int32))
    return told


def _own_refusal(tokens: Tokens, there: torch.Tensor, experts: int) -> torch.Tensor:
    given, topk = tokens.ids.shape
    ids = tokens.ids.flatten().long()
    refusal = torch.zeros(_STATUS, dtype=torch.int64, device=ids.device)
    if given:
        bad = ((ids < -1) | (ids >= experts)) & there.expand(given, topk).flatten()
        first = torch.where(bad, torch.arange(len(ids), device=ids.device), len(ids)).amin()
        at = first.clamp(max=len(ids) - 1)
        bad_id = ids.index_select(0, at[None])[0]  # ids[at] would ask the device where
        refusal = torch.where(first < len(ids), _words(Cause.ID, at // topk, bad_id), refusal)
    if tokens.num_tokens is not None:
        count = tokens.num_tokens[0].long()
        wrong = (count < 0) | (count > given)
        refusal = torch.where(wrong, _words(Cause.TOKENS, torch.full_like(count, given), count), refusal)
    return refusal


def _words(cause: Cause, other: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """A refusal as `Refusal.pack` has it."""
    return torch.stack([(other << 32) + int(cause), number])


def refusals_of(status: torch.Tensor) -> list[Refusal]:
    """Those of all ranks; `status` is in host memory.

    >>> refusals_of(torch.stack([torch.zeros(2, dtype=torch.int64), _words(Cause.ID, *torch.tensor([7, -2]))]))[1]
    Refusal(cause=<Cause.ID: 1>, other=7, number=-2)
    """
    return [Refusal.unpack(words.numpy().tobytes()) for words in status]


@dataclass(frozen=True)
class Heard:
    """What all ranks told."""

    ids: torch.Tensor  # int32[R, T, K], -1 for none
    weights: torch.Tensor  # float32[R, T, K]
    status: torch.Tensor  # int64[R, 2] the refusal of each rank, those of what it was to receive included

    @classmethod
    def of(cls, told: torch.Tensor, spec: ExchangeSpec) -> Heard:
        """Of int32[R, told_length]."""
        ranks, words = len(told), spec.tokens * spec.topk
        status, ids, weights = torch.split(told, [2 * _STATUS, words, words], dim=1)
        shape = (ranks, spec.tokens, spec.topk)
        ids, weights = ids.reshape(shape), weights.reshape(shape).view(torch.float32)
        own = status.contiguous().view(torch.int64)
        return cls(ids, weights, torch.where(own[:, :1] != 0, own, _over_capacity(ids, spec)))

    @property
    def any_refused(self) -> torch.Tensor:
        """bool[]"""
        return (self.status[:, 0] != 0).any()

    def going(self, rank: int, local: int) -> torch.Tensor:
        """bool[R, T]: whether a token of `rank` goes to each rank."""
        ids = self.ids[rank]
        homes = torch.where(ids >= 0, ids // local, -1)
        ranks = torch.arange(len(self.ids), device=ids.device)
        return (homes == ranks[:, None, None]).any(dim=2)


def _over_capacity(ids: torch.Tensor, spec: ExchangeSpec) -> torch.Tensor:
    """int64[R, 2]: the refusals of those ranks that would receive more rows than they have room for."""
    ranks = len(ids)
    expert = torch.where(ids >= 0, ids, spec.experts).flatten().long()
    counts = torch.zeros(spec.experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    needed = _aligned(counts[:-1].view(ranks, -1), spec.alignment).sum(dim=1)
    words = torch.stack([torch.full_like(needed, int(Cause.CAPACITY)), needed], dim=1)
    return torch.where((needed > spec.rows(ranks))[:, None], words, 0)


def _aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    return (counts + alignment - 1) // alignment * alignment


@dataclass(frozen=True)
class Places:
    """What one rank receives, expert by expert, inside an expert in the order (source, token, k).

    >>> spec = ExchangeSpec(tokens=2, hidden=8, experts=2, topk=2, alignment=4, capacity=8)
    >>> ids = torch.tensor([[[1, 0], [-1, 1]]], dtype=torch.int32)
    >>> heard = Heard(ids, torch.tensor([[[0.25, 0.75], [0.0, 1.0]]]), torch.zeros(1, 2, dtype=torch.int64))
    >>> places = Places.of(heard, rank=0, spec=spec)
    >>> places.counts.tolist(), places.offsets.tolist()
    ([1, 2], [0, 4, 8])
    >>> places.token.tolist()  # 2 where there is none
    [0, 2, 2, 2, 0, 1, 2, 2]
    >>> places.of_pair.tolist()  # 8 for a pair that has no place
    [[4, 0], [8, 5]]
    """

    counts: torch.Tensor  # int32[L]
    offsets: torch.Tensor  # int32[L + 1]
    token: torch.Tensor  # int64[C] which of the N tokens stands there; N in gaps and behind the last row
    weights: torch.Tensor  # float32[C]
    of_pair: torch.Tensor  # int64[N, K] where each (token, k) stands; C for one that does not

    @classmethod
    def of(cls, heard: Heard, rank: int, spec: ExchangeSpec) -> Places:
        ranks, device = len(heard.ids), heard.ids.device
        local, capacity, topk = spec.local_experts(ranks), spec.rows(ranks), spec.topk
        expert = heard.ids.flatten() - rank * local
        fits = (heard.status[rank, 0] & 0xFFFFFFFF) != int(Cause.CAPACITY)  # of a step that does not, nothing is placed
        expert = torch.where((expert >= 0) & (expert < local) & fits, expert, local)
        expert, pair = torch.sort(expert, stable=True)
        starts = torch.searchsorted(expert, torch.arange(local + 1, dtype=expert.dtype, device=device))
        counts = starts.diff()
        offsets = torch.zeros(local + 1, dtype=torch.int64, device=device)
        torch.cumsum(_aligned(counts, spec.alignment), 0, out=offsets[1:])
        place = torch.arange(len(expert), device=device) + (offsets - starts)[expert.long()]
        place = torch.where(expert < local, place, capacity)
        # One place more: everything that has none goes there.
        token = torch.full((capacity + 1,), ranks * spec.tokens, device=device).scatter_(0, place, pair // topk)
        weights = torch.zeros(capacity + 1, device=device).scatter_(0, place, heard.weights.flatten()[pair])
        of_pair = torch.empty_like(place).scatter_(0, pair, place).view(-1, topk)
        return cls(counts.int(), offsets.int(), token[:-1], weights[:-1], of_pair)


def sum_rows(rows: torch.Tensor, at: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """out[i] = the sum over j of rows[at[i, j]] * weights[i, j], in float32, in the order of j, rounded once.

    An `at` of len(rows) or more is no row: it adds nothing, whatever any row holds.

    >>> out = torch.empty(1, 2)
    >>> sum_rows(torch.tensor([[1.0, torch.nan], [2.0, 4.0]]), torch.tensor([[1, 2]]), torch.tensor([[0.5, 9.0]]), out)
    >>> out.tolist()
    [[1.0, 2.0]]
    """
    if not len(rows) or not at.shape[1]:
        out.zero_()
        return
    piece = max(1, _PIECE_BYTES // (4 * rows.shape[1]))
    for begin in range(0, len(out), piece):
        mine = at[begin : begin + piece]
        total = torch.zeros(len(mine), rows.shape[1], device=rows.device)
        for j in range(at.shape[1]):
            row = rows.index_select(0, mine[:, j].clamp(max=len(rows) - 1)).float()
            if weights is not None:
                row *= weights[begin : begin + piece, j, None]
            total += torch.where((mine[:, j] < len(rows))[:, None], row, 0.0)
        out[begin : begin + piece].copy_(total)


def sum_blocks(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = the sum over r of blocks[r, t], in float32, in the order of r, rounded once."""
    total = torch.zeros(out.shape, device=out.device)
    for block in blocks:
        total += block[: len(out)]
    out.copy_(total)
