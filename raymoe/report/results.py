"""Defines result lines and summary.json, and reads both back from a run directory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raymoe.config.yaml_tree import Source, compose
from raymoe.errors import ConfigError, printable
from raymoe.report.reading import (
    MOST_BYTES,
    MOST_DOCUMENT_BYTES,
    MOST_LINE_BYTES,
    MOST_LINES,
    WANTED,
    Kind,
    check_kinds,
    count,
    flag,
    is_directory,
    number,
    parse_json,
    read_text,
    text,
)
from raymoe.shell import STOP_SIGNALS
from raymoe.workload.progress import MOST_LOADS, MOST_POINTS, MOST_RANK_TIMES

# Lines of results.jsonl: their keys in order, and how they are written and read back.

KEYS = (
    *("run", "generation", "case", "workload", "op", "backend", "transport", "wire", "graph", "pattern", "src", "dst"),
    *(
        "bytes",
        "ranks",
        "domains",
        "chunks",
        "tokens",
        "rows",
        "hidden",
        "ffn",
        "experts",
        "topk",
        "dtype",
        "routing",
        "seed",
    ),
    *("layout", "alignment", "padding", "sms", "stages", "beside", "l2", "leaves_out", "skipped", "stopped"),
    *("samples", "runs", "us_p50", "us_p99", "us_min", "us_max"),
    *("us_by_rank", "us_over_steps", "host_us_p50", "timeline"),
    *("bytes_wire", "gbps_wire", "gbps_link", "bytes_net", "bytes_memory", "gbps_memory", "bytes_weights"),
    *("tflops", "tokens_per_s", "bytes_peak", "bytes_kept"),
    *("expert_load_imbalance", "expert_load", "rows_busiest", "rows_capacity"),
    *("losses", "starts"),
    *("verified", "max_error", "device", "commit"),
)

LATER_KEYS = frozenset(
    {
        *("beside", "l2", "leaves_out", "skipped", "host_us_p50", "timeline", "expert_load_imbalance", "expert_load"),
        *("stages", "bytes_memory", "gbps_memory", "bytes_peak", "bytes_kept", "domains", "bytes_net"),
        *("chunks", "runs", "rows", "ffn", "bytes_weights", "tflops", "tokens_per_s", "stopped"),
        *("us_by_rank", "us_over_steps", "gbps_link", "rows_busiest", "rows_capacity", "losses", "starts"),
    }
)
"""Keys that lines of earlier versions lack. They are read as null."""

Line = dict[str, object]

MOST_RANKS = 4096
MOST_MARKS = 64


def rank(value: object) -> bool:
    return count(value) and int(str(value)) <= MOST_RANKS


MOST_GENERATION = 1_000_000


def generation(value: object) -> bool:
    return count(value) and int(str(value)) <= MOST_GENERATION


def timeline(value: object) -> bool:
    """Whether a value is a list of points: the name, and the first, the median and the last block's microseconds."""
    return isinstance(value, list) and len(value) <= MOST_MARKS and all(map(_is_point, value))


def _is_point(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and text(value[0])
        and all(number(time) and time >= 0 for time in value[1:])
    )


def load(value: object) -> bool:
    """Whether a value is a list of experts' rows in a step."""
    return isinstance(value, list) and len(value) <= MOST_LOADS and all(number(rows) and rows >= 0 for rows in value)


def times(value: object) -> bool:
    """Whether a value is a list of microseconds in the order of steps."""
    return isinstance(value, list) and len(value) <= MOST_POINTS and all(number(us) and us >= 0 for us in value)


def losses(value: object) -> bool:
    """Whether a value is a list of steps and their losses."""
    return isinstance(value, list) and len(value) <= MOST_POINTS and all(map(_is_pair, value))


def starts(value: object) -> bool:
    """Whether a value is a list of the steps from which generations went on."""
    return isinstance(value, list) and len(value) <= MOST_POINTS and all(map(count, value))


def rank_times(value: object) -> bool:
    """Whether a value is a list of the median and the 99th percentile of each rank."""
    return isinstance(value, list) and len(value) <= MOST_RANK_TIMES and all(map(_is_pair, value))


def _is_pair(value: object) -> bool:
    return times(value) and isinstance(value, list) and len(value) == 2


WANTED |= {
    times: f"a list of at most {MOST_POINTS} times",
    losses: f"a list of at most {MOST_POINTS} steps and losses",
    starts: f"a list of at most {MOST_POINTS} steps",
    rank_times: f"a list of two times of each of at most {MOST_RANK_TIMES} ranks",
    rank: f"a rank, or a number of ranks, up to {MOST_RANKS}",
    generation: f"the number of a generation, up to {MOST_GENERATION:,}",
    timeline: "a list of a kernel's points and times",
    load: f"a list of the rows of at most {MOST_LOADS} experts",
}

