"""What a list of times says."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def percentile(times: Sequence[float], percent: float) -> float:
    """The smallest time that at least `percent` of all times do not exceed: always one that was measured.

    >>> percentile([5.0, 1.0, 3.0], 50), percentile([5.0, 1.0, 3.0], 99), percentile(range(1, 201), 99)
    (3.0, 5.0, 198)
    """
    ordered = sorted(times)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def spread(us: Sequence[float]) -> dict[str, object]:
    """The keys of a result line that tell of times in microseconds.

    >>> spread([4.0, 2.0])
    {'samples': 2, 'us_p50': 3.0, 'us_p99': 4.0, 'us_min': 2.0, 'us_max': 4.0}
    """
    return {
        "samples": len(us),
        "us_p50": median(us),
        "us_p99": percentile(us, 99),
        "us_min": min(us),
        "us_max": max(us),
    }


def on_wire(total: float, busiest: float, us: float) -> dict[str, object]:
    """The keys that tell of bytes: `total` crossed between ranks, `busiest` in one direction of one rank's port.

    >>> on_wire(total=4e6, busiest=1e6, us=100.0)
    {'bytes_wire': 4000000, 'gbps_wire': 10.0}
    >>> on_wire(total=0, busiest=0, us=100.0)
    {'bytes_wire': 0, 'gbps_wire': None}
    """
    return {"bytes_wire": round(total), "gbps_wire": busiest / us / 1e3 if busiest else None}
