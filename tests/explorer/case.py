"""One exploration: the program that the ranks run, their data, and the injected bug."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tests.explorer.fault import Fault

Routing = tuple[tuple[tuple[int, ...], ...], ...]
"""`routing[source][token]`: the ranks with an expert of the token. The source is among them where own rows matter."""


def full(ranks: int, tokens: int = 1, own: bool = False, domains: int = 1) -> Routing:
    """Every token goes to every other rank of its domain, with `own` also to its own rank.

    >>> full(3), full(4, domains=2)
    ((((1, 2),), ((0, 2),), ((0, 1),)), (((1,),), ((0,),), ((3,),), ((2,),)))
    """
    size = ranks // domains
    firsts = [rank // size * size for rank in range(ranks)]
    to = [
        tuple(peer for peer in range(first, first + size) if own or peer != rank) for rank, first in enumerate(firsts)
    ]
    return tuple((each,) * tokens for each in to)


def empty(ranks: int) -> Routing:
    """Every rank has one token that goes to no rank.

    >>> empty(2)
    (((),), ((),))
    """
    return (((),),) * ranks


_PARTS = {"": "", "S": " send", "R": " receive", "T": " publish", "P": " push", "C": " copy", "A": " announce"}


@dataclass(frozen=True)
class Launch:
    """A kernel that every rank runs; `number` counts its kind from 1.

    `kind`: dispatch, combine, copies (by the copy engine), use (reads `x` of dispatch `number`), crossing (the next
    dispatch's rows come in chunks), or other (uses no memory of the workspace). `path`: words, lines (the LL path),
    stages, or blocks (staged, rows by the copy engine).
    """

    kind: str
    number: int
    dispatch: int  # the dispatch that it belongs to
    part: str = ""  # of a dispatch or combine; empty: all of it
    path: str = "words"
    known: bool = False  # a dispatch whose rows go to the places of dispatch `dispatch`
    crossing: int = 0  # the crossing in which its rows come; 0: they are there
    beside: bool = False  # a combine with the product of its rows, which runs beside it

    @property
    def sends_metadata(self) -> bool:
        """Whether it sends counts or a pass (dispatch), or a status (combine)."""
        return self.part in (("", "R") if self.known else ("", "S", "T"))

    @property
    def sends(self) -> bool:
        return self.part in ("", "S", "P")

    @property
    def receives(self) -> bool:
        return self.part in ("", "R")

    @property
    def starts_run(self) -> bool:
        return self.kind in ("dispatch", "combine") and (self.sends if self.known else self.sends_metadata)

    def __str__(self) -> str:
        lines = " in lines" * (self.path == "lines")
        what = f"{'chunked ' * bool(self.crossing)}{'known ' * self.known}{self.kind}{' beside product' * self.beside}"
        name = f"{what}{lines}{_PARTS[self.part] * (self.kind != 'copies')}"
        return f"{name} {self.number}" if self.number else name


@dataclass(frozen=True)
class Case:
    """All ranks run `program`, each on one stream.

    `program` has these words:
      D C             dispatch, combine of the latest dispatch (C1: of the first)
      PC              a product, and beside it the combine of its rows, which it stores in pieces
      FD FC           the same by the LL path
      DS DR CS CR     send and receive of the split form
      DT DP DR        the stages of a staged dispatch: publish, push, receive
      BT BP BC BA BR  those by the copy engine: publish, pack, copy, announce, receive
      K KP KR         a dispatch of known routing: that of the latest other dispatch (K1: of the first); staged
      X               a crossing: the rows of the next dispatch, D or K, come over the rail in chunks
      U1              a user's kernel reads `x` of dispatch 1
      N               a kernel that uses no memory of the workspace
    `routings`: of dispatch 1, 2, ...; repeated if they are too few.
    `calls`: for each rank a letter for each launch: e (eager) or r (replay of a graph that was captured first). The
    kernels do not see the difference, so it matters to one injected bug only. Empty: all are eager.
    """

    ranks: int
    program: str
    routings: tuple[Routing, ...]
    fault: Fault | None = None
    senders: int = 1  # blocks that push rows
    warps: int = 1  # of each
    one_block: bool = False  # of the LL path: it works on what leaves, then on what arrives
    counting_blocks: int = 1  # 0: heads announce nothing, and there are no routing entries: for large cases
    domains: int = 1  # of as many ranks each, whose rails are modelled. 1: rows of other domains come at any time
    chunk: int = 1  # rows of a chunk, of all domains
    layout: str = "expert"
    own: str = ""  # a rank's own rows: "" none, "slots" through slots (fp8), "copied" by placement blocks
    refused: tuple[tuple[int, int], ...] = ()  # (rank, dispatch): by the counts, the rows do not fit there
    mixed: tuple[tuple[int, int, int], ...] = ()  # (rank, combine, dispatch): not the program's dispatch
    timeouts: bool = False  # whether every wait may fail
    late: bool = False  # whether a block may also begin so late that it finds its own kernel's failure
    # Beginnings of the roles of a combine beside its product that have no SM before the product ends.
    without_sms: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        launches = len(self.launches())
        if self.calls and [len(each) for each in self.calls] != [launches] * self.ranks:
            raise ValueError(f"calls {self.calls}; {self.ranks} ranks make {launches} launches each, a letter for each")
        if any(len(routing) != self.ranks for routing in self.routings):
            raise ValueError(f"a routing for another number of ranks than {self.ranks}")
        if self.ranks % self.domains or any(self._leaves_domain(routing) for routing in self.routings):
            raise ValueError(f"{self.ranks} ranks in {self.domains} domains: of one size, and no row leaves its domain")
        if self.own == "slots" and any(launch.known for launch in self.launches()):
            raise ValueError("a dispatch of known routing with own rows through slots: rows as fp8 have no gradient")
        if self.without_sms and not any(launch.beside for launch in self.launches()):
            raise ValueError("roles without SMs in a program without PC: only a combine beside its product has them")
        if self.late and not self.timeouts:
            raise ValueError("late threads without timeouts: no wait can have failed before they begin")
        crossings = [each for each in self.launches() if each.kind == "crossing"]
        needed = self.layout == "rank" or crossings
        if self.own not in ("", "slots", "copied") or (self.own == "copied" and not needed):
            raise ValueError(f"own rows {self.own!r} with layout {self.layout}; 'copied' is for layout rank, and for X")
        chunked = [each for each in self.launches() if each.crossing]
        if len(chunked) != len(crossings) or any(each.part or each.path != "words" for each in chunked):
            raise ValueError(f"a crossing without a dispatch in program {self.program!r}: a D or K follows each X")
        if max(launch.number for launch in self.launches()) > 7:
            raise ValueError("more than 7 operations of a kind; the model's memory has 3 bits for an epoch")

    def routing(self, dispatch: int) -> Routing:
        return self.routings[(dispatch - 1) % len(self.routings)]

    @property
    def tokens(self) -> int:
        """The most tokens of a rank."""
        return max(len(each) for routing in self.routings for each in routing)

    @property
    def chunks(self) -> int:
        """The chunks of a crossing."""
        return -(-self.tokens // self.chunk)

    def domain(self, rank: int) -> int:
        return rank // (self.ranks // self.domains)

    def domain_ranks(self, rank: int) -> range:
        """The ranks of a rank's domain.

        >>> case = Case(4, "D", (empty(4),), domains=2)
        >>> case.domain_ranks(1), case.domain_ranks(2), case.rail(1)
        (range(0, 2), range(2, 4), [3])
        """
        size = self.ranks // self.domains
        return range(self.domain(rank) * size, (self.domain(rank) + 1) * size)

    def rail(self, rank: int) -> list[int]:
        """The other ranks of a rank's rail: those with its place in the other domains."""
        size = self.ranks // self.domains
        return [other for other in range(rank % size, self.ranks, size) if other != rank]

    def _leaves_domain(self, routing: Routing) -> bool:
        return any(
            peer not in self.domain_ranks(rank) for rank, tokens in enumerate(routing) for to in tokens for peer in to
        )

    def dispatch_after(self, crossing: Launch) -> Launch:
        return next(each for each in self.launches() if each.crossing == crossing.number)

    def index_of_crossing(self, number: int) -> int:
        """The index of a crossing's launch in the program."""
        launches = enumerate(self.launches())
        return next(index for index, each in launches if each.kind == "crossing" and each.number == number)

    def refuses(self, dispatch: int, rank: int | None = None) -> bool:
        """Whether a rank, by default any rank, refuses the rows of a dispatch."""
        return any(number == dispatch and rank in (None, refusing) for refusing, number in self.refused)

    def combined(self, rank: int, combine: int) -> int:
        """The dispatch that a rank combines.

        >>> case = Case(2, "D D C", (full(2),), mixed=((1, 1, 1),))
        >>> [case.combined(rank, 1) for rank in range(2)], case.refuses_combine(1)
        ([2, 1], True)
        """
        usual = next(each.dispatch for each in self.launches() if each.kind == "combine" and each.number == combine)
        return next((dispatch for *where, dispatch in self.mixed if where == [rank, combine]), usual)

    def refuses_combine(self, combine: int) -> bool:
        """Whether a rank refuses its data, or two ranks combine different dispatches."""
        combined = [self.combined(rank, combine) for rank in range(self.ranks)]
        return len(set(combined)) > 1 or any(self.refuses(dispatch, rank) for rank, dispatch in enumerate(combined))

    def path(self, dispatch: int) -> str:
        return next(each.path for each in self.launches() if each.kind == "dispatch" and each.number == dispatch)

    def launches(self) -> tuple[Launch, ...]:
        """Parse the program. The bug LATE_READ puts each user's kernel after the next dispatch.

        >>> [str(each) for each in Case(2, "D U1 DS FC1 DR C2 N", (full(2),)).launches()]
        ['dispatch 1', 'use 1', 'dispatch send 2', 'combine in lines 1', 'dispatch receive 2', 'combine 2', 'other']
        >>> [(str(each), each.dispatch) for each in Case(2, "D K C", (full(2),)).launches()]
        [('dispatch 1', 1), ('known dispatch 2', 1), ('combine 1', 1)]
        >>> [str(each) for each in Case(2, "X D X K", (full(2),)).launches()]
        ['crossing 1', 'chunked dispatch 1', 'crossing 2', 'chunked known dispatch 2']
        """
        found: list[Launch] = []
        counts = {"dispatch": 0, "combine": 0}
        path = "words"  # of the dispatch in progress
        routed = 0  # the latest dispatch that is not known
        crossings, crossed = 0, 0  # in all, and before a dispatch
        for word in self.program.split():
            letters, given = _split_word(word)
            its_path, kind, part = _parse(letters, path)
            if kind == "crossing":
                crossings += 1
                found.append(Launch(kind, crossings, 0))
                continue
            if kind in ("use", "other"):
                found.append(Launch(kind, given, given))
                continue
            known = letters.startswith("K")
            launch = Launch(kind, 0, 0, part, its_path, known, beside=letters == "PC")
            if launch.starts_run:
                counts[kind] += 1
                routed = counts["dispatch"] if kind == "dispatch" and not known else routed
            path = path if kind == "combine" else its_path
            dispatch = given or (routed if known or kind == "combine" else counts["dispatch"])
            number = counts[kind] if kind == "combine" or known else dispatch
            crossing = 0
            if kind == "dispatch" and crossed < crossings:
                crossing = crossed = crossings
            found.append(replace(launch, number=number, dispatch=dispatch, crossing=crossing))
        return tuple(_delay_uses(found) if self.fault is Fault.LATE_READ else found)

    def host_epoch(self, rank: int, index: int) -> int:
        """The epoch that a host which counts its own calls passes to launch `index`. A graph was captured with 1.

        >>> case = Case(2, "D D D", (full(2),), calls=("ere", "eee"))
        >>> [[case.host_epoch(rank, index) for index in range(3)] for rank in range(2)]
        [[1, 1, 2], [1, 2, 3]]
        """
        launches = self.launches()
        calls = self.calls[rank] if self.calls else "e" * len(launches)
        if calls[index] == "r":
            return 1
        kind = launches[index].kind
        return sum(calls[each] == "e" and launches[each].kind == kind for each in range(index + 1))


def _parse(letters: str, path: str) -> tuple[str, str, str]:
    """The path, kind and part of a program's word. A receive takes the path of its dispatch's send.

    >>> _parse("FC", "words"), _parse("DR", "stages"), _parse("BC", "blocks")
    (('lines', 'combine', ''), ('stages', 'dispatch', 'R'), ('blocks', 'copies', 'C'))
    """
    first, part = letters[0], letters[1:]
    if first == "F":
        return "lines", "dispatch" if part == "D" else "combine", ""
    if first == "P":
        return "words", "combine", ""
    if first == "B":
        return "blocks", "copies" if part == "C" else "dispatch", part
    if first == "K":
        return "stages" if part else "words", "dispatch", part
    if first == "D":
        ways = {"T": "stages", "P": "stages", "R": path}
        return ways.get(part, "words"), "dispatch", part
    return "words", {"C": "combine", "U": "use", "N": "other", "X": "crossing"}[first], part


def _delay_uses(launches: list[Launch]) -> list[Launch]:
    """Move every user's kernel after the next dispatch."""
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


def _split_word(word: str) -> tuple[str, int]:
    match = re.fullmatch(r"([FP]?C|F?D|D[STPR]|B[TPCAR]|K[PR]?|C[SR]|U|N|X)(\d*)", word)
    if match is None:
        words = "D DS DT DP DR FD BT BP BC BA BR K KP KR, C CS CR FC PC, U with a number, N and X"
        raise ValueError(f"{word!r} in a program; it has {words}")
    return match[1], int(match[2] or 0)
