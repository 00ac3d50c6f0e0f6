"""YAML text to entries: what `yaml.safe_load` accepts, minus its surprises, plus the line of every value.

Works on the parser's events, so that depth, size and aliases are bounded before anything is built.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import yaml

from raymoe.job.entry import MAX_DEPTH, MAX_NODES, Entry, Source
from raymoe.job.errors import ConfigError
from raymoe.job.problem import Problem, shown
from raymoe.job.scalars import resolve

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")


def compose(text: str, source: Source) -> tuple[Entry | None, list[Problem]]:
    """The document in `text` (None if there is none) and its problems; ConfigError where it cannot be read at all."""
    composer = _Composer(source)
    if bad := _FORBIDDEN.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        composer.refuse(line, f"the character {bad[0]!a} is not allowed in YAML")
    try:
        root = composer.document(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        composer.refuse(mark.line + 1 if mark else None, f"not YAML: {reason}")
    except yaml.YAMLError as error:
        composer.refuse(None, f"not YAML: {shown(str(error))}")
    return root, composer.problems


class _Composer:
    def __init__(self, source: Source) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._nodes = 0
        self._anchors: dict[str, Entry | None] = {}  # None while the anchored value is still being read

    def refuse(self, line: int | None, reason: str) -> NoReturn:
        problem = Problem(self._source.name, line, "", None, reason)
        raise ConfigError(str(problem), (*self.problems, problem))

    def document(self, events: Iterator[Any]) -> Entry | None:
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.refuse(_line(event), "a second document, one is read")
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
            self.refuse(_line(event), f"no anchor &{shown(event.anchor)} before this alias")
        entry = self._anchors[event.anchor]
        if entry is None:
            self.refuse(_line(event), f"the alias *{shown(event.anchor)} contains itself")
        self._count(event, entry.nodes)
        return entry

    def _count(self, event: Any, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self.refuse(_line(event), f"more than {MAX_NODES} values once its aliases are written out")

    def _scalar(self, event: Any, key: str) -> Entry:
        if event.implicit[0]:
            return Entry(resolve(event.value), self._source, _line(event), event.value)
        entry = Entry(event.value, self._source, _line(event))
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            self.problems.append(_tagged(entry, key, event.tag))
        return entry

    def _sequence(self, event: Any, events: Iterator[Any], key: str, depth: int) -> Entry:
        items: list[Entry] = []
        for inner in events:
            if isinstance(inner, yaml.SequenceEndEvent):
                break
            items.append(self._node(inner, events, f"{key}.{len(items)}", depth + 1))
        return self._collected(event, items, items, key)

    def _mapping(self, event: Any, events: Iterator[Any], key: str, depth: int) -> Entry:
        given: dict[str, Entry] = {}
        below: list[Entry] = []  # what merge keys bring in; given keys win over it
        for inner in events:
            if isinstance(inner, yaml.MappingEndEvent):
                break
            name = self._node(inner, events, key, depth + 1)
            dotted = f"{key}.{name.text or name.value}" if key else str(name.text or name.value)
            value = replace(self._node(next(events), events, dotted, depth + 1), line=name.line)
            if name.text == "<<":
                below += self._merged(value, dotted)
            elif not isinstance(name.value, str):
                reason = f"the key {name.shown() or '{…}'} is not text"
                self.problems.append(replace(value.problem(key, reason, "put it in quotes"), value=None))
            elif name.value in given:
                first = f"it was first given in line {given[name.value].line}"
                self.problems.append(value.problem(dotted, "duplicate key", first))
            else:
                given[name.value] = value
        for mapping in below:
            assert isinstance(mapping.value, dict)
            given = {**mapping.value, **given}
        return self._collected(event, given, list(given.values()), key)

    def _merged(self, value: Entry, dotted: str) -> list[Entry]:
        mappings = value.value if isinstance(value.value, list) else [value]
        if all(isinstance(entry.value, dict) for entry in mappings):
            return mappings
        self.problems.append(value.problem(dotted, "only a mapping, or a list of them, can be merged in"))
        return []

    def _collected(self, event: Any, value: list[Entry] | dict[str, Entry], inner: list[Entry], key: str) -> Entry:
        entry = Entry(value, self._source, _line(event), nodes=1 + sum(child.nodes for child in inner))
        if not event.implicit and event.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self.problems.append(_tagged(entry, key, event.tag))
        return entry


def _tagged(entry: Entry, key: str, tag: str) -> Problem:
    written = shown(tag.replace("tag:yaml.org,2002:", "!!"))
    return entry.problem(key, f"the tag {written} is not read", "take it away")


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
