"""Where the time of a traced operation goes: when blocks came to which point of its kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raymoe.device.trace import POINTS
from raymoe.report.columns import Column
from raymoe.report.results import Line
from raymoe.report.ways import us


@dataclass(frozen=True)
class Reached:
    """A point, and the microseconds after the start at which the first, the median and the last block came to it."""

    point: str
    first: float
    median: float
    last: float


def reached(line: Line) -> list[Reached]:
    """In the order of time; empty where a line has no timeline."""
    told: Any = line["timeline"]
    return [Reached(*each) for each in told or ()]


def timelines(lines: Sequence[Line]) -> Iterator[tuple[str, list[Column]]]:
    """A table for each line with a timeline. Its title also says how long the operation takes by the clock of its
    steps, launch included."""
    runs = {line["run"] for line in lines}
    for line in lines:
        points = reached(line)
        if not points:
            continue
        known = POINTS.get(str(line["op"]), {})
        which = f"{line['case']}, run {line['run']}" if len(runs) > 1 else str(line["case"])
        yield (
            f"where the time of {line['op']} goes, {which}: us after the start ({us(line):.1f} by the clock)",
            [
                Column("point", [each.point for each in points]),
                Column("first block", [f"{each.first:.1f}" for each in points], right=True),
                Column("median", [f"{each.median:.1f}" for each in points], right=True),
                Column("last block", [f"{each.last:.1f}" for each in points], right=True),
                Column("blocks", [known[each.point].who if each.point in known else "-" for each in points]),
                Column("meaning", [known[each.point].what if each.point in known else "-" for each in points]),
            ],
        )
