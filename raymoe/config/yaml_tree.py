"""Reads YAML text as a tree of entries that know their file and line.

It reads what `yaml.safe_load` accepts, but resolves plain scalars by simpler rules than YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from raymoe.errors import ConfigError, Problem, shown

# Plain scalars.
#
# `yaml.safe_load` reads `on` as true, `010` as 8, `1:30` as 90 and `1e-3` as text. Here `1e-3` is a number and the
# others are text, so they become type errors with the hint that `yaml11_hint` gives.

Scalar = bool | int | float | str

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SWITCH = {"yes": "true", "y": "true", "on": "true", "no": "false", "n": "false", "off": "false"}
# Bounded, because Python refuses to convert more than 4300 digits. No key takes a number of 400 digits.
_INT = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,400})")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,400}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,400}|[0-9]{1,400}(\.[0-9]{0,400})?)([eE][-+]?[0-9]{1,9})?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"([-+]?)0o?([0-9]+)")
_SEXAGESIMAL = re.compile(r"[0-9]{1,9}(:[0-5]?[0-9]){1,3}")


def resolve(text: str) -> Scalar | None:
    """Return the value of a plain (unquoted) scalar.

    >>> [resolve(text) for text in ("12", "1e-3", "1_000", "true", "on", "010", "1:30", "2026-11-21", "~")]
    [12, 0.001, 1000, True, 'on', '010', '1:30', '2026-11-21', None]
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    # A whole number with a leading zero is octal in YAML 1.1. It is text here, neither octal nor decimal.
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text)
    if not_finite := _NOT_FINITE.fullmatch(text):
        return float(not_finite[1] + not_finite[2])
    return text


def yaml11_hint(text: str) -> str | None:
    """Say what to write instead of a text that YAML 1.1 reads as a number or a boolean; None for other text.

    >>> yaml11_hint("on"), yaml11_hint("1:30"), yaml11_hint("010"), yaml11_hint("fine")
    ('write true', 'write 90 if minutes were meant', 'write 10, or 8 if octal was meant', None)
    """
    if text.lower() in _SWITCH:
        return f"write {_SWITCH[text.lower()]}"
    if zero := _LEADING_ZERO.fullmatch(text):
        digits = zero[2].lstrip("0") or "0"
        if len(digits) > 20 or not set(digits) <= set("01234567"):
            return "remove the leading zero"
        return f"write {zero[1]}{digits}, or {zero[1]}{int(digits, 8)} if octal was meant"
    if _SEXAGESIMAL.fullmatch(text):
        total = 0
        for part in text.split(":"):
            total = total * 60 + int(part)
        return f"write {total} if minutes were meant"
    return None


# The tree of entries.

# Keys that errors repeat from any file. A line of /etc/shadow is a key too: it ends with a colon.
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}(\.[A-Za-z0-9][A-Za-z0-9_]{0,31}){0,5}")

MAX_NODES = 20_000  # values of one document, with aliases expanded
MAX_DEPTH = 20


@dataclass(frozen=True)
class Source:
    """A file, or one `--set`. A higher `level` overrides a lower one. Paths in values are relative to `folder`."""

    name: str
    folder: Path
    level: int
    quotable: bool = True
    """Whether errors may repeat text of the file, besides keys that are plain words."""

    def quoting(self, sentence: str, otherwise: str) -> str:
        """Return a sentence that repeats text of the file, if errors may; else the other one."""
        return sentence if self.quotable else otherwise


@dataclass(frozen=True)
class Entry:
    """A value and where it was written.

    `text` is the source text of an unquoted scalar. `nodes` counts the values inside, with aliases expanded.
    """

    value: Scalar | list[Entry] | dict[str, Entry] | None
    source: Source
    line: int | None = None
    text: str | None = None
    nodes: int = 1

    def plain(self) -> object:
        """Return the value without sources and lines."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value

    def child(self, key: str) -> Entry | None:
        """Return the entry at a mapping's key or a list's index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def find(self, path: Iterable[str]) -> Entry | None:
        """Follow keys from here to an entry; None if it was not given."""
        entry: Entry | None = self
        for key in path:
            entry = entry.child(key) if entry else None
        return entry

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """Yield every value that is not a mapping, with the keys that lead to it."""
        if not isinstance(self.value, dict):
            yield path, self
            return
        for key, entry in self.value.items():
            yield from entry.leaves((*path, key))

    def problem(self, key: str, reason: str, hint: str | None = None) -> Problem:
        """Make a problem of this entry."""
        key = self.source.quoting(key, key if _PLAIN_KEY.fullmatch(key) else "")
        return Problem(self.source.name, self.line, shown(key), self.shown(), reason, hint)

    def shown(self) -> str | None:
        """Format the value for an error message; None for a section, an empty value or one not to be repeated."""
        if isinstance(self.value, dict) or self.text == "" or not self.source.quotable:
            return None
        if isinstance(self.value, list):
            return shown("[" + ", ".join(entry.shown() or "{…}" for entry in self.value[:10]) + "]")
        if self.text is not None:
            return shown(self.text)
        return shown(f'"{self.value}"' if isinstance(self.value, str) else str(self.value))


