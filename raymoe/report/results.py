"""Defines result lines and summary.json, and reads both back from a run directory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from raymoe.errors import ConfigError
from raymoe.shell import STOP_SIGNALS

# Lines of results.jsonl: their keys in order, and how they are written and read back.

KEYS = (
    *("run", "generation", "case", "workload", "op", "backend", "transport", "wire", "graph", "pattern", "src", "dst"),
    *("bytes", "ranks", "tokens", "hidden", "experts", "topk", "dtype", "routing", "seed"),
    *("layout", "alignment", "padding", "sms", "beside", "l2", "leaves_out", "skipped"),
    *("samples", "us_p50", "us_p99", "us_min", "us_max", "host_us_p50", "timeline"),
    *("bytes_wire", "gbps_wire", "verified", "max_error", "device", "commit"),
)

LATER_KEYS = frozenset({"beside", "l2", "leaves_out", "skipped", "host_us_p50", "timeline"})
"""Keys that lines of earlier versions lack. They are read as null."""

Line = dict[str, object]


def complete(measured: Mapping[str, object], *, run: str, generation: int, commit: str | None) -> Line:
    """Make a complete line, in the order of `KEYS`, from a rank's measurements and the driver's facts. Other keys are
    null.

    >>> line = complete({"case": "default", "op": "copy"}, run="a-b", generation=0, commit=None)
    >>> list(line) == list(KEYS), line["case"], line["run"], line["hidden"]
    (True, 'default', 'a-b', None)
    >>> complete({"case": "default", "colour": "red"}, run="a-b", generation=0, commit=None)
    Traceback (most recent call last):
    ValueError: a result line of case 'default' has a key that results.jsonl does not: colour
    """
    case = measured.get("case")
    if not isinstance(case, str):
        raise ValueError(f"a result line names no case: {dict(measured)!r}")
    if unknown := sorted(set(measured) - set(KEYS)):
        raise ValueError(
            f"a result line of case {case!r} has a key that results.jsonl does not: {', '.join(map(str, unknown))}"
        )
    for key, value in measured.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"a result line of case {case!r} has {key} = {value}, which JSON cannot hold")
    known = {**measured, "run": run, "generation": generation, "commit": commit}
    return {key: known.get(key) for key in KEYS}


def encode(line: Line) -> str:
    """Write a line of results.jsonl, with its line end. Refuses a line that is not from `complete`."""
    if list(line) != list(KEYS):
        raise ValueError(f"a result line must have the keys of results.jsonl in their order, found {list(line)}")
    return json.dumps(line, allow_nan=False) + "\n"


def decode(text: str) -> Line:
    """Read a line back. Raises ValueError if it is not a result line (json.JSONDecodeError is a ValueError too)."""
    line = json.loads(text)
    if not isinstance(line, dict) or set(line) | LATER_KEYS != set(KEYS):
        raise ValueError("not a result line of raymoe: its keys are not those of results.jsonl")
    return {key: line.get(key) for key in KEYS}


# summary.json: how a run ended, for scripts.

STOPPED = {128 + number for number in STOP_SIGNALS}


@dataclass(frozen=True)
class Generation:
    """One gang: seconds until it was ready (null: never), the cause of an early end, and the rank at fault."""

    ready_s: float | None = None
    cause: str | None = None
    culprit: int | None = None


@dataclass(frozen=True)
class Summary:
    """The content of summary.json. `cases` maps every case of the job, in its order, to `done` or `not done`."""

    status: str
    exit_code: int
    message: str
    cases: dict[str, str]
    generations: tuple[Generation, ...] = ()

    @classmethod
    def of(
        cls,
        exit_code: int,
        message: str,
        cases: Iterable[str],
        finished: Collection[str],
        generations: Iterable[Generation] = (),
    ) -> Summary:
        """Make the summary of a run with this exit code.

        >>> Summary.of(143, "stopped by SIGTERM", ["a", "b"], {"a"}).as_dict()["cases"]
        {'a': 'done', 'b': 'not done'}
        """
        status = "done" if exit_code == 0 else "stopped" if exit_code in STOPPED else "failed"
        marks = {case: "done" if case in finished else "not done" for case in cases}
        return cls(status, exit_code, message, marks, tuple(generations))

    def after(self, earlier: Iterable[Generation]) -> Summary:
        """Put the generations of earlier processes before those of this one (`--resume`)."""
        return dataclasses.replace(self, generations=(*earlier, *self.generations))

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "generations": [vars(each) for each in self.generations]}


def generations_of(document: object) -> tuple[Generation, ...]:
    """Read the generations of a summary.json. Raises ValueError if it is not a summary."""
    rows = document.get("generations") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("not a summary of raymoe: it has no list of generations")
    names = [field.name for field in dataclasses.fields(Generation)]
    return tuple(Generation(**{name: row.get(name) for name in names}) for row in rows)


# Reading a run directory without its lock, for `--resume` and `raymoe report`.

CONFIG, ENVIRONMENT, RESULTS, SUMMARY = "config.yaml", "environment.json", "results.jsonl", "summary.json"
FIRST_LINE = "# raymoe run "  # of config.yaml; the name of the run follows


@dataclass(frozen=True)
class Record:
    """The content of a run directory. `summary` is None while the run goes on, or if it was killed."""

    path: Path
    run: str
    config: dict[str, object]
    lines: list[Line] = field(default_factory=list)
    summary: dict[str, object] | None = None
    generations: tuple[Generation, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a run directory. Raises ConfigError, with file and line, if it is none or is damaged."""
        text = _text(path / CONFIG) if path.is_dir() else None
        if text is None or not text.startswith(FIRST_LINE):
            found = "no such directory" if not path.exists() else "not a directory" if not path.is_dir() else None
            raise ConfigError(
                f"{path} is no run directory: {found or f'it has no {CONFIG} that a run wrote'}; "
                f"name one that `raymoe run` made"
            )
        head, _, body = text.partition("\n")
        try:
            config = yaml.safe_load(body)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path / CONFIG} is damaged: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path / CONFIG} is damaged: it holds no mapping")
        summary = _summary(path / SUMMARY)
        return cls(
            path=path,
            run=head.removeprefix(FIRST_LINE).strip(),
            config=config,
            lines=_lines(path / RESULTS),
            summary=summary,
            generations=() if summary is None else generations_of(summary),
        )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error


def _lines(path: Path) -> list[Line]:
    lines = []
    for number, text in enumerate((_text(path) or "").splitlines(), start=1):
        try:
            lines.append(decode(text))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}; repair or remove that line") from error
    return lines


def _summary(path: Path) -> dict[str, object] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        document = json.loads(text)
        generations_of(document)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; repair or remove it") from error
    return dict(document)
