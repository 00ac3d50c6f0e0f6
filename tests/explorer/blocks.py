"""A staged dispatch whose rows go by the copy engine: kernels/peer/pack.cu, the copies, kernels/peer/announce.cu."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.fault import Fault
from tests.explorer.kernel import Roles
from tests.explorer.steps import MAX_STEPS, Act, Step
from tests.explorer.words import WordKernel


class BlockKernel(WordKernel):
    """A launch of such a dispatch. Captured copies have fixed addresses: there is one buffer, and heads are credits."""

    def roles(self) -> Roles:
        if self.launch.kind == "copies":
            return {"copy engine": list(self._copies())}
        if self.launch.part == "P":
            return {"packer": list(self._pack())}
        if self.launch.part == "A":
            return {"announcer": [*self.done_words(0), *self.await_done_words()]}
        return super().roles()

    def _block(self, owner: int, writer: int, token: int) -> int:
        return self.memory["block", owner, writer, token]

    def _tokens_sent(self) -> list[int]:
        return [token for token, to in enumerate(self.routing[self.rank]) if set(to) - {self.rank}]

    def _pack(self) -> Iterator[Step]:
        """Store rows into this rank's own slots. The kernel's end orders this before the copies."""
        if not self.has_fault(Fault.PACKED_EARLY):
            yield from self.heads()
        for token in self._tokens_sent():
            yield Step(Act.STORE, self._block(self.rank, self.rank, token), value=self.tag)
        yield Step(Act.DRAIN, operands=(self.first,), value=MAX_STEPS)

    def _copies(self) -> Iterator[Step]:
        """Copy all rows to all peers, whatever the ids are. Copies do not check the poison."""
        from_x = self.has_fault(Fault.COPIED_FROM_X)
        for peer in self.peers:
            for token in range(len(self.routing[self.rank])):
                of = () if from_x else (self._block(self.rank, self.rank, token),)
                yield Step(Act.COPY, self._block(peer, self.rank, token), value=self.tag, operands=of)
        yield Step(Act.DRAIN, operands=(self.first,), value=MAX_STEPS)

    def row(self, peer: int, token: int) -> Step:
        return Step(Act.READ, value=self.tag, operands=(self._block(self.rank, peer, token),))
