"""The raw lines in benchmarks/*.jsonl, as the pages' tables, figures and sentences quote them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import pytest

from tests.python_path import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
Line = Mapping[str, Any]


EXPORTED = dict.fromkeys(("mgyt", "ewjr", "pwls", "eqxm", "etrd", "zhwj"), "2bd4ba376d2d")
"""Runs of a tree without its repository, whose lines name no commit: the end of a run's name, and what was exported."""


@cache
def lines_of(name: str) -> list[Line]:
    lines = [json.loads(line) for line in (BENCHMARKS / f"{name}.jsonl").read_text().splitlines()]
    return [line | {"commit": line["commit"] or EXPORTED.get(line["run"].rpartition("-")[2])} for line in lines]


@dataclass(frozen=True)
class Column:
    """Which raw lines a column shows: the file, the ends of the runs' names, and keys with their values."""

    file: str
    run: str | tuple[str, ...]
    keys: Mapping[str, object]
    shown: str = "us_p50"
    scale: float = 1.0
    median_only: bool = False
    """Whether a cell has no p99 beside the median."""

    def lines(self, row: Mapping[str, object]) -> list[Line]:
        """The lines of a cell; several, for example, if a table shows the median over all pairs of ranks."""
        wanted = {**self.keys, **row}
        lines = [line for line in lines_of(self.file) if line["run"].endswith(self.run) and holds(line, wanted)]
        assert lines, (self, row)
        return lines

    def value(self, row: Mapping[str, object], key: str | None = None) -> float:
        """The number of a cell, by default of the key that the column shows first."""
        return self.scale * median(quantity(line, key or self.shown) for line in self.lines(row))


def quantity(line: Line, name: str) -> float:
    """A key of a line, or when the last block came to a point of its timeline."""
    kind, _, point = name.partition(" ")
    if kind != "timeline":
        return float(line[name])
    return float(next(last for name, _, _, last in line["timeline"] if name == point))


def holds(line: Line, wanted: Mapping[str, object]) -> bool:
    """Whether a line has the keys; a key that begins with `case ` is a word of the case's name."""
    words = line["case"].split(",")
    return all(f"{key[5:]}={value}" in words if key.startswith("case ") else line.get(key) == value
               for key, value in wanted.items())  # fmt: skip


@dataclass(frozen=True, order=True)
class Circumstances:
    """Where lines come from. A table has one of these, or a column that tells them apart."""

    commit: str
    device: str
    ranks: int

    @property
    def machine(self) -> str:
        """The short name that pages use: `H200`, `H100`, `CPU`."""
        model = re.search(r"[HBA]\d00", self.device)
        return model[0] if model else "CPU"


def circumstances(line: Line) -> Circumstances:
    return Circumstances(line["commit"], line["device"], line["ranks"])


def date_of(line: Line) -> str:
    """The day of a line, which the name of its run has."""
    day = re.search(r"-(\d{4})(\d\d)(\d\d)T\d{6}Z-", line["run"])
    assert day, line["run"]
    return "-".join(day.groups())


@cache
def history() -> frozenset[str]:
    """All commits up to this one. Where the tree has no whole history, as in an unpacked sdist, a test is skipped."""
    shallow = _git("rev-parse", "--is-shallow-repository")
    if shallow is None or shallow.strip() != "false":
        pytest.skip("this tree has no whole history of commits")
    return frozenset((_git("rev-list", "HEAD") or "").split())


def in_history(commit: str) -> bool:
    return any(known.startswith(commit) for known in history())


def _git(*words: str) -> str | None:
    """The output of git in the repository; None where it is none, or belongs to another tree."""
    if not (REPOSITORY / ".git").exists():
        return None
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
