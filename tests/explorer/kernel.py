"""The steps that all paths share: stores of rows and words, and their reads."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.case import Case, Launch
from tests.explorer.fault import Fault
from tests.explorer.memory import Memory
from tests.explorer.steps import MAX_STEPS, Act, Step

Roles = dict[str, list[Step]]


class Kernel:
    """The threads of one launch on one rank, by their roles; `first` is the number of the first."""

    def __init__(self, case: Case, memory: Memory, launch: Launch, rank: int, first: int) -> None:
        self.case, self.memory, self.launch, self.rank, self.first = case, memory, launch, rank, first
        own = case.own == "slots" and launch.kind == "dispatch"
        self.peers = [peer for peer in case.domain_ranks(rank) if own or peer != rank]
        self.routing = case.routing(launch.dispatch) if launch.dispatch else ()
        # The number of the operation, which a slot must hold. Only the model knows it; kernels know epochs.
        self.tag = launch.number

    def threads(self) -> dict[str, tuple[Step, ...]]:
        return {name: (Step(Act.ENTER), *self._with_failures(steps)) for name, steps in self.roles().items()}

    def roles(self) -> Roles:
        """The steps of each role; here those of a user's kernel."""
        return {self.launch.kind: list(self._uses() if self.launch.kind == "use" else ())}

    def _with_failures(self, steps: list[Step]) -> Iterator[Step]:
        """Insert the points at which a thread may fail: before each wait, and at its start in a case with `late`."""
        in_workspace = self.launch.kind in ("dispatch", "combine")
        for number, step in enumerate(steps):
            joins = step.act is Act.JOIN and step.operands  # such a thread started with those that it joins
            starts = number == 0 and not joins
            waits = step.act in (Act.WAIT, Act.POLL_LINES)
            if self.case.timeouts and in_workspace and (waits or (starts and self.case.late)):
                yield Step(Act.MAY_FAIL)
            yield step

    def _uses(self) -> Iterator[Step]:
        """The reads of a user's kernel: the rows in slots, or none if the dispatch was refused."""
        if self.case.refuses(self.launch.dispatch, self.rank):
            return
        in_blocks = self.case.path(self.launch.dispatch) == "blocks"
        for peer in range(self.case.ranks):
            for token, to in enumerate(self.routing[peer]):
                if self.rank in to and in_blocks:
                    yield Step(Act.USE, self.memory["block", self.rank, peer, token], 0, self.launch.dispatch)
                elif self.rank in to:
                    at, stride = self.memory.buffers("dispatch", "row", self.rank, peer, token)
                    yield Step(Act.USE, at, stride, self.launch.dispatch)

    # ---- peers -------------------------------------------------------------------------------------------------------

    def rows(self, sender: int, receiver: int) -> list[int]:
        """The tokens whose rows `sender` stores at `receiver`. A combined row goes back to its token's source."""
        source, other = (sender, receiver) if self.launch.kind == "dispatch" else (receiver, sender)
        return [token for token, to in enumerate(self.routing[source]) if other in to]

    def has_fault(self, *faults: Fault) -> bool:
        return self.case.fault in faults

    def refuses(self) -> bool:
        return self.case.refuses(self.launch.dispatch, self.rank)

    def sends_words(self) -> bool:
        quiet = self.launch.kind == "combine" and self.refuses() and self.has_fault(Fault.REFUSAL_SILENT)
        return not quiet

    def word_receivers(self) -> list[int]:
        silent = self.has_fault(Fault.SILENT, Fault.SILENT_UNAWAITED)
        return [peer for peer in self.peers if not silent or self.rows(self.rank, peer)]

    def awaited_peers(self) -> list[int]:
        careless = self.has_fault(Fault.EARLY_END, Fault.SILENT_UNAWAITED)
        return [peer for peer in self.peers if not careless or self.rows(peer, self.rank)]

    def status_ranks(self) -> list[int]:
        """The ranks whose statuses are read."""
        careless = self.has_fault(Fault.STATUS_UNHEARD)
        return [peer for peer in self.awaited_peers() if not careless or self.rows(peer, self.rank)]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def store(self, part: str, peer: int, number: int) -> Step:
        at, stride = self.memory.buffers(self.launch.kind, part, peer, self.rank, number)
        return Step(Act.STORE, at, stride, self.tag)

    def line(self, part: str, peer: int, number: int) -> Step:
        return self.store(part, peer, number)._replace(act=Act.STORE_LINE)

    def read(self, part: str, peers: list[int], number: int) -> Step:
        places = [self.memory.buffers(self.launch.kind, part, self.rank, peer, number) for peer in peers]
        stride = places[0][1] if places else 0  # the same for all
        return Step(Act.READ, stride=stride, value=self.tag, operands=tuple(at for at, _ in places))

    def poll(self, part: str, peers: list[int], number: int) -> Step:
        return self.read(part, peers, number)._replace(act=Act.POLL_LINES)

    def with_refusal(self, step: Step) -> Step:
        """Add this rank's refusal, which its dispatch found, to a stored status."""
        if not self.case.refused or self.has_fault(Fault.STATUS_BEFORE_COUNTS):
            return step
        return step._replace(refusal=self.memory["refusal", self.rank, self.launch.dispatch])

    def as_statuses(self, step: Step, skips: int = MAX_STEPS) -> Step:
        """Make a read one of statuses: if a rank refuses, the next `skips` steps are skipped."""
        return step._replace(statuses=True, skips=skips)

    def unless_refused(self, steps: list[Step]) -> list[Step]:
        """Skip these steps in a combine of a rank that refuses."""
        if self.launch.kind == "combine" and self.case.refused:
            return [Step(Act.SKIP_IF_REFUSED, skips=len(steps)), *steps]
        return steps
