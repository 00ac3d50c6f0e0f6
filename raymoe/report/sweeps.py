"""Groups exchanges by the number of SMs that a matrix gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raymoe.report.results import Line

LEAST_POINTS = 3

_ASKED = re.compile(r"(?:^|,)sms=([1-9]\d{0,5})(?:,|$)")


def asked_sms(line: Line) -> int | None:
    """Read from a case's name how many SMs it asks for; None if the name has no number.

    >>> asked_sms({"case": "layout=rank,sms=24"}), asked_sms({"case": "layout=rank,sms=auto"})
    (24, None)
    """
    found = _ASKED.search(str(line["case"]))
    return int(found[1]) if found else None


def sms_curves(lines: Sequence[Line], op: str) -> dict[str, dict[int, Line]]:
    """Give the lines of an operation by label and SMs: a curve for each setting with LEAST_POINTS numbers of SMs.

    >>> lines = [
    ...     {"op": "dispatch", "case": f"layout={layout},sms={sms}", "backend": "fused", "us_p50": 9.0}
    ...     for layout in ("rank", "expert") for sms in (8, 16, 24)
    ... ]
    >>> [(label, list(points)) for label, points in sms_curves(lines, "dispatch").items()]
    [('fused layout=rank', [8, 16, 24]), ('fused layout=expert', [8, 16, 24])]
    """
    swept: dict[tuple[str, ...], dict[int, Line]] = {}
    for line in lines:
        sms = asked_sms(line)
        if line["op"] == op and line["us_p50"] and sms is not None:
            others = (word for word in str(line["case"]).split(",") if not word.startswith("sms="))
            swept.setdefault((f"run {line.get('run')}", *others), {})[sms] = line
    swept = {words: points for words, points in swept.items() if len(points) >= LEAST_POINTS}
    shared = set.intersection(*(set(words) for words in swept)) if swept else set()
    curves: dict[str, dict[int, Line]] = {}
    for words, points in swept.items():
        backend = str(next(iter(points.values()))["backend"])
        curves[" ".join([backend, *(word for word in words if word not in shared)])] = points
    return curves
