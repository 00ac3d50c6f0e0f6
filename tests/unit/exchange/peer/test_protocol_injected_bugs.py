"""The explorer finds each bug that is injected into the protocol of dispatch and combine, and describes its effect.

`tests/explorer/injected_bugs.py` lists the faults, `docs/internals/protocol.md` the rule that each of them breaks. The
tests print a trace of each failure (pytest -rP).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.explorer.case import Case, Routing, empty, full
from tests.explorer.fault import Fault
from tests.explorer.injected_bugs import (
    injected_bug,
    injected_in_known,
    injected_in_lines,
    injected_in_placement_blocks,
)
from tests.explorer.search import explore

ALL = {
    **{f"{fault.name.lower()}-{ranks}": injected_bug(fault, ranks) for fault in Fault for ranks in (2, 3)},
    **{
        f"{fault.name.lower()} in lines-{ranks}": made
        for ranks in (2, 3)
        for fault, made in injected_in_lines(ranks).items()
    },
    **{
        f"{fault.name.lower()} with known routing-{ranks}": made
        for ranks in (2, 3)
        for fault, made in injected_in_known(ranks).items()
    },
    **{f"{fault.name.lower()} in placement blocks-1": made for fault, made in injected_in_placement_blocks().items()},
}
FILLED = (full(3), empty(3), full(3))  # a rank that is overwritten in epoch 3 got only words in epoch 2
ONE_WAY: Routing = (((1,),), ((),))


@cache  # some cases are explored twice
def broken_by(case: Case) -> str:
    return explore(case).broken


@pytest.mark.parametrize(
    ("case", "how"),
    [pytest.param(*made, marks=pytest.mark.thorough if made[0].ranks > 2 else ()) for made in ALL.values()],
    ids=ALL,
)
def test_an_injected_bug_is_found(case, how):
    found = explore(case, deep=True)
    print(f"{case.fault.value}\n{found}")
    assert re.search(how, found.broken), str(found)
    assert found.trace


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("case", "how"), ALL.values(), ids=ALL)
def test_the_same_case_holds_without_the_fault(case, how):
    assert not broken_by(replace(case, fault=None))


@pytest.mark.parametrize("fault", [Fault.NO_DEPENDENT_WAIT])
@pytest.mark.parametrize("program", ["D C", "D U1"])
def test_without_the_dependent_wait_results_are_read_too_early(fault, program):
    found = explore(Case(3, program, (full(3),), fault, counting_blocks=0, layout="rank"), deep=True)
    assert "before it has ended" in found.broken


def test_an_epoch_from_the_host_fails_unless_every_call_is_eager():
    """Try every mix of eager calls and replays on two ranks."""
    ways = ["".join(each) for each in product("er", repeat=3)]
    broken = set()
    for calls in product(ways, repeat=2):
        if explore(Case(2, "D D D", (full(2),), Fault.BAKED_EPOCH, counting_blocks=0, calls=calls), deep=True).broken:
            broken.add(calls)
    assert set(product(ways, repeat=2)) - broken == {("eee", "eee")}


@pytest.mark.parametrize(
    "case",
    [
        Case(3, "D C D C D C", (full(3),), Fault.SINGLE_BUFFER, counting_blocks=0),
        Case(3, "D C D C D C", (full(3),), Fault.SHARED_EPOCH, counting_blocks=0),
        Case(3, "D D D", FILLED, Fault.NO_LAST_WORDS, counting_blocks=0),
        Case(2, "FD FD FD", (full(2),), Fault.UNPOISONED, timeouts=True),
        Case(2, "D U1", (full(2, own=True),), Fault.OWN_UNHEARD, own="slots", layout="rank"),
        Case(1, "X D X D X D", (full(1, 2, own=True),), Fault.EQUAL, own="copied"),
        Case(1, "X D X D X D", (full(1, 2, own=True),), Fault.RAIL_UNJOINED, own="copied"),
    ],
    ids=lambda case: case.fault.name.lower(),
)
def test_a_fault_does_no_harm_where_its_rule_is_not_needed(case):
    """Each fault is harmless here for its own reason.

    - One buffer, or one epoch, is enough if every dispatch is followed by its combine and nothing aliases a slot.
    - The last words of warps matter only with layout rank; with layout expert the heads give the same information.
    - A line that a rank overwrites after a failed wait is missed, not misread.
    - A rank's own words matter only to placement blocks. Where rows stay in slots, its senders have awaited their rows
      before the kernel ends.
    - The word of a chunk is never ahead of the crossing for which its reader waits.
    - A rank that waits for every chunk does not leave its rail behind.
    """
    assert not broken_by(case)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("D C C C", "combine .*operation 2; it needs operation 1"),  # combines without a dispatch between them
        ("D D C1 C2 C2", "it needs operation"),
    ],
)
def test_one_buffer_fails_for_combines_in_a_row(program, how):
    found = explore(Case(3, program, (full(3),), Fault.SINGLE_BUFFER, counting_blocks=0), deep=True)
    assert re.search(how, found.broken), str(found)


def test_a_second_send_before_the_first_receive_fails():
    """Both sends would have the same epoch; sends and receives must alternate."""
    found = explore(Case(2, "DS DS DR DR", (full(2),)))
    assert "it needs operation" in found.broken, str(found)


@pytest.mark.parametrize("program", ["DS CS DR CR", "DS FC DR", "DT DP C DR"])
def test_a_combine_between_a_send_and_its_receive_fails(program):
    """The combine would need the status before the counts have arrived."""
    found = explore(Case(2, program, (full(2),), refused=((1, 1),)))
    assert "before it has ended" in found.broken, str(found)


def test_rows_in_slots_are_overwritten_by_the_next_send():
    found = explore(Case(2, "DS DR DS U1 DR DS DR", (full(2),), layout="rank"), deep=True)
    assert re.search("use 1, use: READS .*operation 3; it needs operation 1", found.broken), str(found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "program"),
    [
        (Fault.ROWS_AFTER_WORD, "D"),
        (Fault.SINGLE_BUFFER, "D D D"),
        (Fault.SILENT, "D"),
        (Fault.EQUAL, "D D"),
        (Fault.NO_DEPENDENT_WAIT, "D D"),
        (Fault.LINE_UNCHECKED, "FD"),
        (Fault.LINE_IN_GRANULES, "FD"),
        (Fault.SINGLE_BUFFER, "FD FD"),
        (Fault.EARLY_END, "FD FD FD"),
        (Fault.UNORDERED_LINES, "FD FD FD"),
    ],
)
def test_the_plain_search_finds_the_same_faults(fault, program):
    """In the plain search, every step of every thread is a choice."""
    filled = fault is Fault.EARLY_END
    refused = ((1, 1),) if fault is Fault.UNORDERED_LINES else ()
    routings = (full(2), empty(2), full(2)) if filled else (ONE_WAY,)
    case = Case(2, program, routings, fault, counting_blocks=0, refused=refused)
    plain, reduced = explore(case, reduced=False, deep=True), explore(case, deep=True)
    assert plain.broken
    assert reduced.broken


@pytest.mark.one_in(3)
@pytest.mark.parametrize("made", injected_in_placement_blocks().values(), ids=lambda made: made[0].fault.name.lower())
def test_the_plain_search_finds_the_same_faults_of_chunks(made):
    case, how = made
    found = explore(case, reduced=False)
    assert re.search(how, found.broken), str(found)
