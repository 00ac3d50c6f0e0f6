"""Measure faults: the exit code, the time, the last line, and what is kept and left.

A test asks for the fixture `fault`. It calls `strike` just before the fault, and `ended` instead of `Command.end`.
With RAYMOE_FAULTS=FILE, each such test that passes appends its line to FILE; `make faults` does that.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.report.environment import environment
from tests.gang.fault_table import FAULTS
from tests.gang.processes import alive_after, descendants, shared_memory

if TYPE_CHECKING:
    from tests.gang.conftest import Command

FILE = "RAYMOE_FAULTS"
GONE_S = 5.0  # for the processes of a run to end after the command; most end before it
KEPT = ("results.jsonl", "summary.json", "report.html", "driver.log")

Line = dict[str, object]


@dataclass
class Fault:
    """One fault of a run, from the moment that it happens. `line` is there once the run has ended."""

    line: Line | None = None
    name: str = ""
    run: Command | None = None
    began: float = 0.0
    noticed_after: float | None = None
    recovered_after: float | None = None
    processes: list[int] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    others: list[Fault] = field(default_factory=list)
    ended_at: float = 0.0
    _waits: threading.Thread = field(init=False)

    def another(self) -> Fault:
        """Measure another fault in the same test, of another run."""
        self.others.append(Fault())
        return self.others[-1]

    def strike(self, name: str, run: Command) -> None:
        """Begin the clock. The processes of the run are those that exist now."""
        assert name in FAULTS, f"{name} has no row in tests/gang/fault_table.py"
        ranks = [int(pid) for pid in re.findall(r"rank \d+ pid (\d+)", run.stderr())]
        self.name, self.run, self.noticed_after, self.recovered_after = name, run, None, None
        self.processes = sorted({*descendants(run.process.pid), *ranks})
        self.shared = shared_memory()
        self._waits = threading.Thread(target=self._note_end, daemon=True)
        self._waits.start()
        self.began = time.monotonic()

    def _note_end(self) -> None:
        """Note when the command ends, whatever the test does meanwhile."""
        assert self.run is not None
        self.run.process.wait()
        self.ended_at = time.monotonic()

    def noticed(self, pattern: str, seconds: float) -> None:
        """Wait for the line that tells of the fault. It counts instead of the end of a run that goes on."""
        assert self.run is not None
        self.run.wait_for(pattern, seconds)
        self.noticed_after = time.monotonic() - self.began

    def recovered(self, seconds: float) -> None:
        """Wait until all ranks of the new generation have done a step."""
        assert self.run is not None
        self.run.wait_for(r"^generation \d+: all ranks have done a step", seconds)
        self.recovered_after = time.monotonic() - self.began

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def ended(self, seconds: float, directory: Path | None = None) -> int:
        """Wait for the end of the command, then of its processes. Return the exit code, as a shell gives it."""
        assert self.run is not None
        code = self.run.end(seconds)
        code = code if code >= 0 else 128 - code
        self._waits.join(timeout=5)
        took = self.ended_at - self.began
        left = alive_after(GONE_S, self.processes)
        gone = self.seconds
        directory = directory or self.run.out
        self.line = {
            "fault": self.name,
            "exit": code,
            "seconds": round(took if self.noticed_after is None else self.noticed_after, 2),
            "recovered_seconds": None if self.recovered_after is None else round(self.recovered_after, 2),
            "gone_seconds": None if left or (self.noticed_after and code == 0) else round(max(took, gone), 2),
            "last_line": without_places(self.run.last_line()) if code not in (0, 137) else "",
            "kept": [name for name in KEPT if (directory / name).is_file()],
            **cases_of(directory),
            "processes_left": len(left),
            "shared_memory_left": len(shared_memory() - self.shared),
        }
        return code

    def write(self) -> None:
        """Append the line to the file that RAYMOE_FAULTS names."""
        for other in self.others:
            other.write()
        if self.line is None or not os.environ.get(FILE):
            return
        facts = {"cpus": os.cpu_count(), "date": f"{datetime.date.today()}", "commit": environment()["commit"]}
        with Path(os.environ[FILE]).open("a") as file:
            file.write(json.dumps(self.line | facts, ensure_ascii=False) + "\n")


def cases_of(directory: Path) -> Line:
    """Count the cases that results.jsonl holds. summary.json, if it is there, knows how many there were."""
    done, summary = directory / "results.jsonl", directory / "summary.json"
    lines = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
    names = {line["case"] for line in lines if not line["stopped"]}
    total = len(json.loads(summary.read_text())["cases"]) if summary.exists() else None
    return {"cases_kept": len(names), "cases": total}


def without_places(text: str) -> str:
    """Replace what differs from run to run: paths, process ids, ids of nodes, jobs and workers.

    >>> without_places("rank 1 (pid 4711) died in `run`: Aborted; its log: /tmp/x/worker-0a1b-01-4711.err")
    'rank 1 (pid N) died in `run`: Aborted; its log: …/worker-….err'
    """
    text = re.sub(r"(?<![\w.])/(?:[^\s/]+/)+", "…/", text)
    text = re.sub(r"worker-[\w-]+\.", "worker-….", text)
    text = re.sub(r"…/raymoe-\w+", "…/raymoe-…", text)
    text = re.sub(r"\bpid \d+", "pid N", text)
    text = re.sub(r"\bjob \S+-\d{8}T\d{6}Z-[a-z]{4}\b", "job ID", text)
    return re.sub(r"\bnode [0-9a-f]{12} \([\d.]+\)", "node ID (IP)", text)
