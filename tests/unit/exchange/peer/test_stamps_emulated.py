"""Every kernel that reads rows detects a row of an earlier run (RAYMOE_STAMPS=1).

A changed sender leaves out rows of run 3, or stores them into the other parity, but still announces them. Their slots
then hold rows from two runs before. A build with stamps reports this; a build without stamps takes the old row. Lines
carry their epoch in every build, so there such a row never arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from raymoe.errors import PeerTimeout, RaymoeError
from tests.emulator.build import Change, compiler
from tests.emulator.cases import FP8
from tests.emulator.machine import Emulator
from tests.emulator.ranks import LONG_S, backend, small, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange.exchange_cases import Case

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

SHORT_S = 1e-2


@dataclass(frozen=True)
class Stale:
    """A kind of backend, and the change that misplaces its rows of run 3."""

    kind: str
    changes: tuple[Change, ...]
    op: str = "dispatch"
    form: str = "whole"
    spec: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def three_runs(self, seed: int, stamped: bool, timeout_s: float = LONG_S) -> Iterator[Steps]:
        """Run three steps to their end."""
        spec = spec_for(self.kind, **self.spec)
        case = Case(2, spec, "auto", ("uniform",) * 3, seed=seed, ragged=False)
        with Emulator(2, 20_000_000, self.changes) as emulator:
            spaces = workspaces(emulator, spec, stamped=stamped, timeout_s=timeout_s)
            steps = Steps(emulator, case, [backend(self.kind, space, spec, small) for space in spaces])
            for step in range(3):
                steps.enqueue(step, self.form)
            emulator.run(seed)
            yield steps


SENT = (Change("sending.cuh", "parity_(epoch & 1)", "parity_((epoch & 1) ^ (epoch == 3))"),)
REDUCED = (
    Change("local_reduction.cuh", "slot_at(source, epoch_ & 1,", "slot_at(source, (epoch_ & 1) ^ (epoch_ == 3),"),
)
QUANTISED = (
    Change("quantised_sending.cuh", "slot_at(peer_, epoch_ & 1,", "slot_at(peer_, (epoch_ & 1) ^ (epoch_ == 3),"),
)
STORED = (Change("storing.cuh", "if (!(mask >> peer & 1)) {", "if (epoch == 3 || !(mask >> peer & 1)) {"),)
RAW = {"wire": FP8, "output": "raw", "hidden": 144}
STALE = {
    "fused": Stale("fused", SENT),
    "halves of fused": Stale("fused", SENT, form="halves"),
    "fused, fp8": Stale("fused", QUANTISED, spec={"wire": FP8, "hidden": 136}),
    "fused, fp8 raw": Stale("fused", QUANTISED, spec=RAW),
    "staged, fp8 raw": Stale("staged", QUANTISED, spec=RAW),
    "staged": Stale("staged", STORED),
    "halves of staged": Stale("staged", STORED, form="halves"),
    "fused, layout rank": Stale("fused", SENT, spec={"layout": "rank"}),
    "fused, fp8 raw, layout rank": Stale("fused", QUANTISED, spec={**RAW, "layout": "rank"}),
    "staged, layout rank": Stale("staged", STORED, spec={"layout": "rank"}),
    "copied, layout rank": Stale("copied", STORED, spec={"layout": "rank"}),
    "copied": Stale("copied", STORED),
    "sums of fused": Stale("fused", REDUCED, op="combine"),
    "sums of fused, in halves": Stale("fused", REDUCED, op="combine", form="halves"),
    "sums of staged": Stale("staged", REDUCED, op="combine"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stale", STALE.values(), ids=STALE)
def test_with_stamps_an_older_row_in_a_slot_is_reported(stale):
    # A slow rank may read in run 2 what was meant for run 3.
    told = rf"{stale.op} [23] on rank \d read a slot of rank \d that held the row of [0123]: the protocol is broken"
    for seed in range(3):
        with stale.three_runs(seed, stamped=True) as steps:
            for each in steps.backends:
                with pytest.raises(RaymoeError, match=told):
                    each.check()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stale", [each for each in STALE.values() if each.form == "whole"])
def test_without_stamps_an_older_row_is_taken_as_current(stale):
    with stale.three_runs(seed=0, stamped=False) as steps:
        for each in steps.backends:
            each.check()
        with pytest.raises(AssertionError):
            steps.judge(first=2)


def _not_sent(file: str, store: str) -> tuple[Change, ...]:
    return (Change(file, store, f"if (epoch != 3) {store}"),)


NO_LINES = (
    Change("lines.cuh", "if (line + ahead * GROUP < lines) {", "if (epoch != 3 && line + ahead * GROUP < lines) {"),
)
LINES = {
    "dispatch": Stale("ll", NO_LINES),
    "dispatch, fp8": Stale("ll", NO_LINES, spec=RAW),
    "combine": Stale("ll", _not_sent("sums_ll.cuh", "part.send(slot, g, value, epoch);"), "combine"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stale", LINES.values(), ids=LINES)
@pytest.mark.parametrize("stamped", [False, True])
def test_a_line_of_an_older_run_is_not_accepted(stale, stamped):
    with stale.three_runs(0, stamped, SHORT_S) as steps:
        for each in steps.backends:
            with pytest.raises(PeerTimeout, match=stale.op) as raised:
                each.check()
            assert raised.value.epoch == 3
