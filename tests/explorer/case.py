"""What the ranks run in one exploration, and which bug is planted in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

Routing = tuple[tuple[tuple[int, ...], ...], ...]
"""`routing[source][token]`: the other ranks that hold an expert of the token."""


def full(ranks: int, tokens: int = 1) -> Routing:
    """Every token goes to every other rank.

    >>> full(3)
    (((1, 2),), ((0, 2),), ((0, 1),))
    """
    others = [tuple(peer for peer in range(ranks) if peer != rank) for rank in range(ranks)]
    return tuple((each,) * tokens for each in others)


def empty(ranks: int) -> Routing:
    """Every rank has one token that leaves for nobody.

    >>> empty(2)
    (((),), ((),))
    """
    return (((),),) * ranks


class Fault(Enum):
    """A planted bug. Each value says what is done wrong."""

    ROWS_AFTER_WORD = "a lane announces rows that have not landed"
    HEAD_BEFORE_COUNTS = "the head word leaves before the counts have landed"
    RELAXED_TICKET = "the last router releases its own counts only, not those of the other routers"
    SINGLE_BUFFER = "both halves are one"
    BAKED_EPOCH = "a launch gets its epoch from the host, so a graph repeats that of its capture"
    SHARED_EPOCH = "dispatch and combine count in one word"
    EPOCH_BY_FIRST_OUT = "the first block out stores the next epoch"
    EPOCH_BY_SEND = "in the split form the sending kernel stores the epoch"
    EQUAL = "words are compared by equality"
    SILENT = "no word goes to a rank that gets no row"
    SILENT_UNAWAITED = "no word goes to a rank that gets no row, and none is waited for"
    EARLY_END = "a kernel hears and ends without the ranks that send it no row"
    NO_LAST_WORDS = "a dispatch ends without the last words of the lanes"
    LANES_APART = "each lane says for itself that it is done, and the first of a sender is heard for all"
    UNEQUAL_LANES = "a reader takes rows for those of another lane than their sender"
    UNPOISONED = "a wait that fails poisons nothing"
    POISON_UNREAD = "a poisoned operation begins all the same"
    LATE_READ = "rows in a slot are read after this rank's next dispatch"
    NO_DEPENDENT_WAIT = "kernels launched as dependents do not wait for the kernel before"
    USER_WITHOUT_WAIT = "a kernel that reads what a dispatch gives does not wait for it"
    NEIGHBOUR_WITHOUT_WAIT = "a kernel of the user's in the chain does not wait for the one before it"


@dataclass(frozen=True)
class Launch:
    """A kernel that every rank runs; `number` counts its kind from 1.

    `kind`: dispatch, combine, use (reads `x` of dispatch `number`), or other (touches nothing of ours).
    """

    kind: str
    number: int
    dispatch: int  # the dispatch that it belongs to
    sends: bool = True
    receives: bool = True

    def __str__(self) -> str:
        part = "" if self.sends and self.receives else " send" if self.sends else " receive"
        return f"{self.kind}{part} {self.number}" if self.number else self.kind


@dataclass(frozen=True)
class Case:
    """Ranks that all run `program`, one stream each.

    `program`: words of D (dispatch), C (combine of the latest dispatch; C1 of the first), DS DR CS CR (the halves of
    the split form), U1 (a kernel of the user's reads `x` of dispatch 1), N (one that touches nothing of ours).
    `routings`: of dispatch 1, 2, ...; from the start again where they are too few.
    `calls`: for each rank, how each launch is made: e (eager) or r (replay of a graph that was captured before all).
    The kernels as they are cannot tell, so it matters to one planted bug only; none: all are eager.
    """

    ranks: int
    program: str
    routings: tuple[Routing, ...]
    fault: Fault | None = None
    senders: int = 1  # blocks that push rows
    lanes: int = 1  # of each
    routers: int = 1  # 0: the head words announce nothing, which makes large cases affordable
    layout: str = "expert"
    timeouts: bool = False  # whether every wait may fail
    late: bool = False  # and a block begin so late that it finds its own kernel's failure
    calls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        launches = len(self.launches())
        if self.calls and [len(each) for each in self.calls] != [launches] * self.ranks:
            raise ValueError(f"calls {self.calls}; {self.ranks} ranks make {launches} launches each, a letter for each")
        if any(len(routing) != self.ranks for routing in self.routings):
            raise ValueError(f"a routing for another number of ranks than {self.ranks}")
        if self.late and not self.timeouts:
            raise ValueError("late threads without timeouts: nothing can have failed before they begin")

    def routing(self, dispatch: int) -> Routing:
        return self.routings[(dispatch - 1) % len(self.routings)]

    @property
    def tokens(self) -> int:
        """Of the rank that has most."""
        return max(len(each) for routing in self.routings for each in routing)

    def launches(self) -> tuple[Launch, ...]:
        """The program, read; a planted late read puts a kernel of the user's behind the next dispatch.

        >>> [str(each) for each in Case(2, "D U1 DS DR C1 C N", (full(2),)).launches()]
        ['dispatch 1', 'use 1', 'dispatch send 2', 'dispatch receive 2', 'combine 1', 'combine 2', 'other']
        """
        found = []
        dispatches = combines = 0
        for word in self.program.split():
            letters, given = _read(word)
            if letters in ("D", "DS"):
                dispatches += 1
            if letters in ("C", "CS"):
                combines += 1
            parts = {"sends": letters[1:] in ("", "S"), "receives": letters[1:] in ("", "R")}
            if letters[0] == "D":
                found.append(Launch("dispatch", dispatches, dispatches, **parts))
            elif letters[0] == "C":
                found.append(Launch("combine", combines, given or dispatches, **parts))
            else:
                found.append(Launch("use" if letters == "U" else "other", given, given))
        return tuple(_late(found) if self.fault is Fault.LATE_READ else found)

    def given_epoch(self, rank: int, place: int) -> int:
        """What a host that counts its own calls passes to launch `place`: a graph was captured with 1.

        >>> case = Case(2, "D D D", (full(2),), calls=("ere", "eee"))
        >>> [[case.given_epoch(rank, place) for place in range(3)] for rank in range(2)]
        [[1, 1, 2], [1, 2, 3]]
        """
        launches = self.launches()
        how = self.calls[rank] if self.calls else "e" * len(launches)
        if how[place] == "r":
            return 1
        kind = launches[place].kind
        return sum(how[each] == "e" and launches[each].kind == kind for each in range(place + 1))


def _late(launches: list[Launch]) -> list[Launch]:
    """Every kernel of the user's behind the next dispatch."""
    found, held = [], []
    for launch in launches:
        if launch.kind == "use":
            held.append(launch)
            continue
        found.append(launch)
        if launch.kind == "dispatch":
            found += held
            held = []
    return found + held


def _read(word: str) -> tuple[str, int]:
    match = re.fullmatch(r"(D|DS|DR|C|CS|CR|U|N)(\d*)", word)
    if match is None:
        raise ValueError(f"{word!r} in a program; it has D DS DR C CS CR, U with a number, and N")
    return match[1], int(match[2] or 0)
