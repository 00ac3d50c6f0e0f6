"""What must hold of the times at which blocks come to the points of a kernel, however fast it is."""

from __future__ import annotations

from collections.abc import Mapping

EXPECTED = {"start", "first push", "last push", "counts", "first row", "last row", "end"}
ONE_AFTER_THE_OTHER = (("first push", "last push"), ("first row", "last row"), ("last push", "arrived"))
"""The same blocks come to both."""


def judge_timeline(op: str, times: Mapping[str, tuple[float, float, float]], slack_us: float) -> None:
    """Of a run of several ranks that send one another something; `slack_us` is what rounding and clocks may be off."""
    assert set(times) >= EXPECTED | ({"told", "placed"} if op == "dispatch" else set())
    assert times["start"][0] == 0
    for point, (first, median, last) in times.items():
        assert 0 <= first <= median <= last, point
        if point != "all awaited":
            assert last <= times["end"][2] + slack_us, point
    for before, after in ONE_AFTER_THE_OTHER:
        if {before, after} <= set(times):
            for earlier, later in zip(times[before], times[after], strict=True):
                assert earlier <= later + slack_us, (before, after)
    if op == "dispatch":
        assert times["told"][0] <= times["counts"][2] + slack_us
    if "all awaited" in times:
        assert times["end"][2] <= times["all awaited"][0] + slack_us
        assert times["all awaited"][0] == times["all awaited"][2], "one block comes to it"
