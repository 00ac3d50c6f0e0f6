"""What the points of kernels/include/raymoe/trace.cuh are called, and what a kernel's times say."""

from __future__ import annotations

from collections.abc import Sequence

POINTS = (
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
TRACE_POINTS = 16
MOST_BLOCKS = 264


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
    for point, name in enumerate(POINTS):
        came = sorted((row[point] - began) / 1e3 for row in times if point < len(row) and row[point])
        if came:
            found[name] = came[0], came[len(came) // 2], came[-1]
    return found
