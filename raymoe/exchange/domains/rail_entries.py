"""The ids and weights of a dispatch between domains of GPU ranks, while they cross the rail.

A rank publishes to all ranks of its rail the ids and weights of its tokens, and the scales of rows that cross as fp8.
From those of the whole rail it computes the ids and weights of the dispatch inside its domain. After that dispatch it
computes the offsets and counts of its own experts. Each of these is one small kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymoe.cuda.launch import Shape
from raymoe.cuda.launcher import Launcher
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
from raymoe.exchange.domains.rail_passes import PASS_WORDS, RailPasses
from raymoe.exchange.spec import ExchangeSpec
from raymoe.fp8 import FP8
from raymoe.net.rail import DeviceRail

_WORDS_AN_ENTRY = 3  # int32 words of an entry (token, k) on the rail: the id has two, the weight one


@dataclass(frozen=True)
class Arriving:
    """The tokens of a whole rail, for the dispatch inside."""

    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    number: torch.Tensor
    """int32[2], the halves of a word: the dispatch, counted from 1 on the device, because replays count too."""


class RailEntries:
    """The memory and the kernels of a dispatch's ids and weights."""

    def __init__(
        self, shape: DomainShape, spec: ExchangeSpec, rail: DeviceRail, launcher: Launcher, device: torch.device
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
        """Send this rank's ids and weights to all ranks of the rail, and get theirs. `scales` are those of fp8 rows."""
        ids, weights, count = tokens.topk_idx, tokens.topk_weights, tokens.num_tokens
        wide = int(ids.dtype == torch.int64)
        self._publish(stream, topk_idx=ids, topk_weights=weights, num_tokens=count, given=len(ids), wide_topk_idx=wide)
        if scales is not None:
            self._scales[self._shape.index, : len(scales)].copy_(scales)
        self._rail.gather(op, self._published.flatten(), self._published[self._shape.index])()

    def arriving(self, stream: int) -> Arriving:
        """Return the ids, weights and scales of the rail for the dispatch inside. Counts the dispatch."""
        tokens, topk = self._shape.domains * self._spec.tokens, self._spec.topk
        ids = torch.empty(tokens, topk, dtype=torch.int64, device=self._device)
        weights = torch.empty(tokens, topk, dtype=torch.float32, device=self._device)
        number = torch.empty(2, dtype=torch.int32, device=self._device)
        self._enter(stream, ids=ids, weights=weights, number=number)
        fp8 = self._spec.dispatch_wire == FP8
        scales = self._shape.inside(self._scales).contiguous() if fp8 else None
        return Arriving(ids, weights, scales, number)

    def forget_dispatches(self) -> None:
        """Count from 1 again, as the exchange inside does."""
        self._dispatches.zero_()

    def joined(
        self, stream: int, offsets_inside: torch.Tensor, counts_inside: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the offsets and counts of this rank's experts. Each is N experts inside."""
        local = self._shape.local
        offsets, counts = (torch.empty(each, dtype=torch.int32, device=self._device) for each in (local + 1, local))
        self._join(
            stream,
            offsets_inside=offsets_inside,
            counts_inside=counts_inside,
            expert_offsets=offsets,
            expert_counts=counts,
        )
        return offsets, counts
