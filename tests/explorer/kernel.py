"""What all ways of a launch have in common: who sends what to whom, and what is read of it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.case import Case, Launch
from tests.explorer.fault import Fault
from tests.explorer.memory import Memory
from tests.explorer.steps import EVER, Act, Step

Roles = dict[str, list[Step]]


class Kernel:
    """The threads of one launch on one rank, by their roles; `first` is the number of the first."""

    def __init__(self, case: Case, memory: Memory, launch: Launch, rank: int, first: int) -> None:
        self.case, self.memory, self.launch, self.rank, self.first = case, memory, launch, rank, first
        own = case.own == "slots" and launch.kind == "dispatch"
        self.peers = [peer for peer in range(case.ranks) if own or peer != rank]
        self.routing = case.routing(launch.dispatch) if launch.dispatch else ()
        # Number of the operation: what a slot must hold. It is known to the model alone; kernels know epochs.
        self.tag = launch.number

    def threads(self) -> dict[str, tuple[Step, ...]]:
        return {name: (Step(Act.ENTER), *self._dared(steps)) for name, steps in self.roles().items()}

    def roles(self) -> Roles:
        """Of a kernel that is not ours; the others say more."""
        return {self.launch.kind: list(self._uses() if self.launch.kind == "use" else ())}

    def _dared(self, steps: list[Step]) -> Iterator[Step]:
        """With the places at which a thread may fail: before each wait and, where it begins late, at once."""
        ours = self.launch.kind in ("dispatch", "combine")
        for number, step in enumerate(steps):
            begins = number == 0 and not (step.act is Act.JOIN and step.of)  # who joins others has begun with them
            waits = step.act in (Act.WAIT, Act.LOOK)
            if self.case.timeouts and ours and (waits or (begins and self.case.late)):
                yield Step(Act.DARE)
            yield step

    def _uses(self) -> Iterator[Step]:
        """By a kernel of the user's: what stays in slots, which is nothing where the dispatch was refused."""
        if self.case.refuses(self.launch.dispatch, self.rank):
            return
        in_blocks = self.case.way(self.launch.dispatch) == "blocks"
        for peer in range(self.case.ranks):
            for token, to in enumerate(self.routing[peer]):
                if self.rank in to and in_blocks:
                    yield Step(Act.USE, self.memory["block", self.rank, peer, token], 0, self.launch.dispatch)
                elif self.rank in to:
                    at, stride = self.memory.halves("dispatch", "row", self.rank, peer, token)
                    yield Step(Act.USE, at, stride, self.launch.dispatch)

    # ---- who ---------------------------------------------------------------------------------------------------------

    def rows(self, sender: int, receiver: int) -> list[int]:
        """Tokens whose rows `sender` stores at `receiver`; a combined row goes back to where its token came from."""
        source, other = (sender, receiver) if self.launch.kind == "dispatch" else (receiver, sender)
        return [token for token, to in enumerate(self.routing[source]) if other in to]

    def faulty(self, *faults: Fault) -> bool:
        return self.case.fault in faults

    def refuses(self) -> bool:
        return self.case.refuses(self.launch.dispatch, self.rank)

    def speaks(self) -> bool:
        quiet = self.launch.kind == "combine" and self.refuses() and self.faulty(Fault.REFUSAL_SILENT)
        return not quiet

    def listeners(self) -> list[int]:
        silent = self.faulty(Fault.SILENT, Fault.SILENT_UNAWAITED)
        return [peer for peer in self.peers if not silent or self.rows(self.rank, peer)]

    def awaited(self) -> list[int]:
        careless = self.faulty(Fault.EARLY_END, Fault.SILENT_UNAWAITED)
        return [peer for peer in self.peers if not careless or self.rows(peer, self.rank)]

    def heard(self) -> list[int]:
        """Ranks whose statuses are read."""
        careless = self.faulty(Fault.STATUS_UNHEARD)
        return [peer for peer in self.awaited() if not careless or self.rows(peer, self.rank)]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def store(self, part: str, peer: int, number: int) -> Step:
        at, stride = self.memory.halves(self.launch.kind, part, peer, self.rank, number)
        return Step(Act.STORE, at, stride, self.tag)

    def line(self, part: str, peer: int, number: int) -> Step:
        return self.store(part, peer, number)._replace(act=Act.LINE)

    def read(self, part: str, peers: list[int], number: int) -> Step:
        places = [self.memory.halves(self.launch.kind, part, self.rank, peer, number) for peer in peers]
        stride = places[0][1] if places else 0  # the same for all
        return Step(Act.READ, stride=stride, value=self.tag, of=tuple(at for at, _ in places))

    def look(self, part: str, peers: list[int], number: int) -> Step:
        return self.read(part, peers, number)._replace(act=Act.LOOK)

    def saying(self, step: Step) -> Step:
        """The status of this rank: what its dispatch has found out travels with it."""
        if not self.case.refused or self.faulty(Fault.STATUS_BEFORE_COUNTS):
            return step
        return step._replace(says=self.memory["refusal", self.rank, self.launch.dispatch])

    def heeding(self, step: Step, skips: int = EVER) -> Step:
        """Statuses: where a rank refuses, the rest is left out."""
        return step._replace(heeds=True, skips=skips)

    def abstaining(self, steps: list[Step]) -> list[Step]:
        """Not by a rank that refuses."""
        if self.launch.kind == "combine" and self.case.refused:
            return [Step(Act.ABSTAIN, skips=len(steps)), *steps]
        return steps
