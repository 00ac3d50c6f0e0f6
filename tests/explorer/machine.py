"""The memory of all ranks, and what one step of one thread does to it.

Stores are asynchronous: a store sets out, and lands at any later time, in any order with others, also after the kernel
that made it. Only two things are sure: a drain waits until stores have landed, and stores of one thread into one word
land in order.

Which steps matter. Two steps commute if neither changes what the other does or whether it can be done. Words only
grow, have one writer and are compared by >=, so the landing of a word, and a wait that can go on, commute with every
step that any other thread can do before it; so do a store that sets out, a drain that can go on, and what a stream
orders. Such steps are *quiet*: doing one at once, and nothing else, loses no ending (a persistent set of one). Landings
in slots and reads of slots are not quiet. Where a planted bug takes the reason away (words that shrink, kernels that
overlap) the steps in question are not quiet either.

Waits that fail. A thread that waits does nothing that another sees. Its failure is seen by later kernels of its rank,
and by threads of its own kernel that begin late, which then return at once; in a case with late threads any thread may,
as if somebody had failed. So a failure at any time is as good as one at the moment when the wait begins: there, and
nowhere else, a thread fails or decides to wait for as long as it takes. This is more than the kernels do: they do not
fail where the word is there. An ending in which somebody waits for ever stands for none, since that wait would fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.explorer import wording
from tests.explorer.case import Case, Fault
from tests.explorer.state import Action, BrokenError, Landing, Log, State
from tests.explorer.threads import EVER, Act, Memory, Step, threads

CARELESS = {  # kinds of kernels that begin as dependents and do not wait
    Fault.NO_DEPENDENT_WAIT: ("dispatch", "combine", "use", "other"),
    Fault.USER_WITHOUT_WAIT: ("use",),
    Fault.NEIGHBOUR_WITHOUT_WAIT: ("other",),
}
UNORDERED = (*CARELESS, Fault.EPOCH_BY_FIRST_OUT)
RETURNED = 255  # in place of an epoch: the thread has left its kernel before its work was done
SHRINKING = (Fault.BAKED_EPOCH, Fault.EQUAL, *UNORDERED)


class Machine:
    def __init__(self, case: Case, reduced: bool = True) -> None:
        self.case, self.memory = case, Memory(case)
        self.threads = threads(case, self.memory)
        self.ends = [len(thread.steps) for thread in self.threads]
        self.launches = case.launches()
        self.kernels = [
            [
                [number for number, each in enumerate(self.threads) if (each.rank, each.place) == (rank, place)]
                for place in range(len(self.launches))
            ]
            for rank in range(case.ranks)
        ]
        self.ticketed = {
            number
            for thread in self.threads
            if thread.role != "out"
            for step in thread.steps
            if step.act is Act.JOIN
            for number in step.of
        }
        self.oldest = [self.memory["oldest", rank] for rank in range(case.ranks)]
        monotone = case.fault not in SHRINKING
        self.words_at_once = reduced and monotone
        self.quiet = {Act.STORE, Act.DRAIN, Act.WORD, Act.JOIN} if reduced else set()
        if reduced and monotone:
            self.quiet.add(Act.WAIT)
        if reduced and case.fault not in UNORDERED:
            self.quiet |= {Act.ENTER, Act.EPOCH}

    def start(self) -> State:
        nothing = bytes(len(self.threads))
        return State((nothing, nothing, bytes(len(self.memory.names)), ()))

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def actions(self, state: State) -> list[Action]:
        found = []
        for number in self._running(state):
            step = self.step(state, number)
            if not self._can(state, number, step):
                continue
            choices = [Action("step", number)]
            if step.act is Act.DARE:
                choices.append(Action("fail", number))
                if self.quiet:
                    return choices  # both commute with what all others do
            found += choices
        first: dict[int, Landing] = {}
        for landing in sorted(state.pending):
            if landing.at < self.memory.words_from:
                found.append(Action("land", landing.thread, landing))
            else:
                first.setdefault(landing.at, landing)
        return [*found, *(Action("land", landing.thread, landing) for landing in first.values())]

    def settle(self, state: State, log: Log | None = None) -> None:
        """Does every step that is quiet, until none is."""
        moving = bool(self.quiet)
        while moving:
            moving = False
            for number in self._running(state):
                while state.at[number] < self.ends[number]:
                    step = self.step(state, number)
                    if step.act not in self.quiet or not self._can(state, number, step):
                        break
                    self._do(state, number, step, log)
                    moving = True

    def apply(self, state: State, action: Action, log: Log | None = None) -> None:
        if action.landing is not None:
            state.pending.remove(action.landing)
            state.memory[action.landing.at] = action.landing.value
            if log:
                log(wording.landing(self, action.thread, action.landing.at, action.landing.value))
        elif action.what == "fail":
            self._fail(state, action.thread, log)
        else:
            self._do(state, action.thread, self.step(state, action.thread), log)

    def ended(self, state: State) -> bool:
        return list(state.at) == self.ends

    def stuck(self, state: State) -> list[str]:
        """What each thread that has not ended waits for."""
        return [
            wording.step(self, state, number)
            for number in self._running(state)
            if not self._can(state, number, self.step(state, number))
        ]

    def apart(self, state: State) -> int:
        """How many launches the fastest rank has completed more than the slowest."""
        oldest = [state.memory[each] for each in self.oldest]
        return max(oldest) - min(oldest)

    # ---- how it happens ----------------------------------------------------------------------------------------------

    def _running(self, state: State) -> Iterator[int]:
        """Threads that have not ended, of kernels that have begun or may begin."""
        for rank, kernels in enumerate(self.kernels):
            for place in range(state.memory[self.oldest[rank]], len(kernels)):
                if not self._may_begin(state, rank, place):
                    break
                yield from (number for number in kernels[place] if state.at[number] < self.ends[number])

    def _may_begin(self, state: State, rank: int, place: int) -> bool:
        if place == 0:
            return True
        before = self.kernels[rank][place - 1]
        careless = self.case.fault in CARELESS and self.launches[place].kind in CARELESS[self.case.fault]
        if careless:  # a dependent launch begins when all blocks of the kernel before have begun
            return all(state.at[number] for number in before)
        return all(state.at[number] == self.ends[number] for number in before)

    def step(self, state: State, number: int) -> Step:
        return self.threads[number].steps[state.at[number]]

    def _can(self, state: State, number: int, step: Step) -> bool:
        if step.act is Act.WAIT:
            seen, wanted = state.memory[step.at], step.value + step.scale * state.epoch[number]
            return seen == wanted if self.case.fault is Fault.EQUAL else seen >= wanted
        if step.act is Act.DRAIN:
            return not any(
                each.at < self.memory.words_from and each.thread in step.of and each.order % EVER < step.value
                for each in state.pending
            )
        if step.act is Act.JOIN:
            return all(state.at[each] == self.ends[each] for each in step.of)
        return True

    def _do(self, state: State, number: int, step: Step, log: Log | None) -> None:
        if log:
            log(wording.step(self, state, number))
        thread, memory = self.threads[number], state.memory
        if step.act is Act.ENTER:
            self._enter(state, number)
            return
        if step.act in (Act.STORE, Act.WORD):
            poison = memory[self.memory["poison", thread.rank]]
            if 0 < poison <= thread.place:
                raise BrokenError(f"rank {thread.rank} stores in an operation that began poisoned")
            at, value = self.place(state, number, step), step.value + step.scale * state.epoch[number]
            if step.act is Act.WORD and self.words_at_once:
                memory[at] = value
            else:
                state.pending.append(Landing(at, thread.place * EVER + state.at[number], value, number))
        elif step.act in (Act.READ, Act.USE):
            at = self.place(state, number, step)
            if at < 0:
                self._expect_known(state, number)
            elif memory[at] != step.value:
                raise BrokenError(f"{wording.step(self, state, number)}; it wants that of {step.value}")
        elif step.act is Act.EPOCH:
            memory[step.at] = state.epoch[number]
            launch = self.launches[thread.place]
            if launch.kind == "dispatch" and launch.receives and memory[self.memory["failed", thread.rank]] == 0:
                memory[self.memory["used", thread.rank, launch.number]] = 2 + state.epoch[number] % 2
        elif step.act is Act.JOIN and self._in_vain(state, number, step):
            self._go(state, number, self.ends[number])
            return
        self._go(state, number, state.at[number] + 1)

    def _expect_known(self, state: State, number: int) -> None:
        """That the dispatch to which this belongs has left what it found out, or has failed."""
        rank, dispatch = self.threads[number].rank, self.launches[self.threads[number].place].dispatch
        if not state.memory[self.memory["used", rank, dispatch]] and not state.memory[self.memory["failed", rank]]:
            raise BrokenError(
                f"{wording.who(self, number)} reads what dispatch {dispatch} finds out before it has ended"
            )

    def _in_vain(self, state: State, number: int, step: Step) -> bool:
        """Whether the last block out finds its rank poisoned, or a ticket is short of a thread that left early."""
        if self.threads[number].role == "out":
            return state.memory[self.memory["poison", self.threads[number].rank]] != 0
        return any(state.epoch[each] == RETURNED for each in step.of)

    def place(self, state: State, number: int, step: Step) -> int:
        """-1: the user's kernel found counts of 0."""
        epoch = state.epoch[number]
        if step.act is Act.USE:
            epoch = state.memory[self.memory["used", self.threads[number].rank, step.value]]
            if epoch == 0:
                return -1
        return step.at + step.stride * (epoch % 2)

    def _enter(self, state: State, number: int) -> None:
        thread, launch = self.threads[number], self.launches[self.threads[number].place]
        ours = launch.kind in ("dispatch", "combine")
        poison = state.memory[self.memory["poison", thread.rank]]
        if ours and 0 < poison <= thread.place and self.case.fault is not Fault.POISON_UNREAD:
            self._go(state, number, self.ends[number])
            return
        if launch.kind == "combine":
            self._expect_known(state, number)
        if ours and self.case.fault is Fault.BAKED_EPOCH:
            state.epoch[number] = self.case.given_epoch(thread.rank, thread.place)
        elif ours:
            state.epoch[number] = state.memory[self.memory["epoch", thread.rank, launch.kind]] + 1
        self._go(state, number, 1)

    def _fail(self, state: State, number: int, log: Log | None) -> None:
        thread = self.threads[number]
        if log:
            log(f"{wording.who(self, number)}: FAILS, or finds that another has")
        state.memory[self.memory["failed", thread.rank]] = 1
        ends = self.ends[number]
        if self.case.fault is Fault.UNPOISONED:  # the run counts as done
            self._go(state, number, ends - 1 if thread.steps[-1].act is Act.EPOCH else ends)
            return
        poison = self.memory["poison", thread.rank]
        state.memory[poison] = state.memory[poison] or thread.place + 1
        self._go(state, number, ends)
        if number in self.ticketed:
            state.epoch[number] = RETURNED

    def _go(self, state: State, number: int, at: int) -> None:
        state.at[number] = at
        if at < self.ends[number]:
            return
        state.epoch[number] = 0
        rank = self.threads[number].rank
        kernels, oldest = self.kernels[rank], state.memory[self.oldest[rank]]
        while oldest < len(kernels) and all(state.at[each] == self.ends[each] for each in kernels[oldest]):
            oldest += 1
        state.memory[self.oldest[rank]] = oldest
