"""The trace of a run: the phases of the driver and of all ranks on one clock, as Chrome and Perfetto read it.

Open trace.json in https://ui.perfetto.dev or chrome://tracing. Every process is a row group, every generation a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from raymoe.report.directory import write_atomically
from raymoe.report.history import numbered
from raymoe.workload.progress import Span

TRACE = "trace.json"
MOST_SPANS = 200_000  # about 25 MB; later ones are dropped and counted


class ChromeTrace:
    """Collects spans. `write` turns their times into microseconds since the first one began."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._spans: list[tuple[str, str, Span]] = []
        self._shifts: dict[str, tuple[float, float]] = {}
        self._processes: dict[str, int] = {}
        self.dropped = 0

    def add(self, process: str, host: str, spans: Sequence[Span]) -> None:
        """Add spans of a process. Times of one `host` are on one clock."""
        self._processes.setdefault(process, len(self._processes))
        for span in spans:
            if len(self._spans) < MOST_SPANS:
                self._spans.append((process, host, span))
            else:
                self.dropped += 1

    def shift(self, host: str, seconds: float, error: float) -> None:
        """Add `seconds` to all times of a host, which are then right to within `error`."""
        self._shifts[host] = seconds, error

    def events(self) -> list[dict[str, object]]:
        """Return the events of the trace: names of the rows, then the spans by their begin, outer ones first.

        >>> trace = ChromeTrace("a-run")
        >>> trace.add("rank 0", "host", [Span("step 0", 7.25, 7.5), Span("case x", 7.0, 8.0)])
        >>> [(event["name"], event["ts"], event["dur"]) for event in trace.events() if event["ph"] == "X"]
        [('case x', 0.0, 1000000.0), ('step 0', 250000.0, 250000.0)]
        """
        placed = []
        for process, host, span in self._spans:
            by = self._shifts.get(host, (0.0, 0.0))[0]
            placed.append((span.began + by, span.ended + by, self._number(process), span))
        placed.sort(key=lambda place: (place[0], -place[1]))
        first = placed[0][0] if placed else 0.0
        spans: list[dict[str, object]] = [
            {
                "ph": "X",
                "name": span.name,
                "cat": "raymoe",
                "pid": number,
                "tid": span.generation,
                "ts": round((began - first) * 1e6, 3),
                "dur": round((ended - began) * 1e6, 3),
            }
            for began, ended, number, span in placed
        ]
        rows = sorted({(self._number(process), span.generation) for process, _, span in self._spans})
        return [*self._process_names(), *(_name("thread_name", *row, f"generation {row[1]}") for row in rows), *spans]

    def write(self, folder: Path, first_generation: int = 0) -> Path:
        """Write trace.json into a run directory and return its path. A resumed run keeps the trace before its own."""
        path = folder / numbered(TRACE, first_generation)
        errors = [error for _, error in self._shifts.values()]
        document = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {
                "run": self._run,
                "clock": "CLOCK_MONOTONIC of the driver's host",
                "clock_error_us": round(max(errors, default=0.0) * 1e6, 1),
                "spans_dropped": self.dropped,
            },
        }
        write_atomically(path, json.dumps(document, allow_nan=False))
        return path

    def _number(self, process: str) -> int:
        return self._processes[process]

    def _process_names(self) -> list[dict[str, object]]:
        """Return the names of the row groups: the driver first, then ranks by number."""
        in_order = sorted(self._processes, key=lambda name: (name != "driver", len(name), name))
        names = []
        for place, process in enumerate(in_order):
            number = self._number(process)
            names += [
                _name("process_name", number, 0, process),
                {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": place}},
            ]
        return names


def _name(kind: str, pid: int, tid: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}