KINDS: dict[str, Kind] = dict.fromkeys(KEYS, text)
KINDS |= {"generation": generation}
KINDS |= dict.fromkeys(("bytes", "tokens", "hidden", "experts", "topk", "seed", "alignment"), count)
KINDS |= dict.fromkeys(("sms", "stages", "chunks", "samples", "runs", "bytes_wire", "bytes_net", "bytes_memory"), count)
KINDS |= dict.fromkeys(("bytes_peak", "bytes_kept"), count)
KINDS |= dict.fromkeys(("src", "dst", "ranks", "domains"), rank)
KINDS |= dict.fromkeys(("us_p50", "us_p99", "us_min", "us_max", "host_us_p50", "gbps_wire", "max_error"), number)
KINDS |= dict.fromkeys(("rows", "ffn", "bytes_weights"), count)
KINDS |= dict.fromkeys(("gbps_memory", "tflops", "tokens_per_s"), number)
KINDS |= dict.fromkeys(("graph", "verified", "stopped"), flag) | {"timeline": timeline}
KINDS |= {"expert_load_imbalance": number, "expert_load": load, "rows_busiest": count, "rows_capacity": count}
KINDS |= {"losses": losses, "starts": starts}
KINDS |= {"us_by_rank": rank_times, "us_over_steps": times, "gbps_link": number}
"""The kind of each key's value. A value may also be null, except for NEEDED keys."""

NEEDED = frozenset({"run", "case", "op"})


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


def finished_cases(lines: Iterable[Line]) -> set[str]:
    """Name the cases of these lines whose steps were all done. A case that was stopped has lines with samples so far.

    >>> sorted(finished_cases([{"case": "a", "stopped": None}, {"case": "b", "stopped": True}]))
    ['a']
    """
    return {str(line["case"]) for line in lines if not line["stopped"]}


def encode(line: Line) -> str:
    """Write a line of results.jsonl, with its line end. Refuses a line that is not from `complete`."""
    if list(line) != list(KEYS):
        raise ValueError(f"a result line must have the keys of results.jsonl in their order, found {list(line)}")
    return json.dumps(line, allow_nan=False) + "\n"


def decode(encoded: str) -> Line:
    """Read a line back. Raises ValueError if it is not a result line (json.JSONDecodeError is a ValueError too)."""
    line = parse_json(encoded)
    if not isinstance(line, dict) or set(line) | LATER_KEYS != set(KEYS):
        raise ValueError("not a result line of raymoe: its keys are not those of results.jsonl")
    check_kinds(line, KINDS, NEEDED)
    return {key: line.get(key) for key in KEYS}


MOST_MESSAGE = 4000  # characters of the sentence that says how a run ended
MOST_SHOWN = 300  # characters of a text in a table, a figure or a page
LEAST_SHOWN = {"us_p50": 1e-6, "gbps_wire": 1e-12, "gbps_link": 1e-12, "gbps_memory": 1e-12}


def displayed(lines: Sequence[Line]) -> list[Line]:
    """Copy lines for display: texts are short and have no control characters, and times and rates are positive.

    A time of 0 is null in the copy. It has no ratio, and no place on a logarithmic axis.
    """
    return [_displayed(line) for line in lines]


def _displayed(line: Line) -> Line:
    copy = dict(line)
    for key in _TEXTS:
        value = line.get(key)
        if isinstance(value, str) and (len(value) > MOST_SHOWN or not value.isprintable()):
            copy[key] = shortened(value)
    for key, least in LEAST_SHOWN.items():
        value = line.get(key)
        if isinstance(value, int | float) and value < least:
            copy[key] = None
    points = line.get("timeline")
    if isinstance(points, list):
        copy["timeline"] = [[shortened(point[0]), *point[1:]] for point in points]
    return copy


_TEXTS = tuple(key for key, kind in KINDS.items() if kind is text)


def shortened(outside: object, most: int = MOST_SHOWN) -> str:
    """Write a value from outside in one line for display.

    >>> shortened("a\x1bb"), len(shortened("x" * 400))
    ('a\\\\x1bb', 300)
    """
    plain = printable(str(outside)[: most + 1])
    return plain if len(plain) <= most else plain[: most - 1] + "…"


# summary.json: how a run ended, for scripts.

STOPPED = {128 + number for number in STOP_SIGNALS}
START, RESTART, RESUME = "start", "restart", "resume"


