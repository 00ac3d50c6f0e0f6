"""The protocol of dispatch and combine holds in every interleaving.

`tests/explorer/` holds the model of `docs/internals/protocol.md`. test_protocol_injected_bugs.py injects bugs into it.
"""

from __future__ import annotations

import re
from itertools import product

import pytest

from tests.explorer.__main__ import main
from tests.explorer.case import Case, Routing, empty, full
from tests.explorer.fault import Fault
from tests.explorer.memory import Memory
from tests.explorer.search import Found, TooManyStatesError, explore

# Every order of three dispatches and three combines that begins with a dispatch.
ORDERS = sorted(
    " ".join("D" if place in chosen else "C" for place in range(6))
    for chosen in ((0, a, b) for a in range(1, 6) for b in range(a + 1, 6))
)
# The path of few tokens (lines) alone, and in turns with the other path on one workspace.
LINES = [
    *(order.replace("D", "FD").replace("C", "FC") for order in ORDERS),
    *("FD C FD FC", "D FC FD C", "FD D FD", "D FD D FD"),
]
FILLED = (full(3), empty(3), full(3))  # a rank that is overwritten in epoch 3 got only words in epoch 2
SPARSE: Routing = (((1, 2), ()), ((2,), (0,)), ((), ()))  # rank 2 sends nothing, and gets rows from both


