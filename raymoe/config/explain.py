"""Explains pydantic's errors in words for the author of the config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import ErrorDetails

from raymoe.config.job import Job
from raymoe.config.sections import Section
from raymoe.config.yaml_tree import Entry, yaml11_hint
from raymoe.errors import ConfigError, Problem

MEANT = {
    "gpu": "cuda",
    "gpus": "cuda",
    "nvidia": "cuda",
    "nccl": "collective",
    "gloo": "collective",
    "fp8": "float8_e4m3",
    "float8": "float8_e4m3",
    "e4m3": "float8_e4m3",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "random": "uniform",
}
"""Words of other programs, and the names here that they mean. Their spelling is near to another name, or to none."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Find the name that a misspelt one probably means; None if no name is close.

    >>> nearest("hiden", ["tokens", "hidden"]), nearest("xyz", ["tokens", "hidden"])
    ('hidden', None)
    >>> nearest("wait", ["ranks", "wait_timeout_s"]), nearest("gpu", ["auto", "cuda", "cpu"])
    ('wait_timeout_s', 'cuda')
    """
    import difflib  # imported here because only a config with mistakes needs it

    names = list(names)
    if (meant := MEANT.get(name.lower())) in names:
        return meant
    by_normalised = {known.lower().replace("-", "_"): known for known in names}
    wanted = name[:100].lower().replace("-", "_")
    close = difflib.get_close_matches(wanted, by_normalised, n=1, cutoff=0.6)
    close += [known for known in by_normalised if len(wanted) >= 4 and known.startswith(wanted[:4])]
    return by_normalised[close[0]] if close else None


# The tree of a job's keys, read from its models.

KeyTree = dict[str, Any]  # name -> the KeyTree below it, empty for a value


def key_tree(section: type[Section] = Job) -> KeyTree:
    """Return all keys of a job as a tree; a section holds its own keys.

    >>> key_tree()["exchange"]["wire"]
    {'dispatch': {}, 'combine': {}}
    """
    tree: KeyTree = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        tree[name] = key_tree(inner) if isinstance(inner, type) and issubclass(inner, Section) else {}
    return tree


def leaves(tree: KeyTree, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that holds a value.

    >>> list(leaves({"name": {}, "wire": {"dispatch": {}}}))
    ['name', 'wire.dispatch']
    """
    for name, inner in tree.items():
        if inner:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": ("is below the least value", "ge"),
    "greater_than": ("is not above", "gt"),
    "less_than_equal": ("is above the greatest value", "le"),
    "less_than": ("is not below", "lt"),
}

_WRONG = {"size": "not a size such as 4096 or 4KiB"}  # instead of messages that repeat the value

Path = tuple[str, ...]


def explained(root: Entry, errors: list[ErrorDetails], keys: KeyTree) -> Iterator[tuple[Path, Problem]]:
    """Yield each error once, with the path of its key. `keys` are the valid keys. No required key may be missing."""
    paths = [_path(root, error["loc"]) for error in errors]
    for path, error in zip(paths, errors, strict=True):
        # pydantic drops a bad item from its list, and then also reports the list as too short.
        if error["type"] == "too_short" and any(other[: len(path)] == path and other != path for other in paths):
            continue
        entry = root.find(path)
        yield path, (entry or root).problem(".".join(path), *_reason_and_hint(error, entry or root, path, keys))


def unknown(path: Path, keys: KeyTree) -> tuple[str, str]:
    """Return reason and hint for an unknown key.

    The hint is the section that has a key of this name, else a similar key of the same section, else all its keys.
    """
    siblings = keys
    for part in path[:-1]:
        siblings = siblings.get(part, {})
    leaf = path[-1].rpartition(".")[2]
    split = [key.rpartition(".") for key in leaves(keys)]
    sections = [section for section, _, name in split if section and name == leaf]
    if sections:
        return "unknown key", f"write {leaf} below {' or '.join(sections)}"
    if near := nearest(path[-1], siblings):
        return "unknown key", f"did you mean '{near}'?"
    if siblings:
        return "unknown key", f"valid here: {', '.join(siblings)}"
    return "unknown key", f"{'.'.join(path[:-1])} has no keys"


