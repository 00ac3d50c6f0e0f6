"""The effect of one step of one thread on the memory of all ranks."""

from __future__ import annotations

from tests.explorer import wording
from tests.explorer.case import Case
from tests.explorer.fault import Fault
from tests.explorer.memory import KINDS, Memory
from tests.explorer.state import BrokenError, Landing, Log, State
from tests.explorer.steps import EPOCH_FACTOR, MAX_STEPS, OPERATION_MASK, RAIL, REFUSED_BIT, Act, Step
from tests.explorer.threads import threads

RETURNED = 255  # instead of an epoch: the thread has left its kernel before its work was done


class Effects:
    """The threads of a case, the steps that can run, and their effects."""

    def __init__(self, case: Case) -> None:
        self.case, self.memory = case, Memory(case)
        self.threads = threads(case, self.memory)
        self.steps = [thread.steps for thread in self.threads]
        self.ends = [len(steps) for steps in self.steps]
        self.launches = case.launches()
        by_rank: list[list[list[int]]] = [[[] for _ in self.launches] for _ in range(case.ranks)]
        for number, thread in enumerate(self.threads):
            by_rank[thread.rank][thread.launch].append(number)
        self.kernels = [[tuple(each) for each in kernels] for kernels in by_rank]
        self.rails = [
            [number for number, thread in enumerate(self.threads) if thread.role == RAIL and thread.rank == rank]
            for rank in range(case.ranks)
        ]  # in the order of their stream
        if case.fault is Fault.RAIL_UNJOINED:
            for number, thread in enumerate(self.threads):
                if thread.role == RAIL:
                    kernel = self.kernels[thread.rank][thread.launch]
                    self.kernels[thread.rank][thread.launch] = tuple(each for each in kernel if each != number)
        self.joined = {
            number
            for thread in self.threads
            if thread.role not in ("out", RAIL)
            for step in thread.steps
            if step.act is Act.JOIN
            for number in step.operands
        }
        ranks = range(case.ranks)
        self.oldest = [self.memory["oldest", rank] for rank in ranks]  # the first launch that has not ended
        self.poison = [self.memory["poison", rank] for rank in ranks]
        self.failed = [self.memory["failed", rank] for rank in ranks]
        self.at_once = False  # whether words land when they are stored
        self.never_quiet: frozenset[int] = frozenset()  # words that do not

    def step(self, state: State, number: int) -> Step:
        return self.steps[number][state.at[number]]

    def can_run(self, state: State, number: int, step: Step) -> bool:
        act = step.act
        if act is Act.WAIT:
            seen, wanted = state.memory[step.at], self.wanted(state, number, step)
            return seen == wanted if self.case.fault is Fault.EQUAL else seen >= wanted
        if act is Act.DRAIN:
            return not any(
                each.at < self.memory.lines_from
                and each.thread in step.operands
                and each.order % MAX_STEPS < step.value
                for each in state.pending
            )
        if act is Act.JOIN:
            at, ends = state.at, self.ends
            return all(at[each] == ends[each] for each in step.operands)
        if act is Act.POLL_LINES:
            memory, epoch = state.memory, state.epoch[number]
            offset = step.stride * (epoch % 2)
            return all(
                memory[at + offset] // EPOCH_FACTOR % (REFUSED_BIT // EPOCH_FACTOR) == epoch for at in step.operands
            )
        return True

    def run(self, state: State, number: int, step: Step, log: Log | None) -> None:
        if log:
            log(wording.step(self, state, number))
        act, steps = step.act, 1
        if act is Act.ENTER:
            self._enter(state, number)
            return
        if act in (Act.STORE, Act.STORE_WORD, Act.STORE_LINE, Act.COPY):
            self._store(state, number, step)
        elif act in (Act.READ, Act.POLL_LINES):
            steps += self._read(state, number, step)
        elif act is Act.USE:
            self._use(state, number, step)
        elif act is Act.STORE_EPOCH:
            self._store_epoch(state, number, step)
        elif act is Act.COUNT:
            state.memory[step.at] += 1
        elif act is Act.JOIN and self._ends_early(state, number, step):
            steps = MAX_STEPS
        elif act is Act.SKIP_IF_REFUSED and state.memory[self._refusal(number)]:
            steps += step.skips
        elif act is Act.SKIP_IF_ABORTED:
            steps += state.memory[step.at]
        elif act is Act.TAKE_ROW or act is Act.SKIP_UNLESS_TAKEN:
            steps += self._skips_of_row(state, step)
        self._advance(state, number, min(state.at[number] + steps, self.ends[number]))

    def address(self, state: State, number: int, step: Step) -> int:
        """The address of a step. -1: a user's kernel finds counts of 0."""
        epoch = state.epoch[number]
        if step.act is Act.USE:
            epoch = state.memory[self.memory["used", self.threads[number].rank, step.value]]
            if epoch == 0:
                return -1
        return step.at + step.stride * (epoch % 2)

    def wanted(self, state: State, number: int, step: Step) -> int:
        """The value of a word that a step stores or waits for."""
        if step.operands:
            return state.memory[step.operands[0]]
        return step.value + step.scale * state.epoch[number]

    def stored(self, state: State, number: int, step: Step) -> int:
        """The value that a step stores."""
        if step.act is Act.STORE_WORD:
            return self.wanted(state, number, step)
        if step.act is Act.COPY and step.operands:
            return state.memory[step.operands[0]]
        refused = REFUSED_BIT if step.refusal and state.memory[step.refusal] else 0
        return refused | (EPOCH_FACTOR * state.epoch[number] if step.act is Act.STORE_LINE else 0) | step.value

    def fail(self, state: State, number: int, log: Log | None) -> None:
        thread = self.threads[number]
        if thread.role == RAIL:
            self._abort(state, number, log)
            return
        if log:
            log(f"{wording.thread_name(self, number)}: FAILS, or finds that another has")
        state.memory[self.failed[thread.rank]] = 1
        ends = self.ends[number]
        if self.case.fault is Fault.UNPOISONED:  # the run counts as done
            self._advance(state, number, ends - 1 if thread.steps[-1].act is Act.STORE_EPOCH else ends)
            return
        self._poison(state, number)
        self._advance(state, number, ends)
        if number in self.joined:
            state.epoch[number] = RETURNED

    def _abort(self, state: State, number: int, log: Log | None) -> None:
        """Let the host abort a rail, for ever. A dispatch that waits for its rows fails by itself."""
        thread, step = self.threads[number], self.step(state, number)
        if log:
            log(f"{wording.thread_name(self, number)}: is ABORTED")
        word = self.memory["aborted", thread.rank]
        if self.case.fault is Fault.ABORT_BEFORE_WORD and step.at != word:
            if not state.memory[step.at]:
                state.pending.append(Landing(word, thread.launch * MAX_STEPS + state.at[number], 1, number))
        else:
            state.memory[word] = 1
        state.memory[step.at] = 1
        self._advance(state, number, state.at[number] + 1 + step.skips)

    def _refusal(self, number: int) -> int:
        return self.memory["refusal", self.threads[number].rank, self._dispatch_of(number)]

    def _dispatch_of(self, number: int) -> int:
        """The dispatch that the thread's launch belongs to."""
        thread = self.threads[number]
        launch = self.launches[thread.launch]
        return self.case.combined(thread.rank, launch.number) if launch.kind == "combine" else launch.dispatch

    def _poison(self, state: State, number: int) -> None:
        thread = self.threads[number]
        poison = self.poison[thread.rank]
        state.memory[poison] = state.memory[poison] or thread.launch + 1

    def _in_workspace(self, number: int) -> bool:
        """Whether the thread belongs to a kernel that reads the poison."""
        thread = self.threads[number]
        return self.launches[thread.launch].kind in KINDS and thread.role != RAIL

    def _is_poisoned(self, state: State, number: int) -> bool:
        """Whether its rank was poisoned before its kernel began."""
        thread = self.threads[number]
        return 0 < state.memory[self.poison[thread.rank]] <= thread.launch

    def _enter(self, state: State, number: int) -> None:
        thread, launch = self.threads[number], self.launches[self.threads[number].launch]
        if thread.role == RAIL:  # it knows no epoch and no poison
            self._advance(state, number, 1)
            return
        in_workspace = self._in_workspace(number)
        if in_workspace and self._is_poisoned(state, number) and self.case.fault is not Fault.POISON_UNREAD:
            if not state.memory[self.failed[thread.rank]]:
                raise BrokenError(f"{wording.thread_name(self, number)} does nothing, and no wait has failed")
            self._advance(state, number, self.ends[number])
            return
        if launch.kind == "combine":
            self._expect_dispatched(state, number)
        if in_workspace and self.case.fault is Fault.BAKED_EPOCH:
            state.epoch[number] = self.case.host_epoch(thread.rank, thread.launch)
        elif in_workspace:
            state.epoch[number] = state.memory[self.memory["epoch", thread.rank, launch.kind]] + 1
        self._advance(state, number, 1)

    def _store(self, state: State, number: int, step: Step) -> None:
        thread = self.threads[number]
        # A copy cannot be cancelled, and a rail does not know of the poison.
        if self._is_poisoned(state, number) and step.act is not Act.COPY and self._in_workspace(number):
            raise BrokenError(f"rank {thread.rank} stores in an operation that began poisoned")
        at, value = self.address(state, number, step), self.stored(state, number, step)
        if step.act is Act.STORE_WORD and self.at_once and at not in self.never_quiet:
            state.memory[at] = value
        else:
            state.pending.append(Landing(at, thread.launch * MAX_STEPS + state.at[number], value, number))

    def _read(self, state: State, number: int, step: Step) -> int:
        """The number of steps to skip: not 0 where statuses are read, and one of them or this rank refuses the data."""
        memory, offset = state.memory, step.stride * (state.epoch[number] % 2)
        for at in step.operands:
            if memory[at + offset] & OPERATION_MASK != step.value:
                raise BrokenError(f"{wording.step(self, state, number)}; it needs operation {step.value}")
        if not step.statuses or not (self.case.refused or self.case.mixed):
            return 0
        combine = self.launches[self.threads[number].launch].number
        refused = any(memory[at + offset] & REFUSED_BIT for at in step.operands) or self._statuses_differ(number, step)
        refused = refused or (self.case.refused and memory[self._refusal(number)])
        if not refused and self.case.refuses_combine(combine):
            raise BrokenError(f"{wording.thread_name(self, number)} accepts data that a rank refuses")
        if refused and self.case.fault is Fault.REFUSAL_POISONS:
            self._poison(state, number)
        return step.skips if refused else 0

    def _statuses_differ(self, number: int, step: Step) -> bool:
        """Whether one of the statuses names another dispatch than this rank combines."""
        if self.case.fault is Fault.STATUS_UNNUMBERED:
            return False
        combine = self.launches[self.threads[number].launch].number
        combined = {self.case.combined(self.memory.writers[at], combine) for at in step.operands}
        return not combined <= {self._dispatch_of(number)}

    def _skips_of_row(self, state: State, step: Step) -> int:
        """The number of steps to skip: not 0 where another warp has taken the row."""
        if step.act is Act.TAKE_ROW and not state.memory[step.at]:
            state.memory[step.at] = step.value
            return 0
        mine = step.act is Act.SKIP_UNLESS_TAKEN and state.memory[step.at] == step.value
        return 0 if mine else step.skips

    def _use(self, state: State, number: int, step: Step) -> None:
        at = self.address(state, number, step)
        if at < 0:
            self._expect_dispatched(state, number)
        elif state.memory[at] != step.value:
            raise BrokenError(f"{wording.step(self, state, number)}; it needs operation {step.value}")

    def _store_epoch(self, state: State, number: int, step: Step) -> None:
        thread, memory = self.threads[number], state.memory
        launch = self.launches[thread.launch]
        memory[step.at] = state.epoch[number]
        for at in self.memory.taken(thread.rank, launch.kind):
            memory[at] = MAX_STEPS if self.case.fault is Fault.TAKEN_KEPT else 0  # MAX_STEPS: no warp has this number
        if launch.kind == "dispatch" and launch.receives and memory[self.failed[thread.rank]] == 0:
            memory[self.memory["used", thread.rank, launch.number]] = 2 + state.epoch[number] % 2
            if self.case.refuses(launch.number, thread.rank):
                memory[self._refusal(number)] = 1

    def _expect_dispatched(self, state: State, number: int) -> None:
        """Raise unless the dispatch that this belongs to has stored its results, or has failed."""
        rank = self.threads[number].rank
        dispatch = self._dispatch_of(number)
        if not state.memory[self.memory["used", rank, dispatch]] and not state.memory[self.failed[rank]]:
            raise BrokenError(
                f"{wording.thread_name(self, number)} reads the results of dispatch {dispatch} before it has ended"
            )

    def _ends_early(self, state: State, number: int, step: Step) -> bool:
        """Whether the last block out finds its rank poisoned, or a thread has left without taking its ticket."""
        if self.threads[number].role == "out":
            return state.memory[self.poison[self.threads[number].rank]] != 0
        return any(state.epoch[each] == RETURNED for each in step.operands)

    def _advance(self, state: State, number: int, at: int) -> None:
        state.at[number] = at
        if at < self.ends[number]:
            return
        state.epoch[number] = 0
        rank = self.threads[number].rank
        kernels, oldest = self.kernels[rank], state.memory[self.oldest[rank]]
        while oldest < len(kernels) and all(state.at[each] == self.ends[each] for each in kernels[oldest]):
            oldest += 1
        state.memory[self.oldest[rank]] = oldest
