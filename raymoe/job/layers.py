"""The one tree of a job: a file over its parents, and every `--set` over them all."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raymoe.job.compose import compose
from raymoe.job.entry import Entry, Source, merge
from raymoe.job.errors import ConfigError
from raymoe.job.problem import Problem, shown
from raymoe.job.reading import MAX_BYTES, read_config, refused

MAX_PARENTS = 16
SET_LEVEL = MAX_PARENTS + 1


@dataclass
class Layers:
    """The merged tree and the problems of reading it. `whole` is False where a layer is missing from the tree."""

    file: str
    root: Entry
    problems: list[Problem] = field(default_factory=list)
    whole: bool = True


def layered(path: Path, sets: Sequence[str]) -> Layers:
    """A file, its parents and the settings over them; ConfigError where the file itself cannot be read."""
    layers = _file(path, (), MAX_PARENTS)
    for text in sets:
        try:
            entry, problems = _set(text)
        except ConfigError as error:
            layers.problems += error.problems
            layers.whole = False
            continue
        layers.problems += problems
        layers.root = merge(layers.root, entry)
    return layers


def _file(path: Path, children: tuple[Path, ...], level: int) -> Layers:
    source = Source(_named(path), path.absolute().parent, level)
    root, problems = compose(read_config(path, source.name), source)
    if root is None or root.value is None:
        raise refused(Problem(source.name, None, "", None, "is empty, a config says at least its workload"))
    if not isinstance(root.value, dict):
        raise refused(root.problem("", "a mapping is wanted at the top"))
    own = {key: entry for key, entry in root.value.items() if key != "defaults"}
    layers = Layers(source.name, Entry(own, source, root.line), problems)
    if (defaults := root.value.get("defaults")) is None:
        return layers
    try:
        below = _file(_parent(defaults, (*children, path)), (*children, path), level - 1)
    except ConfigError as error:
        return Layers(source.name, layers.root, problems + list(error.problems), whole=False)
    return Layers(source.name, merge(below.root, layers.root), problems + below.problems, below.whole)


def _parent(entry: Entry, chain: tuple[Path, ...]) -> Path:
    """The file that `defaults` names, refused where it cannot be one. `chain` ends with the file that names it."""
    if not isinstance(entry.value, str) or not entry.value or "\0" in entry.value:
        raise refused(entry.problem("defaults", "the path of one parent is wanted"))
    parent = Path(os.path.normpath(chain[-1].parent / entry.value))
    try:
        again = any(parent.samefile(file) for file in chain)
    except OSError as error:
        raise refused(entry.problem("defaults", f"{_named(parent)} cannot be read: {error.strerror}")) from error
    if again:
        cycle = " -> ".join(_named(file) for file in (*chain, parent))
        raise refused(entry.problem("defaults", f"a cycle: {cycle}"))
    if len(chain) > MAX_PARENTS:
        raise refused(entry.problem("defaults", f"more than {MAX_PARENTS} parents"))
    return parent


def _set(text: str) -> tuple[Entry, list[Problem]]:
    """`a.b=c` as a tree with one leaf. Below `matrix` the rest of the path is one key: matrix.shape.tokens=[1,2]."""
    source = Source(f"--set {shown(text)}", Path.cwd(), SET_LEVEL)
    dotted, equals, value = text.partition("=")
    parts = dotted.split(".", 1 if dotted.startswith("matrix.") else -1)
    if not equals or len(parts) > 4 or not all(part and part == part.strip() for part in parts):
        raise refused(Problem(source.name, None, "", None, "a key and a value are wanted, as in --set world.ranks=2"))
    if parts[0] == "defaults":
        raise refused(Problem(source.name, None, "", None, "only a file has a parent"))
    if len(value) > MAX_BYTES:
        raise refused(Problem(source.name, None, "", None, f"{len(value)} characters, at most {MAX_BYTES} are read"))
    leaf, problems = compose(value, source)
    entry = _without_lines(leaf or Entry(None, source, text=""))
    for part in reversed(parts):
        entry = Entry({part: entry}, source)
    return entry, problems


def _without_lines(entry: Entry) -> Entry:
    value = entry.value
    if isinstance(value, dict):
        value = {key: _without_lines(inner) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_without_lines(inner) for inner in value]
    return Entry(value, entry.source, None, entry.text)


def _named(path: Path) -> str:
    """A path as short as it can be said from here."""
    here = Path.cwd()
    return shown(str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path))