def check_that_it_holds(case: Case, limit: int = 1_000_000) -> Found:
    found = explore(case, limit=limit)
    assert not found.broken, str(found)
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("program", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_protocol_holds_for_three_epochs_in_any_order(ranks, program):
    found = check_that_it_holds(Case(ranks, program, (full(ranks),), counting_blocks=1 if ranks == 2 else 0))
    assert len(found.endings) == 1  # the final state does not depend on which rank was first
    assert found.most_ahead == 1  # no rank is more than one operation ahead
    assert found.states > 100


def _case_id(case: Case) -> str:
    also = [
        case.own,
        "one block" * case.one_block,
        "mixed" * bool(case.mixed),
        "refused" * bool(case.refused),
        case.layout * (case.layout == "rank"),
    ]
    return ", ".join([f"{case.ranks} ranks", case.program, *filter(None, also)])


ONE_WAY: Routing = (((1,),), ((),))
TWO_ROWS: Routing = (((1,), (1,)), ((),))
COPIED = "BT BP BC BA BR"
SOME: Routing = (((1,), ()), ((), (0,)))
OWN, OWN_3 = (full(2, own=True),), (full(3, own=True),)
BOTH, ALL_3 = (full(2),), (full(3),)
OWN_1 = (full(1, 2, own=True),)
ACROSS: Routing = (((1,), (1,)), ((0,), ()), ((), (3,)), ((2,), (2,)))  # two domains of two ranks


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D C D C D C", (full(2, 3),), warps=1, counting_blocks=2),
        Case(2, "D C D C D C", (TWO_ROWS,), warps=2, counting_blocks=0),
        Case(2, "D C D C D C", (TWO_ROWS,), senders=2),
        Case(2, "DS DR CS CR DS DR", (TWO_ROWS,), warps=2, counting_blocks=2),
        Case(3, "D C D C D C", (SPARSE, empty(3), SPARSE), counting_blocks=0),
        Case(3, "D D D", FILLED, counting_blocks=0),
        Case(3, "D C D C D C", (empty(3), full(3), empty(3)), counting_blocks=0),
        Case(3, "D U1 D U2 D U3", ALL_3, counting_blocks=0, layout="rank"),
        Case(3, "D C U1 D C U2 D C U3", ALL_3, counting_blocks=0, layout="rank"),
        Case(2, "D N C N D N D N", BOTH),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_warps_counting_blocks_and_layouts(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "DS DR CS CR DS DR CS CR DS DR CS CR", BOTH),
        Case(3, "DS DR CS CR DS DR CS CR DS DR CS CR", ALL_3, counting_blocks=0),
        Case(2, "DS DR U1 DS DR U2 DS DR U3", BOTH, layout="rank"),
        # With other operations between the halves.
        Case(2, "DS N DR CS N CR DS N DR CS N CR", BOTH),
        Case(3, "D DS C1 DR DS C2 DR C3", ALL_3, counting_blocks=0),
        Case(2, "D CS DS CR1 DR CS2 DS CR2 DR", BOTH),
        Case(3, "D CS DS CR1 DR", ALL_3, counting_blocks=0),
        Case(2, "D U1 DS CS1 DR CR1 U2 DS CS2 DR CR2", BOTH, layout="rank"),
        Case(3, "DS DR U1 CS U1 CR DS N DR U2", ALL_3, counting_blocks=0, layout="rank"),
        # The stages of a staged dispatch.
        Case(2, "DT DP DR CS CR DT DP DR CS CR DT DP DR", BOTH),
        Case(2, "DT DP DR DT DP DR DT DP DR", (full(2, 2),), warps=2),
        Case(3, "DT DP DR CS CR DT DP DR CS CR DT DP DR", ALL_3, counting_blocks=0),
        # Dispatches by the copy engine, which have one buffer.
        Case(2, f"{COPIED} CS CR {COPIED} CS CR {COPIED} CS CR", BOTH),
        Case(2, f"{COPIED} {COPIED} {COPIED}", (SOME, full(2, 2), SOME)),
        Case(3, f"{COPIED} {COPIED} {COPIED}", ALL_3, counting_blocks=0),
        Case(2, f"{COPIED} U1 {COPIED} C1 U2 {COPIED} U3", BOTH, layout="rank"),
        Case(2, f"D BT BP BC BA C1 BR D {COPIED}", BOTH),
        Case(2, f"{COPIED} FD {COPIED} D {COPIED}", BOTH),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_halves_and_stages(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D K C K1 K1 D", BOTH),
        Case(2, "D D K1 K2 K1 D", (TWO_ROWS,), warps=2),
        Case(2, "D K K K", (TWO_ROWS,), senders=2),
        Case(2, "D K K D K3 K3", (ONE_WAY,), counting_blocks=2),
        Case(3, "D K K K D", ALL_3, counting_blocks=0),
        Case(3, "D K K D", (SPARSE,), counting_blocks=0),
        Case(3, "D D K1 K2 D", FILLED, counting_blocks=0),
        Case(3, "D K D K1 K3 K1", (empty(3), empty(3), full(3)), counting_blocks=0),
        Case(2, "D U1 K C1 D U3 K1", BOTH, layout="rank"),
        Case(2, "D U1 K D U3", OWN, own="copied", layout="rank"),
        Case(2, "DT DP DR KP KR CS1 CR1 KP KR KP KR", BOTH),
        Case(3, "DT DP DR KP KR KP KR DT DP DR", ALL_3, counting_blocks=0),
        Case(2, "FD K D K3 FD KP KR", BOTH),
        Case(2, f"{COPIED} K {COPIED} D K4 {COPIED}", BOTH),
        Case(2, "D K1 C1 D K1 C3", BOTH, refused=((1, 1),)),
        Case(3, "D K1 K1 D", ALL_3, counting_blocks=0, refused=((0, 1),)),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_dispatches_of_known_routing(case):
    """They have no heads and no routing entries. So only done words keep a rank from being two operations ahead."""
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D C D C D C", OWN, own="slots"),
        Case(3, "D", OWN_3, own="slots", counting_blocks=0),
        Case(2, "D U1 D U2 D U3", OWN, own="slots", layout="rank"),
        Case(2, "D U1 D U2 D U3", OWN, own="copied", layout="rank"),
        Case(3, "D U1 D U2 D U3", OWN_3, own="copied", counting_blocks=0, layout="rank"),
        Case(2, "DS DR U1 DS DR U2 DS DR U3", OWN, own="copied", layout="rank"),
        Case(2, "FD FC FD FC FD FC", OWN, own="slots"),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_rows_that_a_rank_sends_itself(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "refused", [((1, 1),), ((0, 2),), ((0, 2), (1, 2)), ((0, 1), (1, 2)), ((0, 1), (0, 2), (1, 3))]
)
@pytest.mark.parametrize(
    "program",
    ["D C D C D C", "FD FC FD FC FD FC", "D D C1 C2 C1 C2", "FD FD FD FC1 FC2 FC3", "DS DR CS CR FD C D FC"],
)
def test_all_ranks_refuse_the_same_step_and_the_next_one_works(program, refused):
    """The model asserts equal refusals where statuses are read, and correct rows where rows are read."""
    assert len(check_that_it_holds(Case(2, program, BOTH, refused=refused)).endings) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, "D C D", ALL_3, counting_blocks=0, refused=((1, 1),)),
        Case(3, "FD FC FD FC FD FC", ALL_3, counting_blocks=0, refused=((1, 1), (2, 2))),
        Case(3, "D D FC1 FC2 FC2", ALL_3, counting_blocks=0, refused=((1, 1),)),
        Case(2, "D U1 C D U2 C", OWN, own="copied", layout="rank", refused=((1, 1),)),
        Case(2, "D C D C", OWN, own="slots", refused=((1, 1),)),
        # Ranks that combine different dispatches; the next combine is valid.
        Case(2, "D D C C D", BOTH, mixed=((1, 1, 1),)),
        Case(3, "FD FD FC FC", ALL_3, counting_blocks=0, mixed=((1, 1, 1),)),
        Case(2, "D D CS CR C", BOTH, mixed=((1, 1, 1),), refused=((0, 1),)),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_other_refusals(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.one_in(5)
@pytest.mark.parametrize("program", LINES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_lines_hold_in_any_order_of_operations(ranks, program):
    found = check_that_it_holds(Case(ranks, program, (full(ranks),), counting_blocks=1 if ranks == 2 else 0))
    assert len(found.endings) == 1
    assert found.most_ahead == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(2, "FD FC FD FC FD FC", (full(2, 3),)),
        Case(2, "FD FC D C FD FC", (full(2, 2),), one_block=True),
        Case(3, "FD FC FD FC FD FC", ALL_3, one_block=True, refused=((1, 1), (2, 2))),
        Case(2, "FD DS FC1 DR C2 FD", BOTH),
        Case(3, "FD", ALL_3),
        Case(3, "FD FC FD FC FD FC", (SPARSE, empty(3), SPARSE), counting_blocks=0),
        Case(3, "FD FD FD", FILLED, counting_blocks=0),
    ],
    ids=_case_id,
)
def test_lines_hold_for_more_tokens_and_between_other_operations(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [
        # Rows of other domains come at any time.
        Case(1, "X D X D X D", OWN_1, own="copied"),
        Case(2, "X D C X D C X D C", (full(2, 2),)),
        Case(2, "X D C X D C X D C", (full(2, 3),), chunk=2, counting_blocks=0),
        Case(2, "X D X K X K C1 D", BOTH),
        Case(2, "X D X D X D", (SOME, full(2, 2), SOME)),
        Case(2, "X D X D", (TWO_ROWS,), warps=2),
        Case(2, "X D C X D", (TWO_ROWS,), senders=2, chunk=2),
        Case(2, "X D X D X D", OWN, own="slots"),
        Case(2, "X D X D", (full(2, 2, own=True),), own="copied"),
        Case(2, "X D U1 X D U2", OWN, own="copied", layout="rank"),
        Case(2, "X D FD X K1 FC D X D", BOTH),
        Case(2, "X D C X D C", BOTH, refused=((1, 1),)),
        Case(3, "X D C X D C X D C", ALL_3, counting_blocks=0),
        Case(3, "X D X D X D", FILLED, counting_blocks=0),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_rows_that_come_in_chunks(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D PC D PC D PC", (full(2),)),
        Case(2, "D PC D C D PC", (full(2, 2),), counting_blocks=0),
        Case(2, "D D PC1 PC2 D PC", BOTH),
        Case(2, "D PC", (TWO_ROWS,), warps=2),
        Case(2, "D PC D PC", BOTH, without_sms=("sender", "final")),
        Case(2, "D PC D PC", BOTH, without_sms=("sender",)),
        Case(2, "D PC D PC", BOTH, without_sms=("final",)),
        Case(2, "D PC", (TWO_ROWS,), warps=2, without_sms=("sender warp 1",)),
        Case(2, "FD PC FD FC FD PC", BOTH),
        Case(2, "D PC D PC", BOTH, refused=((1, 1),)),
        Case(2, "D D PC", BOTH, mixed=((1, 1, 1),)),
        Case(3, "D PC D PC", FILLED, counting_blocks=0),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_a_combine_beside_its_product(case):
    assert len(check_that_it_holds(case).endings) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(2, "X D X D X D", (full(2, 2, True, domains=2),), domains=2, chunk=2, own="copied"),
        Case(3, "X D X D X D", (full(3, 3, True, domains=3),), domains=3, chunk=3, own="copied"),
        Case(2, "X D X K X K X D", (full(2, 4, True, domains=2),), domains=2, chunk=2, own="copied"),
        Case(4, "X D C X D C", (ACROSS,), domains=2, chunk=2, counting_blocks=0),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_for_the_ranks_of_several_domains(case):
    """Each rank waits for its rail, and for the other ranks of its domain; no two wait for one another."""
    found = check_that_it_holds(case)
    assert len(found.endings) == 1
    assert found.most_ahead > 1  # a rank of a rail is one operation ahead


@pytest.mark.thorough
def test_every_routing_of_two_ranks_holds_over_three_epochs():
    one_way: list[Routing] = [(first, second) for first, second in product((((1,),), ((),)), (((0,),), ((),)))]
    states = [check_that_it_holds(Case(2, "D C D D C C", routings)).states for routings in product(one_way, repeat=3)]
    assert len(states) == 64
    assert len(set(states)) > 5  # the routings lead to different searches


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D C D C D C", (full(2),), timeouts=True, late=True),
        Case(2, "D D D C1 C2 C3", (full(2),), timeouts=True, late=True),
        Case(2, "DS DR DS DR DS DR", (full(2, 2),), timeouts=True),
        Case(2, "FD FC FD FC FD FC", BOTH, timeouts=True, late=True),
        Case(2, "FD D FD D", BOTH, timeouts=True),
        Case(2, "D K K D", BOTH, timeouts=True),
        Case(2, "D K C1 K", BOTH, timeouts=True, late=True),
        Case(2, "DT DP DR KP KR KP KR", BOTH, timeouts=True),
        Case(2, "D C D C", BOTH, timeouts=True, late=True, refused=((1, 1),)),
        Case(2, f"{COPIED} {COPIED} {COPIED}", BOTH, timeouts=True),
        Case(2, "X D C X D C", BOTH, timeouts=True, late=True),
        Case(2, "D PC D PC", BOTH, timeouts=True, late=True),
        Case(2, "D PC D PC", BOTH, timeouts=True, late=True, without_sms=("sender",)),
        Case(2, "X D X K", (TWO_ROWS,), warps=2, counting_blocks=0, timeouts=True),
        Case(2, "X D X D", (full(2, 2, True, domains=2),), domains=2, own="copied", timeouts=True, late=True),
        Case(3, "FD FD", ALL_3, counting_blocks=0, timeouts=True),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_when_any_wait_fails(case):
    """A poisoned rank stores nothing, and no other rank reads what is not meant for it."""
    found = check_that_it_holds(case)
    assert len(found.endings) >= 10
    # A poisoned rank passes all its later operations at once. A rank counts its first crossing without a wait.
    assert found.most_ahead >= len(case.launches()) - case.program.startswith("X")


def test_no_chunk_is_announced_after_an_abort_of_its_rail():
    """The abort may come in each crossing, before the rows or just after. Later crossings then announce nothing."""
    assert len(check_that_it_holds(Case(1, "X D X D X D", OWN_1, own="copied", timeouts=True, late=True)).endings) > 10
    case = Case(1, "X D X D", (full(1, own=True),), own="copied", timeouts=True)
    memory = Memory(case)
    places = [memory["aborted", 0], memory["ended", 0], memory["chunk", 0, 0]]
    seen = {tuple(ending[2][at] for at in places) for ending in check_that_it_holds(case).endings}
    assert seen == {(0, 0, 2), (1, 1, 0), (1, 0, 0), (1, 1, 1), (1, 0, 1)}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, "D", ALL_3, counting_blocks=2),
        Case(3, "D D D", ALL_3, counting_blocks=1),
        Case(3, "D D D", ALL_3, counting_blocks=0, timeouts=True),
        Case(3, "D C D C D C", (full(3),), counting_blocks=0, timeouts=True),
        Case(3, "D D", (full(3),), counting_blocks=0, timeouts=True, late=True),
        Case(3, "D C D C", (full(3, 2),), counting_blocks=0),
        Case(2, "D C D C D C", (full(2, 2),), warps=2, counting_blocks=2),
        Case(2, "D C D C", (full(2, 3),), warps=2, counting_blocks=0),
        Case(3, "D C D C D C", ALL_3, counting_blocks=0, refused=((1, 1), (2, 2))),
        Case(3, "D C D C D C", OWN_3, own="slots", counting_blocks=0),
        Case(3, "FD FC FD FC FD FC", OWN_3, own="slots", counting_blocks=0),
        Case(3, "FD FD FD FC1 FC2 FC3", ALL_3),
        Case(3, "FD FC FD FC FD FC", ALL_3, counting_blocks=0, timeouts=True),
        Case(3, "FD FC FD", ALL_3, counting_blocks=0, timeouts=True, late=True),
        Case(3, "FD C D FC FD FC", ALL_3),
        Case(3, "D D C C2", ALL_3, counting_blocks=0, mixed=((1, 1, 1),)),
        Case(2, "X D C X D C", (full(2, 2),), warps=2, counting_blocks=0),
        Case(3, "X D X D X D", OWN_3, own="slots", counting_blocks=0),
        Case(3, "X D X D", ALL_3, counting_blocks=0, timeouts=True),
        Case(4, "X D X D X D", (full(4, 2, domains=2),), domains=2, chunk=2, counting_blocks=0),
    ],
    ids=_case_id,
)
def test_the_protocol_holds_in_larger_cases(case):
    check_that_it_holds(case, limit=20_000_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "D D", (ONE_WAY,), counting_blocks=0),
        Case(2, "D", (ONE_WAY,), counting_blocks=0, timeouts=True),
        Case(2, "D", (empty(2),), counting_blocks=0, timeouts=True, late=True),
        Case(2, "D", ((((0,),), ((),)),), counting_blocks=0, own="copied", layout="rank"),
        Case(2, "D C", (ONE_WAY,), counting_blocks=0, refused=((1, 1),)),
        Case(2, "DS", (ONE_WAY,), counting_blocks=0, warps=2),
        Case(2, "FD FC FD", BOTH, counting_blocks=0, refused=((1, 1),)),
        Case(2, "X D", (ONE_WAY,), counting_blocks=0),
        Case(2, "X D", (full(2, 2, True, domains=2),), domains=2, own="copied", counting_blocks=0),
    ],
    ids=_case_id,
)
def test_the_reduced_search_finds_every_ending_of_larger_cases(case):
    plain, reduced = explore(case, reduced=False, limit=20_000_000), check_that_it_holds(case)
    assert plain.broken == ""
    assert plain.endings == reduced.endings


