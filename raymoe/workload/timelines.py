"""What several runs of an operation on all ranks say of when blocks came to which point of its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

SAMPLES = 9

Times = Mapping[str, tuple[float, float, float]]
"""Of each point, the microseconds after the start at which the first, the median and the last block came to it."""

Timeline = list[list[str | float]]
"""The same in a result line: [point, first, median, last], in the order of time."""


def typical(samples: Sequence[Times]) -> Times:
    """The medians over the samples that came to a point at all.

    >>> typical([{"start": (0.0, 1.0, 2.0)}, {"start": (0.0, 3.0, 9.0), "end": (4.0, 5.0, 6.0)}])
    {'start': (0.0, 2.0, 5.5), 'end': (4.0, 5.0, 6.0)}
    """
    found = {}
    for point in dict.fromkeys(point for sample in samples for point in sample):
        first, middle, last = zip(*(sample[point] for sample in samples if point in sample), strict=True)
        found[point] = median(first), median(middle), median(last)
    return found


def of_slowest(ranks: Sequence[Times]) -> Timeline:
    """That of the rank whose last block came last to its last point.

    >>> quick = {"start": (0.0, 0.0, 0.1), "end": (5.0, 6.0, 7.0)}
    >>> of_slowest([quick, {"end": (4.0, 6.03, 8.26), "start": (0.0, 0.1, 0.2)}, quick])
    [['start', 0.0, 0.1, 0.2], ['end', 4.0, 6.0, 8.3]]
    """
    slowest = max(ranks, key=lambda times: max(last for *_, last in times.values()))
    in_order = sorted(slowest.items(), key=lambda item: (item[1][1], item[1][2]))
    return [[point, *(round(us, 1) for us in times)] for point, times in in_order]
