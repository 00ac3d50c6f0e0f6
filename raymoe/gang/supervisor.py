"""What the driver decides when something happens to the gang: `decide(state, event, now) -> (state, actions)`.

No Ray, no clock, no process in here: `driver.py` turns what it sees into events and carries the actions out. A
generation ends with a verdict; only the loss of a process lets the next generation start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

LAST_WORDS_S = 1.5  # how long ranks may take to answer an abort before they are killed


class Phase(Enum):
    """Where the gang is."""

    PLACING = "placing"  # Ray was asked for one bundle a rank, all on one node; nothing runs yet.
    STARTING = "starting"  # Actors are being created; each tells its node, its GPUs and its process.
    WIRING = "wiring"  # Descriptors are swapped, every rank maps its peers and proves them.
    RUNNING = "running"  # Every rank is inside its one long run().
    ENDING = "ending"  # Something happened: waits were aborted, last words are collected for a short while.
    CLEARING = "clearing"  # Ranks are being ended; the next generation waits until their processes are gone.
    OVER = "over"  # Nothing is left to do.


WITH_RANKS = (Phase.STARTING, Phase.WIRING, Phase.RUNNING, Phase.ENDING)


@dataclass(frozen=True)
class Failure:
    """Why a rank's call ended badly, in its own words. `peer` is the rank it was waiting for, where it waited."""

    kind: str
    exit_code: int
    message: str
    peer: int | None = None
    traceback: str | None = None

    @property
    def may_follow(self) -> bool:
        """True where it may be a mere consequence: a peer did not come, or its memory could not be mapped."""
        return self.kind in ("PeerTimeout", "Aborted", "WiringError")


@dataclass(frozen=True)
class Verdict:
    """Why a generation ended."""

    exit_code: int
    message: str
    cause: str = "done"
    culprit: int | None = None
    restartable: bool = False
    traceback: str | None = None


