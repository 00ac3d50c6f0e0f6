"""The backward passes of dispatches between domains: all ranks must run those of the same dispatch.

A dispatch tells all ranks of its rail ids and weights, and after them its pass: to which dispatch it belongs, 0
outside of a backward pass. One of known routing tells no ids, and its pass. Each rank compares the passes of its rail.
Where they differ, it also tells another pass inside its domain, so the whole domain refuses. So all ranks of the world
refuse if two of them differ: else all passes of each domain and of each rail are equal.
"""

from __future__ import annotations

import torch

from raymoe.cuda.launch import Shape
from raymoe.cuda.launcher import Launcher
from raymoe.errors import DataRefused
from raymoe.exchange.domains.domain_shape import DomainShape
from raymoe.exchange.nccl.rounds import COMPARE_PASSES, PUBLISH_PASS, ComparePassesParams, PublishPassParams
from raymoe.exchange.refusal import Refusal
from raymoe.net.rail import DeviceRail

PASS_WORDS = Refusal.NBYTES // 4
"""Of int32, at the end of what a rank publishes."""
_MARK_WORDS = _SPARE_WORDS = 2


class RailPasses:
    """The passes of this rank's rail, and the memory of dispatches of known routing."""

    def __init__(
        self,
        shape: DomainShape,
        published: torch.Tensor,
        dispatches: torch.Tensor,
        rail: DeviceRail,
        launcher: Launcher,
    ) -> None:
        """`published`, int32[N, words], is what the domains publish in a dispatch; `dispatches` counts them."""
        self._rail, self._me, self._published, self._dispatches = rail, shape.index, published, dispatches
        self._known = torch.full_like(published, -1)  # no ids
        self._again = False
        self._uncounted = torch.zeros_like(dispatches)
        self.mark = torch.zeros(_MARK_WORDS, dtype=torch.int64, device=published.device)
        """The first is not 0 if the ranks of the rail run the backward passes of different dispatches."""
        self._refused = torch.zeros(_SPARE_WORDS + 2 * shape.domains, dtype=torch.int64, device=published.device)
        self._publish = launcher.ready(PUBLISH_PASS, Shape(1, 32), PublishPassParams())
        one = Shape(1, launcher.threads)
        blocks = Shape(max(1, min(launcher.sms, launcher.resident(COMPARE_PASSES, one))), launcher.threads)
        params = ComparePassesParams(stride=published[0].nbytes, ranks=shape.domains)
        self._compare = launcher.ready(COMPARE_PASSES, blocks, params, refused=self._refused)

    def cross_known(self, stream: int, number: torch.Tensor, site: int) -> None:
        """Tell all ranks of the rail that this is the backward pass of dispatch `number`, with its places."""
        self._write(stream, self._known, number, site, self._dispatches)
        self._rail.gather("dispatch", self._known.flatten(), self._known[self._me])()
        self._find(stream, self._known)

    def publish_again(self, stream: int, number: torch.Tensor, site: int) -> None:
        """Tell it with the next ids and weights."""
        self._write(stream, self._published, number, site, self._uncounted)
        self._again = True

    def crossed_again(self, stream: int) -> None:
        """Read the passes that came with ids and weights."""
        self._find(stream, self._published)

    def refused(self, stream: int, rows: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """Return the rows of the dispatch: NaN if the passes of the rail differ. The next dispatch tells no pass.

        Unless they are the `whole` memory, there are rows of others beside them, so they are copied.
        """
        if whole:
            self._compare(stream, passes=self._passes, rows=rows, bytes=rows.nbytes)
        else:
            rows = torch.where(self.mark[0] != 0, torch.nan, rows)
        if self._again:
            self._published[self._me, -PASS_WORDS:].zero_()
            self._again = False
        return rows

    def check(self, inside: torch.Tensor) -> None:
        """Raise once after a refused dispatch; `inside` is the record of those inside the domain.

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

    def _find(self, stream: int, published: torch.Tensor) -> None:
        self._passes = published.flatten()[published.shape[1] - PASS_WORDS :]
        self.mark.zero_()
        self._compare(stream, passes=self._passes, rows=self.mark, bytes=self.mark.nbytes)
