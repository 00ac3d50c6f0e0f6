"""What compute-sanitizer has said: `python -m tests.gpu.sanitizer_report LOG...` tells it in short.

>>> report = Report.of('''
... ========= COMPUTE-SANITIZER
... 12.0 s  a case
... ========= Error: Race reported between Write access at copy+0x90 in ring.cuh:13
... =========     and Read access at raymoe::refill(int *)+0xa0 in copy.cu:14 [2048 hazards]
... =========
... ========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
... ''')
>>> report.total, [str(place) for finding in report.findings for place in finding.places]
(1, ['Write copy ring.cuh:13', 'Read raymoe::refill copy.cu:14'])
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PREFIX = "========="
_HEADLINE = "COMPUTE-SANITIZER"
_SUMMARY = re.compile(r"^(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b(?! were not printed)")
_PLACE = re.compile(
    r"(?:(?:(?P<access>\w+) access )?\bat |Device Frame: ?)"
    r"(?P<function>\S.*?)\+0x[0-9a-f]+(?: in (?P<file>\S+?):(?P<line>\d+))?(?=\s|$)"
)


@dataclass(frozen=True)
class Place:
    """An access, or what went wrong, and where. `file` and `line` are of the innermost function, inlined or not."""

    access: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "no line"
        return " ".join(filter(None, (self.access, self.function, where)))


@dataclass(frozen=True)
class Finding:
    """Of one paragraph of the report: its first line, and every place that it names."""

    says: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Report:
    """Everything that the tool has said of all processes."""

    summaries: int
    """How many there are. Without one the tool has not come to its end."""
    total: int
    """Errors or hazards, as the summaries count them."""
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        return self.summaries > 0 and self.total == 0 and not self.findings

    @property
    def hazards(self) -> set[tuple[Place, Place]]:
        """Of racecheck: an access, and each other that is not ordered with it, itself where no other is named."""
        accesses = [[place for place in finding.places if place.access] for finding in self.findings]
        return {(first, other) for first, *others in filter(None, accesses) for other in others or [first]}

    @classmethod
    def of(cls, text: str) -> Self:
        """A line of the tool's that is neither its heading, nor a summary, nor empty, begins a finding or, indented,
        goes on with one: so also whatever this reader does not know."""
        summaries, total, paragraphs = 0, 0, []
        for line in text.splitlines():
            if not line.startswith(PREFIX):
                continue
            said = line[len(PREFIX) :].removeprefix(" ")
            if summary := _SUMMARY.match(said):
                summaries, total = summaries + 1, total + int(summary[1])
            elif said.startswith(" ") and paragraphs:
                paragraphs[-1].append(said.strip())
            elif said.strip() not in ("", _HEADLINE):
                paragraphs.append([said.strip()])
        return cls(summaries, total, tuple(Finding(lines[0], _places(lines)) for lines in paragraphs))

    def __str__(self) -> str:
        if not self.summaries:
            return "the tool has said no summary: it, or what it ran, was ended before its time\n" + self._counted()
        return f"{self.total} in {self.summaries} summaries\n" + self._counted()

    def _counted(self) -> str:
        """Findings that say the same of the same places, once, the most frequent first."""
        same = Counter((re.sub(r"0x[0-9a-f]+", "0x..", each.says), each.places) for each in self.findings)
        lines = []
        for (says, places), count in same.most_common():
            lines += [f"{count} x {says}", *(f"      {place}" for place in places)]
        return "\n".join(lines)


def _places(lines: list[str]) -> tuple[Place, ...]:
    found = [match for line in lines if not line.startswith("Host Frame") for match in _PLACE.finditer(line)]
    return tuple(
        Place(each["access"] or "", each["function"].split("(")[0], each["file"] or "", int(each["line"] or 0))
        for each in found
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {Report.of(Path(name).read_text(errors='replace'))}")
