"""Decide what to do when something happens to the gang: `decide(state, event, now) -> (state, actions)`.

These are pure functions: `driver.py` reports events and carries out actions. A generation ends with a verdict. Only the
loss of a process lets the next generation start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

ABORT_ANSWER_S = 1.5  # for ranks to report after an abort, before they are killed


class Phase(Enum):
    """The phase of a gang."""

    PLACING = "placing"  # Ray was asked for the resources of all ranks; nothing runs yet.
    STARTING = "starting"  # Actors are created, report their locations and open their memory.
    WIRING = "wiring"  # Every rank gets all descriptors, maps its peers and proves the mappings.
    RUNNING = "running"  # Every rank is inside its one long run().
    ENDING = "ending"  # A failure or a stop: waits are aborted, and ranks may report for ABORT_ANSWER_S.
    CLEARING = "clearing"  # Processes are being ended; the next generation starts when they are gone.
    OVER = "over"  # Nothing is left to do.


WITH_RANKS = (Phase.STARTING, Phase.WIRING, Phase.RUNNING, Phase.ENDING)


@dataclass(frozen=True)
class Failure:
    """The error that a rank reports. `peer` is the rank that it waited for, if it waited.

    `lines` are the result lines of the case that it stopped in, with the samples so far.
    """

    kind: str
    exit_code: int
    message: str
    peer: int | None = None
    traceback: str | None = None
    lines: tuple[dict[str, object], ...] = ()

    @property
    def may_be_consequence(self) -> bool:
        """Return whether another rank may be the cause: a peer did not come, or its memory could not be mapped."""
        return self.kind in ("PeerTimeout", "Aborted", "WiringError")


@dataclass(frozen=True)
class Verdict:
    """The reason that a generation ended."""

    exit_code: int
    message: str
    cause: str = "done"
    culprit: int | None = None
    restartable: bool = False
    traceback: str | None = None


@dataclass(frozen=True)
class State:
    """The state of the gang. `failures` are those reported in this generation, `done` the ranks that finished."""

    ranks: int
    restarts_left: int
    phase: Phase = Phase.PLACING
    generation: int = 0
    failures: Mapping[int, Failure] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()  # ranks that died or do not answer
    verdict: Verdict | None = None  # None in ENDING: `blame` finds it when the failures are in
    ends_at: float = 0.0  # when ENDING stops waiting for reports

    @property
    def final(self) -> bool:
        """Return whether the verdict is that of the whole run: no other generation follows."""
        return self.verdict is not None and (not self.verdict.restartable or self.restarts_left == 0)

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that are not gone and reported neither a result nor a failure in this generation."""
        return frozenset(range(self.ranks)) - self.done - self.failures.keys() - self.gone


# Events, which the driver reports.


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
class NodeLost:
    """A rank whose node is gone, and with it all ranks there. Nothing can be asked of them any more."""

    rank: int
    message: str


@dataclass(frozen=True)
class RayLost:
    """Ray itself is gone: a server of the run's own Ray, or the raylet of the driver's node."""

    message: str


@dataclass(frozen=True)
class NotAnswering:
    """A rank whose process runs but does not answer. `exit_code`: 3 if no rank has answered so far, else 5."""

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


Event = (
    Placed
    | Unplaceable
    | Started
    | Wired
    | Finished
    | Failed
    | Lost
    | NodeLost
    | RayLost
    | NotAnswering
    | StopAsked
    | Tick
    | Cleared
)


# Actions, which the driver carries out.


class Action(Enum):
    START = "start"  # create the actors of state.generation
    WIRE = "wire"  # give every rank all descriptors; each maps its peers and proves the mappings
    RUN = "run"  # start the one long run() of every rank, from the first unfinished case
    ABORT = "abort"  # ask every rank to stop waiting
    CLOSE = "close"  # all cases are done: ranks unmap and free in order
    KILL = "kill"  # end every process of the generation, also those stopped by SIGSTOP


Decision = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event, now: float) -> Decision:
    """Return the next state and the actions to carry out.

    An event that means nothing in a phase, such as a late reply, leaves the state as it is.

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
            verdict = Verdict(128 + signum, f"stopped by {name}; finished cases are kept", "stopped")
            if state.phase is Phase.PLACING:
                return replace(state, phase=Phase.OVER, verdict=verdict), ()
            if state.phase is Phase.CLEARING:
                return (state if state.final else replace(state, verdict=verdict)), ()
            return _end(state, verdict, now)
        case RayLost(message):  # nothing can be asked of a rank any more
            verdict = _unless_known(state, Verdict(3, message, "RayLost"))
            return replace(state, phase=Phase.OVER, verdict=verdict), ()
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
        case NodeLost(rank, message) if state.phase in WITH_RANKS:
            verdict = _unless_known(state, Verdict(4, message, "NodeLost", rank, restartable=True))
            return replace(state, phase=Phase.CLEARING, verdict=verdict), (Action.KILL,)
        case Finished(rank) | Failed(rank) | Lost(rank) | NotAnswering(rank) if state.phase in WITH_RANKS:
            return _on_rank_event(state, rank, event, now)
        case Tick() if state.phase is Phase.ENDING and now >= state.ends_at:
            return _clear(state)
    return state, ()


def _unless_known(state: State, verdict: Verdict) -> Verdict:
    """Return the state's verdict, or `verdict` if there is none or it is a loss, which this one explains."""
    return verdict if state.verdict is None or state.verdict.restartable else state.verdict


