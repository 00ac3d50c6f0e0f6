"""Visit every state that a case can reach, breadth first, so that the trace of a failure is a shortest one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from tests.explorer.case import Case
from tests.explorer.machine import Machine
from tests.explorer.state import BrokenError, Key, Log, State


@dataclass(frozen=True)
class Found:
    """The result of an exploration; `broken` is empty if the protocol held in every state."""

    states: int
    endings: frozenset[Key]  # all final states
    most_ahead: int  # the most launches that one rank was ahead of another
    broken: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.broken:
            return f"{self.states} states, {len(self.endings)} endings: the protocol holds"
        steps = (f"{number:4} {line}" for number, line in enumerate(self.trace, start=1))
        return "\n".join([*steps, f"=> {self.broken}"])


class TooManyStatesError(Exception):
    """The case has more states than the caller allows."""


def explore(case: Case, *, reduced: bool = True, deep: bool = False, limit: int = 1_000_000) -> Found:
    """Explore every interleaving of a case; without `reduced`, also those that differ only in quiet steps.

    `deep`: depth first, which finds a fault sooner, with a longer trace.
    """
    machine = Machine(case, reduced)
    first = machine.start()
    parents: dict[Key, Key | None] = {first.key(): None}
    waiting = deque(parents)
    endings: set[Key] = set()
    most_ahead = 0
    shuffle = Random(0)
    while waiting:
        key = waiting.pop() if deep else waiting.popleft()
        state = State(key)
        most_ahead = max(most_ahead, machine.launches_ahead(state))
        actions = machine.actions(state)
        if not actions:
            if not machine.ended(state) and not case.timeouts:
                broken = "no thread can go on; " + "; ".join(machine.stuck(state))
                return Found(len(parents), frozenset(endings), most_ahead, broken, _trace(machine, parents, key))
            if machine.ended(state):
                endings.add(key)
        numbers = list(range(len(actions)))
        if deep:
            shuffle.shuffle(numbers)
        for number in numbers:
            action, after = actions[number], State(key)
            try:
                machine.apply(after, action)
            except BrokenError as why:
                trace = _trace(machine, parents, key)
                last = _lines(machine, key, number)
                return Found(len(parents), frozenset(endings), most_ahead, str(why), (*trace, *last))
            reached = after.key()
            if reached not in parents:
                parents[reached] = key
                waiting.append(reached)
        if len(parents) > limit:
            raise TooManyStatesError(f"more than {limit} states; fewer ranks, launches or tokens, or a higher limit")
    return Found(len(parents), frozenset(endings), most_ahead)


def _trace(machine: Machine, parents: dict[Key, Key | None], key: Key) -> tuple[str, ...]:
    """The trace that leads to `key`: the steps are run again, with a log."""
    path = [key]
    while (before := parents[path[-1]]) is not None:
        path.append(before)
    path.reverse()
    lines: list[str] = []
    machine.start(lines.append)
    for before, after in pairwise(path):
        for number in range(len(machine.actions(State(before)))):
            step, reached = _again(machine, before, number)
            if reached == after:
                lines += step
                break
    return tuple(lines)


def _again(machine: Machine, key: Key, number: int) -> tuple[list[str], Key | None]:
    lines: list[str] = []
    state = State(key)
    log: Log = lines.append
    try:
        machine.apply(state, machine.actions(state)[number], log)
    except BrokenError:
        return lines, None
    return lines, state.key()


def _lines(machine: Machine, key: Key, number: int) -> list[str]:
    return _again(machine, key, number)[0]