SMALL = [
    Case(2, "D", (empty(2),), counting_blocks=0, timeouts=True),
    Case(2, "D C", (ONE_WAY,), counting_blocks=0),
    Case(2, COPIED, (ONE_WAY,), counting_blocks=0),
    Case(1, "X D X D", OWN_1, own="copied", counting_blocks=0),
    Case(1, "X D X D", OWN_1, own="copied", counting_blocks=0, timeouts=True),
    Case(2, "FD FD FD", BOTH, counting_blocks=0),
    Case(2, "FD", BOTH),
    Case(2, "FD FD FD", (ONE_WAY,), counting_blocks=0, refused=((1, 1),)),
    Case(2, "FD FC", (ONE_WAY,), counting_blocks=0, refused=((1, 1),)),
    Case(2, "FD D", (ONE_WAY,), counting_blocks=0),
    Case(2, "FD", (ONE_WAY,), counting_blocks=0, timeouts=True, late=True),
]


@pytest.mark.one_in(22)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{_case_id(case)}, {case.routings[0]}, {case.timeouts}")
def test_the_reduced_search_finds_every_ending(case):
    """Compare with the plain search, where every step of every thread is a choice."""
    plain, reduced = explore(case, reduced=False), check_that_it_holds(case)
    assert plain.broken == ""
    assert plain.endings == reduced.endings
    assert plain.states > 100 * reduced.states


