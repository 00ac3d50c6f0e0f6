"""The protocol of dispatch and combine, explored over every interleaving, and bugs planted in it, which must be found.

`tests/explorer/` is the model, `docs/protocol.md` what it models. A trace of what went wrong is printed (pytest -rP).
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import pytest

from tests.explorer.__main__ import main
from tests.explorer.case import Case, Fault, Routing, empty, full
from tests.explorer.search import Found, TooManyStatesError, explore

# Every order of three dispatches and three combines that begins with a dispatch.
ORDERS = sorted(
    " ".join("D" if place in chosen else "C" for place in range(6))
    for chosen in ((0, a, b) for a in range(1, 6) for b in range(a + 1, 6))
)
FILLED = (full(3), empty(3), full(3))  # who is overwritten in epoch 3 heard of nothing but words in epoch 2
SPARSE: Routing = (((1, 2), ()), ((2,), (0,)), ((), ()))  # rank 2 sends nothing, and gets rows from both


@cache  # some cases are asked for twice
def holds(case: Case, limit: int = 1_000_000) -> Found:
    found = explore(case, limit=limit)
    assert not found.broken, str(found)
    return found


@pytest.mark.parametrize("program", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_three_epochs_in_any_order_of_operations(ranks, program):
    found = holds(Case(ranks, program, (full(ranks),), routers=1 if ranks == 2 else 0))
    assert len(found.endings) == 1  # nothing that a rank ends with depends on who was first
    assert found.apart == 1  # a rank has at most one operation more behind it than another
    assert found.states > 100


@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D C D C D C", (full(2, 3),), lanes=1, routers=2),
        Case(2, "D C D C D C", (full(2, 2),), lanes=2, routers=2),
        Case(3, "D", (full(3),), routers=1),
        Case(2, "D C D C D C", (full(2, 2),), senders=2, routers=2),
        Case(3, "D C D C D C", (SPARSE, empty(3), SPARSE), lanes=2, routers=0),
        Case(3, "D D D", FILLED, routers=0),
        Case(3, "D C D C D C", (empty(3), full(3), empty(3)), routers=0),
        Case(2, "DS DR CS CR DS DR CS CR DS DR CS CR", (full(2),)),
        Case(3, "DS DR CS CR DS DR CS CR DS DR CS CR", (full(3),), routers=0),
        Case(3, "D DS C1 DR DS C2 DR C3", (full(3),), routers=0),
        Case(3, "D U1 D U2 D U3", (full(3),), routers=0, layout="rank"),
        Case(3, "D C U1 D C U2 D C U3", (full(3),), routers=0, layout="rank"),
        Case(2, "DS DR U1 DS DR U2 DS DR U3", (full(2),), layout="rank"),
        Case(2, "D N C N D N D N", (full(2),)),
    ],
    ids=lambda case: f"{case.ranks} ranks, {case.program}",
)
def test_lanes_routers_halves_and_layouts(case):
    assert len(holds(case).endings) == 1


def test_every_routing_of_two_ranks_over_three_epochs():
    one_way: list[Routing] = [(first, second) for first, second in product((((1,),), ((),)), (((0,),), ((),)))]
    states = [holds(Case(2, "D C D D C C", routings)).states for routings in product(one_way, repeat=3)]
    assert len(states) == 64
    assert len(set(states)) > 5  # they differ


@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D C D C D C", (full(2),), timeouts=True, late=True),
        Case(2, "D D D C1 C2 C3", (full(2),), timeouts=True, late=True),
        Case(2, "DS DR DS DR DS DR", (full(2, 2),), timeouts=True),
        Case(3, "D D D", (full(3),), routers=0, timeouts=True),
    ],
    ids=lambda case: f"{case.ranks} ranks, {case.program}",
)
def test_any_wait_may_fail(case):
    """A poisoned rank stores nothing, and no other reads what is not meant for it."""
    found = holds(case)
    assert len(found.endings) >= 10
    assert found.apart == len(case.launches())  # a poisoned rank is through with all the rest at once


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, "D D D", (full(3),), routers=1),
        Case(3, "D C D C D C", (full(3),), routers=0, timeouts=True),
        Case(3, "D D", (full(3),), routers=0, timeouts=True, late=True),
        Case(3, "D C D C", (full(3, 2),), routers=0),
    ],
    ids=lambda case: f"{case.ranks} ranks, {case.program}",
)
def test_larger_cases(case):
    holds(case, limit=20_000_000)


def planted(fault: Fault, ranks: int) -> tuple[Case, str]:
    """A small case that the bug breaks, and how."""
    one = (full(ranks),)
    filled = (full(ranks), empty(ranks), full(ranks))
    two_rows: Routing = (((1,), (1,)), *empty(ranks)[1:])
    told = 1 if ranks == 2 else 0
    never, stale, early = "never written; it wants that of", "that of 2; it wants that of 1", "before it has ended"

    def case(program: str, **others: object) -> Case:
        return Case(**{"ranks": ranks, "program": program, "routings": one, "routers": told, "fault": fault} | others)

    return {
        Fault.ROWS_AFTER_WORD: (case("D C"), f"row .*{never}"),
        Fault.HEAD_BEFORE_COUNTS: (case("D", routers=1, routings=(empty(ranks),)), f"told .*{never}"),
        Fault.RELAXED_TICKET: (case("D", routers=2, routings=(empty(ranks),)), f"told 1 .*{never}"),
        Fault.SINGLE_BUFFER: (case("D D D"), r"half 0 = that of (\d); it wants that of (?!\1)"),
        Fault.BAKED_EPOCH: (case("D D D", calls=("err",) * ranks), r"that of (\d); it wants that of (?!\1)"),
        Fault.SHARED_EPOCH: (case("D C U1 D C U2", layout="rank"), f"use 1, use: READS .*{stale}"),
        Fault.EPOCH_BY_FIRST_OUT: (case("D D"), "it wants that of"),
        Fault.EPOCH_BY_SEND: (case("DS DR"), "nobody can go on; .*dispatch receive 1"),
        Fault.EQUAL: (case("D D"), "nobody can go on"),
        Fault.SILENT: (case("D D D", routings=filled), "nobody can go on; .*dispatch 2"),
        Fault.SILENT_UNAWAITED: (case("D D D", routings=filled), "that of 3; it wants that of 1"),
        Fault.EARLY_END: (case("D D D", routings=filled), "that of 3; it wants that of 1"),
        Fault.NO_LAST_WORDS: (case("D U1", layout="rank"), f"use 1, use: READS .*{never}"),
        Fault.LANES_APART: (
            case("D U1", lanes=2, routings=(two_rows,), layout="rank"),
            f"use 1, use: READS dispatch row 1 .*{never}",
        ),
        Fault.UNEQUAL_LANES: (case("D", senders=2, routings=(two_rows,)), f"row 1 .*{never}"),
        Fault.UNPOISONED: (case("D D D", timeouts=True), "that of 3; it wants that of 1"),
        Fault.POISON_UNREAD: (case("D D", timeouts=True), "stores in an operation that began poisoned"),
        Fault.LATE_READ: (case("D U1 D U2 D", layout="rank"), "use 1, use: READS .*that of 3; it wants that of 1"),
        Fault.NO_DEPENDENT_WAIT: (case("D D"), "it wants that of"),
        Fault.NEIGHBOUR_WITHOUT_WAIT: (case("D N D"), "it wants that of"),
        Fault.USER_WITHOUT_WAIT: (case("D U1", layout="rank"), early),
    }[fault]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
def test_a_planted_bug_is_found(fault, ranks):
    case, how = planted(fault, ranks)
    found = explore(case, deep=True)
    print(f"{fault.value}\n{found}")
    assert re.search(how, found.broken), str(found)
    assert found.trace


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
def test_the_same_case_holds_without_the_bug(fault, ranks):
    case, _ = planted(fault, ranks)
    right = Case(**{**vars(case), "fault": None})
    assert holds(right).states > 1


@pytest.mark.parametrize("fault", [Fault.NO_DEPENDENT_WAIT])
@pytest.mark.parametrize("program", ["D C", "D U1"])
def test_what_a_dispatch_finds_out_is_read_too_early(fault, program):
    found = explore(Case(3, program, (full(3),), fault, routers=0, layout="rank"), deep=True)
    assert "before it has ended" in found.broken


def test_every_mix_of_eager_calls_and_replays():
    """An epoch from the host is right where every call is eager, and wrong in every other mix."""
    ways = ["".join(each) for each in product("er", repeat=3)]
    broken = set()
    for calls in product(ways, repeat=2):
        if explore(Case(2, "D D D", (full(2),), Fault.BAKED_EPOCH, routers=0, calls=calls), deep=True).broken:
            broken.add(calls)
    assert set(product(ways, repeat=2)) - broken == {("eee", "eee")}


@pytest.mark.parametrize(
    "case",
    [
        Case(3, "D C D C D C", (full(3),), Fault.SINGLE_BUFFER, routers=0),
        Case(3, "D C D C D C", (full(3),), Fault.SHARED_EPOCH, routers=0),
        Case(3, "D D D", FILLED, Fault.NO_LAST_WORDS, routers=0),
    ],
    ids=lambda case: case.fault.name.lower(),
)
def test_what_is_wrong_elsewhere_is_right_here(case):
    """One buffer, or one epoch, will do where every dispatch is followed by its combine and nothing aliases a slot; the
    last words of lanes matter to layout rank only, since with layout expert the heads say as much."""
    holds(case)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("D C C C", "combine .*that of 2; it wants that of 1"),  # a combine without a dispatch between
        ("D D C1 C2 C2", "it wants that of"),
    ],
)
def test_one_buffer_will_not_do_for_combines_in_a_row(program, how):
    found = explore(Case(3, program, (full(3),), Fault.SINGLE_BUFFER, routers=0), deep=True)
    assert re.search(how, found.broken), str(found)


def test_a_second_send_before_the_first_receive_is_no_use():
    """Both would be of one epoch: the split form takes turns."""
    found = explore(Case(2, "DS DS DR DR", (full(2),)))
    assert "it wants that of" in found.broken, str(found)


def test_x_in_slots_lives_until_the_next_send():
    found = explore(Case(2, "DS DR DS U1 DR DS DR", (full(2),), layout="rank"), deep=True)
    assert re.search("use 1, use: READS .*that of 3; it wants that of 1", found.broken), str(found)


ONE_WAY: Routing = (((1,),), ((),))
SMALL = [
    Case(2, "D", (full(2),), routers=0),
    Case(2, "D D", (ONE_WAY,), routers=0),
    Case(2, "D C", (ONE_WAY,), routers=0),
    Case(2, "D", (ONE_WAY,), routers=0, timeouts=True),
    Case(2, "D", (empty(2),), routers=0, timeouts=True, late=True),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.program} {case.routings[0]} {case.timeouts}")
def test_quiet_steps_lose_no_ending(case):
    """Against the plain search, where every step of every thread is a choice."""
    plain, reduced = explore(case, reduced=False), holds(case)
    assert plain.broken == ""
    assert plain.endings == reduced.endings
    assert plain.states > 100 * reduced.states


@pytest.mark.parametrize(
    ("fault", "program"),
    [
        (Fault.ROWS_AFTER_WORD, "D"),
        (Fault.SINGLE_BUFFER, "D D D"),
        (Fault.SILENT, "D"),
        (Fault.EQUAL, "D"),
        (Fault.NO_DEPENDENT_WAIT, "D D"),
    ],
)
def test_the_plain_search_finds_them_too(fault, program):
    case = Case(2, program, (ONE_WAY,), fault, routers=0)
    plain, reduced = explore(case, reduced=False, deep=True), explore(case, deep=True)
    assert plain.broken
    assert reduced.broken


def test_a_trace_tells_what_happened():
    case = Case(2, "D D D", (full(2),), Fault.SINGLE_BUFFER, routers=0)
    shortest, deep = explore(case), explore(case, deep=True)
    assert len(shortest.trace) <= len(deep.trace)
    line = re.compile(r"rank \d, (dispatch|combine|use) \d, [a-z0-9 ]+: .+")
    assert all(line.fullmatch(each) for each in shortest.trace)
    text = str(shortest)
    overwritten = text.index("LANDS dispatch row 0 of rank 0 at rank 1, half 0 = that of 2")
    read = text.index("READS dispatch row 0 of rank 0 at rank 1, half 0 = that of 2")
    assert overwritten < read
    assert text.splitlines()[-1].startswith("=> rank 1, dispatch 1, placer of 0: READS")


def test_the_command(capsys):
    assert main(["D C D C D C", "--ranks", "3", "--routers", "0"]) == 0
    assert "1 endings: the protocol holds" in capsys.readouterr().out
    assert main(["D D D", "--empty", "2", "--fault", "EARLY_END", "--layout", "expert"]) == 1
    assert "it wants that of 1" in capsys.readouterr().out.splitlines()[-1]


def test_a_case_that_is_too_large_or_makes_no_sense_is_refused():
    with pytest.raises(TooManyStatesError, match="more than 50 states"):
        explore(Case(3, "D", (full(3),)), limit=50)
    with pytest.raises(ValueError, match="'X' in a program"):
        Case(2, "D X", (full(2),))
    with pytest.raises(ValueError, match="another number of ranks than 3"):
        Case(3, "D", (full(2),))
    with pytest.raises(ValueError, match="2 launches"):
        Case(2, "D D", (full(2),), calls=("e", "e"))
    with pytest.raises(ValueError, match="late threads"):
        Case(2, "D", (full(2),), late=True)
