"""Compares the results of two runs, and says which times changed by more than the noise of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from raymoe.report.columns import SETTINGS, Column, byte_size, case_settings, setting_columns, show
from raymoe.report.results import Line, shortened

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
        found = [
            f"{header} {show(key, self.base[key])} -> {show(key, self.other[key])}"
            for key, header in SETTINGS.items()
            if self.base[key] != self.other[key]
        ]
        if self.base["bytes_wire"] != self.other["bytes_wire"]:
            found.append(f"on wire {byte_size(self.base['bytes_wire'])} -> {byte_size(self.other['bytes_wire'])}")
        return ", ".join(found)


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
        found = [f"{count} {verdict}" for verdict in ChangeVerdict if (count := self.count(verdict))]
        many = f"{len(self.pairs)} operation{'' if len(self.pairs) == 1 else 's'} in both"
        parts = [f"{many}: {', '.join(found)}" if found else many]
        parts += [f"{len(self.only_base)} only in the first"] * bool(self.only_base)
        parts += [f"{len(self.only_other)} only in the second"] * bool(self.only_other)
        return "; ".join(parts)


# Pairing of lines. Each step pairs lines with the same key, if both runs have the same number of them. The next step
# tries the lines that are left, with fewer settings in its key.

_CHOSEN = ("sms", "graph", "device")
"""Settings that raymoe may choose itself. A comparison of two versions shows how they changed."""
_ASKED = tuple(key for key in SETTINGS if key not in _CHOSEN)
_PLACE = ("workload", "case", "op", "transport", "pattern", "src", "dst", "bytes", "l2", "beside")
_STEPS = (
    ("workload", "case", *SETTINGS),
    ("workload", "case", *_ASKED),
    ("workload", *_ASKED),
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
                for mine, theirs in zip(indices, matching, strict=True):
                    if not _contradict(left_base[mine], left_other[theirs]):
                        pairs[mine] = Pair(left_base.pop(mine), left_other.pop(theirs))
    return Comparison([pairs[index] for index in sorted(pairs)], list(left_base.values()), list(left_other.values()))


def _contradict(base: Line, other: Line) -> bool:
    """Whether the names of two cases give a setting different values that no key of a line has, as masked=0.5.

    >>> _contradict({"case": "masked=0.9,sms=24"}, {"case": "masked=0.9,sms=48"})
    False
    >>> _contradict({"case": "masked=0.9"}, {"case": "masked=0.5"})
    True
    """
    mine, theirs = case_settings(base), case_settings(other)
    named = {key for key in mine.keys() & theirs.keys() if key.rpartition(".")[2] not in SETTINGS}
    return any(mine[key] != theirs[key] for key in named)


def _by_key(lines: Mapping[int, Line], keys: Sequence[str]) -> dict[tuple[object, ...], list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for index, line in lines.items():
        found.setdefault(tuple(line[key] for key in keys), []).append(index)
    return found


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
        columns.append(Column("differs", [each or "-" for each in differing]))
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
    found: dict[str, str] = {}
    waiting: list[tuple[str, object]] = [("", document)]
    while waiting and len(found) < MOST_FACTS:
        key, value = waiting.pop()
        if isinstance(value, dict):
            inner = [(f"{key}.{shortened(name)}".lstrip("."), child) for name, child in value.items()]
            waiting += reversed(inner)
        elif keep(key):
            found[shortened(key)] = _plain(value)
    return found


MOST_FACTS = 500


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return shortened("[" + ", ".join(str(each) for each in value[:100]) + "]")
    return shortened(value)


def differences(base: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Give each key whose value differs, with both values; `-` stands for a missing value."""
    for key in dict.fromkeys((*base, *other)):
        if base.get(key, "-") != other.get(key, "-"):
            yield key, base.get(key, "-"), other.get(key, "-")
