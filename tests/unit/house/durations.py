"""How long each test file takes: `make durations` runs all tests with this plugin, and writes the table of the lines.

The variable RAYMOE_DURATIONS names a file. At its end, a session of pytest appends a line for each test file. Tests
that start pytest themselves do not hand the variable on.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

VARIABLE = "RAYMOE_DURATIONS"
MAKES = {"daily": "make test", "thorough": "make test-all"}


@dataclass(frozen=True)
class Line:
    """The tests of one file in one session: how many ran, and the seconds that they took with their fixtures."""

    file: str
    part: str
    tests: int
    seconds: float


class Recorder:
    """Adds up what pytest reports. A skipped test counts as one that ran."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests[file] += report.when == "setup"

    def pytest_sessionfinish(self) -> None:
        lines = [Line(file, self._part, self._tests[file], round(s, 2)) for file, s in self._seconds.items()]
        with self._path.open("a") as output:
            output.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.pop(VARIABLE, None)
    if path is not None:
        expression = config.getoption("markexpr")
        part = "daily" if "not thorough" in expression else "thorough"
        config.pluginmanager.register(Recorder(Path(path), part), "durations")


def table(lines: Iterable[Line], head: str) -> str:
    """Return the table of all files, the slowest first, below a line of text.

    >>> lines = [Line("a.py", "daily", 2, 1.0), Line("b.py", "daily", 3, 4.0), Line("a.py", "thorough", 9, 20.0)]
    >>> print(table(lines, "on two cores"))
    on two cores
    <BLANKLINE>
        make test  make test-all  file
      s     tests      s   tests
      1         2     20       9  a.py
      4         3      -       -  b.py
      5         5     20       9  in all
    """
    found = {(line.file, line.part): line for line in lines}
    files = sorted(
        {file for file, _ in found},
        key=lambda file: -sum(line.seconds for (name, _), line in found.items() if name == file),
    )
    rows = [[found.get((file, part)) for part in MAKES] for file in files]
    sums = []
    for part in MAKES:
        ours = [line for (_, name), line in found.items() if name == part]
        sums.append(Line("in all", part, sum(line.tests for line in ours), sum(line.seconds for line in ours)))
    text = [head, "", "    make test  make test-all  file", "  s     tests      s   tests"]
    for file, row in zip([*files, "in all"], [*rows, sums], strict=True):
        (s, n), (more_s, more_n) = (("-", "-") if it is None else (f"{it.seconds:.0f}", it.tests) for it in row)
        text.append(f"{s:>3} {n:>9} {more_s:>6} {more_n:>7}  {file}")
    return "\n".join(text)


def main(path: str) -> None:
    lines = [Line(**json.loads(line)) for line in Path(path).read_text().splitlines()]
    cores = len(os.sched_getaffinity(0))
    print(table(lines, f"Seconds of test files on {cores} cores, two halves run side by side; by `make durations`."))


if __name__ == "__main__":
    main(sys.argv[1])
