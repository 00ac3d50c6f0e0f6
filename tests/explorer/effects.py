"""What one step of one thread does to the memory of all ranks."""

from __future__ import annotations

from tests.explorer import wording
from tests.explorer.case import Case
from tests.explorer.fault import Fault
from tests.explorer.memory import KINDS, Memory
from tests.explorer.state import BrokenError, Landing, Log, State
from tests.explorer.steps import EPOCHS, EVER, OF, REFUSED, Act, Step
from tests.explorer.threads import threads

RETURNED = 255  # in place of an epoch: the thread has left its kernel before its work was done


class Effects:
    """The threads of a case, what they may do, and what comes of it."""

    def __init__(self, case: Case) -> None:
        self.case, self.memory = case, Memory(case)
        self.threads = threads(case, self.memory)
        self.steps = [thread.steps for thread in self.threads]
        self.ends = [len(steps) for steps in self.steps]
        self.launches = case.launches()
        places: list[list[list[int]]] = [[[] for _ in self.launches] for _ in range(case.ranks)]
        for number, thread in enumerate(self.threads):
            places[thread.rank][thread.place].append(number)
        self.kernels = [[tuple(each) for each in kernels] for kernels in places]
        self.ticketed = {
            number
            for thread in self.threads
            if thread.role != "out"
            for step in thread.steps
            if step.act is Act.JOIN
            for number in step.of
        }
        ranks = range(case.ranks)
        self.oldest = [self.memory["oldest", rank] for rank in ranks]  # launch in the program that has not ended
        self.poison = [self.memory["poison", rank] for rank in ranks]
        self.failed = [self.memory["failed", rank] for rank in ranks]
        self.at_once = False  # whether words land as they set out

    def step(self, state: State, number: int) -> Step:
        return self.steps[number][state.at[number]]

    def can(self, state: State, number: int, step: Step) -> bool:
        act = step.act
        if act is Act.WAIT:
            seen, wanted = state.memory[step.at], step.value + step.scale * state.epoch[number]
            return seen == wanted if self.case.fault is Fault.EQUAL else seen >= wanted
        if act is Act.DRAIN:
            return not any(
                each.at < self.memory.lines_from and each.thread in step.of and each.order % EVER < step.value
                for each in state.pending
            )
        if act is Act.JOIN:
            at, ends = state.at, self.ends
            return all(at[each] == ends[each] for each in step.of)
        if act is Act.LOOK:
            memory, epoch = state.memory, state.epoch[number]
            behind = step.stride * (epoch % 2)
            return all(memory[at + behind] // EPOCHS % (REFUSED // EPOCHS) == epoch for at in step.of)
        return True

    def do(self, state: State, number: int, step: Step, log: Log | None) -> None:
        if log:
            log(wording.step(self, state, number))
        act, on = step.act, 1
        if act is Act.ENTER:
            self._enter(state, number)
            return
        if act in (Act.STORE, Act.WORD, Act.LINE, Act.COPY):
            self._store(state, number, step)
        elif act in (Act.READ, Act.LOOK):
            on += self._read(state, number, step)
        elif act is Act.USE:
            self._use(state, number, step)
        elif act is Act.EPOCH:
            self._store_epoch(state, number, step)
        elif act is Act.JOIN and self._in_vain(state, number, step):
            on = EVER
        elif act is Act.ABSTAIN and state.memory[self._refusal(number)]:
            on += step.skips
        elif act is Act.TAKE or act is Act.HOLD:
            on += self._take(state, step)
        self._go(state, number, min(state.at[number] + on, self.ends[number]))

    def place(self, state: State, number: int, step: Step) -> int:
        """-1: the user's kernel found counts of 0."""
        epoch = state.epoch[number]
        if step.act is Act.USE:
            epoch = state.memory[self.memory["used", self.threads[number].rank, step.value]]
            if epoch == 0:
                return -1
        return step.at + step.stride * (epoch % 2)

    def stored(self, state: State, number: int, step: Step) -> int:
        """What a step stores."""
        if step.act is Act.WORD:
            return step.value + step.scale * state.epoch[number]
        if step.act is Act.COPY and step.of:
            return state.memory[step.of[0]]
        refused = REFUSED if step.says and state.memory[step.says] else 0
        return refused | (EPOCHS * state.epoch[number] if step.act is Act.LINE else 0) | step.value

    def fail(self, state: State, number: int, log: Log | None) -> None:
        thread = self.threads[number]
        if log:
            log(f"{wording.who(self, number)}: FAILS, or finds that another has")
        state.memory[self.failed[thread.rank]] = 1
        ends = self.ends[number]
        if self.case.fault is Fault.UNPOISONED:  # the run counts as done
            self._go(state, number, ends - 1 if thread.steps[-1].act is Act.EPOCH else ends)
            return
        self._poison(state, number)
        self._go(state, number, ends)
        if number in self.ticketed:
            state.epoch[number] = RETURNED

    def _refusal(self, number: int) -> int:
        return self.memory["refusal", self.threads[number].rank, self._dispatch(number)]

    def _dispatch(self, number: int) -> int:
        """To which the thread's launch belongs."""
        thread = self.threads[number]
        launch = self.launches[thread.place]
        return self.case.combined(thread.rank, launch.number) if launch.kind == "combine" else launch.dispatch

    def _poison(self, state: State, number: int) -> None:
        thread = self.threads[number]
        poison = self.poison[thread.rank]
        state.memory[poison] = state.memory[poison] or thread.place + 1

    def _is_poisoned(self, state: State, number: int) -> bool:
        """Since before its kernel began."""
        thread = self.threads[number]
        return 0 < state.memory[self.poison[thread.rank]] <= thread.place

    def _enter(self, state: State, number: int) -> None:
        thread, launch = self.threads[number], self.launches[self.threads[number].place]
        ours = launch.kind in KINDS
        if ours and self._is_poisoned(state, number) and self.case.fault is not Fault.POISON_UNREAD:
            if not state.memory[self.failed[thread.rank]]:
                raise BrokenError(f"{wording.who(self, number)} does nothing, and no wait has failed")
            self._go(state, number, self.ends[number])
            return
        if launch.kind == "combine":
            self._expect_known(state, number)
        if ours and self.case.fault is Fault.BAKED_EPOCH:
            state.epoch[number] = self.case.given_epoch(thread.rank, thread.place)
        elif ours:
            state.epoch[number] = state.memory[self.memory["epoch", thread.rank, launch.kind]] + 1
        self._go(state, number, 1)

    def _store(self, state: State, number: int, step: Step) -> None:
        thread = self.threads[number]
        if self._is_poisoned(state, number) and step.act is not Act.COPY:  # nobody can call a copy back
            raise BrokenError(f"rank {thread.rank} stores in an operation that began poisoned")
        at, value = self.place(state, number, step), self.stored(state, number, step)
        if step.act is Act.WORD and self.at_once:
            state.memory[at] = value
        else:
            state.pending.append(Landing(at, thread.place * EVER + state.at[number], value, number))

    def _read(self, state: State, number: int, step: Step) -> int:
        """How many steps to leave out: where statuses are read and one of them, or this rank, refuses the data."""
        memory, behind = state.memory, step.stride * (state.epoch[number] % 2)
        for at in step.of:
            if memory[at + behind] & OF != step.value:
                raise BrokenError(f"{wording.step(self, state, number)}; it wants that of {step.value}")
        if not step.heeds or not (self.case.refused or self.case.mixed):
            return 0
        combine = self.launches[self.threads[number].place].number
        refused = any(memory[at + behind] & REFUSED for at in step.of) or self._is_unlike(number, step)
        refused = refused or (self.case.refused and memory[self._refusal(number)])
        if not refused and self.case.refuses_combine(combine):
            raise BrokenError(f"{wording.who(self, number)} takes for good what a rank refuses")
        if refused and self.case.fault is Fault.REFUSAL_POISONS:
            self._poison(state, number)
        return step.skips if refused else 0

    def _is_unlike(self, number: int, step: Step) -> bool:
        """Whether one of the statuses that are read names another dispatch than this rank combines."""
        if self.case.fault is Fault.STATUS_UNNUMBERED:
            return False
        combine = self.launches[self.threads[number].place].number
        said = {self.case.combined(self.memory.writers[at], combine) for at in step.of}
        return not said <= {self._dispatch(number)}

    def _take(self, state: State, step: Step) -> int:
        """How many steps to leave out: where another lane has taken the row."""
        if step.act is Act.TAKE and not state.memory[step.at]:
            state.memory[step.at] = step.value
            return 0
        mine = step.act is Act.HOLD and state.memory[step.at] == step.value
        return 0 if mine else step.skips

    def _use(self, state: State, number: int, step: Step) -> None:
        at = self.place(state, number, step)
        if at < 0:
            self._expect_known(state, number)
        elif state.memory[at] != step.value:
            raise BrokenError(f"{wording.step(self, state, number)}; it wants that of {step.value}")

    def _store_epoch(self, state: State, number: int, step: Step) -> None:
        thread, memory = self.threads[number], state.memory
        launch = self.launches[thread.place]
        memory[step.at] = state.epoch[number]
        for at in self.memory.taken(thread.rank, launch.kind):
            memory[at] = EVER if self.case.fault is Fault.TAKEN_KEPT else 0  # EVER: by a lane that is gone
        if launch.kind == "dispatch" and launch.receives and memory[self.failed[thread.rank]] == 0:
            memory[self.memory["used", thread.rank, launch.number]] = 2 + state.epoch[number] % 2
            if self.case.refuses(launch.number, thread.rank):
                memory[self._refusal(number)] = 1

    def _expect_known(self, state: State, number: int) -> None:
        """That the dispatch to which this belongs has left what it found out, or has failed."""
        rank = self.threads[number].rank
        dispatch = self._dispatch(number)
        if not state.memory[self.memory["used", rank, dispatch]] and not state.memory[self.failed[rank]]:
            raise BrokenError(
                f"{wording.who(self, number)} reads what dispatch {dispatch} finds out before it has ended"
            )

    def _in_vain(self, state: State, number: int, step: Step) -> bool:
        """Whether the last block out finds its rank poisoned, or a ticket is short of a thread that left early."""
        if self.threads[number].role == "out":
            return state.memory[self.poison[self.threads[number].rank]] != 0
        return any(state.epoch[each] == RETURNED for each in step.of)

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
