"""Puts the copy of a run directory in its place, where an earlier copy and files of the user may be.

`.copied.json` in that place has the SHA-256 of each file that a copy wrote. Only files that still have it are replaced
or removed: all others are the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path, PurePath, PurePosixPath

from raymoe.errors import CannotWrite, shown
from raymoe.report.storage import MOST_BYTES

RECORD = ".copied.json"
_FOREIGN = "no file"  # of what is no regular file, or is reached through a link


def put_in_place(copy: Path, destination: Path, renew: bool) -> None:
    """Move the files of a copy to `destination`. `renew` says that an earlier copy of the same run is there.

    Raises CannotWrite, and moves nothing, if a file of the user has the name of one that has changed in the run.
    """
    names = [path.relative_to(copy) for path in sorted(copy.rglob("*")) if path.is_file()]
    new = {name.as_posix(): _digest(copy, name) or _FOREIGN for name in names}
    (copy / RECORD).write_text(json.dumps(new, indent=2) + "\n")
    if renew:
        _renew(copy, destination, new)
    elif destination.is_dir() and not any(destination.iterdir()):  # kept: it may be where a shell is
        for each in copy.iterdir():
            each.rename(destination / each.name)
    else:
        copy.chmod(0o777 & ~_umask())
        copy.rename(destination)


def _renew(copy: Path, destination: Path, new: dict[str, str]) -> None:
    before = _recorded(destination)
    moved, conflicts = [], []
    for name, digest in new.items():
        there, earlier = _digest(destination, PurePosixPath(name)), before.get(name)
        if there is None or (there == earlier and there != digest):
            moved.append(name)
        elif digest not in (there, earlier):  # neither there already nor unchanged since the earlier copy
            conflicts.append(name)
    if conflicts:
        first = shown(str(destination / conflicts[0]))
        more = f" and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
        raise CannotWrite(
            f"{first}{more} would be overwritten, which no copy of this run wrote or which was changed since; "
            "move it away, or name another place with --out"
        )
    for name in moved:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (copy / name).replace(target)
    for name in before.keys() - new.keys():
        if _digest(destination, PurePosixPath(name)) == before[name]:
            (destination / name).unlink()
    (copy / RECORD).replace(destination / RECORD)


def _recorded(directory: Path) -> dict[str, str]:
    """Return the digests of the files that earlier copies wrote, by name."""
    try:
        record = json.loads(read_file(directory / RECORD))
    except (OSError, ValueError, RecursionError):
        return {}  # a copy that another program made: nothing in it counts as written here
    if not isinstance(record, dict):
        return {}
    return {name: digest for name, digest in record.items() if is_name_inside(name) and isinstance(digest, str)}


def is_name_inside(name: str) -> bool:
    r"""Whether this is the name of a file in a run directory: printable, not hidden, and inside of it.

    >>> [is_name_inside(name) for name in ("plots/a.png", "../a", "/a", ".ssh/a", "a\n", "")]
    [True, False, False, False, False, False]
    """
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)  # `..` too
    return bool(path.parts) and not path.is_absolute() and not hidden and name.isprintable()


def _digest(directory: Path, name: PurePath) -> str | None:
    """Return the SHA-256 of a file of a directory; None if there is none."""
    for folder in reversed((directory / name).parents[: len(name.parts) - 1]):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            return _FOREIGN
    try:
        return hashlib.sha256(read_file(directory / name)).hexdigest()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return _FOREIGN


def read_file(path: Path) -> bytes:
    """Read a regular file: no link, and no FIFO, which would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        return file.read(MOST_BYTES)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
