"""Reads config files, merges a file over its parents, and applies every `--set`."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raymoe.config.yaml_tree import Entry, Source, compose, merge
from raymoe.errors import ConfigError, Problem, shown
from raymoe.packaged import packaged_config, packaged_names

# Reading: the text of a config, or an error for a path that is no config.

MAX_BYTES = 64 * 1024


def find_config(config: str, folder: str = "configs", beside: Path | None = None) -> Path:
    """Find the file of a config: a path that exists, else the packaged config of that name.

    With `folder="jobs"` it finds a job. A relative path is relative to `beside`, else to the working directory.
    """
    path = Path(config) if beside is None else beside / config
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        packaged = packaged_config(config, folder)
        if packaged is None:
            raise _unknown(config, folder, path) from None
        return packaged
    except (OSError, ValueError) as error:
        raise _unreadable(shown(config), _reason(error)) from error
    return path


def read_config(path: Path, name: str) -> str:
    """Read the text of a config. Errors call it `name`."""
    try:
        # Non-blocking, because opening a FIFO without a writer would hang before `_read` can refuse it.
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
        reason = f"not UTF-8: the byte {data[error.start]:#04x} begins no valid character"
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
        if len(data) > MAX_BYTES:  # the file has grown since fstat, or is below /proc, where fstat gives no size
            raise _unreadable(name, f"has more than {MAX_BYTES} bytes, the limit of a config")
    return data


def refused(problem: Problem) -> ConfigError:
    """Make the error of a config that cannot be read further."""
    return ConfigError(str(problem), [problem])


def _unreadable(name: str, reason: str) -> ConfigError:
    return refused(Problem(name, None, "", None, reason))


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _unknown(config: str, folder: str, path: Path) -> ConfigError:
    from raymoe.config.explain import nearest

    names = packaged_names(folder)
    near = _file_like(path) or nearest(Path(config).name.removesuffix(".yaml"), names)
    choice = f"did you mean '{near}'?" if near else f"choose from {_listed(names) or 'none'}"
    return _unreadable(shown(config) or "''", f"neither a file nor a packaged {folder.removesuffix('s')}, {choice}")


def _file_like(path: Path) -> str | None:
    """Return the YAML file in the folder of a path that its name is meant for; None if none is near."""
    from raymoe.config.explain import nearest

    try:
        found = [each.name for each in path.parent.iterdir() if each.suffix in PARENT_SUFFIXES]
    except OSError:
        return None
    near = nearest(path.name, found) if path.suffix in PARENT_SUFFIXES else None
    return None if near is None else shown_path(path.parent / near)


def _listed(names: Sequence[str]) -> str:
    """List names; count those that extend another name instead of listing them.

    >>> _listed(["p2p", "p2p_host", "p2p_host_large", "quickstart"])
    'p2p, quickstart, and 2 variants of these'
    """
    short = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    more = len(names) - len(short)
    variants = f", and {more} variant{'s' * (more > 1)} of these" if more else ""
    return ", ".join(short) + variants


# Merging: a file over its parents, and every `--set` over the result.

# A config may come from somebody else, and a parent can be any file that its reader may read. So a parent has the name
# of a YAML file, and an error repeats no text of a parent outside the folder of the config: position and key only.

MAX_PARENTS = 16
PARENT_SUFFIXES = frozenset({".yaml", ".yml"})
SET_LEVEL = MAX_PARENTS + 1


@dataclass
class Layers:
    """The merged tree and the problems found so far. `complete` is False if a layer could not be read.

    `paths` holds the file and its parents.
    """

    file: str
    root: Entry
    problems: list[Problem] = field(default_factory=list)
    complete: bool = True
    paths: tuple[Path, ...] = ()


def layered(path: Path, sets: Sequence[str], folder: Path | None = None) -> Layers:
    """Merge a file, its parents and the settings. Raises ConfigError if the file itself cannot be read.

    Errors repeat text of files below `folder` only, by default of the file that the user named and those below its
    folder.
    """
    layers = _file(path, (), MAX_PARENTS, folder)
    for text in sets:
        try:
            entry, problems = _set(text)
        except ConfigError as error:
            layers.problems += error.problems
            layers.complete = False
            continue
        layers.problems += problems
        layers.root = merge(layers.root, entry)
    return layers


def _file(path: Path, children: tuple[Path, ...], level: int, folder: Path | None) -> Layers:
    own_folder = folder or (*children, path)[0].absolute().parent
    quotable = (folder is None and not children) or path.resolve().is_relative_to(own_folder.resolve())
    source = Source(shown_path(path), path.absolute().parent, level, quotable)
    root, problems = compose(read_config(path, source.name), source)
    if root is None or root.value is None:
        raise refused(Problem(source.name, None, "", None, "is empty, a config needs at least a workload"))
    if not isinstance(root.value, dict):
        raise refused(root.problem("", "a mapping is wanted at the top"))
    own = {key: entry for key, entry in root.value.items() if key != "defaults"}
    layers = Layers(source.name, Entry(own, source, root.line), problems, paths=(path,))
    if (defaults := root.value.get("defaults")) is None:
        return layers
    try:
        below = _file(_parent(defaults, (*children, path)), (*children, path), level - 1, folder)
    except ConfigError as error:
        return Layers(source.name, layers.root, problems + list(error.problems), complete=False)
    root, problems = merge(below.root, layers.root), problems + below.problems
    return Layers(source.name, root, problems, below.complete, (path, *below.paths))


def _parent(entry: Entry, chain: tuple[Path, ...]) -> Path:
    """Find the file that `defaults` names, or refuse it. `chain` holds the files from the child to the one that names
    it."""
    if not isinstance(entry.value, str) or not entry.value or "\0" in entry.value:
        raise refused(entry.problem("defaults", "the path of one parent is wanted"))
    parent = Path(os.path.normpath(chain[-1].parent / entry.value))
    try:
        again = any(parent.samefile(file) for file in chain)
        named_as_yaml = {parent.suffix, parent.resolve().suffix} <= PARENT_SUFFIXES
    except OSError as error:
        name = entry.source.quoting(shown_path(parent), "that file")
        raise refused(entry.problem("defaults", f"{name} cannot be read: {error.strerror}")) from error
    if not named_as_yaml:
        raise refused(entry.problem("defaults", "a parent is a file .yaml or .yml, and so is what a link leads to"))
    if again:
        cycle = " -> ".join(shown_path(file) for file in (*chain, parent))
        raise refused(entry.problem("defaults", f"a cycle: {cycle}"))
    if len(chain) > MAX_PARENTS:
        raise refused(entry.problem("defaults", f"more than {MAX_PARENTS} parents"))
    return parent


def _set(text: str) -> tuple[Entry, list[Problem]]:
    """Read `a.b=c` as a tree with one leaf. After `matrix.` the rest is one key: matrix.shape.tokens=[1,2]."""
    source = Source(f"--set {shown(text)}", Path.cwd(), SET_LEVEL)
    dotted, equals, value = text.partition("=")
    parts = dotted.split(".", 1 if dotted.startswith("matrix.") else -1)
    if not equals or len(parts) > 4 or not all(part.isprintable() and part.strip() == part != "" for part in parts):
        raise refused(Problem(source.name, None, "", None, "a key and a value are wanted, as in --set world.ranks=2"))
    if parts[0] == "defaults":
        raise refused(Problem(source.name, None, "", None, "only a config file can name a parent"))
    if len(value) > MAX_BYTES:
        reason = f"the value has {len(value)} characters, at most {MAX_BYTES} are allowed"
        raise refused(Problem(source.name, None, "", None, reason))
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


def shown_path(path: Path) -> str:
    """Shorten a path: relative if it is below the working directory."""
    here = Path.cwd()
    return shown(str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path))