def test_a_trace_shows_the_steps_that_lead_to_a_fault():
    case = Case(2, "D D D", (full(2),), Fault.SINGLE_BUFFER, counting_blocks=0)
    shortest, deep = explore(case), explore(case, deep=True)
    assert len(shortest.trace) <= len(deep.trace)
    line = re.compile(r"rank \d, (dispatch|combine|use) \d, [a-z0-9 ]+: .+")
    assert all(line.fullmatch(each) for each in shortest.trace)
    text = str(shortest)
    overwritten = text.index("LANDS dispatch row 0 of rank 0 at rank 1, parity 0 = operation 2")
    read = text.index("READS dispatch row 0 of rank 0 at rank 1, parity 0 = operation 2")
    assert overwritten < read
    assert text.splitlines()[-1].startswith("=> rank 1, dispatch 1, placement block of 0: READS")


def test_the_command_reports_a_correct_and_a_broken_protocol(capsys):
    assert main(["D C D C D C", "--ranks", "3", "--counting-blocks", "0"]) == 0
    assert "1 endings: the protocol holds" in capsys.readouterr().out
    assert main(["D D D", "--empty", "2", "--fault", "EARLY_END", "--layout", "expert"]) == 1
    assert "it needs operation 1" in capsys.readouterr().out.splitlines()[-1]


def test_too_large_and_invalid_cases_are_refused():
    with pytest.raises(TooManyStatesError, match="more than 50 states"):
        explore(Case(3, "D", (full(3),)), limit=50)
    with pytest.raises(ValueError, match="'Z' in a program"):
        Case(2, "D Z", (full(2),))
    with pytest.raises(ValueError, match="another number of ranks than 3"):
        Case(3, "D", (full(2),))
    with pytest.raises(ValueError, match="2 launches"):
        Case(2, "D D", (full(2),), calls=("e", "e"))
    with pytest.raises(ValueError, match="a D or K follows each X"):
        Case(2, "X FD", (full(2),))
    with pytest.raises(ValueError, match="no row leaves its domain"):
        Case(2, "X D", (full(2),), domains=2)
    with pytest.raises(ValueError, match="late threads"):
        Case(2, "D", (full(2),), late=True)
