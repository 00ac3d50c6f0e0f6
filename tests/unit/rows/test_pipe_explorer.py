"""The stages of a block of kernels/include/raymoe/rows/pipe.cuh, in every order of their steps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.explorer.pipe import PipeCase, PipeFault, explore_pipe

RIGHT = [
    PipeCase(1, 1, 3),
    PipeCase(2, 1, 5),
    PipeCase(3, 1, 7, inputs=1),
    PipeCase(2, 2, 5, inputs=1),
    PipeCase(4, 2, 9, inputs=1),
    PipeCase(2, 2, 4),
    PipeCase(2, 1, 5, warps=2),
    PipeCase(1, 1, 3, warps=3),
    PipeCase(2, 2, 4, inputs=1, warps=2),
    PipeCase(2, 1, 5, stores=False),
    PipeCase(2, 1, 5, warps=2, stores=False),
    PipeCase(2, 2, 5, inputs=1, warps=2, stores=False),
    PipeCase(1, 1, 3, inputs=1, dynamic=True),
    PipeCase(2, 2, 4, inputs=1, dynamic=True),
    PipeCase(4, 2, 7, inputs=1, dynamic=True),
    PipeCase(4, 2, 1, inputs=1, dynamic=True),
    PipeCase(2, 1, 5, warps=2, dynamic=True),
    PipeCase(3, 3, 4, inputs=1, stores=False, dynamic=True),
    PipeCase(2, 2, 5, inputs=1, warps=2, stores=False, dynamic=True),
]


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_every_order_of_steps_is_right(case: PipeCase) -> None:
    found = explore_pipe(case)
    assert not found.broken, "\n".join((found.broken, *found.trace))
    assert found.states > 20


FAULTS = {
    PipeFault.NO_EMPTY_WAIT: (PipeCase(2, 1, 4), "finds|arrives"),
    PipeFault.LATE_PARITY: (PipeCase(2, 1, 4), "finds|arrives|no step"),
    PipeFault.BYTES_OF_ONE: (PipeCase(2, 1, 4), "reads turn .* and finds in"),
    PipeFault.NO_FULL_WAIT: (PipeCase(2, 1, 4), "reads turn .* and finds in"),
    PipeFault.NO_STORE_WAIT: (PipeCase(2, 1, 5), "the store of turn .* reads and finds in"),
    PipeFault.OWN_STAGE: (PipeCase(2, 1, 5), "the store of turn .* reads and finds in"),
    PipeFault.NEVER_EMPTY: (PipeCase(1, 1, 3), "no step is left"),
    PipeFault.ONE_WARP: (PipeCase(2, 1, 4, warps=2, stores=False), "warp 1 of group 0 reads turn .* and finds in"),
    PipeFault.EARLY_NUMBER: (PipeCase(2, 1, 4, dynamic=True), "finds number 2 at turn 0"),
    PipeFault.LATE_NUMBER: (PipeCase(2, 1, 4, dynamic=True), "finds number 2 at turn 4"),
    PipeFault.ONE_END: (PipeCase(2, 2, 3, inputs=1, dynamic=True), "no step is left"),
    PipeFault.NO_BARRIER: (PipeCase(2, 1, 3, warps=2), "begins before the results of all warps"),
}


@pytest.mark.parametrize("fault", PipeFault)
def test_an_injected_bug_is_found(fault: PipeFault) -> None:
    case, says = FAULTS[fault]
    found = explore_pipe(replace(case, fault=fault))
    print(f"{fault.value}: {found.broken}", *found.trace, sep="\n    ")
    assert re.search(says, found.broken), found.broken
    assert found.trace


def test_stages_that_are_no_multiple_of_the_groups_fail() -> None:
    """A group would wait two phases ahead: a parity is the same two phases later, so it reads a stage too early."""
    found = explore_pipe(PipeCase(3, 2, 5, inputs=1))
    assert "reads turn" in found.broken, found
