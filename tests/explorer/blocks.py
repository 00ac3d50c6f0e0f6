"""A staged dispatch whose rows go by the copy engine: kernels/pack.cu, announce.cu and what is between them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.fault import Fault
from tests.explorer.kernel import Roles
from tests.explorer.steps import EVER, Act, Step
from tests.explorer.words import WordKernel


class BlockKernel(WordKernel):
    """Captured copies have fixed addresses, so slots have no halves, and heads are credits."""

    def roles(self) -> Roles:
        if self.launch.kind == "copies":
            return {"copy engine": list(self._copies())}
        if self.launch.part == "P":
            return {"packer": list(self._pack())}
        if self.launch.part == "A":
            return {"announcer": [*self.said_done(0), *self.last_words()]}
        return super().roles()

    def _block(self, owner: int, writer: int, token: int) -> int:
        return self.memory["block", owner, writer, token]

    def _leaving(self) -> list[int]:
        return [token for token, to in enumerate(self.routing[self.rank]) if set(to) - {self.rank}]

    def _pack(self) -> Iterator[Step]:
        """Into this rank's own slots; the kernel's end orders that before the copies."""
        if not self.faulty(Fault.PACKED_EARLY):
            yield from self.heads()
        for token in self._leaving():
            yield Step(Act.STORE, self._block(self.rank, self.rank, token), value=self.tag)
        yield Step(Act.DRAIN, of=(self.first,), value=EVER)

    def _copies(self) -> Iterator[Step]:
        """All rows to all peers, whatever the ids say. Nobody asks whether the workspace is poisoned."""
        from_x = self.faulty(Fault.COPIED_FROM_X)
        for peer in self.peers:
            for token in range(len(self.routing[self.rank])):
                of = () if from_x else (self._block(self.rank, self.rank, token),)
                yield Step(Act.COPY, self._block(peer, self.rank, token), value=self.tag, of=of)
        yield Step(Act.DRAIN, of=(self.first,), value=EVER)

    def row(self, peer: int, token: int) -> Step:
        return Step(Act.READ, value=self.tag, of=(self._block(self.rank, peer, token),))
