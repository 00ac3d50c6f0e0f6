"""Makes the text of `raymoe report RUN...`: how each run ended, what changed between them, and their tables."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from raymoe.report.columns import Column
from raymoe.report.compare import RULE, compare, comparison_columns, differences, flattened
from raymoe.report.results import ENVIRONMENT, MOST_MESSAGE, Line, Record, displayed, read_document, shortened
from raymoe.report.tables import plain_table, render

_TOLD = ("raymoe", "commit", "python", "packages.", "host", "system", "cpu.", "memory.")
"""Keys of environment.json that a comparison looks at. Process numbers and nodes always differ."""


def letters(count: int) -> list[str]:
    """Name runs that are compared: A to Z, then R27, R28.

    >>> letters(2), letters(28)[-2:]
    (['A', 'B'], ['R27', 'R28'])
    """
    return [*string.ascii_uppercase, *(f"R{number}" for number in range(27, count + 1))][:count]


def overview(records: Sequence[Record], *, terminal: bool = False, width: int = 100) -> str:
    """Make the text: a line for each run, the comparison of the first run with each other one, and all tables."""
    names = letters(len(records))
    prefix = [f"{name} " for name in names] if len(records) > 1 else [""]
    parts = ["".join(f"{start}{headline(record)}\n" for start, record in zip(prefix, records, strict=True))]
    lines = [displayed(record.lines) for record in records]
    if len(records) > 1:
        lines = [[line | {"run": name} for line in of_run] for name, of_run in zip(names, lines, strict=True)]
    for index in range(1, len(records)):
        parts += _compared((records[0], records[index]), (lines[0], lines[index]), (names[0], names[index]))
    every = [line for of_record in lines for line in of_record]
    return "\n".join([*parts, *([render(every, terminal=terminal, width=width)] if every else [])])


def headline(record: Record) -> str:
    """Say how a run ended."""
    cases = len({line["case"] for line in record.lines})
    finished = f"{cases} finished case{'' if cases == 1 else 's'}"
    summary = record.summary
    if summary is None:
        return f"{shortened(record.run)}: not ended (running, or killed), {finished}"
    message = f": {shortened(summary['message'], MOST_MESSAGE)}" if summary.get("message") else ""
    status = shortened(summary.get("status"))
    return f"{shortened(record.run)}: {status}, exit code {summary.get('exit_code')}, {finished}{message}"


def _compared(
    records: tuple[Record, Record], lines: tuple[Sequence[Line], Sequence[Line]], names: tuple[str, str]
) -> Iterator[str]:
    comparison = compare(*lines)
    yield f"{names[1]} against {names[0]}: {comparison.summary()}\n" + (
        f"{RULE}\n{plain_table(comparison_columns(comparison, names))}" if comparison.pairs else ""
    )
    if found := list(facts_differing(*records)):
        keys, before, after = zip(*found, strict=True)
        columns = [Column("differs", list(keys)), Column(names[0], list(before)), Column(names[1], list(after))]
        yield plain_table(columns)


def facts_differing(base: Record, other: Record) -> Iterator[tuple[str, str, str]]:
    """Give what differs between the configs and environments of two runs: key, and both values."""
    yield from differences(*(flattened(record.config) for record in (base, other)))
    yield from differences(*(environment_of(record.path) for record in (base, other)))


def environment_of(path: Path) -> dict[str, str]:
    """Read what a comparison shows of a run's environment.json, by dotted key; empty if there is none."""
    return flattened(read_document(path / ENVIRONMENT), keep=lambda key: key.startswith(_TOLD))
