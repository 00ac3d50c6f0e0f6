"""The sums of a combine between domains of GPU ranks, while they cross the rail, and the domains' sums of each token.

The combine inside writes its sums to `sums`. Where they cross in the dtype of rows, that is the memory from which the
rail sends them. A status of each rank of the domain goes with them. One kernel then adds the sums of all domains.

In chunks, the combine inside is a launch for each chunk of tokens. The sums of a chunk cross on a stream of their own,
beside the combine of the next one. The current stream waits for each chunk, and adds it. All ranks know in the first
chunk whether a step is refused, because each launch publishes the same statuses. So only those of the first one cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from raymoe.cuda.launch import Field, Launch, Shape
from raymoe.cuda.launcher import Launcher
from raymoe.exchange.domains.domain_kernels import PUBLISH_STATUSES, PublishStatusesParams, SumDomainsParams, sum_source
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.nccl import rounds
from raymoe.exchange.refusal import Refusal
from raymoe.exchange.spec import ExchangeSpec
from raymoe.net.nccl_rail import NcclRail

STATUS_WORDS = Refusal.NBYTES // 8
_NO_ENTRIES: dict[str, Field] = dict.fromkeys(("outgoing_entries", "returned_entries", "out_entries"))
_SPARE_WORDS = 2  # before the statuses of a record: whether there are any, and one that is not used


@dataclass(frozen=True)
class CombineStatus:
    """The status that the ranks of a domain send with a combine that they do not refuse."""

    number: torch.Tensor
    """int32[2], the halves of a word: the dispatch that is combined."""
    weighted: bool
    site: int


class RailSums:
    """The memory and the kernels of a combine on both sides of the rail."""

    def __init__(
        self, shape: DomainShape, spec: ExchangeSpec, rail: NcclRail, launcher: Launcher, record: torch.Tensor
    ) -> None:
        """`record` is that of the combine inside (`InsideBackend.refusal_record`)."""
        N, L, T, K, device = shape.domains, shape.per_domain, shape.tokens, spec.topk, record.device
        self._shape, self._spec, self._rail = shape, spec, rail
        dtype: torch.dtype = getattr(torch, spec.dtype)
        wire: torch.dtype = getattr(torch, spec.combine_wire)
        direct = wire is dtype and spec.combine_width == spec.hidden

        def zeros(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        self._outgoing = zeros(N * T, spec.combine_width, of=wire)
        self._returned = torch.zeros_like(self._outgoing)
        self.sums = self._outgoing if direct else zeros(N * T, spec.hidden, of=dtype)
        """The sums of this domain's ranks for the tokens of all domains, in the order of tokens inside."""
        self._outgoing_statuses = zeros(N, L, STATUS_WORDS, of=torch.int64)
        self._statuses = torch.zeros_like(self._outgoing_statuses)
        self._outgoing_entries = zeros(N, T, K, of=torch.float32)
        self._returned_entries = torch.zeros_like(self._outgoing_entries)
        self.entries = zeros(N * T, K, of=torch.float32) if shape.chunk else self._outgoing_entries.flatten(0, 1)
        """The gradients of weights, one for each entry, in the order of tokens inside."""
        self._refused = zeros(_SPARE_WORDS + N * L * STATUS_WORDS, of=torch.int64)
        self._publish = launcher.ready(
            PUBLISH_STATUSES,
            Shape(1, 32),
            PublishStatusesParams(domains=N, per_domain=L, index=shape.index),
            record=record,
            outgoing=self._outgoing_statuses,
            statuses=self._statuses,
        )
        self._add = self._make_add(launcher)
        self._record = record
        self._side: Any = None
        if shape.chunk and device.type == "cuda":
            cuda: Any = torch.cuda  # its streams and events have no annotations
            self._side = cuda.Stream(device, priority=-1)  # NCCL's blocks get SMs before those of other kernels
            self._summed, self._came = ([cuda.Event() for _ in shape.chunks] for _ in range(2))

    def combine_in_chunks(
        self,
        stream: int,
        status: CombineStatus,
        out: torch.Tensor,
        combine: Callable[[tuple[int, int]], None],
        publish_failures: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Combine chunk by chunk into `out`. `combine` combines some tokens inside the domain, into `sums`.

        `publish_failures` makes the context of all that follows the first chunk's combine.
        """
        shape, blocks = self._shape, self._shape.blocks
        chunks = zip(shape.chunks, blocks(self._outgoing), blocks(self._returned), blocks(self.sums), strict=True)
        with ExitStack() as after_first:
            for chunk, ((begin, end), outgoing, returned, sums) in enumerate(chunks):
                combine((shape.domains * begin, shape.domains * end))
                sent, received = [outgoing], [returned]
                if chunk == 0:
                    after_first.enter_context(publish_failures())
                    self._publish(stream, number=status.number, weighted=status.weighted, site=status.site, carries=0)
                    sent.append(self._outgoing_statuses)
                    received.append(self._statuses)
                if self.sums is not self._outgoing:
                    outgoing[..., : self._spec.hidden].copy_(sums)
                self._swap_beside(chunk, received, sent)
            self._record[:1].zero_()  # the later launches of a refused step have written it again
            for chunk, (begin, end) in enumerate(shape.chunks):
                if self._side is not None:
                    self._came[chunk].wait()
                if begin < len(out):
                    self._add(stream, y=out, first=begin, end=min(end, len(out)), **_NO_ENTRIES)

    def _swap_beside(self, chunk: int, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
        """Swap the blocks on the side stream, after the work that the current stream has so far."""
        if self._side is None:
            self._rail.swap_all("combine", received, sent)()
            return
        self._summed[chunk].record()
        with torch.cuda.stream(self._side):
            self._summed[chunk].wait()
            self._rail.swap_all("combine", received, sent)()
            self._came[chunk].record()

    def cross(self, stream: int, status: CombineStatus, *, entries: bool = False) -> None:
        """Swap the sums and the statuses of this domain's ranks with those of all domains.

        With `entries` the gradients of weights cross too.
        """
        shape = self._shape
        self._publish(stream, number=status.number, weighted=status.weighted, site=status.site, carries=int(entries))
        if self.sums is not self._outgoing:
            self._outgoing[:, : self._spec.hidden].copy_(self.sums)
        received = [*shape.blocks(self._returned), self._statuses]
        sent = [*shape.blocks(self._outgoing), self._outgoing_statuses]
        if entries:
            if shape.chunk:
                shape.by_domain(self.entries, self._outgoing_entries)
            received.append(self._returned_entries)
            sent.append(self._outgoing_entries)
        self._rail.swap_all("combine", received, sent)()

    def add(self, stream: int, out: torch.Tensor, out_entries: torch.Tensor | None = None) -> None:
        """Add the domains' sums into `out`. If the step is refused, fill it with NaN, and write a record for the host.

        With `out_entries` also add the gradients of weights: all domains but one have sent zero.
        """
        entries: dict[str, Field] = _NO_ENTRIES
        if out_entries is not None:
            outgoing, returned = self._outgoing_entries, self._returned_entries
            entries = {"outgoing_entries": outgoing, "returned_entries": returned, "out_entries": out_entries}
        self._add(stream, y=out, first=0, end=len(out), **entries)

    def take_refused(self) -> list[int]:
        """Take the statuses of all ranks in the first refused step since the last call, two words each.

        Empty if there is none. Waits for the stream.
        """
        words: list[int] = self._refused.tolist()
        if not words[0]:
            return []
        self._refused.zero_()
        return words[_SPARE_WORDS:]

    def _make_add(self, launcher: Launcher) -> Launch:
        spec, shape, item = self._spec, self._shape, self._outgoing.element_size()
        pieces = rounds.sum_pieces(spec.row_bytes, self.sums.element_size(), item)
        params = SumDomainsParams(
            domains=shape.domains,
            ranks=shape.domains * shape.per_domain,
            index=shape.index,
            tokens=shape.tokens,
            chunk=shape.chunk or shape.tokens,
            topk=spec.topk,
            row_bytes=spec.row_bytes,
            wire_row_bytes=spec.combine_width * item,
            pieces=pieces,
        )
        source, threads = sum_source(spec.dtype, spec.combine_wire), launcher.threads
        most = launcher.resident(source, Shape(1, threads))
        blocks = max(1, min(most, shape.tokens * pieces * 32 // threads + 1))
        memory = {"outgoing": self._outgoing, "returned": self._returned, "statuses": self._statuses}
        return launcher.ready(source, Shape(blocks, threads), params, **memory, refused=self._refused)
