"""A configuration as a tree that knows where each of its values was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from raymoe.job.problem import Problem, shown
from raymoe.job.scalars import Scalar

MAX_NODES = 20_000  # of one document, with its aliases written out
MAX_DEPTH = 20


@dataclass(frozen=True)
class Source:
    """A file, or one `--set`. `level` says who overrides whom; paths in values are relative to `folder`."""

    name: str
    folder: Path
    level: int


@dataclass(frozen=True)
class Entry:
    """A value and its place.

    `text` is what was written, for a scalar without quotes; `nodes` counts the values in here, aliases written out.
    """

    value: Scalar | list[Entry] | dict[str, Entry] | None
    source: Source
    line: int | None = None
    text: str | None = None
    nodes: int = 1

    def plain(self) -> object:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value

    def child(self, key: str) -> Entry | None:
        """The entry of a mapping's key or a list's index, if there."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def find(self, path: Iterable[str]) -> Entry | None:
        """The entry that keys lead to, if it was given."""
        entry: Entry | None = self
        for key in path:
            entry = entry.child(key) if entry else None
        return entry

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """Every value that is not a mapping, with its keys."""
        if not isinstance(self.value, dict):
            yield path, self
            return
        for key, entry in self.value.items():
            yield from entry.leaves((*path, key))

    def problem(self, key: str, reason: str, hint: str | None = None) -> Problem:
        """What is wrong here."""
        return Problem(self.source.name, self.line, shown(key), self.shown(), reason, hint)

    def shown(self) -> str | None:
        """The value as a report repeats it; None for a section or nothing at all, which would say nothing."""
        if isinstance(self.value, dict) or self.text == "":
            return None
        if isinstance(self.value, list):
            return shown("[" + ", ".join(entry.shown() or "{…}" for entry in self.value[:10]) + "]")
        if self.text is not None:
            return shown(self.text)
        return shown(f'"{self.value}"' if isinstance(self.value, str) else str(self.value))


def merge(below: Entry, above: Entry) -> Entry:
    """`above` over `below`: mappings merge key by key, anything else is replaced."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    merged = dict(below.value)
    for key, entry in above.value.items():
        merged[key] = merge(merged[key], entry) if key in merged else entry
    return Entry(merged, above.source, above.line)
