"""Reads files that somebody else may have written: regular files of bounded size, opened once, and plain JSON."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from raymoe.errors import ConfigError, shown

MOST_BYTES = 64 * 2**20
"""The size of results.jsonl."""
MOST_LINES = 200_000
MOST_LINE_BYTES = 2**20
MOST_DOCUMENT_BYTES = 8 * 2**20
"""The size of config.yaml, environment.json or summary.json."""
MOST_DEPTH = 64
MOST_TEXT = 65_536
MOST_NUMBER = 1e18

_BLOCK = 2**20


def read_text(path: Path, most: int) -> str | None:
    """Give the text of a file of at most `most` bytes; None if there is no such file.

    Raises ConfigError for anything else. A FIFO or a device is refused without waiting for it. A symbolic link is
    refused because it can name a file that its author may not read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        linked = isinstance(error, OSError) and error.errno == errno.ELOOP
        raise _unreadable(path, "it is a symbolic link" if linked else reason_of(error)) from error
    try:
        data = _read(descriptor, path, most)
    except OSError as error:
        raise _unreadable(path, reason_of(error)) from error
    finally:
        os.close(descriptor)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(path, f"it is not text: line {line} is not UTF-8") from error


def _read(descriptor: int, path: Path, most: int) -> bytes:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise _unreadable(path, "it is not a regular file")
    blocks, size = [], 0
    while block := os.read(descriptor, _BLOCK):
        blocks.append(block)
        size += len(block)
        if size > most:  # the size of fstat is not enough: the file could grow
            raise _unreadable(path, f"it has more than {most:,} bytes")
    return b"".join(blocks)


def is_directory(path: Path) -> bool | None:
    """Whether a path leads to a directory; None if it leads nowhere. Raises ConfigError if the system does not say."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, reason_of(error)) from error


def reason_of(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot read {path}: {reason}")


def parse_json(text: str) -> Any:
    """Parse JSON without NaN and Infinity, at most MOST_DEPTH deep. Raises ValueError.

    >>> parse_json("[" * 65 + "]" * 65)
    Traceback (most recent call last):
    ValueError: it is nested more than 64 deep
    >>> parse_json('{"us_p50": NaN}')
    Traceback (most recent call last):
    ValueError: NaN is not a JSON number
    """
    try:
        document = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise _too_deep() from None
    level = [document]
    for _ in range(MOST_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return document
    raise _too_deep()


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MOST_DEPTH} deep")


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, dict | list)]
    return [child for child in value if isinstance(child, dict | list)] if isinstance(value, list) else []


# Kinds of values. Each is a test, and its name is for the error message.

Kind = Callable[[object], bool]


def text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT


def count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER


def flag(value: object) -> bool:
    return isinstance(value, bool)


WANTED: dict[Kind, str] = {
    text: f"text of at most {MOST_TEXT} characters",
    count: "a whole number from 0 to 2^63 - 1",
    number: f"a number of at most {MOST_NUMBER:g}",
    flag: "true or false",
}


def check_kinds(
    document: Mapping[str, object], kinds: Mapping[str, Kind], needed: frozenset[str] = frozenset()
) -> None:
    """Raise ValueError if a value is of another kind than its key's. Only values of `needed` keys may not be null."""
    for key, kind in kinds.items():
        value = document.get(key)
        if value is None:
            if key in needed:
                raise ValueError(f"it has no {key}")
        elif not kind(value):
            raise ValueError(f"{key} = {shown(json.dumps(value)[:200])} is not {WANTED[kind]}")
