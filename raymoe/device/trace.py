"""What the points of kernels/include/raymoe/base/trace.cuh are called and mean, and what a kernel's times say."""

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
"""Of the points, by number."""

TRACE_POINTS = 16
BLOCKS_A_SM = 2
"""That a launch has at most."""


@dataclass(frozen=True)
class Point:
    """Which blocks come to it, and what that means."""

    who: str
    what: str


POINTS = {
    "dispatch": {
        "start": Point("all", "begin"),
        "destinations": Point("senders", "ready to send"),
        "first push": Point("senders", "first row on its way"),
        "last push": Point("senders", "last row on its way"),
        "arrived": Point("senders", "all that was pushed has arrived"),
        "said done": Point("senders", "peers were told that no more comes"),
        "told": Point("routers", "entries are numbered, and all ranks were told"),
        "counts": Point("placers", "the counts of all ranks are here"),
        "planned": Point("placers", "where rows stand is known"),
        "first row": Point("placers", "the first row was there"),
        "last row": Point("placers", "the last row was there"),
        "placed": Point("placers", "all rows stand in their places"),
        "end": Point("all", "done"),
        "all awaited": Point("last", "no peer has anything more to send"),
    },
    "combine": {
        "start": Point("all", "begin"),
        "first push": Point("reducers", "first sum on its way"),
        "last push": Point("reducers", "last sum on its way"),
        "arrived": Point("reducers", "all that was pushed has arrived"),
        "said done": Point("reducers", "nothing more to push (few tokens: summers have added their own)"),
        "counts": Point("summers", "it is known that no rank refuses the data"),
        "first row": Point("summers", "the first sum of a peer was there"),
        "last row": Point("summers", "the last sum of a peer was there"),
        "placed": Point("summers", "all sums are added"),
        "end": Point("all", "done"),
        "all awaited": Point("last", "no peer has anything more to push"),
    },
}
"""Of each operation, in the order of work of each kind of block. `last` is the last block out."""


def traced(on: bool) -> tuple[tuple[str, str], ...]:
    """What a build is defined with that tells its times."""
    return (("TRACED", "1"),) if on else ()


def timeline(times: Sequence[Sequence[int]]) -> dict[str, tuple[float, float, float]]:
    """For each point that blocks came to, the microseconds after the first block's start at which the first, the median
    and the last of them did.

    >>> timeline([[1000, 3000, 0], [1500, 2500, 0], [1200, 0, 0]])
    {'start': (0.0, 0.2, 0.5), 'destinations': (1.5, 2.0, 2.0)}
    """
    began = min(row[0] for row in times if row[0])
    found = {}
    for point, name in enumerate(NAMES):
        came = sorted((row[point] - began) / 1e3 for row in times if point < len(row) and row[point])
        if came:
            found[name] = came[0], came[len(came) // 2], came[-1]
    return found
