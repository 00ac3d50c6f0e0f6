"""What the ranks run in one exploration, and which bug is planted in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tests.explorer.fault import Fault

Routing = tuple[tuple[tuple[int, ...], ...], ...]
"""`routing[source][token]`: the ranks that hold an expert of the token; the source itself where own rows matter."""


def full(ranks: int, tokens: int = 1, own: bool = False) -> Routing:
    """Every token goes to every other rank; with `own` to its own rank too.

    >>> full(3)
    (((1, 2),), ((0, 2),), ((0, 1),))
    """
    to = [tuple(peer for peer in range(ranks) if own or peer != rank) for rank in range(ranks)]
    return tuple((each,) * tokens for each in to)


def empty(ranks: int) -> Routing:
    """Every rank has one token that leaves for nobody.

    >>> empty(2)
    (((),), ((),))
    """
    return (((),),) * ranks


_PARTS = {"": "", "S": " send", "R": " receive", "T": " tell", "P": " push", "C": " copy", "A": " announce"}


@dataclass(frozen=True)
class Launch:
    """A kernel that every rank runs; `number` counts its kind from 1.

    `kind`: dispatch, combine, copies (by the copy engine), use (reads `x` of dispatch `number`), or other (touches
    nothing of ours). `way`: words, lines (of few tokens), stages, or blocks (staged, rows by the copy engine).
    """

    kind: str
    number: int
    dispatch: int  # the dispatch that it belongs to
    part: str = ""  # of a dispatch or combine; all of it
    way: str = "words"

    @property
    def tells(self) -> bool:
        """Counts, or whether this rank refuses the data."""
        return self.part in ("", "S", "T")

    @property
    def sends(self) -> bool:
        return self.part in ("", "S", "P")

    @property
    def receives(self) -> bool:
        return self.part in ("", "R")

    @property
    def begins(self) -> bool:
        return self.kind in ("dispatch", "combine") and self.tells

    def __str__(self) -> str:
        lines = " in lines" * (self.way == "lines")
        said = f"{self.kind}{lines}{_PARTS[self.part] * (self.kind != 'copies')}"
        return f"{said} {self.number}" if self.number else said


@dataclass(frozen=True)
class Case:
    """Ranks that all run `program`, one stream each.

    `program`: words of D (dispatch), C (combine of the latest dispatch; C1 of the first), FD FC (the same by the way of
    few tokens), DS DR CS CR (the halves of the split form), DT DP DR (the stages of a staged dispatch: tell, push,
    receive), BT BP BC BA BR (those by the copy engine: tell, pack, copy, announce, receive), U1 (a kernel of the user's
    reads `x` of dispatch 1), N (one that touches nothing of ours).
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
    routers: int = 1  # 0: head words announce nothing and no line is told of, which makes large cases affordable
    layout: str = "expert"
    own: str = ""  # how rows of a rank itself go: "" not at all, "slots" as others do (fp8), "copied" by placers
    refused: tuple[tuple[int, int], ...] = ()  # (rank, dispatch): what does not fit there, as the counts tell it
    mixed: tuple[tuple[int, int, int], ...] = ()  # (rank, combine, dispatch): another than the program says
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
        if self.own not in ("", "slots", "copied") or (self.own == "copied" and self.layout != "rank"):
            raise ValueError(f"own rows {self.own!r} with layout {self.layout}; 'copied' is for layout rank")
        if max(launch.number for launch in self.launches()) > 7:
            raise ValueError("more than 7 operations of a kind; what is in a place has 3 bits for an epoch")

    def routing(self, dispatch: int) -> Routing:
        return self.routings[(dispatch - 1) % len(self.routings)]

    @property
    def tokens(self) -> int:
        """Of the rank that has most."""
        return max(len(each) for routing in self.routings for each in routing)

    def refuses(self, dispatch: int, rank: int | None = None) -> bool:
        """Whether a rank, or any rank, refuses what a dispatch brings."""
        return any(number == dispatch and rank in (None, who) for who, number in self.refused)

    def combined(self, rank: int, combine: int) -> int:
        """Which dispatch a rank combines.

        >>> case = Case(2, "D D C", (full(2),), mixed=((1, 1, 1),))
        >>> [case.combined(rank, 1) for rank in range(2)], case.refuses_combine(1)
        ([2, 1], True)
        """
        said = next(each.dispatch for each in self.launches() if each.kind == "combine" and each.number == combine)
        return next((dispatch for who, number, dispatch in self.mixed if (who, number) == (rank, combine)), said)

    def refuses_combine(self, combine: int) -> bool:
        """Whether a rank refuses its data, or two combine different dispatches."""
        said = [self.combined(rank, combine) for rank in range(self.ranks)]
        return len(set(said)) > 1 or any(self.refuses(dispatch, rank) for rank, dispatch in enumerate(said))

    def way(self, dispatch: int) -> str:
        return next(each.way for each in self.launches() if each.kind == "dispatch" and each.number == dispatch)

    def launches(self) -> tuple[Launch, ...]:
        """The program, read; a planted late read puts a kernel of the user's behind the next dispatch.

        >>> [str(each) for each in Case(2, "D U1 DS FC1 DR C2 N", (full(2),)).launches()]
        ['dispatch 1', 'use 1', 'dispatch send 2', 'combine in lines 1', 'dispatch receive 2', 'combine 2', 'other']
        """
        found: list[Launch] = []
        counts = {"dispatch": 0, "combine": 0}
        way = "words"  # of the dispatch that goes on
        for word in self.program.split():
            letters, given = _read(word)
            its_way, kind, part = _meant(letters, way)
            if kind in ("use", "other"):
                found.append(Launch(kind, given, given))
                continue
            launch = Launch(kind, 0, 0, part, its_way)
            if launch.begins:
                counts[kind] += 1
            way = way if kind == "combine" else its_way
            dispatch = given or counts["dispatch"]
            number = counts["combine"] if kind == "combine" else dispatch
            found.append(replace(launch, number=number, dispatch=dispatch))
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


def _meant(letters: str, way: str) -> tuple[str, str, str]:
    """Way, kind and part of a word of a program; a receiving kernel goes on by the way in which the dispatch began.

    >>> _meant("FC", "words"), _meant("DR", "stages"), _meant("BC", "blocks")
    (('lines', 'combine', ''), ('stages', 'dispatch', 'R'), ('blocks', 'copies', 'C'))
    """
    first, part = letters[0], letters[1:]
    if first == "F":
        return "lines", "dispatch" if part == "D" else "combine", ""
    if first == "B":
        return "blocks", "copies" if part == "C" else "dispatch", part
    if first == "D":
        ways = {"T": "stages", "P": "stages", "R": way}
        return ways.get(part, "words"), "dispatch", part
    return "words", {"C": "combine", "U": "use", "N": "other"}[first], part


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
    match = re.fullmatch(r"(F?[DC]|D[STPR]|B[TPCAR]|C[SR]|U|N)(\d*)", word)
    if match is None:
        words = "D DS DT DP DR FD BT BP BC BA BR, C CS CR FC, U with a number, and N"
        raise ValueError(f"{word!r} in a program; it has {words}")
    return match[1], int(match[2] or 0)
