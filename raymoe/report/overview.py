"""`raymoe report RUN...`: how each run ended, and one table of all their results."""

from collections.abc import Sequence
from pathlib import Path

from raymoe.report.record import Record
from raymoe.report.table import render


def overview(paths: Sequence[Path], *, terminal: bool = False, width: int = 100) -> str:
    """The text to print. ConfigError when a path is no run directory."""
    records = [Record.read(path) for path in paths]
    heads = "".join(f"{_headline(record)}\n" for record in records)
    lines = [line for record in records for line in record.lines]
    return heads + ("\n" + render(lines, terminal=terminal, width=width) if lines else "")


def _headline(record: Record) -> str:
    cases = len({line["case"] for line in record.lines})
    done = f"{cases} finished case{'' if cases == 1 else 's'}"
    if record.summary is None:
        return f"{record.run}: not ended (running, or killed), {done}"
    message = f": {record.summary['message']}" if record.summary.get("message") else ""
    return f"{record.run}: {record.summary.get('status')}, exit code {record.summary.get('exit_code')}, {done}{message}"
