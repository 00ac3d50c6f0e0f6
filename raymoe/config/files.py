"""Reads config files, merges a file over its parents, and puts every `--set` on top."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raymoe.config.yaml_tree import Entry, Source, compose, merge
from raymoe.errors import ConfigError, Problem, shown
from raymoe.packaged import packaged_config, packaged_names

# A config's text off the disk, with every way in which a path can be something else.

MAX_BYTES = 64 * 1024


def find_config(config: str) -> Path:
    """A path that exists is a file; anything else is the name of a packaged config."""
    path = Path(config)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = packaged_config(config)
        if found is None:
            raise _unknown(config) from None
        return found
    except (OSError, ValueError) as error:
        raise _unreadable(shown(config), _reason(error)) from error
    return path


def read_config(path: Path, name: str) -> str:
    """The text of a config, of which `name` is how the user knows it."""
    try:
        # Not blocking: a FIFO without a writer would hang here, before it is known not to be a file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(name, _reason(error)) from error
    try:
        data = _read(descriptor, name)
    except OSError as error:
        raise _unreadable(name, _reason(error)) from error
    finally:
        os.close(descriptor)
    if b"\0" in data:
        raise _unreadable(name, "is binary, not YAML")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"not UTF-8: the byte {data[error.start]:#04x} starts no character"
        raise refused(Problem(name, line, "", None, reason)) from error


def _read(descriptor: int, name: str) -> bytes:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise _unreadable(name, "is a directory, not a config")
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(name, "is not a regular file")
    if status.st_size > MAX_BYTES:
        raise _unreadable(name, f"has {status.st_size} bytes, a config has at most {MAX_BYTES}")
    data = b""
    while block := os.read(descriptor, MAX_BYTES):
        data += block
        if len(data) > MAX_BYTES:  # it grew since, or (below /proc) never told its size
            raise _unreadable(name, f"has more than {MAX_BYTES} bytes, the most that a config has")
    return data


def refused(problem: Problem) -> ConfigError:
    """The error of a config that cannot be read any further."""
    return ConfigError(str(problem), [problem])


def _unreadable(name: str, reason: str) -> ConfigError:
    return refused(Problem(name, None, "", None, reason))


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _unknown(config: str) -> ConfigError:
    from raymoe.config.explain import nearest

    names = packaged_names()
    near = nearest(Path(config).name.removesuffix(".yaml"), names)
    choice = f"did you mean '{near}'?" if near else f"packaged are {_listed(names) or 'none'}"
    return _unreadable(shown(config) or "''", f"neither a file nor a packaged config, {choice}")


def _listed(names: Sequence[str]) -> str:
    """Names in a row, without those that extend another.

    >>> _listed(["p2p", "p2p_host", "p2p_host_large", "quickstart"])
    'p2p, quickstart, and 2 variants of these'
    """
    first = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    more = len(names) - len(first)
    variants = f", and {more} variant{'s' * (more > 1)} of these" if more else ""
    return ", ".join(first) + variants


# The one tree of a job: a file over its parents, and every `--set` over them all.

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