@dataclass(frozen=True)
class Generation:
    """One gang: seconds until it was ready (null: never), the cause of an early end, and the rank at fault.

    Result lines name its `number`. `began` is START, RESTART (a rank was lost) or RESUME (another process went on).
    """

    ready_s: float | None = None
    cause: str | None = None
    culprit: int | None = None
    number: int = 0
    began: str = START


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
        return {**vars(self), "generations": [vars(generation) for generation in self.generations]}


_SUMMARY: dict[str, Kind] = {"status": text, "exit_code": number, "message": text}
_GENERATION: dict[str, Kind] = {"ready_s": number, "cause": text, "culprit": number}
_GENERATION |= {"number": generation, "began": text}


def generations_of(document: object) -> tuple[Generation, ...]:
    """Read the generations of a summary.json. Raises ValueError if it is not a summary."""
    if not isinstance(document, dict):
        raise ValueError("not a summary of raymoe: it is no mapping")
    generations, cases = generation_rows(document.get("generations")), document.get("cases")
    if not isinstance(cases, dict) or not all(text(case) and text(mark) for case, mark in cases.items()):
        raise ValueError("not a summary of raymoe: its cases are no mapping from names to marks")
    check_kinds(document, _SUMMARY)
    return generations


def generation_rows(rows: object) -> tuple[Generation, ...]:
    """Read a list of generations. Those of earlier versions have no number and do not say how they began.

    >>> [(one.number, one.began) for one in generation_rows([{"ready_s": 1.5}, {"number": 4, "began": "resume"}, {}])]
    [(0, 'start'), (4, 'resume'), (2, 'restart')]
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("not a summary of raymoe: it has no list of generations")
    generations = []
    for index, row in enumerate(rows):
        check_kinds(row, _GENERATION)
        known = {name: row[name] for name in _GENERATION if row.get(name) is not None}
        generations.append(Generation(**{"number": index, "began": RESTART if index else START, **known}))
    return tuple(generations)


# Reading a run directory without its lock, for `--resume` and `raymoe report`.

CONFIG, ENVIRONMENT, RESULTS, SUMMARY = "config.yaml", "environment.json", "results.jsonl", "summary.json"
PAGE = "report.html"
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
        there = is_directory(path)
        config_text = read_text(path / CONFIG, MOST_DOCUMENT_BYTES) if there else None
        if config_text is None or not config_text.startswith(FIRST_LINE):
            reason = "no such directory" if there is None else "not a directory" if not there else None
            raise ConfigError(
                f"{path} is no run directory: {reason or f'it has no {CONFIG} that a run wrote'}; "
                f"name one that `raymoe run` made"
            )
        summary = _summary(path / SUMMARY)
        return cls(
            path=path,
            run=config_text.partition("\n")[0].removeprefix(FIRST_LINE).strip()[:MOST_NAME],
            config=_config(path / CONFIG, config_text),
            lines=_lines(path / RESULTS),
            summary=summary,
            generations=() if summary is None else generations_of(summary),
        )


MOST_NAME = 200  # characters of a run's name; `new_run_id` gives at most 86


def _config(path: Path, config_text: str) -> dict[str, object]:
    """Parse a resolved config. It has the bounds of a user's config: depth, number of values, aliases expanded."""
    try:
        root, problems = compose(config_text, Source("", path.parent, 0))
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if problems:
        raise ConfigError(f"{path} is damaged: {problems[0]}")
    config = root.plain() if root else None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is damaged: it holds no mapping")
    return config


def _lines(path: Path) -> list[Line]:
    encoded = (read_text(path, MOST_BYTES) or "").split("\n")
    if encoded[-1] == "":
        encoded.pop()
    if len(encoded) > MOST_LINES:
        raise ConfigError(f"{path} has {len(encoded):,} lines, at most {MOST_LINES:,} are read; repair it")
    lines = []
    for row, line in enumerate(encoded, start=1):
        try:
            if len(line) > MOST_LINE_BYTES:
                raise ValueError(f"it has more than {MOST_LINE_BYTES:,} characters")
            lines.append(decode(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {row} is damaged: {error}; repair or remove that line") from error
    return lines


def _summary(path: Path) -> dict[str, object] | None:
    document = read_document(path)
    if document is None:
        return None
    try:
        generations_of(document)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; repair or remove it") from error
    return document


def read_document(path: Path) -> dict[str, object] | None:
    """Read a JSON document that is a mapping; None if there is no such file. Raises ConfigError, naming the file."""
    encoded = read_text(path, MOST_DOCUMENT_BYTES)
    if encoded is None:
        return None
    try:
        document = parse_json(encoded)
        if not isinstance(document, dict):
            raise ValueError("it is no mapping")
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; repair or remove it") from error
    return document
