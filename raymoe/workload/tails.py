"""Keep of a line's samples what explains its slow ones: the times of each rank, and the times over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import median

from raymoe.workload.progress import FAR, MOST_POINTS, MOST_RANK_TIMES


def percentile(times: Sequence[float], percent: float) -> float:
    """Return the smallest measured time that at least `percent` of all times do not exceed.

    >>> percentile([5.0, 1.0, 3.0], 50), percentile([5.0, 1.0, 3.0], 99), percentile(range(1, 201), 99)
    (3.0, 5.0, 198)
    """
    ordered = sorted(times)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def by_rank(us: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """Return the median and the 99th percentile of each rank's own times.

    None for a single rank, for many, and where a rank takes no part: the time of a copy is 0 on other ranks.

    >>> by_rank([[4.0, 2.0, 3.0], [9.0, 1.0, 5.0]]), by_rank([[0.0], [5.0]])
    ([[3.0, 4.0], [5.0, 9.0]], None)
    """
    if not 1 < len(us) <= MOST_RANK_TIMES or not all(map(any, us)):
        return None
    return [[round(median(times), 2), round(percentile(times, 99), 2)] for times in us]


def over_steps(us: Sequence[float]) -> list[float] | None:
    """Return the slowest rank's times in the order of the steps, if some are far from the median.

    Of more than MOST_POINTS steps, neighbours share a point, which is the slowest of them.

    >>> over_steps([2.0, 2.0, 9.0]), over_steps([2.0, 2.0, 2.1])
    ([2.0, 2.0, 9.0], None)
    >>> len(over_steps([1.0] * 400 + [9.0] * 50)), over_steps([1.0] * 400 + [9.0] * 50)[-1]
    (150, 9.0)
    """
    if percentile(us, 99) < FAR * median(us):
        return None
    together = ceil(len(us) / MOST_POINTS)
    return [round(max(us[first : first + together]), 2) for first in range(0, len(us), together)]
