"""The possible actions in a state, and the steps that can be run at once without losing an ending.

Stores are asynchronous. A store lands at any later time, in any order with others, even after the kernel that made it.
Only two things order landings. A drain waits until stores have landed. Stores of one rank into one word, or into one
line, land in the order in which they were made.

**Quiet steps.** Two steps commute if neither changes the effect of the other, or whether the other can run. Words only
grow, have one writer and are compared by >=. So the landing of a word, and a wait that can end, commute with every step
that any other thread can run before it. So do the start of a store, a drain that can end, and steps that a stream
orders. Such steps are *quiet*: running one at once, and nothing else, loses no ending (a persistent set of one).

- Landings in slots and reads of slots are not quiet.
- The landing of a line is quiet if no thread has yet to poll for the present contents: a later poll cannot end before
  the line has landed. Polls are not quiet.
- Where an injected bug breaks these reasons (words that shrink, kernels that overlap), the steps are not quiet either.
  A bug of a crossing breaks them only for the words of chunks, and for the number of the crossing.

**Waits that fail.** A thread that waits has no effect on others. Its failure is seen by later kernels of its rank, and
by threads of its own kernel that begin late, which return at once. In a case with late threads any thread may do that,
as if another had failed. So a failure at any time equals one at the start of the wait. Only there does a thread fail,
or decide to wait without limit. The kernels do less: they do not fail if the word is there. An ending in which a thread
waits for ever is not counted, because that wait would fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.explorer import wording
from tests.explorer.case import Case
from tests.explorer.effects import Effects
from tests.explorer.fault import Fault
from tests.explorer.state import Action, Landing, Log, State
from tests.explorer.steps import OPERATION_MASK, Act

NOT_WAITING = {  # kinds of kernels that begin as dependents and do not wait for the kernel before
    Fault.NO_DEPENDENT_WAIT: ("dispatch", "combine", "use", "other"),
    Fault.USER_WITHOUT_WAIT: ("use",),
    Fault.NEIGHBOUR_WITHOUT_WAIT: ("other",),
}
RAILS_APART = (Fault.CROSSING_EARLY, Fault.RAIL_UNJOINED)
UNORDERED = (*NOT_WAITING, Fault.EPOCH_BY_FIRST_OUT)
SHRINKING = (Fault.BAKED_EPOCH, Fault.EQUAL, *UNORDERED)
CHUNKS_UNORDERED = (*RAILS_APART, Fault.BAKED_CROSSING, Fault.CHUNK_RESET, Fault.COUNTED_BESIDE)
LINES_APART = (Fault.SHARED_EPOCH, Fault.LINE_UNCHECKED, Fault.OWN_UNHEARD, Fault.UNORDERED_LINES)


class Machine(Effects):
    """The possible actions in a state, and the quiet steps."""

    def __init__(self, case: Case, reduced: bool = True) -> None:
        super().__init__(case)
        monotone = case.fault not in SHRINKING
        self.at_once = reduced and monotone
        self._not_waiting = NOT_WAITING.get(case.fault, ()) if case.fault else ()
        self._ordered_from = self.memory.lines_from
        if case.fault is Fault.UNORDERED_LINES:
            self._ordered_from = self.memory.words_from
        self.quiet = (
            {
                Act.STORE,
                Act.DRAIN,
                Act.STORE_WORD,
                Act.JOIN,
                Act.STORE_LINE,
                Act.COPY,
                Act.SKIP_IF_REFUSED,
                Act.SKIP_UNLESS_TAKEN,
                Act.SKIP_IF_ABORTED,
            }
            if reduced
            else set()
        )
        if reduced and monotone:
            self.quiet.add(Act.WAIT)
        if reduced and case.fault not in UNORDERED:
            self.quiet |= {Act.ENTER, Act.STORE_EPOCH, Act.COUNT}
        if case.fault in CHUNKS_UNORDERED:
            self.never_quiet = frozenset(self.memory.chunk_words)
        if case.fault is Fault.ABORT_BEFORE_WORD:
            self.never_quiet = frozenset(self.memory["aborted", rank] for rank in range(case.ranks))
        lines = self.memory.lines_from < self.memory.words_from
        self._lines_at_once = self.at_once and lines and case.fault not in LINES_APART
        self._lookers = self._find_lookers()
        self._products = self._find_products()

    def _find_products(self) -> dict[int, int]:
        """The product that must end before a thread has an SM, by the thread."""
        products = {
            (each.rank, each.launch): number for number, each in enumerate(self.threads) if each.role == "product"
        }
        return {
            number: products[each.rank, each.launch]
            for number, each in enumerate(self.threads)
            if each.role.startswith(self.case.without_sms) and (each.rank, each.launch) in products
        }

    def _find_lookers(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """The polls of a line for an operation's store: thread and step, by (address, operation)."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, steps in enumerate(self.steps):
            for index, step in enumerate(steps):
                if step.act is Act.POLL_LINES:
                    for at in {each + offset for each in step.operands for offset in (0, step.stride)}:
                        found.setdefault((at, step.value), []).append((number, index))
        return found

    def start(self, log: Log | None = None) -> State:
        """The first state, after all quiet steps."""
        nothing = bytes(len(self.threads))
        state = State((nothing, nothing, bytes(len(self.memory.names)), ()))
        self.settle(state, range(self.case.ranks), log)
        return state

    # ---- actions -----------------------------------------------------------------------------------------------------

    def actions(self, state: State) -> list[Action]:
        found = []
        for number in self._running(state):
            step = self.step(state, number)
            if not self.can_run(state, number, step):
                continue
            choices = [Action("step", number)]
            if step.act is Act.MAY_FAIL:
                fails = Action("fail", number)
                aborted = step.at and state.memory[step.at]  # of a rail, for ever
                choices = [fails] if aborted else [*choices, fails]
                if self.quiet:
                    return choices  # both commute with all other steps
            found += choices
        return [*found, *(Action("land", landing.thread, landing) for landing in self._landings(state))]

    def settle(self, state: State, ranks: Iterable[int], log: Log | None = None) -> None:
        """Run all quiet steps of these ranks, and of the ranks whose waits these end, until there are none."""
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
                        quiet = step.act in self.quiet and step.at not in self.never_quiet
                        if not quiet or not self.can_run(state, number, step):
                            break
                        if step.act is Act.STORE_WORD:
                            waiting.add(self.memory.owners[step.at])
                        self.run(state, number, step, log)
                        moving = True
        while self._lines_at_once and self._land_lines(state, log):
            pass

    def apply(self, state: State, action: Action, log: Log | None = None) -> None:
        """Run an action, and all quiet steps after it."""
        if action.landing is not None:
            self._land(state, action.landing, log)
        elif action.kind == "fail":
            self.fail(state, action.thread, log)
        else:
            self.run(state, action.thread, self.step(state, action.thread), log)
        alone = self.at_once or action.landing is None  # otherwise a word that lands may end a wait of another rank
        self.settle(state, (self.threads[action.thread].rank,) if alone else range(self.case.ranks), log)

    def ended(self, state: State) -> bool:
        return list(state.at) == self.ends

    def stuck(self, state: State) -> list[str]:
        """The steps in which threads wait."""
        return [
            wording.step(self, state, number)
            for number in self._running(state)
            if not self.can_run(state, number, self.step(state, number))
        ]

    def launches_ahead(self, state: State) -> int:
        """How many more launches the fastest rank has completed than the slowest."""
        oldest = [state.memory[each] for each in self.oldest]
        return max(oldest) - min(oldest)

    # ---- landings ----------------------------------------------------------------------------------------------------

    def _landings(self, state: State) -> list[Landing]:
        """The stores that can land: all into slots, but only the oldest into each line or word."""
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
        """Land the lines whose landing is quiet."""
        landed = False
        for landing in self._landings(state) if state.pending else ():
            if self.memory.lines_from <= landing.at < self.memory.words_from and not self._is_polled_for(
                state, landing.at
            ):
                self._land(state, landing, log)
                landed = True
        return landed

    def _is_polled_for(self, state: State, at: int) -> bool:
        """Whether a thread has yet to poll for the present contents of a line."""
        lookers = self._lookers.get((at, state.memory[at] & OPERATION_MASK), ())
        return any(state.at[number] <= index for number, index in lookers)

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _running(self, state: State) -> Iterator[int]:
        """The threads that have not ended, of kernels that have begun or may begin."""
        for rank in range(self.case.ranks):
            yield from self._running_on(state, rank)

    def _running_on(self, state: State, rank: int) -> list[int]:
        at, ends, kernels = state.at, self.ends, self.kernels[rank]
        oldest = state.memory[self.oldest[rank]]
        rails = self._rail_apart(state, rank, oldest)
        if oldest == len(kernels):
            return rails
        found = [number for number in kernels[oldest] if at[number] < ends[number] and self._has_sm(state, number)]
        for index in range(oldest + 1, len(kernels) if self._not_waiting else 0):
            if not self._begins_beside(state, rank, index):
                break
            found += [number for number in kernels[index] if at[number] < ends[number]]
        return found + [number for number in rails if number not in found]

    def _rail_apart(self, state: State, rank: int, oldest: int) -> list[int]:
        """The rail's thread, if a fault lets it run beside the launches of another dispatch."""
        rails = self.rails[rank]
        ended = sum(state.at[number] == self.ends[number] for number in rails)
        if self.case.fault not in RAILS_APART or ended == len(rails):
            return []
        early = self.case.fault is Fault.CROSSING_EARLY and ended > 0
        before = rails[ended - early]  # it begins when the launches before this thread's dispatch have ended
        return [rails[ended]] if self.threads[before].launch <= oldest else []

    def _has_sm(self, state: State, number: int) -> bool:
        product = self._products.get(number)
        return product is None or state.at[product] == self.ends[product]

    def _begins_beside(self, state: State, rank: int, index: int) -> bool:
        """Whether a dependent launch may begin: all blocks of the kernel before it have begun, or have ended."""
        before = self.kernels[rank][index - 1]
        if self.launches[index].kind in self._not_waiting:
            return all(state.at[number] for number in before)
        return all(state.at[number] == self.ends[number] for number in before)