def _on_rank_event(state: State, rank: int, event: Event, now: float) -> Decision:
    """Note the event of a rank; then go on, end the generation, or wait for more reports."""
    verdict: Verdict | None = None
    match event:
        case Finished():
            state = replace(state, done=state.done | {rank})
        case Failed(_, failure):
            state = replace(state, failures={**state.failures, rank: failure})
            if not failure.may_be_consequence:
                verdict = Verdict(failure.exit_code, failure.message, failure.kind, rank, traceback=failure.traceback)
        case Lost(_, message):
            state = replace(state, gone=state.gone | {rank})
            verdict = Verdict(4, message, "RankDied", rank, restartable=True)
        case NotAnswering(_, message, exit_code):
            state = replace(state, gone=state.gone | {rank})
            verdict = Verdict(exit_code, message, "NotAnswering", rank)

    if state.phase is not Phase.ENDING:
        if isinstance(event, Finished):
            if len(state.done) < state.ranks:
                return state, ()
            return replace(state, phase=Phase.CLEARING, verdict=Verdict(0, "done")), (Action.CLOSE, Action.KILL)
        return _end(state, verdict, now)
    if state.verdict is None and verdict is not None:  # the cause of the failures so far
        state = replace(state, verdict=verdict)
    return (state, ()) if state.silent else _clear(state)


def _end(state: State, verdict: Verdict | None, now: float) -> Decision:
    """Begin to end a generation. If `verdict` is None, `blame` finds it when the failures are in."""
    ends_at = state.ends_at if state.phase is Phase.ENDING else now + ABORT_ANSWER_S
    state = replace(state, phase=Phase.ENDING, verdict=verdict, ends_at=ends_at)
    if not state.silent:
        return _clear(state)
    return state, (Action.ABORT,)


def _clear(state: State) -> Decision:
    verdict = state.verdict or blame(state)
    return replace(state, phase=Phase.CLEARING, verdict=verdict), (Action.KILL,)


def reason_to_stop(state: State) -> str:
    """Say why the ranks of a generation are stopped, for their logs.

    >>> waits = {0: Failure("PeerTimeout", 5, "rank 0 waited 2.0 s for rank 1", peer=1)}
    >>> reason_to_stop(State(ranks=2, restarts_left=1, failures=waits))
    'the gang is being stopped: rank 0 waited 2.0 s for rank 1'
    >>> reason_to_stop(State(ranks=2, restarts_left=1))
    'the gang is being stopped'
    """
    said = ""
    if state.verdict is not None:
        said = state.verdict.message
    elif state.failures:
        said = _first_failure(state)[1].message
    first_line = said.partition("\n")[0]
    return f"the gang is being stopped: {first_line}" if first_line else "the gang is being stopped"


def _first_failure(state: State) -> tuple[int, Failure]:
    """Return a failure that is no consequence of another rank's, if there is one, and its rank."""
    return min(state.failures.items(), key=lambda item: (item[1].kind == "Aborted", item[0]))


def blame(state: State) -> Verdict:
    """Find the culprit where every failure may be a consequence: a rank that others waited for and that did not report.

    >>> waits = {0: Failure("PeerTimeout", 5, "rank 0 waited 2.0 s for rank 2", peer=2),
    ...          1: Failure("Aborted", 1, "told to stop", peer=0)}
    >>> blame(State(ranks=3, restarts_left=1, failures=waits)).culprit
    2

    If every rank reported, one was late. The chain of waits leads to it: the rank that waited for no other.

    >>> waits[2] = Failure("Aborted", 1, "told to stop", peer=None)
    >>> blame(State(ranks=3, restarts_left=1, failures=waits)).culprit
    2
    """
    rank, first = _first_failure(state)
    if first.kind == "WiringError":
        return Verdict(first.exit_code, first.message, first.kind, rank)
    awaited = [failure.peer for failure in state.failures.values() if failure.peer is not None]
    culprits = [peer for peer in awaited if peer in state.silent or peer in state.gone]
    if culprits:
        culprit = max(sorted(set(culprits)), key=culprits.count)
    else:
        culprit = rank
        for _ in range(state.ranks):
            failure = state.failures.get(culprit)
            if failure is None or failure.peer is None:
                break
            culprit = failure.peer
    return Verdict(5, f"{first.message}; the culprit is rank {culprit}", "PeerTimeout", culprit)


def _next_generation(state: State) -> Decision:
    if state.verdict is None or state.final:
        return replace(state, phase=Phase.OVER), ()
    fresh = State(state.ranks, state.restarts_left - 1, Phase.STARTING, state.generation + 1)
    return fresh, (Action.START,)
