"""A model of one block of kernels/include/raymoe/rows/pipe.cuh, searched in every order of its steps.

A group is one warp or several: the emulator looks at the order among the threads of a warp. Its first warp also stores.
Loads land in any order, and stores read their stages in any order, at any time. A stage holds, for each input, the turn
that it belongs to, and whether it was loaded or is a result. In a dynamic case the number of a tile stands for its
turn, and the producer ends each group with a number after the last turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum


class PipeFault(Enum):
    NO_EMPTY_WAIT = "the producer does not wait for an empty stage"
    LATE_PARITY = "the producer waits for the phase of this turn, which another turn ends"
    BYTES_OF_ONE = "`full` expects the bytes of one input only"
    NO_FULL_WAIT = "a group does not wait for a full stage"
    NO_STORE_WAIT = "a group gives a stage back before its store has read it"
    OWN_STAGE = "a group gives back the stage of this turn, not of the turn before"
    NEVER_EMPTY = "a group with one stage gives back the stage before, which it does not have"
    ONE_WARP = "`empty` counts the first warp of a group alone"
    EARLY_NUMBER = "the producer leaves a number before the stage is empty"
    LATE_NUMBER = "the producer leaves a number after it has announced the bytes"
    ONE_END = "the producer ends one group alone"
    NO_BARRIER = "the first warp stores before the other warps have written"


@dataclass(frozen=True)
class PipeCase:
    stages: int
    groups: int
    turns: int
    inputs: int = 2
    warps: int = 1
    stores: bool = True
    """Whether results pass through the stage. If not, each warp gives the stage back when it has read it."""
    dynamic: bool = False
    """Whether a number beside the stage tells a group which tile it has, or that it ends."""
    fault: PipeFault | None = None

    @property
    def produced(self) -> int:
        """Return the turns of the producer: those of tiles, and those that end groups."""
        ends = 1 if self.fault is PipeFault.ONE_END else self.groups
        return self.turns + (ends if self.dynamic else 0)

    @property
    def depth(self) -> int:
        return self.stages // self.groups

    @property
    def arrivals(self) -> int:
        """Return how many arrivals complete a phase of `empty`."""
        return 1 if self.fault is PipeFault.ONE_WARP else self.warps


@dataclass(frozen=True)
class Full:
    """A barrier that expects bytes: one unit for each input."""

    phase: int = 0
    missing: int = 1
    bytes: int = 0

    def changed(self, missing: int, nbytes: int) -> Full:
        left, expected = self.missing - missing, self.bytes + nbytes
        return Full(self.phase + 1) if (left, expected) == (0, 0) else Full(self.phase, left, expected)


@dataclass(frozen=True)
class Empty:
    """A barrier that counts arrivals."""

    phase: int
    missing: int

    def arrived(self, arrivals: int) -> Empty:
        return Empty(self.phase + 1, arrivals) if self.missing == 1 else Empty(self.phase, self.missing - 1)


Content = tuple[int, str]
"""A turn, and `in` or `out`."""


@dataclass(frozen=True)
class PipeState:
    full: tuple[Full, ...]
    empty: tuple[Empty, ...]
    content: tuple[tuple[Content, ...], ...]
    """Of each stage, for each input."""
    producer: tuple[int, int] = (0, 0)
    """The turn, and the step within it: wait, expect, then a load for each input."""
    numbers: tuple[int, ...] = ()
    """Of each stage."""
    warps: tuple[tuple[int, str], ...] = ()
    """The turn and the step of each warp, group by group."""
    loads: frozenset[tuple[int, int]] = frozenset()
    """Turns and inputs that are under way."""
    stores: frozenset[int] = frozenset()
    """Turns whose stores have not read their stage."""


class BrokenStepError(Exception):
    """A step that a right protocol never takes."""


@dataclass(frozen=True)
class Explored:
    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def explore_pipe(case: PipeCase) -> Explored:
    """Search every order of steps, and stop at the first that breaks a rule."""
    first = PipeState(
        (Full(),) * case.stages,
        (Empty(0, case.arrivals),) * case.stages,
        (((-1, "in"),) * case.inputs,) * case.stages,
        numbers=(-1,) * case.stages,
        warps=tuple((group, "wait") for group in range(case.groups) for _ in range(case.warps)),
    )
    came: dict[PipeState, tuple[PipeState | None, str]] = {first: (None, "begin")}
    waiting = [first]
    while waiting:
        state = waiting.pop()
        try:
            following = list(_steps(case, state))
        except BrokenStepError as broken:
            return Explored(len(came), str(broken), _trace(came, state))
        if not following and not _is_over(case, state):
            return Explored(len(came), "no step is left before the end", _trace(came, state))
        for said, after in following:
            if after not in came:
                came[after] = (state, said)
                waiting.append(after)
    return Explored(len(came))


def _trace(came: dict[PipeState, tuple[PipeState | None, str]], state: PipeState | None) -> tuple[str, ...]:
    said = []
    while state is not None:
        state, step = came[state]
        said.append(step)
    return tuple(reversed(said))


def _is_over(case: PipeCase, state: PipeState) -> bool:
    ended = all(step == "ended" for _, step in state.warps)
    return ended and state.producer[0] == case.produced and not state.loads and not state.stores


def _steps(case: PipeCase, state: PipeState) -> Iterator[tuple[str, PipeState]]:
    yield from _produce(case, state)
    for number in range(case.groups * case.warps):
        yield from _consume(case, state, number)
    for turn, number in sorted(state.loads):
        yield f"the load of input {number} of turn {turn} lands", _landed(case, state, turn, number)
    for turn in sorted(state.stores):
        _check(state, turn % case.stages, (turn, "out"), f"the store of turn {turn} reads")
        yield f"the store of turn {turn} reads its stage", replace(state, stores=state.stores - {turn})


def _is_past(phase: int, parity: int) -> bool:
    """Return whether a wait for a phase of this parity ends. It compares the parity of the current phase alone."""
    return phase & 1 != parity


def _produce(case: PipeCase, state: PipeState) -> Iterator[tuple[str, PipeState]]:
    turn, step = state.producer
    if turn >= case.produced:
        return
    stage = turn % case.stages
    if step == 0 and case.fault is PipeFault.EARLY_NUMBER and state.numbers[stage] != turn:
        yield f"the producer leaves number {turn}", _numbered(state, stage, turn)
        return
    if step == 0:
        parity = (turn // case.stages - (case.fault is not PipeFault.LATE_PARITY)) & 1
        waits = turn >= case.stages and case.fault is not PipeFault.NO_EMPTY_WAIT
        if not waits or _is_past(state.empty[stage].phase, parity):
            leaves = case.fault is not PipeFault.LATE_NUMBER
            after = _numbered(state, stage, turn) if leaves else state
            yield f"the producer begins turn {turn}", replace(after, producer=(turn, 1))
        return
    if step == 1:
        if state.full[stage].missing == 0:
            raise BrokenStepError(f"turn {turn} arrives at a phase that has its arrival")
        expected = 1 if case.fault is PipeFault.BYTES_OF_ONE else case.inputs if turn < case.turns else 0
        full = _with(state.full, stage, state.full[stage].changed(1, expected))
        after = (turn, 2) if turn < case.turns else (turn + 1, 0)
        yield f"the producer tells the bytes of turn {turn}", replace(state, full=full, producer=after)
        return
    if case.fault is PipeFault.LATE_NUMBER and state.numbers[stage] != turn:
        yield f"the producer leaves number {turn}", _numbered(state, stage, turn)
        return
    loads = state.loads | {(turn, step - 2)}
    after = (turn + 1, 0) if step - 1 == case.inputs else (turn, step + 1)
    yield f"the producer loads input {step - 2} of turn {turn}", replace(state, loads=loads, producer=after)


def _numbered(state: PipeState, stage: int, number: int) -> PipeState:
    return replace(state, numbers=_with(state.numbers, stage, number))


def _landed(case: PipeCase, state: PipeState, turn: int, number: int) -> PipeState:
    stage = turn % case.stages
    content = _with(state.content, stage, _with(state.content[stage], number, (turn, "in")))
    full = _with(state.full, stage, state.full[stage].changed(0, -1))
    return replace(state, content=content, full=full, loads=state.loads - {(turn, number)})


def _consume(case: PipeCase, state: PipeState, number: int) -> Iterator[tuple[str, PipeState]]:
    """The next step of a warp, if it need not wait."""
    turn, step = state.warps[number]
    group, first, stage = number // case.warps, number % case.warps == 0, turn % case.stages
    who = f"warp {number % case.warps} of group {group}"

    def at(new_turn: int, new_step: str, **fields: object) -> PipeState:
        return replace(state, warps=_with(state.warps, number, (new_turn, new_step)), **fields)

    if step == "end" or (step == "wait" and turn >= case.turns and not case.dynamic):
        if not first or not any(each % case.groups == group for each in state.stores):
            yield f"{who} ends", at(turn, "ended")
    elif step == "wait":
        if case.fault is PipeFault.NO_FULL_WAIT or _is_past(state.full[stage].phase, turn // case.stages & 1):
            yield f"{who} finds turn {turn}", at(turn, "number" if case.dynamic else "read")
    elif step == "number":
        if state.numbers[stage] != turn:
            raise BrokenStepError(f"{who} finds number {state.numbers[stage]} at turn {turn}")
        yield f"{who} reads number {turn}", at(turn, "read" if turn < case.turns else "end")
    elif step == "read":
        _check(state, stage, (turn, "in"), f"{who} reads turn {turn}")
        yield f"{who} reads turn {turn}", at(turn, "barrier" if case.stores and first else "arrive")
    elif step == "arrive":
        after = (turn, "barrier") if case.stores else (turn + case.groups, "wait")
        if case.fault is PipeFault.ONE_WARP and not first:
            yield f"{who} leaves turn {turn}", at(*after)
        else:
            yield f"{who} gives back turn {turn}", at(*after, empty=_arrived(case, state, stage))
    elif step == "barrier" and first:
        yield from _store(case, state, group)
    elif step == "give":
        yield from _give(case, state, number)


def _store(case: PipeCase, state: PipeState, group: int) -> Iterator[tuple[str, PipeState]]:
    """The barrier of a group, and the store of its first warp."""
    begin = group * case.warps
    turn, _ = state.warps[begin]
    together = range(begin, begin + case.warps)
    if any(state.warps[each] != (turn, "barrier") for each in together):
        if case.fault is PipeFault.NO_BARRIER:
            raise BrokenStepError(f"the store of turn {turn} begins before the results of all warps")
        return
    warps = state.warps
    for each in together:
        warps = _with(warps, each, (turn, "give") if each == begin else (turn + case.groups, "wait"))
    content = _with(state.content, turn % case.stages, ((turn, "out"),) * case.inputs)
    stored = replace(state, warps=warps, content=content, stores=state.stores | {turn})
    yield f"group {group} stores turn {turn}", stored


def _give(case: PipeCase, state: PipeState, number: int) -> Iterator[tuple[str, PipeState]]:
    """The first warp of a group gives a stage back that its store has read."""
    (turn, _), group = state.warps[number], number // case.warps
    alone = case.depth == 1 and case.fault is not PipeFault.NEVER_EMPTY
    young = set() if alone else {turn}
    older = {each for each in state.stores if each % case.groups == group} - young
    if older and case.fault is not PipeFault.NO_STORE_WAIT:
        return
    given = turn if alone or case.fault is PipeFault.OWN_STAGE else turn - case.groups
    empty = state.empty if given < 0 else _arrived(case, state, given % case.stages)
    warps = _with(state.warps, number, (turn + case.groups, "wait"))
    yield f"group {group} gives back turn {given}", replace(state, warps=warps, empty=empty)


def _arrived(case: PipeCase, state: PipeState, stage: int) -> tuple[Empty, ...]:
    return _with(state.empty, stage, state.empty[stage].arrived(case.arrivals))


def _check(state: PipeState, stage: int, want: Content, who: str) -> None:
    for found in state.content[stage]:
        if found != want:
            raise BrokenStepError(f"{who} and finds {found[1]} of turn {found[0]}")


def _with(items: tuple, place: int, item: object) -> tuple:
    return (*items[:place], item, *items[place + 1 :])
