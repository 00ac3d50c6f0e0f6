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
    "entries published",
    "counts",
    "planned",
    "first row",
    "last row",
    "placed",
    "end",
    "all awaited",
)
"""The names of the points, by number."""

FORMER_NAMES = {"told": "entries published"}
"""The names of points in older results, by which the report reads them."""

TRACE_POINTS = 16
BLOCKS_A_SM = 2
"""The most that a launch has."""


@dataclass(frozen=True)
class TracePoint:
    """The blocks that reach a point, and what it means that they have."""

    blocks: str
    meaning: str


SENDERS, COUNTING, PLACEMENT = "senders", "counting blocks", "placement"
LOCAL, FINAL = "local reduction", "final reduction"

POINTS = {
    "dispatch": {
        "start": TracePoint("all", "begin"),
        "destinations": TracePoint(SENDERS, "ready to send"),
        "first push": TracePoint(SENDERS, "first row sent"),
        "last push": TracePoint(SENDERS, "last row sent"),
        "arrived": TracePoint(SENDERS, "all pushed rows have arrived"),
        "said done": TracePoint(SENDERS, "peers know that no more rows come"),
        "entries published": TracePoint(COUNTING, "routing entries are numbered and written to all ranks"),
        "counts": TracePoint(PLACEMENT, "the counts of all ranks are here"),
        "planned": TracePoint(PLACEMENT, "the place of each row is known"),
        "first row": TracePoint(PLACEMENT, "the first row has come"),
        "last row": TracePoint(PLACEMENT, "the last row has come"),
        "placed": TracePoint(PLACEMENT, "all rows are in their places"),
        "end": TracePoint("all", "done"),
        "all awaited": TracePoint("last", "all peers have finished sending"),
    },
    "combine": {
        "start": TracePoint("all", "begin"),
        "first push": TracePoint(LOCAL, "first sum sent"),
        "last push": TracePoint(LOCAL, "last sum sent"),
        "arrived": TracePoint(LOCAL, "all pushed sums have arrived"),
        "said done": TracePoint(LOCAL, "nothing more to push (few tokens: final reduction has added its own sums)"),
        "counts": TracePoint(FINAL, "known that no rank refuses the data"),
        "first row": TracePoint(FINAL, "the first sum of a peer has come"),
        "last row": TracePoint(FINAL, "the last sum of a peer has come"),
        "placed": TracePoint(FINAL, "all sums are added"),
        "end": TracePoint("all", "done"),
        "all awaited": TracePoint("last", "all peers have finished pushing"),
    },
}
"""The points of each operation, in the order of work of each kind of block. `last` is the last block out."""


def traced(on: bool) -> tuple[tuple[str, str], ...]:
    """Return the macros of a build that stores its times."""
    return (("TRACED", "1"),) if on else ()


def timeline(times: Sequence[Sequence[int]]) -> dict[str, tuple[float, float, float]]:
    """Give when the first, the median and the last block reached each point, in microseconds after the first start.

    >>> timeline([[1000, 3000, 0], [1500, 2500, 0], [1200, 0, 0]])
    {'start': (0.0, 0.2, 0.5), 'destinations': (1.5, 2.0, 2.0)}
    """
    began = min(row[0] for row in times if row[0])
    by_name = {}
    for point, name in enumerate(NAMES):
        reached = sorted((row[point] - began) / 1e3 for row in times if point < len(row) and row[point])
        if reached:
            by_name[name] = reached[0], reached[len(reached) // 2], reached[-1]
    return by_name
