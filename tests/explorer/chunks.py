"""A dispatch whose rows cross between domains in chunks (domains/rail_rows.py, peer/dispatch/chunks.cuh).

Its rail is a thread on a stream of its own: NCCL's kernels, and after each the kernel that announces the chunk. The
launch before the dispatch counts the crossing.

In a case with timeouts the host may abort the rail. It sets a word, then ends the gather at hand and all later ones. Of
such a gather no rows come, or only some. The kernel that announces runs all the same, and looks at the word. An abort
whose word is set just before a gather ends by itself is a choice of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer.case import Case, Launch
from tests.explorer.fault import Fault
from tests.explorer.kernel import Kernel, Roles
from tests.explorer.memory import Memory
from tests.explorer.steps import MAX_STEPS, RAIL, Act, Step
from tests.explorer.words import WordKernel


class CrossingKernel(Kernel):
    """The launches before such a dispatch: they count the crossing, and copy this domain's own rows into x."""

    def roles(self) -> Roles:
        count = [] if self.has_fault(Fault.COUNTED_BESIDE) else [_count(self.memory, self.rank)]
        dispatch = self.case.dispatch_after(self.launch)
        own = [
            Step(Act.STORE, self.memory["x", self.rank, token], value=dispatch.number)
            for token in _tokens(self.case, dispatch, self.rank)
            if self.case.domains > 1 and _domain(self.case, token) == self.case.domain(self.rank)
        ]
        return {"counter": [*count, *own, Step(Act.DRAIN, operands=(self.first,), value=MAX_STEPS)]}


class ChunkedKernel(WordKernel):
    """A launch of such a dispatch, and its rail."""

    def threads(self) -> dict[str, tuple[Step, ...]]:
        roles = super().threads()
        number = self.first + len(roles)
        return roles | {RAIL: (Step(Act.ENTER), *self._rail(number))}

    # ---- readers of x ------------------------------------------------------------------------------------------------

    def reads_of_x(self) -> list[list[Step]]:
        return [self._read_of_x(token) for token in range(self.case.tokens)]

    def _read_of_x(self, token: int) -> list[Step]:
        read = Step(Act.READ, value=self.tag, operands=(self.memory["x", self.rank, token],))
        if self.has_fault(Fault.CHUNK_UNHEARD):
            return [read]
        chunk = 0 if self.has_fault(Fault.FIRST_CHUNK_ONLY) else token // self.case.chunk
        wait = self._numbered(Step(Act.WAIT, self.memory["chunk", self.rank, chunk]))
        return [read, wait] if self.has_fault(Fault.CHUNK_UNFENCED) else [wait, read]

    def has_own_placement_block(self) -> bool:
        return self.case.own == "copied"

    def own_placement_block(self, thread: int) -> Iterator[Step]:
        """Read this rank's own rows from x. With layout rank, and routing that is not known, copy them into slots."""
        yield from self.heads()
        if self.refuses():
            return
        for token in self.rows(self.rank, self.rank):
            yield from self._read_of_x(token)
            if self.case.layout == "rank" and not self.launch.known:
                yield self.store("row", self.rank, token)
        yield Step(Act.DRAIN, operands=(thread,), value=MAX_STEPS)

    def last_steps(self) -> Iterator[Step]:
        if self.has_fault(Fault.CHUNK_RESET):
            for chunk in range(self.case.chunks):
                yield Step(Act.STORE_WORD, self.memory["chunk", self.rank, chunk])

    # ---- the rail ----------------------------------------------------------------------------------------------------

    def _rail(self, thread: int) -> Iterator[Step]:
        if self.has_fault(Fault.CROSSING_AFTER):
            yield Step(Act.JOIN, operands=tuple(range(self.first, thread)))
        if self.has_fault(Fault.COUNTED_BESIDE):
            yield _count(self.memory, self.rank)
        for chunk in range(self.case.chunks):
            gather = [*self._gather(chunk), Step(Act.DRAIN, operands=(thread,), value=MAX_STEPS), *self._came(chunk)]
            gather = self._with_aborts(gather)
            word = Step(Act.STORE_WORD, self.memory["chunk", self.rank, chunk])
            if self.has_fault(Fault.CROSSING_EARLY):  # it shall not be found by its number
                word = word._replace(value=self.launch.crossing)
            else:
                word = self._numbered(word)
            if self.has_fault(Fault.CHUNK_BEFORE_ROWS):
                yield from (*gather[:-1], word, gather[-1])
            elif self.has_fault(Fault.ABORT_ANNOUNCED):
                yield from (*gather, word)
            else:
                yield from (*gather, Step(Act.SKIP_IF_ABORTED, self.memory["aborted", self.rank]), word)

    def _with_aborts(self, gather: list[Step]) -> list[Step]:
        """Insert the points at which an abort ends a gather: at its start, and before each wait. After it, one too."""
        if not self.case.timeouts:
            return gather
        ended = self.memory["ended", self.rank]
        found = [Step(Act.MAY_FAIL, self.memory["aborted", self.rank])]  # from the end
        for index, step in reversed(list(enumerate(gather))):
            found.append(step)
            if index == 0 or step.act is Act.WAIT:
                found.append(Step(Act.MAY_FAIL, ended, skips=len(found)))
        return found[::-1]

    def _gather(self, chunk: int) -> Iterator[Step]:
        """Store the rows of a chunk.

        With several domains each rank stores its domain's rows at the other ranks of its rail, once these have begun
        the same gather. With one domain the other ranks are left out, and their rows come at any time.
        """
        begun, others = self._turn(chunk), self.case.rail(self.rank)
        yield from (Step(Act.STORE_WORD, self.memory["begun", other, self.rank], value=begun) for other in others)
        if not self.has_fault(Fault.RAIL_UNASKED):
            yield from (Step(Act.WAIT, self.memory["begun", self.rank, other], value=begun) for other in others)
        for owner in others or [self.rank]:
            for token in _tokens(self.case, self.launch, owner):
                mine = not others or _domain(self.case, token) == self.case.domain(self.rank)
                if mine and token // self.case.chunk == chunk:
                    yield Step(Act.STORE, self.memory["x", owner, token], value=self.tag)

    def _came(self, chunk: int) -> list[Step]:
        """Tell the other ranks of the rail that their rows have landed, and wait for theirs."""
        turn, others = self._turn(chunk), self.case.rail(self.rank)
        stores = [Step(Act.STORE_WORD, self.memory["came", other, self.rank], value=turn) for other in others]
        return stores + [Step(Act.WAIT, self.memory["came", self.rank, other], value=turn) for other in others]

    def _turn(self, chunk: int) -> int:
        """The number of a gather of the rail. NCCL matches gathers by their order."""
        return (self.launch.crossing - 1) * self.case.chunks + chunk + 1

    def _numbered(self, step: Step) -> Step:
        """Make a step store, or wait for, the number of the crossing. It is read in this rank's memory."""
        if self.has_fault(Fault.CHUNK_RESET):
            return step._replace(value=1)
        if self.has_fault(Fault.BAKED_CROSSING):
            index = self.case.index_of_crossing(self.launch.crossing)
            return step._replace(value=self.case.host_epoch(self.rank, index))
        return step._replace(operands=(self.memory["crossing", self.rank],))


def _count(memory: Memory, rank: int) -> Step:
    return Step(Act.COUNT, memory["crossing", rank])


def _tokens(case: Case, launch: Launch, rank: int) -> range:
    return range(len(case.routing(launch.dispatch)[rank]))


def _domain(case: Case, token: int) -> int:
    """The domain that a token comes from. Tokens of all domains alternate in x."""
    return token % case.domains