def merge(below: Entry, above: Entry) -> Entry:
    """Merge `above` over `below`: mappings key by key; anything else is replaced."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    merged = dict(below.value)
    for key, entry in above.value.items():
        merged[key] = merge(merged[key], entry) if key in merged else entry
    return Entry(merged, above.source, above.line)


# From YAML text to entries. This works on the parser's events, to check depth, size and aliases before it builds
# anything.

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")


def compose(text: str, source: Source) -> tuple[Entry | None, list[Problem]]:
    """Read the document in `text` (None if there is none) and list its problems.

    Raises ConfigError if the text cannot be read at all.
    """
    composer = _Composer(source)
    if bad := _FORBIDDEN.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        reason = source.quoting(f"the character {bad[0]!a}", "a character")
        composer.refuse(line, f"{reason} is not allowed in YAML")
    try:
        root = composer.document(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        composer.refuse(mark.line + 1 if mark else None, source.quoting(f"not YAML: {reason}", "not YAML"))
    except yaml.YAMLError as error:
        composer.refuse(None, source.quoting(f"not YAML: {shown(str(error))}", "not YAML"))
    return root, composer.problems


class _Composer:
    def __init__(self, source: Source) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._nodes = 0
        self._anchors: dict[str, Entry | None] = {}  # None until the anchored value is complete

    def refuse(self, line: int | None, reason: str) -> NoReturn:
        problem = Problem(self._source.name, line, "", None, reason)
        raise ConfigError(str(problem), (*self.problems, problem))

    def document(self, events: Iterator[Any]) -> Entry | None:
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.refuse(_line(event), "a second document, but a config is one document")
                root = self._node(next(events), events, "", 0)
        return root

    def _node(self, event: Any, events: Iterator[Any], key: str, depth: int) -> Entry:
        if depth > MAX_DEPTH:
            self.refuse(_line(event), f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.MappingStartEvent):
            entry = self._mapping(event, events, key, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            entry = self._sequence(event, events, key, depth)
        else:
            entry = self._scalar(event, key)
        self._count(event, 1)
        if event.anchor is not None:
            self._anchors[event.anchor] = entry
        return entry

    def _aliased(self, event: Any) -> Entry:
        if event.anchor not in self._anchors:
            anchor = self._source.quoting(f"anchor &{shown(event.anchor)}", "anchor")
            self.refuse(_line(event), f"no {anchor} before this alias")
        entry = self._anchors[event.anchor]
        if entry is None:
            alias = self._source.quoting(f"the alias *{shown(event.anchor)}", "an alias")
            self.refuse(_line(event), f"{alias} contains itself")
        self._count(event, entry.nodes)
        return entry

    def _count(self, event: Any, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self.refuse(_line(event), f"more than {MAX_NODES} values with aliases expanded")

    def _scalar(self, event: Any, key: str) -> Entry:
        if event.implicit[0]:
            return Entry(resolve(event.value), self._source, _line(event), event.value)
        entry = Entry(event.value, self._source, _line(event))
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            self.problems.append(_tagged(entry, key, event.tag))
        return entry

    def _sequence(self, event: Any, events: Iterator[Any], key: str, depth: int) -> Entry:
        items: list[Entry] = []
        for child in events:
            if isinstance(child, yaml.SequenceEndEvent):
                break
            items.append(self._node(child, events, f"{key}.{len(items)}", depth + 1))
        return self._collected(event, items, items, key)

    def _mapping(self, event: Any, events: Iterator[Any], key: str, depth: int) -> Entry:
        entries: dict[str, Entry] = {}
        merged: list[Entry] = []  # mappings of merge keys (<<); keys given here override theirs
        for child in events:
            if isinstance(child, yaml.MappingEndEvent):
                break
            name = self._node(child, events, key, depth + 1)
            dotted = f"{key}.{name.text or name.value}" if key else str(name.text or name.value)
            value = replace(self._node(next(events), events, dotted, depth + 1), line=name.line)
            if name.text == "<<":
                merged += self._mappings_of(value, dotted)
            elif not isinstance(name.value, str):
                reason = f"the key {name.shown() or '{…}'} is not text"
                self.problems.append(replace(value.problem(key, reason, "put it in quotes"), value=None))
            elif name.value in entries:
                first = f"it was first given in line {entries[name.value].line}"
                self.problems.append(value.problem(dotted, "duplicate key", first))
            else:
                entries[name.value] = value
        for mapping in merged:
            assert isinstance(mapping.value, dict)
            entries = {**mapping.value, **entries}
        return self._collected(event, entries, list(entries.values()), key)

    def _mappings_of(self, value: Entry, dotted: str) -> list[Entry]:
        mappings = value.value if isinstance(value.value, list) else [value]
        if all(isinstance(entry.value, dict) for entry in mappings):
            return mappings
        self.problems.append(value.problem(dotted, "only a mapping, or a list of them, can be merged in"))
        return []

    def _collected(self, event: Any, value: list[Entry] | dict[str, Entry], children: list[Entry], key: str) -> Entry:
        entry = Entry(value, self._source, _line(event), nodes=1 + sum(child.nodes for child in children))
        if not event.implicit and event.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self.problems.append(_tagged(entry, key, event.tag))
        return entry


def _tagged(entry: Entry, key: str, tag: str) -> Problem:
    written = shown(tag.replace("tag:yaml.org,2002:", "!!"))
    return entry.problem(key, f"{entry.source.quoting(f'the tag {written}', 'a tag')} is not allowed", "remove it")


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
