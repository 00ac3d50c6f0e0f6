"""The LL path: every line and word holds its epoch, and no flag follows it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.fault import Fault
from tests.explorer.kernel import Kernel, Roles
from tests.explorer.steps import Act, Step


class LineKernel(Kernel):
    """A launch of dispatch_ll or combine_ll."""

    def roles(self) -> Roles:
        roles: Roles = {}
        if self.sends_words():
            if self.launch.kind == "dispatch":
                roles["counting block"] = [*self._counts(), *self._routing_entries()]
            else:
                roles["status sender"] = [
                    self.with_refusal(self.line("status", peer, 0)) for peer in self.word_receivers()
                ]
            roles["sender"] = self.unless_refused(list(self._rows()))
        arriving: Roles = {}
        for peer in self.peers:
            if self.launch.kind == "dispatch":
                arriving[f"placement block of {peer}"] = list(self._placement_block(peer))
            else:
                arriving[f"final reduction of {peer}"] = list(self._final_reduction(peer))
        if self.case.one_block:  # with MIXED_ROLES it does all that, one after another
            late = self.has_fault(Fault.ARRIVES_FIRST)
            order = [*arriving.values(), *roles.values()] if late else [*roles.values(), *arriving.values()]
            roles = {"block": [step for steps in order for step in steps]}
        else:
            roles |= arriving
        # The threads have polled every line and word that the kernel must wait for.
        join = Step(Act.JOIN, operands=tuple(range(self.first, self.first + len(roles))))
        epoch = Step(Act.STORE_EPOCH, self.memory["epoch", self.rank, self.launch.kind])
        roles["out"] = [epoch, join] if self.has_fault(Fault.EPOCH_BY_FIRST_OUT) else [join, epoch]
        return roles

    def _counts(self) -> Iterator[Step]:
        return (self.line("count", peer, 0) for peer in self.word_receivers())

    def _routing_entries(self) -> Iterator[Step]:
        """For each token and rank: whether the token goes there."""
        for token in range(len(self.routing[self.rank]) if self.case.counting_blocks else 0):
            yield from (self.line("routing entry", peer, token) for peer in self.word_receivers())

    def _rows(self) -> Iterator[Step]:
        for peer in self.peers:
            for token in self.rows(self.rank, peer):
                if self.has_fault(Fault.LINE_IN_GRANULES):
                    yield self.store("granule", peer, token)
                yield self.line("line", peer, token)

    def _placement_block(self, peer: int) -> Iterator[Step]:
        """Each of them waits for all counts. Where rows do not fit, it polls neither lines nor routing entries."""
        yield self.poll("count", self.awaited_peers(), 0)
        for token in range(0 if self.refuses() else len(self.routing[peer])):
            if self.case.counting_blocks and peer in self.awaited_peers():
                yield self.poll("routing entry", [peer], token)
            if token in self.rows(peer, self.rank):
                yield from self._row(peer, token)

    def _final_reduction(self, peer: int) -> Iterator[Step]:
        yield self.as_statuses(self.poll("status", self.status_ranks(), 0))
        for token in self.rows(peer, self.rank):
            yield from self._row(peer, token)

    def _row(self, peer: int, token: int) -> Iterator[Step]:
        unchecked = self.has_fault(Fault.LINE_UNCHECKED) or (peer == self.rank and self.has_fault(Fault.OWN_UNHEARD))
        yield (self.read if unchecked else self.poll)("line", [peer], token)
        if self.has_fault(Fault.LINE_IN_GRANULES):
            yield self.read("granule", [peer], token)
