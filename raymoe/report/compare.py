"""Compares the results of runs: which times changed by more than the noise of their samples, which settings differ.

`overview` is the text of `raymoe report RUN...`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from raymoe.report.columns import SETTINGS, Column, byte_size, case_settings, setting_columns, show
from raymoe.report.results import (
    ENVIRONMENT,
    MOST_MESSAGE,
    Line,
    Record,
    displayed,
    finished_cases,
    read_document,
    shortened,
)
from raymoe.report.tables import plain_table, render

LEAST_CHANGE = 0.02
"""Without this bound, a very small spread inside both runs would make each difference a change. Medians of two runs of
the same kernels differ by up to 1.3 % (48 operations, two H200, two hours apart, 2026-11-23)."""

LEAST_SAMPLES = 5
RULE = (
    "A time counts as changed if the median of the faster run is below every sample of the slower run, "
    f"and the medians differ by {LEAST_CHANGE:.0%} or more."
)


class ChangeVerdict(StrEnum):
    """How the time of an operation differs between two runs."""

    WRONG = "now wrong"
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "within noise"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Pair:
    """The same operation in two runs. Both lines are from `displayed`."""

    base: Line
    other: Line

    @property
    def change(self) -> float | None:
        """The relative change of the median time; None without both times."""
        if not self.base["us_p50"] or not self.other["us_p50"]:
            return None
        return _number(self.other, "us_p50") / _number(self.base, "us_p50") - 1

    @property
    def verdict(self) -> ChangeVerdict:
        """Apply RULE.

        >>> base = {"us_p50": 100.0, "us_min": 95.0, "samples": 50, "verified": True}
        >>> def verdict(us_p50, us_min):
        ...     return str(Pair(base, base | {"us_p50": us_p50, "us_min": us_min}).verdict)
        >>> verdict(110.0, 101.0), verdict(110.0, 99.0), verdict(94.0, 90.0), verdict(101.5, 101.0)
        ('slower', 'within noise', 'faster', 'within noise')
        """
        if self.base["verified"] is not False and self.other["verified"] is False:
            return ChangeVerdict.WRONG
        both = (self.base, self.other)
        if self.change is None or any(line["us_min"] is None for line in both):
            return ChangeVerdict.UNKNOWN
        if any(_number(line, "samples") < LEAST_SAMPLES for line in both if line["samples"] is not None):
            return ChangeVerdict.UNKNOWN
        slow, fast = both if self.change < 0 else both[::-1]
        ratio = _number(slow, "us_p50") / _number(fast, "us_p50")
        changed = _number(fast, "us_p50") < _number(slow, "us_min") and ratio >= 1 + LEAST_CHANGE
        return (ChangeVerdict.FASTER if self.change < 0 else ChangeVerdict.SLOWER) if changed else ChangeVerdict.SAME

    @property
    def differs(self) -> str:
        """The settings that differ, as `SMs 24 -> 48, on wire 2 MiB -> 4 MiB`; empty if none does."""
        changes = [
            f"{header} {show(key, self.base[key])} -> {show(key, self.other[key])}"
            for key, header in SETTINGS.items()
            if self.base[key] != self.other[key]
        ]
        if self.base["bytes_wire"] != self.other["bytes_wire"]:
            changes.append(f"on wire {byte_size(self.base['bytes_wire'])} -> {byte_size(self.other['bytes_wire'])}")
        return ", ".join(changes)


def _number(line: Line, key: str) -> float:
    return float(str(line[key]))


@dataclass(frozen=True)
class Comparison:
    """The operations of two runs: those in both, and those in one of them only."""

    pairs: list[Pair] = field(default_factory=list)
    only_base: list[Line] = field(default_factory=list)
    only_other: list[Line] = field(default_factory=list)

    def count(self, verdict: ChangeVerdict) -> int:
        return sum(pair.verdict == verdict for pair in self.pairs)

    def summary(self) -> str:
        """Count the verdicts.

        >>> line = dict.fromkeys((*SETTINGS, "bytes_wire"), 1) | {"us_p50": 2.0, "us_min": 1.0, "verified": True}
        >>> Comparison([Pair(line | {"samples": 9}, line | {"samples": 9})], [line]).summary()
        '1 operation in both: 1 within noise; 1 only in the first'
        """
        counts = [f"{count} {verdict}" for verdict in ChangeVerdict if (count := self.count(verdict))]
        many = f"{len(self.pairs)} operation{'' if len(self.pairs) == 1 else 's'} in both"
        parts = [f"{many}: {', '.join(counts)}" if counts else many]
        parts += [f"{len(self.only_base)} only in the first"] * bool(self.only_base)
        parts += [f"{len(self.only_other)} only in the second"] * bool(self.only_other)
        return "; ".join(parts)


# Pairing of lines. Each step pairs lines with the same key, if both runs have the same number of them. The next step
# tries the lines that are left, with fewer settings in its key.

_CHOSEN = ("sms", "graph", "device")
"""Settings that raymoe may choose itself. A comparison of two versions shows how they changed."""
_CONFIGURED = tuple(key for key in SETTINGS if key not in _CHOSEN)
_PLACE = ("workload", "case", "op", "transport", "pattern", "src", "dst", "bytes", "l2", "beside")
_STEPS = (
    ("workload", "case", *SETTINGS),
    ("workload", "case", *_CONFIGURED),
    ("workload", *_CONFIGURED),
    _PLACE,
)


def compare(base: Sequence[Line], other: Sequence[Line]) -> Comparison:
    """Pair the lines of two runs, in the order of the first. The lines are from `displayed`."""
    left_base, left_other = dict(enumerate(base)), dict(enumerate(other))
    pairs: dict[int, Pair] = {}
    for keys in _STEPS:
        of_other = _by_key(left_other, keys)
        for key, indices in _by_key(left_base, keys).items():
            matching = of_other.get(key, [])
            if len(indices) == len(matching):
                for index, match in zip(indices, matching, strict=True):
                    if not _contradict(left_base[index], left_other[match]):
                        pairs[index] = Pair(left_base.pop(index), left_other.pop(match))
    return Comparison([pairs[index] for index in sorted(pairs)], list(left_base.values()), list(left_other.values()))


def _contradict(base: Line, other: Line) -> bool:
    """Whether the names of two cases give a setting different values that no key of a line has, as masked=0.5.

    >>> _contradict({"case": "masked=0.9,sms=24"}, {"case": "masked=0.9,sms=48"})
    False
    >>> _contradict({"case": "masked=0.9"}, {"case": "masked=0.5"})
    True
    """
    settings, others = case_settings(base), case_settings(other)
    shared = {key for key in settings.keys() & others.keys() if key.rpartition(".")[2] not in SETTINGS}
    return any(settings[key] != others[key] for key in shared)


def _by_key(lines: Mapping[int, Line], keys: Sequence[str]) -> dict[tuple[object, ...], list[int]]:
    by_key: dict[tuple[object, ...], list[int]] = {}
    for index, line in lines.items():
        by_key.setdefault(tuple(line[key] for key in keys), []).append(index)
    return by_key


def comparison_columns(comparison: Comparison, names: tuple[str, str]) -> list[Column]:
    """Make the columns of a comparison, a row for each pair. `names` are those of the two runs, such as A and B."""
    pairs = comparison.pairs
    columns = [column for column in setting_columns([pair.base for pair in pairs]) if column.header != "run"]
    for name, side in zip(names, ([pair.base for pair in pairs], [pair.other for pair in pairs]), strict=True):
        columns.append(Column(f"{name} p50 us", [_time(line, "us_p50") for line in side], right=True))
        columns.append(Column(f"{name} min", [_time(line, "us_min") for line in side], right=True))
        columns.append(Column(f"{name} p99", [_time(line, "us_p99") for line in side], right=True))
    changes = ["-" if pair.change is None else f"{pair.change:+.1%}" for pair in pairs]
    columns.append(Column("change", changes, right=True))
    columns.append(Column("verdict", [_marked(pair.verdict) for pair in pairs]))
    if any(differing := [pair.differs for pair in pairs]):
        columns.append(Column("differs", [settings or "-" for settings in differing]))
    return columns


def _time(line: Line, key: str) -> str:
    return "-" if line[key] is None else f"{_number(line, key):,.1f}"


def _marked(verdict: ChangeVerdict) -> str:
    """Write a verdict so that a change stands out without colours."""
    return (
        f"** {verdict}"
        if verdict in (ChangeVerdict.WRONG, ChangeVerdict.SLOWER, ChangeVerdict.FASTER)
        else str(verdict)
    )


# Differences of two documents: configs, and environments.


def flattened(document: object, keep: Callable[[str], bool] = lambda _: True) -> dict[str, str]:
    """Give the values of a document by dotted key, fit for display. Lists are one value.

    >>> flattened({"world": {"ranks": 4}, "sizes": [1, 2], "none": None})
    {'world.ranks': '4', 'sizes': '[1, 2]', 'none': '-'}
    """
    facts: dict[str, str] = {}
    waiting: list[tuple[str, object]] = [("", document)]
    while waiting and len(facts) < MOST_FACTS:
        key, value = waiting.pop()
        if isinstance(value, dict):
            inner = [(f"{key}.{shortened(name)}".lstrip("."), child) for name, child in value.items()]
            waiting += reversed(inner)
        elif keep(key):
            facts[shortened(key)] = _plain(value)
    return facts


MOST_FACTS = 500


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return shortened("[" + ", ".join(str(item) for item in value[:100]) + "]")
    return shortened(value)


def differences(base: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Give each key whose value differs, with both values; `-` stands for a missing value."""
    for key in dict.fromkeys((*base, *other)):
        if base.get(key, "-") != other.get(key, "-"):
            yield key, base.get(key, "-"), other.get(key, "-")


