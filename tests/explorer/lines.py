"""The way of few tokens: lines and words that each say of which epoch they are, and nothing that follows them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.fault import Fault
from tests.explorer.kernel import Kernel, Roles
from tests.explorer.steps import Act, Step


class LineKernel(Kernel):
    """A dispatch_ll or a combine_ll."""

    def roles(self) -> Roles:
        roles: Roles = {}
        if self.speaks():
            if self.launch.kind == "dispatch":
                roles["router"] = [*self._counts(), *self._told()]
            else:
                roles["teller"] = [self.saying(self.line("status", peer, 0)) for peer in self.listeners()]
            roles["sender"] = self.abstaining(list(self._rows()))
        for peer in self.peers:
            if self.launch.kind == "dispatch":
                roles[f"placer of {peer}"] = list(self._placer(peer))
            else:
                roles[f"summer of {peer}"] = list(self._summer(peer))
        # All that it must hear its threads have looked at.
        join = Step(Act.JOIN, of=tuple(range(self.first, self.first + len(roles))))
        epoch = Step(Act.EPOCH, self.memory["epoch", self.rank, self.launch.kind])
        roles["out"] = [epoch, join] if self.faulty(Fault.EPOCH_BY_FIRST_OUT) else [join, epoch]
        return roles

    def _counts(self) -> Iterator[Step]:
        return (self.line("count", peer, 0) for peer in self.listeners())

    def _told(self) -> Iterator[Step]:
        """Of each token to every rank: whether it comes."""
        for token in range(len(self.routing[self.rank]) if self.case.routers else 0):
            yield from (self.line("told entry", peer, token) for peer in self.listeners())

    def _rows(self) -> Iterator[Step]:
        for peer in self.peers:
            for token in self.rows(self.rank, peer):
                if self.faulty(Fault.LINE_IN_GRANULES):
                    yield self.store("granule", peer, token)
                yield self.line("line", peer, token)

    def _placer(self, peer: int) -> Iterator[Step]:
        """Every one awaits all counts. What does not fit is not looked at, nor what is told of it."""
        yield self.look("count", self.awaited(), 0)
        for token in range(0 if self.refuses() else len(self.routing[peer])):
            if self.case.routers and peer in self.awaited():
                yield self.look("told entry", [peer], token)
            if token in self.rows(peer, self.rank):
                yield from self._row(peer, token)

    def _summer(self, peer: int) -> Iterator[Step]:
        yield self.heeding(self.look("status", self.heard(), 0))
        for token in self.rows(peer, self.rank):
            yield from self._row(peer, token)

    def _row(self, peer: int, token: int) -> Iterator[Step]:
        blind = self.faulty(Fault.LINE_UNCHECKED) or (peer == self.rank and self.faulty(Fault.OWN_UNHEARD))
        yield (self.read if blind else self.look)("line", [peer], token)
        if self.faulty(Fault.LINE_IN_GRANULES):
            yield self.read("granule", [peer], token)
