"""Check the times at which blocks reach the points of a kernel. The checks hold at any speed."""

from __future__ import annotations

from collections.abc import Mapping

EXPECTED = {"start", "first push", "last push", "counts", "first row", "last row", "end"}
ORDERED_POINTS = (("first push", "last push"), ("first row", "last row"), ("last push", "arrived"))
"""The same blocks reach both points."""


def judge_timeline(op: str, times: Mapping[str, tuple[float, float, float]], slack_us: float) -> None:
    """Check one rank's times, where ranks send each other rows. `slack_us` covers rounding and clock differences."""
    assert set(times) >= EXPECTED | ({"entries published", "placed"} if op == "dispatch" else set())
    assert times["start"][0] == 0
    for point, (first, median, last) in times.items():
        assert 0 <= first <= median <= last, point
        if point != "all awaited":
            assert last <= times["end"][2] + slack_us, point
    for before, after in ORDERED_POINTS:
        if {before, after} <= set(times):
            for earlier, later in zip(times[before], times[after], strict=True):
                assert earlier <= later + slack_us, (before, after)
    if op == "dispatch":
        assert times["entries published"][0] <= times["counts"][2] + slack_us
    if "all awaited" in times:
        assert times["end"][2] <= times["all awaited"][0] + slack_us
        assert times["all awaited"][0] == times["all awaited"][2], "only one block reaches this point"
