"""The ids and weights of a dispatch between domains of GPU ranks, while they cross the rail.

A rank publishes to all ranks of its rail the ids and weights of its tokens, and the scales of rows that cross as fp8.
From those of the whole rail it computes the ids and weights of the dispatch inside its domain. After that dispatch it
computes the offsets and counts of its own experts. Each of these is one small kernel.

All ranks must run the backward passes of one dispatch. So each publishes its pass after the ids and weights: the
dispatch to which it belongs, or 0 outside of a backward pass. A dispatch of known routing publishes its pass alone.
Each rank compares the passes of its rail. Where they differ, it also publishes another pass inside its domain, so the
whole domain refuses. So all ranks of the world refuse if two of them differ: else all passes of each domain and of each
rail are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.cuda.launch import Shape
from raymoe.cuda.launcher import Launcher
from raymoe.errors import DataRefused
from raymoe.exchange.backend import Tokens
from raymoe.exchange.domains.domain_kernels import (
    ENTER_DOMAIN,
    JOIN_EXPERTS,
    PUBLISH_TOKENS,
    EnterDomainParams,
    JoinExpertsParams,
    PublishTokensParams,
)
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.nccl.rounds import COMPARE_PASSES, PUBLISH_PASS, ComparePassesParams, PublishPassParams
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.net.nccl_rail import NcclRail

_WORDS_AN_ENTRY = 3  # int32 words of an entry (token, k) on the rail: the id has two, the weight one


PASS_WORDS = Refusal.NBYTES // 4
"""int32 words of a pass, at the end of what a rank publishes."""
_MARK_WORDS = _SPARE_WORDS = 2


@dataclass(frozen=True)
class RailTokens:
    """The tokens of a whole rail, for the dispatch inside."""

    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    number: torch.Tensor
    """int32[2], the halves of a word: the dispatch, counted from 1 on the device, because replays count too."""


class RailEntries:
    """The memory and the kernels of a dispatch's ids and weights."""

    def __init__(
        self, shape: DomainShape, spec: ExchangeSpec, rail: NcclRail, launcher: Launcher, device: torch.device
    ) -> None:
        N, T, K = shape.domains, spec.tokens, spec.topk
        self._shape, self._spec, self._rail, self._device = shape, spec, rail, device
        # For each domain T*K ids of two words, then T*K weights of one, then the scales of T rows of fp8, then words
        # that make the sum a multiple of 4. Last comes the pass of a backward pass, a status of four words.
        entries, scales = T * K, T * spec.scales if spec.dispatch_wire == FP8 else 0
        words = _WORDS_AN_ENTRY * entries + scales
        self._published = torch.zeros(N, -(-words // 4) * 4 + PASS_WORDS, dtype=torch.int32, device=device)
        self.ids = self._published[:, : 2 * entries].view(torch.int64).view(N, T, K)
        self._scales = (
            self._published[:, 3 * entries : words].view(torch.float32).view(N, T, spec.scales if scales else 0)
        )
        self._dispatches = torch.zeros(1, dtype=torch.int64, device=device)
        own = self._published[shape.index]
        threads = launcher.threads

        def blocks(count: int) -> int:
            return max(1, min(launcher.sms, -(-count // threads)))

        self._publish = launcher.ready(
            PUBLISH_TOKENS,
            Shape(blocks(entries), threads),
            PublishTokensParams(tokens=T, topk=K),
            ids=own[: 2 * entries],
            weights=own[2 * entries : 3 * entries],
        )
        experts = shape.per_domain * shape.local
        params = EnterDomainParams(
            published_bytes=own.nbytes,
            domains=N,
            tokens=T,
            chunk=shape.chunk or T,
            topk=K,
            first=shape.index * experts,
            here=experts,
            experts=shape.experts,
        )
        self._enter = launcher.ready(
            ENTER_DOMAIN,
            Shape(blocks(N * entries), threads),
            params,
            published=self._published,
            dispatches=self._dispatches,
        )
        self.passes = RailPasses(shape, self._published, self._dispatches, rail, launcher)
        self._join = launcher.ready(JOIN_EXPERTS, Shape(1, threads), JoinExpertsParams(local=shape.local, domains=N))

    def cross(self, op: str, stream: int, tokens: Tokens, scales: torch.Tensor | None) -> None:
        """Gather the ids and weights of all ranks of the rail, and the `scales` of their fp8 rows."""
        ids, weights, count = tokens.topk_idx, tokens.topk_weights, tokens.num_tokens
        wide = int(ids.dtype == torch.int64)
        self._publish(stream, topk_idx=ids, topk_weights=weights, num_tokens=count, x_rows=len(ids), wide_topk_idx=wide)
        if scales is not None:
            self._scales[self._shape.index, : len(scales)].copy_(scales)
        self._rail.gather(op, self._published.flatten(), self._published[self._shape.index])()

    def arriving(self, stream: int) -> RailTokens:
        """Return the ids, weights and scales of the rail for the dispatch inside. Counts the dispatch."""
        tokens, topk = self._shape.domains * self._spec.tokens, self._spec.topk
        ids = torch.empty(tokens, topk, dtype=torch.int64, device=self._device)
        weights = torch.empty(tokens, topk, dtype=torch.float32, device=self._device)
        number = torch.empty(2, dtype=torch.int32, device=self._device)
        self._enter(stream, ids=ids, weights=weights, number=number)
        fp8 = self._spec.dispatch_wire == FP8
        scales = self._shape.inside(self._scales).contiguous() if fp8 else None
        return RailTokens(ids, weights, scales, number)

    def forget_dispatches(self) -> None:
        """Count from 1 again, as the exchange inside does."""
        self._dispatches.zero_()

    def joined(
        self, stream: int, offsets_inside: torch.Tensor, counts_inside: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the offsets and counts of this rank's experts. Each is N experts inside."""
        local = self._shape.local
        offsets, counts = (torch.empty(size, dtype=torch.int32, device=self._device) for size in (local + 1, local))
        self._join(
            stream,
            offsets_inside=offsets_inside,
            counts_inside=counts_inside,
            expert_offsets=offsets,
            expert_counts=counts,
        )
        return offsets, counts


class RailPasses:
    """The passes of this rank's rail, and the memory of dispatches of known routing."""

    def __init__(
        self,
        shape: DomainShape,
        published: torch.Tensor,
        dispatches: torch.Tensor,
        rail: NcclRail,
        launcher: Launcher,
    ) -> None:
        """`published`, int32[N, words], is what the domains publish in a dispatch; `dispatches` counts them."""
        self._rail, self._me, self._published, self._dispatches = rail, shape.index, published, dispatches
        self._known = torch.full_like(published, -1)  # no ids
        self._published_with_ids = False
        self._uncounted = torch.zeros_like(dispatches)
        self.mark = torch.zeros(_MARK_WORDS, dtype=torch.int64, device=published.device)
        """The first is not 0 if the ranks of the rail run the backward passes of different dispatches."""
        self._refused = torch.zeros(_SPARE_WORDS + 2 * shape.domains, dtype=torch.int64, device=published.device)
        self._publish = launcher.ready(PUBLISH_PASS, Shape(1, 32), PublishPassParams())
        one = Shape(1, launcher.threads)
        blocks = Shape(max(1, min(launcher.sms, launcher.resident(COMPARE_PASSES, one))), launcher.threads)
        params = ComparePassesParams(stride=published[0].nbytes, ranks=shape.domains)
        self._compare = launcher.ready(COMPARE_PASSES, blocks, params, refused=self._refused)

    def gather_alone(self, stream: int, number: torch.Tensor, site: int) -> None:
        """Gather the passes of a dispatch of known routing, which is the backward pass of dispatch `number`."""
        self._write(stream, self._known, number, site, self._dispatches)
        self._rail.gather("dispatch", self._known.flatten(), self._known[self._me])()
        self._compare_into_mark(stream, self._known)

    def publish_with_ids(self, stream: int, number: torch.Tensor, site: int) -> None:
        """Publish with the next ids and weights that this is the backward pass of dispatch `number`."""
        self._write(stream, self._published, number, site, self._uncounted)
        self._published_with_ids = True

    def read_with_ids(self, stream: int) -> None:
        """Read the passes that came with ids and weights."""
        self._compare_into_mark(stream, self._published)

    def refuse(self, stream: int, rows: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """Return the rows of the dispatch: NaN if the passes of the rail differ. The next dispatch publishes no pass.

        Unless they are the `whole` memory, rows of other dispatches lie beside them, so they are copied.
        """
        if whole:
            self._compare(stream, passes=self._passes, rows=rows, bytes=rows.nbytes)
        else:
            rows = torch.where(self.mark[0] != 0, torch.nan, rows)
        if self._published_with_ids:
            self._published[self._me, -PASS_WORDS:].zero_()
            self._published_with_ids = False
        return rows

    def check(self, inside: torch.Tensor) -> None:
        """Raise once after a refused dispatch; `inside` is the record of the dispatches inside the domain.

        A rank knows the passes of its rail and its domain only, so the error names no rank: it is the same everywhere.
        """
        refused = [int(words[0]) for words in (self._refused, inside)]
        self._refused[:1].zero_()
        inside[:1].zero_()
        if any(refused):
            raise DataRefused(
                "ranks of this world run the backward passes of different dispatches, or only some of them run one; "
                "all ranks run backward passes in one order"
            )

    def _write(
        self, stream: int, published: torch.Tensor, number: torch.Tensor, site: int, dispatches: torch.Tensor
    ) -> None:
        self._publish(stream, number=number, site=site, into=published[self._me, -PASS_WORDS:], dispatches=dispatches)

    def _compare_into_mark(self, stream: int, published: torch.Tensor) -> None:
        self._passes = published.flatten()[published.shape[1] - PASS_WORDS :]
        self.mark.zero_()
        self._compare(stream, passes=self._passes, rows=self.mark, bytes=self.mark.nbytes)
