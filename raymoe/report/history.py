"""Reads the history of a run: its generations, also those of a run that was killed, and what each of them ran on.

A run directory has `environment.json` for its last generation and `environment-N.json` for each generation N before
it. The number is in the lines of results.jsonl, so each line leads to the host and the versions that it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from raymoe.errors import ConfigError
from raymoe.report.results import ENVIRONMENT, START, Generation, Record, generation_rows, read_document

EARLIER = "earlier"  # key of environment.json: the generations before, which a run without summary.json needs
KILLED = "killed"  # cause: the main process ended without a summary

MOST_SHOWN = 64  # generations whose environments a page reads


def environment_name(number: int) -> str:
    """Name the environment of an earlier generation."""
    return f"environment-{number}.json"


def numbered(name: str, first_generation: int) -> str:
    """Name a file of the process whose first generation this is, so that a resumed run replaces no file.

    >>> numbered("driver.log", 0), numbered("driver.log", 2)
    ('driver.log', 'driver-2.log')
    """
    stem, dot, kind = name.partition(".")
    return f"{stem}-{first_generation}{dot}{kind}" if first_generation else name


def generations_so_far(record: Record) -> tuple[Generation, ...]:
    """Return the generations that a run has had. Raises ConfigError if environment.json is damaged."""
    if record.summary is not None:
        return record.generations
    path = record.path / ENVIRONMENT
    document = read_document(path) or {}
    try:
        last = [row_of(document)] if document.get("generation") is not None else []
        return generation_rows([*_rows(document.get(EARLIER)), *last])
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; repair or remove it") from error


def row_of(environment: Mapping[str, object]) -> dict[str, object]:
    """Make the row of a generation out of its environment. How it ended is not known."""
    began = environment.get("began") or START
    return {
        "number": environment["generation"],
        "ready_s": environment.get("ready_s"),
        "cause": KILLED,
        "began": began,
    }


def _rows(value: object) -> list[object]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{EARLIER} is no list")
    return value or []


def next_number(record: Record, generations: Iterable[Generation]) -> int:
    """Number the generation that continues a run: no result line and no generation has it yet."""
    numbers = [one.number for one in generations]
    numbers += [int(str(line["generation"])) for line in record.lines if line["generation"] is not None]
    return max(numbers, default=-1) + 1


def environments(path: Path, generations: Iterable[Generation]) -> dict[int, dict[str, object]]:
    """Read the environments of generations that have one, by number."""
    last = read_document(path / ENVIRONMENT) or {}
    known: dict[int, dict[str, object]] = {}
    for one in list(generations)[:MOST_SHOWN]:
        document = last if last.get("generation") == one.number else read_document(path / environment_name(one.number))
        if document is not None:
            known[one.number] = document
    return known