def facts_differing(base: Record, other: Record) -> Iterator[tuple[str, str, str]]:
    """Give what differs between the configs and environments of two runs: key, and both values."""
    yield from differences(*(flattened(record.config) for record in (base, other)))
    yield from differences(*(environment_of(record.path) for record in (base, other)))


def environment_of(path: Path) -> dict[str, str]:
    """Read what a comparison shows of a run's environment.json, by dotted key; empty if there is none."""
    return facts_of(read_document(path / ENVIRONMENT))


def facts_of(environment: object) -> dict[str, str]:
    """Give the facts of an environment that a comparison shows, by dotted key."""
    return flattened(environment, keep=lambda key: key.startswith(_FACTS))


_FACTS = ("raymoe", "commit", "python", "packages.", "host", "system", "cpu.", "memory.")
"""Keys of environment.json that a comparison looks at. Process numbers and nodes always differ."""


# The text of `raymoe report RUN...`.


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
    cases = len(finished_cases(record.lines))
    finished = f"{cases} finished case{'' if cases == 1 else 's'}"
    summary = record.summary
    if summary is None:
        return f"{shortened(record.run)}: not ended (running, or killed), {finished}"
    status = shortened(summary.get("status"))
    told = summary.get("message") not in (None, "", summary.get("status"))  # a run that ended well only says "done"
    message = f": {shortened(summary['message'], MOST_MESSAGE)}" if told else ""
    return f"{shortened(record.run)}: {status}, exit code {summary.get('exit_code')}, {finished}{message}"


def _compared(
    records: tuple[Record, Record], lines: tuple[Sequence[Line], Sequence[Line]], names: tuple[str, str]
) -> Iterator[str]:
    comparison = compare(*lines)
    yield f"{names[1]} against {names[0]}: {comparison.summary()}\n" + (
        f"{RULE}\n{plain_table(comparison_columns(comparison, names))}" if comparison.pairs else ""
    )
    if facts := list(facts_differing(*records)):
        keys, before, after = zip(*facts, strict=True)
        columns = [Column("differs", list(keys)), Column(names[0], list(before)), Column(names[1], list(after))]
        yield plain_table(columns)