def _path(root: Entry, location: tuple[int | str, ...]) -> Path:
    """Return the keys of a location, up to the end of the tree. pydantic appends names of its own after them."""
    path: list[str] = []
    entry: Entry | None = root
    for step in map(str, location):
        child = entry.child(step) if entry else None
        if child is None and not (entry and isinstance(entry.value, dict)):
            break
        path.append(step)
        entry = child
    return tuple(path)


def _reason_and_hint(error: ErrorDetails, entry: Entry, path: Path, keys: KeyTree) -> tuple[str, str | None]:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown(path, keys)
    if kind == "literal_error":
        return _not_one_of(str(context["expected"]), entry)
    if kind == "finite_number":
        return "not a finite number", None
    if kind in _WANTED:
        return f"{_WANTED[kind]} is wanted", _hint(kind, entry) or f"found {_found(entry)}"
    if kind in _BOUNDS:
        relation, bound = _BOUNDS[kind]
        return f"{entry.shown() or 'the value'} {relation} {context[bound]}", None
    if kind == "too_short":
        return "the list is empty", "give one value or more"
    if kind == "string_pattern_mismatch":
        return "not a name", "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit"
    return entry.source.quoting(error["msg"], _WRONG.get(kind, error["msg"])), _hint(kind, entry)


def _not_one_of(expected: str, entry: Entry) -> tuple[str, str | None]:
    choices = re.findall("'([^']*)'", expected)
    reason = f"not one of {', '.join(choices)}" if len(choices) > 1 else f"only {choices[0]} is allowed here"
    near = nearest(str(entry.value), choices) if isinstance(entry.value, str) else None
    return reason, f"did you mean '{near}'?" if near else None


def _hint(kind: str, entry: Entry) -> str | None:
    value = entry.value
    if not entry.source.quotable:
        return None  # a hint repeats the value in other words
    if isinstance(value, str) and entry.text is not None:
        return yaml11_hint(entry.text)
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return "remove the quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return "put it in quotes" if kind == "string_type" and isinstance(value, bool | int | float) else None


def _found(entry: Entry) -> str:
    if isinstance(entry.value, dict | list):
        return "a mapping" if isinstance(entry.value, dict) else "a list"
    if entry.value is None:
        return "nothing"
    return "text" if isinstance(entry.value, str) else "true or false" if isinstance(entry.value, bool) else "a number"


# All problems of a config as one error.


def report(file: str, problems: Iterable[Problem]) -> ConfigError:
    """Make one error of all problems. The file's problems come first, then its parents', then those of `--set`.

    >>> str(report("x.yaml", [Problem("x.yaml", 4, "shape.hiden", "8", "unknown key", "did you mean 'hidden'?")]))
    "x.yaml has 1 problem: line 4, shape.hiden = 8: unknown key, did you mean 'hidden'?"
    >>> str(report("x.yaml", [Problem("x.yaml", None, "", None, "is empty")]))
    'x.yaml: is empty'
    """
    problems = list(dict.fromkeys(problems))
    places = list(dict.fromkeys([file, *(problem.where for problem in problems)]))

    def order(problem: Problem) -> tuple[bool, int, int]:
        return problem.where.startswith("--set "), places.index(problem.where), problem.line or 0

    problems.sort(key=order)
    first = problems[0]
    text = first.text if first.where == file else f"{first.where}: {first.text}"
    if len(problems) > 1:
        return ConfigError(f"{file} has {len(problems)} problems; the first is {text}", problems)
    of_whole_file = first.where == file and not first.line and not first.key
    return ConfigError(f"{file}: {text}" if of_whole_file else f"{file} has 1 problem: {text}", problems)
