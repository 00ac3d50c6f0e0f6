"""Read the output of compute-sanitizer; `python -m tests.gpu.sanitizer_report LOG...` prints a summary.

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
from dataclasses import dataclass, replace
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
    """An access or another mistake, and its place. `file` and `line` are of the innermost function, inlined or not."""

    access: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "no line"
        return " ".join(filter(None, (self.access, self.function, where)))


@dataclass(frozen=True)
class Finding:
    """One paragraph of the report: its first line, and every place that it names."""

    says: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Report:
    """All that the tool has reported about all processes."""

    summaries: int
    """Number of summaries. Without one, the tool has not come to its end."""
    total: int
    """Errors or hazards, as the summaries count them."""
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        return self.summaries > 0 and self.total == 0 and not self.findings

    @property
    def hazards(self) -> set[tuple[Place, Place]]:
        """Hazards of racecheck: an access and each access not ordered with it; itself, if the report names no other."""
        accesses = [[place for place in finding.places if place.access] for finding in self.findings]
        return {(first, other) for first, *others in filter(None, accesses) for other in others or [first]}

    def without(self, kernels: str) -> Self:
        """Return the report without findings that name only functions whose names begin so."""

        def inside(finding: Finding) -> bool:
            return bool(finding.places) and all(place.function.startswith(kernels) for place in finding.places)

        kept = tuple(finding for finding in self.findings if not inside(finding))
        return replace(self, total=self.total - (len(self.findings) - len(kept)), findings=kept)

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a report. A line of the tool begins a finding, or continues one if it is indented.

        Headings, summaries and empty lines do not. So lines of an unknown kind are findings too.
        """
        summaries, total, paragraphs = 0, 0, []
        for line in text.splitlines():
            if not line.startswith(PREFIX):
                continue
            text_of_line = line[len(PREFIX) :].removeprefix(" ")
            if summary := _SUMMARY.match(text_of_line):
                summaries, total = summaries + 1, total + int(summary[1])
            elif text_of_line.startswith(" ") and paragraphs:
                paragraphs[-1].append(text_of_line.strip())
            elif text_of_line.strip() not in ("", _HEADLINE):
                paragraphs.append([text_of_line.strip()])
        return cls(summaries, total, tuple(Finding(lines[0], _places(lines)) for lines in paragraphs))

    def __str__(self) -> str:
        if not self.summaries:
            return "the tool printed no summary: it, or the program that it ran, was ended early\n" + self._counted()
        return f"{self.total} in {self.summaries} summaries\n" + self._counted()

    def _counted(self) -> str:
        """Count equal findings with equal places, the most frequent first."""
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
