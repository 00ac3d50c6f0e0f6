"""Names and meanings of the points of kernels/include/raymoe/base/trace.cuh, and timelines from a kernel's times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMES = (
    "start",
    "destinations",
    "first push",
    "last push",
    "arrived",
    "said done",
    "told",
    "counts",
    "planned",
    "first row",
    "last row",
    "placed",
    "end",
    "all awaited",
)
"""The names of the points, by number."""

TRACE_POINTS = 16
BLOCKS_A_SM = 2
"""The most that a launch has."""


@dataclass(frozen=True)
class TracePoint:
    """The blocks that reach a point, and what they have done then."""

    who: str
    what: str


POINTS = {
    "dispatch": {
        "start": TracePoint("all", "begin"),
        "destinations": TracePoint("senders", "ready to send"),
        "first push": TracePoint("senders", "first row sent"),
        "last push": TracePoint("senders", "last row sent"),
        "arrived": TracePoint("senders", "all pushed rows have arrived"),
        "said done": TracePoint("senders", "peers know that no more rows come"),
        "told": TracePoint("routers", "entries are numbered and written to all ranks"),
        "counts": TracePoint("placers", "the counts of all ranks are here"),
        "planned": TracePoint("placers", "the place of each row is known"),
        "first row": TracePoint("placers", "the first row has come"),
        "last row": TracePoint("placers", "the last row has come"),
        "placed": TracePoint("placers", "all rows are in their places"),
        "end": TracePoint("all", "done"),
        "all awaited": TracePoint("last", "all peers have finished sending"),
    },
    "combine": {
        "start": TracePoint("all", "begin"),
        "first push": TracePoint("reducers", "first sum sent"),
        "last push": TracePoint("reducers", "last sum sent"),
        "arrived": TracePoint("reducers", "all pushed sums have arrived"),
        "said done": TracePoint("reducers", "nothing more to push (few tokens: summers have added their own)"),
        "counts": TracePoint("summers", "known that no rank refuses the data"),
        "first row": TracePoint("summers", "the first sum of a peer has come"),
        "last row": TracePoint("summers", "the last sum of a peer has come"),
        "placed": TracePoint("summers", "all sums are added"),
        "end": TracePoint("all", "done"),
        "all awaited": TracePoint("last", "all peers have finished pushing"),
    },
}
"""The points of each operation, in the order of work of each kind of block. `last` is the last block out."""


def traced(on: bool) -> tuple[tuple[str, str], ...]:
    """The macros of a build that stores its times."""
    return (("TRACED", "1"),) if on else ()


def timeline(times: Sequence[Sequence[int]]) -> dict[str, tuple[float, float, float]]:
    """When the first, the median and the last block reached each point, in microseconds after the first block's start.

    >>> timeline([[1000, 3000, 0], [1500, 2500, 0], [1200, 0, 0]])
    {'start': (0.0, 0.2, 0.5), 'destinations': (1.5, 2.0, 2.0)}
    """
    began = min(row[0] for row in times if row[0])
    found = {}
    for point, name in enumerate(NAMES):
        reached = sorted((row[point] - began) / 1e3 for row in times if point < len(row) and row[point])
        if reached:
            found[name] = reached[0], reached[len(reached) // 2], reached[-1]
    return found
