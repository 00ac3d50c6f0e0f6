"""Which headers a kernel includes, at any depth, and what is in them: part of the identity of what is compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


@dataclass
class Headers:
    """All headers that were found, and the names that no folder has."""

    texts: dict[Path, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)


def included(text: str, folders: Sequence[Path]) -> Headers:
    """Every header that `text` includes, directly or through another, looked for in `folders` in turn.

    Conditions are not evaluated, so a header may be named that the compiler never opens: the identity changes once too
    often, never once too seldom. For that reason a missing header is no error here; the compiler will say if it is one.
    """
    found = Headers()
    waiting = [(text, list(folders))]
    while waiting:
        content, search = waiting.pop()
        for bracket, name in _INCLUDE.findall(content):
            places = search if bracket == '"' else folders
            path = next((folder / name for folder in places if (folder / name).is_file()), None)
            if path is None:
                found.missing.add(name)
            elif (path := path.resolve()) not in found.texts:
                found.texts[path] = path.read_text(encoding="utf-8", errors="surrogateescape")
                waiting.append((found.texts[path], [path.parent, *folders]))
    return found
