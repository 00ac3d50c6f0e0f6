"""The memory of all ranks, and what one step of one thread does to it.

Stores are asynchronous: a store sets out, and lands at any later time, in any order with others, also after the kernel
that made it. Only two things are sure: a drain waits until stores have landed, and stores of one rank into one word, or
into one line, land in the order in which they were made.

Which steps matter. Two steps commute if neither changes what the other does or whether it can be done. Words only
grow, have one writer and are compared by >=, so the landing of a word, and a wait that can go on, commute with every
step that any other thread can do before it; so do a store that sets out, a drain that can go on, and what a stream
orders. Such steps are *quiet*: doing one at once, and nothing else, loses no ending (a persistent set of one).
Landings in slots and reads of slots are not quiet. The landing of a line is, where nobody has yet to look at what
stands there: whoever looks at it later cannot go on before it has landed. Looks are not. Where a planted bug takes the
reason away (words that shrink, kernels that overlap) the steps in question are not quiet either.

Waits that fail. A thread that waits does nothing that another sees. Its failure is seen by later kernels of its rank,
and by threads of its own kernel that begin late, which then return at once; in a case with late threads any thread may,
as if somebody had failed. So a failure at any time is as good as one at the moment when the wait begins: there, and
nowhere else, a thread fails or decides to wait for as long as it takes. This is more than the kernels do: they do not
fail where the word is there. An ending in which somebody waits for ever stands for none, since that wait would fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.explorer import wording
from tests.explorer.case import Case
from tests.explorer.effects import Effects
from tests.explorer.fault import Fault
from tests.explorer.state import Action, Landing, Log, State
from tests.explorer.steps import OF, Act

CARELESS = {  # kinds of kernels that begin as dependents and do not wait
    Fault.NO_DEPENDENT_WAIT: ("dispatch", "combine", "use", "other"),
    Fault.USER_WITHOUT_WAIT: ("use",),
    Fault.NEIGHBOUR_WITHOUT_WAIT: ("other",),
}
UNORDERED = (*CARELESS, Fault.EPOCH_BY_FIRST_OUT)
SHRINKING = (Fault.BAKED_EPOCH, Fault.EQUAL, *UNORDERED)
LINES_APART = (Fault.SHARED_EPOCH, Fault.LINE_UNCHECKED, Fault.OWN_UNHEARD, Fault.UNORDERED_LINES)


class Machine(Effects):
    """What may happen in a state, and what happens at once."""

    def __init__(self, case: Case, reduced: bool = True) -> None:
        super().__init__(case)
        monotone = case.fault not in SHRINKING
        self.at_once = reduced and monotone
        self._careless = CARELESS.get(case.fault, ()) if case.fault else ()
        self._ordered_from = self.memory.lines_from
        if case.fault is Fault.UNORDERED_LINES:
            self._ordered_from = self.memory.words_from
        self.quiet = (
            {Act.STORE, Act.DRAIN, Act.WORD, Act.JOIN, Act.LINE, Act.COPY, Act.ABSTAIN, Act.HOLD} if reduced else set()
        )
        if reduced and monotone:
            self.quiet.add(Act.WAIT)
        if reduced and case.fault not in UNORDERED:
            self.quiet |= {Act.ENTER, Act.EPOCH}
        lines = self.memory.lines_from < self.memory.words_from
        self._lines_at_once = self.at_once and lines and case.fault not in LINES_APART
        self._lookers = self._find_lookers()

    def _find_lookers(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Who looks at a line for what an operation has stored there: thread and step."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, steps in enumerate(self.steps):
            for index, step in enumerate(steps):
                if step.act is Act.LOOK:
                    for at in {each + behind for each in step.of for behind in (0, step.stride)}:
                        found.setdefault((at, step.value), []).append((number, index))
        return found

    def start(self, log: Log | None = None) -> State:
        """With what is quiet already done."""
        nothing = bytes(len(self.threads))
        state = State((nothing, nothing, bytes(len(self.memory.names)), ()))
        self.settle(state, range(self.case.ranks), log)
        return state

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def actions(self, state: State) -> list[Action]:
        found = []
        for number in self._running(state):
            step = self.step(state, number)
            if not self.can(state, number, step):
                continue
            choices = [Action("step", number)]
            if step.act is Act.DARE:
                choices.append(Action("fail", number))
                if self.quiet:
                    return choices  # both commute with what all others do
            found += choices
        return [*found, *(Action("land", landing.thread, landing) for landing in self._landings(state))]

    def settle(self, state: State, ranks: Iterable[int], log: Log | None = None) -> None:
        """Does every quiet step of these ranks, and of those that it gives something to do, until there is none."""
        waiting = set(ranks) if self.quiet else set()
        while waiting:
            rank = waiting.pop()
            moving = True
            while moving:
                moving = False
                for number in self._running_on(state, rank):
                    steps, end = self.steps[number], self.ends[number]
                    while (at := state.at[number]) < end:
                        step = steps[at]
                        if step.act not in self.quiet or not self.can(state, number, step):
                            break
                        if step.act is Act.WORD:
                            waiting.add(self.memory.owners[step.at])
                        self.do(state, number, step, log)
                        moving = True
        while self._lines_at_once and self._land_lines(state, log):
            pass

    def apply(self, state: State, action: Action, log: Log | None = None) -> None:
        """An action, and all that is quiet after it."""
        if action.landing is not None:
            self._land(state, action.landing, log)
        elif action.what == "fail":
            self.fail(state, action.thread, log)
        else:
            self.do(state, action.thread, self.step(state, action.thread), log)
        alone = self.at_once or action.landing is None  # else a word that lands lets another rank go on
        self.settle(state, (self.threads[action.thread].rank,) if alone else range(self.case.ranks), log)

    def ended(self, state: State) -> bool:
        return list(state.at) == self.ends

    def stuck(self, state: State) -> list[str]:
        """What each thread that has not ended waits for."""
        return [
            wording.step(self, state, number)
            for number in self._running(state)
            if not self.can(state, number, self.step(state, number))
        ]

    def apart(self, state: State) -> int:
        """How many launches the fastest rank has completed more than the slowest."""
        oldest = [state.memory[each] for each in self.oldest]
        return max(oldest) - min(oldest)

    # ---- what lands --------------------------------------------------------------------------------------------------

    def _landings(self, state: State) -> list[Landing]:
        """Of stores into slots all, of those into a line or a word the one that was made first."""
        found, first = [], {}
        for landing in sorted(state.pending):
            if landing.at < self._ordered_from:
                found.append(landing)
            else:
                first.setdefault(landing.at, landing)
        return [*found, *first.values()]

    def _land(self, state: State, landing: Landing, log: Log | None) -> None:
        state.pending.remove(landing)
        state.memory[landing.at] = landing.value
        if log:
            log(wording.landing(self, landing.thread, landing.at, landing.value))

    def _land_lines(self, state: State, log: Log | None) -> bool:
        """Those that nobody can miss."""
        landed = False
        for landing in self._landings(state) if state.pending else ():
            if self.memory.lines_from <= landing.at < self.memory.words_from and not self._is_wanted(state, landing.at):
                self._land(state, landing, log)
                landed = True
        return landed

    def _is_wanted(self, state: State, at: int) -> bool:
        """Whether somebody has yet to look at what stands there."""
        lookers = self._lookers.get((at, state.memory[at] & OF), ())
        return any(state.at[number] <= index for number, index in lookers)

    # ---- who runs ----------------------------------------------------------------------------------------------------

    def _running(self, state: State) -> Iterator[int]:
        """Threads that have not ended, of kernels that have begun or may begin."""
        for rank in range(self.case.ranks):
            yield from self._running_on(state, rank)

    def _running_on(self, state: State, rank: int) -> list[int]:
        at, ends, kernels = state.at, self.ends, self.kernels[rank]
        oldest = state.memory[self.oldest[rank]]
        if oldest == len(kernels):
            return []
        found = [number for number in kernels[oldest] if at[number] < ends[number]]
        for place in range(oldest + 1, len(kernels) if self._careless else 0):
            if not self._begins_beside(state, rank, place):
                break
            found += [number for number in kernels[place] if at[number] < ends[number]]
        return found

    def _begins_beside(self, state: State, rank: int, place: int) -> bool:
        """A dependent launch begins when all blocks of the kernel before have begun, or ended."""
        before = self.kernels[rank][place - 1]
        if self.launches[place].kind in self._careless:
            return all(state.at[number] for number in before)
        return all(state.at[number] == self.ends[number] for number in before)
