"""The faults of docs/evidence/faults.md, and its tables of what a test measured of each.

`python -m tests.gang.fault_table` writes the tables into the page, from the lines in benchmarks/faults_*.jsonl.
tests/unit/docs/test_operations_page.py holds the page to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "faults.md"
FILES = {kind: ROOT / "benchmarks" / f"faults_{kind}.jsonl" for kind in ("cpu", "gpu", "soak")}
COMMANDS = {"cpu": "make faults", "gpu": "make faults-gpu", "soak": "make soak-faults"}
"""The files of raw lines, and the commands that write them, by the kind of a section."""


@dataclass(frozen=True)
class Section:
    """A table of the page, between two comments with its name. `faults` maps names to their text in the page."""

    name: str
    faults: Mapping[str, str]
    kind: str = "cpu"


SECTIONS = [
    Section(
        "ranks",
        {
            "rank-killed-restart": "kill -9 of a rank, `restarts: 1`: the gang starts again",
            "rank-crashed": "a rank crashes (SIGSEGV), `restarts: 0`",
            "rank-stopped": "SIGSTOP of a rank, `wait_timeout_s: 2`",
            "rank-alone-stopped": "SIGSTOP of the only rank, `wait_timeout_s: 2`",
            "rank-raises": "a rank raises an exception",
            "rank-wrong-bytes": "a rank sends wrong bytes, `verify: true`",
            "data-refused": "more rows than `exchange.capacity`",
            "two-jobs": "kill -9 of a rank beside another job on the node; the other job ends with 0",
        },
    ),
    Section(
        "processes",
        {
            "main-killed": "kill -9 of the main process",
            "driver-killed": "kill -9 of the driver",
            "driver-stopped": "SIGSTOP of the driver, noticed after 4 s in this test and 30 s by default",
            "own-raylet-killed": "kill -9 of the raylet of the run's own Ray",
            "own-gcs-killed": "kill -9 of its GCS",
            "own-raylet-stopped": "SIGSTOP of its raylet",
            "own-gcs-stopped": "SIGSTOP of its GCS while ranks are placed, noticed after 4 s here and 30 s by default",
            "own-servers-stopped-done": "SIGSTOP of raylet and GCS when all cases are done",
            "node-killed": "kill -9 of a whole worker node, `restarts: 0`",
            "node-killed-other": "kill -9 of a whole worker node, another one is free: the gang starts again there",
            "node-raylet-killed": "kill -9 of a node's raylet, no other node is free",
        },
    ),
    Section(
        "signals",
        {
            "sigterm-ray-init": "SIGTERM while Ray starts",
            "sigterm-placing": "SIGTERM while ranks are placed",
            "sigterm-starting": "SIGTERM while ranks start",
            "sigterm-steps": "SIGTERM during steps, own Ray",
            "sigterm-cluster": "SIGTERM during steps, on a cluster",
            "sigint-cluster": "SIGINT (Ctrl-C) during steps",
            "sighup-cluster": "SIGHUP during steps",
            "sigquit-cluster": "SIGQUIT during steps",
            "job-stop": "`ray job stop`, as Ctrl-C in `raymoe submit` does",
        },
    ),
    Section(
        "output",
        {
            "stdout-closed": "nobody reads stdout: `raymoe run ... \\| true`",
            "stdout-full": "stdout is /dev/full: only the table on the terminal is lost",
            "stderr-full": "stderr is /dev/full and the run fails (2 ranks that need 64 CPUs each)",
            "disk-full": "the disk of `--out` is full during the run",
            "report-unwritable": "report.html cannot be written",
        },
    ),
    Section(
        "places",
        {
            "no-room": "a busy cluster has no room within `placement_timeout_s: 1`, from the start of the command",
            "no-ray-directory": "no private directory for Ray can be made, from the start of the command",
            "no-ray-space": "the directory of Ray has too little room (this test asks for 1 EiB)",
            "no-ray-files": "`ulimit -n 64`",
        },
    ),
    Section(
        "gpus",
        {
            "gpu-rank-killed": "kill -9 of a rank, `restarts: 0`",
            "gpu-rank-killed-restart": "kill -9 of a rank, `restarts: 1`: the gang starts again on the same GPUs",
            "gpu-rank-stopped": "SIGSTOP of a rank, `wait_timeout_s: 10`",
        },
        kind="gpu",
    ),
    Section(
        "soak",
        {
            "soak-signals": "any of the four signals in any of the seven phases",
            "soak-cluster-gcs-killed": "kill -9 of the GCS of a cluster, Ray's own time limits",
            "soak-cluster-gcs-stopped": "SIGSTOP of a cluster GCS: the run goes on; ranks elsewhere end after 35 s",
            "soak-driver-stopped": "SIGSTOP of the driver",
            "soak-own-gcs-stopped": "SIGSTOP of the own Ray's GCS while ranks are placed",
            "soak-node-killed": "kill -9 of a worker node, another is free; Ray gives a node up after its own limit",
            "soak-node-stopped": "SIGSTOP of a whole worker node, `wait_timeout_s: 2`; its ranks end when it wakes up",
            "soak-out-of-memory": "a rank uses up the memory of its node, `restarts: 0`",
            "soak-disk-full": "the disk of `--out` is full (a tmpfs of 64 KiB)",
            "soak-ray-disk-full": "the disk of Ray's directory is full during steps: the run goes on",
            "soak-random-kills": "12 kills of random ranks at random moments: the run ends with every case done once",
            "soak-busy-cluster": "kill -9 of a rank of one of two jobs, two other processes keep both CPUs busy",
        },
        kind="soak",
    ),
]  # fmt: skip

SHOWN = [section for section in SECTIONS if section.kind != "soak"]
"""The sections that have a table in the page. It names the file of the others."""
FAULTS = {name: text for section in SECTIONS for name, text in section.faults.items()}

Line = Mapping[str, Any]
HEAD = ["fault", "exit", "seconds", "runs again", "all gone"]


def lines_of(section: Section) -> dict[str, list[Line]]:
    """Read the lines of each fault of a section."""
    path = FILES[section.kind]
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {name: [line for line in lines if line["fault"] == name] for name in section.faults}


def table(section: Section) -> str:
    """Make the table of a section. Of several lines of a fault the slowest is shown. No lines, no table.

    A column that says for no fault when ranks ran again is left out.
    """
    slowest = {name: max(lines, key=lambda line: line["seconds"]) for name, lines in lines_of(section).items() if lines}
    if not slowest:
        return ""
    rows = [HEAD, ["---"] * len(HEAD)] + [_row(section.faults[name], line) for name, line in slowest.items()]
    if all(line.get("recovered_seconds") is None for line in slowest.values()):
        place = HEAD.index("runs again")
        rows = [row[:place] + row[place + 1 :] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(text: str, line: Line) -> list[str]:
    times = [_seconds(line.get(key)) for key in ("seconds", "recovered_seconds", "gone_seconds")]
    return [text, str(line["exit"]), *times]


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"


def measured(lines: Iterable[Line]) -> str:
    """Say when and on what the lines were measured."""
    circumstances = sorted({(line["date"], line.get("gpus", f"{line['cpus']} CPUs"), line["commit"]) for line in lines})
    return "; ".join(f"{date}, {machine}, commit {commit}" for date, machine, commit in circumstances) or "not yet"


def with_tables(page: str, sections: Sequence[Section] = SHOWN) -> str:
    """Replace the tables in the page, and the sentences that say when they were measured."""
    for section in sections:
        page = _replace(page, section.name, f"\n{table(section)}\n")
    for kind in dict.fromkeys(section.kind for section in sections):
        tables = [lines_of(section) for section in sections if section.kind == kind]
        lines = [line for table in tables for measured_lines in table.values() for line in measured_lines]
        page = _replace(page, "measured" if kind == "cpu" else f"measured {kind}", measured(lines))
    return page


def _replace(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    assert len(re.findall(pattern, page, re.DOTALL)) == 1, f"the page has no single place for {name}"
    return re.sub(pattern, lambda _: f"{begin}{text}{end}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