@dataclass(frozen=True)
class State:
    """What a decision rests on. `words` are the failures heard this generation, `done` the ranks that finished."""

    ranks: int
    restarts_left: int
    phase: Phase = Phase.PLACING
    generation: int = 0
    words: Mapping[int, Failure] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()  # ranks without a process, or that answer nothing
    verdict: Verdict | None = None  # None in ENDING: it follows from `words` once they are in
    until: float = 0.0  # when ENDING stops waiting for last words

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that said nothing in this generation: neither a result nor a failure."""
        return frozenset(range(self.ranks)) - self.done - self.words.keys() - self.gone


# Events: what the driver saw.


@dataclass(frozen=True)
class Placed: ...


@dataclass(frozen=True)
class Unplaceable:
    message: str


@dataclass(frozen=True)
class Started: ...


@dataclass(frozen=True)
class Wired: ...


@dataclass(frozen=True)
class Finished:
    rank: int


@dataclass(frozen=True)
class Failed:
    rank: int
    failure: Failure


@dataclass(frozen=True)
class Lost:
    rank: int
    message: str


@dataclass(frozen=True)
class Mute:
    """A rank whose process lives but that answers nothing; `exit_code` 3 before it ever ran, 5 after."""

    rank: int
    message: str
    exit_code: int


@dataclass(frozen=True)
class StopAsked:
    signum: int
    name: str


@dataclass(frozen=True)
class Tick: ...


@dataclass(frozen=True)
class Cleared: ...


Event = Placed | Unplaceable | Started | Wired | Finished | Failed | Lost | Mute | StopAsked | Tick | Cleared


# Actions: what the driver does next.


class Action(Enum):
    START = "start"  # create the actors of state.generation
    WIRE = "wire"  # swap descriptors, map, prove
    RUN = "run"  # one long run() a rank, from the first unfinished case
    ABORT = "abort"  # tell every rank that can hear it to stop waiting
    CLOSE = "close"  # all is done: ranks unmap, free and leave in order
    KILL = "kill"  # end every process of the generation, stopped ones by force


Decision = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event, now: float) -> Decision:
    """The whole policy. Events that mean nothing in a phase leave the state as it is (a late reply, for one).

    >>> state = State(ranks=2, restarts_left=1, phase=Phase.RUNNING)
    >>> state, actions = decide(state, Lost(1, "rank 1 was killed"), now=10.0)
    >>> state.phase, [a.value for a in actions], state.verdict.culprit
    (<Phase.ENDING: 'ending'>, ['abort'], 1)
    >>> state, actions = decide(state, Failed(0, Failure("Aborted", 1, "told to stop", peer=1)), now=10.1)
    >>> state.phase, [a.value for a in actions]
    (<Phase.CLEARING: 'clearing'>, ['kill'])
    >>> state, actions = decide(state, Cleared(), now=10.2)
    >>> state.phase, state.generation, [a.value for a in actions]
    (<Phase.STARTING: 'starting'>, 1, ['start'])
    """
    if state.phase is Phase.OVER:
        return state, ()
    match event:
        case StopAsked(signum, name):
            verdict = Verdict(128 + signum, f"stopped by {name}; what was finished is kept", "stopped")
            if state.phase is Phase.PLACING:
                return replace(state, phase=Phase.OVER, verdict=verdict), ()
            if state.phase is Phase.CLEARING:
                return replace(state, verdict=verdict), ()
            return _end(state, verdict, now)
        case Unplaceable(message) if state.phase is Phase.PLACING:
            return replace(state, phase=Phase.OVER, verdict=Verdict(3, message, "unplaceable")), ()
        case Placed() if state.phase is Phase.PLACING:
            return replace(state, phase=Phase.STARTING), (Action.START,)
        case Started() if state.phase is Phase.STARTING:
            return replace(state, phase=Phase.WIRING), (Action.WIRE,)
        case Wired() if state.phase is Phase.WIRING:
            return replace(state, phase=Phase.RUNNING), (Action.RUN,)
        case Cleared() if state.phase is Phase.CLEARING:
            return _next_generation(state)
        case Finished(rank) | Failed(rank) | Lost(rank) | Mute(rank) if state.phase in WITH_RANKS:
            return _heard(state, rank, event, now)
        case Tick() if state.phase is Phase.ENDING and now >= state.until:
            return _clear(state)
    return state, ()


def _heard(state: State, rank: int, event: Event, now: float) -> Decision:
    """News of one rank: note it, then end the generation, or go on collecting last words."""
    verdict: Verdict | None = None
    match event:
        case Finished():
            state = replace(state, done=state.done | {rank})
        case Failed(_, failure):
            state = replace(state, words={**state.words, rank: failure})
            if not failure.may_follow:
                verdict = Verdict(failure.exit_code, failure.message, failure.kind, rank, traceback=failure.traceback)
        case Lost(_, message):
            state = replace(state, gone=state.gone | {rank})
            verdict = Verdict(4, message, "RankDied", rank, restartable=True)
        case Mute(_, message, exit_code):
            state = replace(state, gone=state.gone | {rank})
            verdict = Verdict(exit_code, message, "NotAnswering", rank)

    if state.phase is not Phase.ENDING:
        if isinstance(event, Finished):
            if len(state.done) < state.ranks:
                return state, ()
            return replace(state, phase=Phase.CLEARING, verdict=Verdict(0, "done")), (Action.CLOSE, Action.KILL)
        return _end(state, verdict, now)
    if state.verdict is None and verdict is not None:  # a cause has turned up for those who only waited
        state = replace(state, verdict=verdict)
    return (state, ()) if state.silent else _clear(state)


def _end(state: State, verdict: Verdict | None, now: float) -> Decision:
    """Begin to end a generation. A verdict of None is found when the last words are in."""
    until = state.until if state.phase is Phase.ENDING else now + LAST_WORDS_S
    state = replace(state, phase=Phase.ENDING, verdict=verdict, until=until)
    if not state.silent:
        return _clear(state)
    return state, (Action.ABORT,)


def _clear(state: State) -> Decision:
    verdict = state.verdict or blame(state)
    return replace(state, phase=Phase.CLEARING, verdict=verdict), (Action.KILL,)


def blame(state: State) -> Verdict:
    """All failures may be consequences: name the rank that was waited for and that said nothing itself.

    >>> waits = {0: Failure("PeerTimeout", 5, "rank 0 waited 2.0 s for rank 2", peer=2),
    ...          1: Failure("Aborted", 1, "told to stop", peer=0)}
    >>> blame(State(ranks=3, restarts_left=1, words=waits)).culprit
    2

    Where every rank spoke (one was late, not gone), the chain of waits is followed to the rank that waits for nobody.

    >>> waits[2] = Failure("Aborted", 1, "told to stop", peer=None)
    >>> blame(State(ranks=3, restarts_left=1, words=waits)).culprit
    2
    """
    rank, first = min(state.words.items(), key=lambda item: (item[1].kind == "Aborted", item[0]))
    if first.kind == "WiringError":
        return Verdict(first.exit_code, first.message, first.kind, rank)
    awaited = [word.peer for word in state.words.values() if word.peer is not None]
    culprits = [peer for peer in awaited if peer in state.silent or peer in state.gone]
    if culprits:
        culprit = max(sorted(set(culprits)), key=culprits.count)
    else:
        culprit = rank
        for _ in range(state.ranks):
            word = state.words.get(culprit)
            if word is None or word.peer is None:
                break
            culprit = word.peer
    return Verdict(5, f"{first.message}; the culprit is rank {culprit}", "PeerTimeout", culprit)


def _next_generation(state: State) -> Decision:
    verdict = state.verdict
    if verdict is None or not verdict.restartable or state.restarts_left == 0:
        return replace(state, phase=Phase.OVER), ()
    fresh = State(state.ranks, state.restarts_left - 1, Phase.STARTING, state.generation + 1)
    return fresh, (Action.START,)
