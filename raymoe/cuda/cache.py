"""Files that raymoe keeps for a user: compiled kernels, and the table that `raymoe doctor --tune` measures.

A kernel from here runs with the rights of its user. So a folder or file is used only if this user owns it, nobody else
can write it, and it is not a symbolic link.

- The folder is opened before it is checked, and its files are opened relative to it. So it cannot be exchanged for
  another one between the check and the use.
- New folders have mode 0700 and new files 0600, whatever the umask.
- A file is written under a random name, synchronised and renamed. A reader finds all of it or nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raymoe.home import home

CACHE_VARIABLE = "RAYMOE_CACHE_DIR"

_UNFINISHED = ".unfinished-"
_UNFINISHED_S = 3600.0  # a file that is still unfinished after this has lost its writer


class NotPrivateError(OSError):
    """A folder or file that somebody else may have written. `strerror` is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def cache_folder() -> Path:
    """Return the folder of compiled kernels and of measured tables: RAYMOE_CACHE_DIR, else ~/.cache/raymoe.

    Without a home directory it is in the temporary directory, under a name that has the number of the user.
    """
    if folder_name := os.environ.get(CACHE_VARIABLE):
        return Path(folder_name)
    if (folder := home()) is not None:
        return folder / ".cache" / "raymoe"
    return Path(os.environ.get("TMPDIR") or "/tmp", f"raymoe-cache-{os.geteuid()}")


@contextmanager
def private_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """Open a folder that only this user can write; give its file descriptor.

    Raises NotPrivateError for another one, and OSError if there is none. The folders above it may be anybody's.
    """
    if create:
        _make(path.absolute())
    if path.is_symlink():
        raise NotPrivateError("it is a symbolic link")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def read(folder: int, name: str, limit: int) -> bytes | None:
    """Read a file of an open folder; None if there is none.

    Raises NotPrivateError if somebody else may have written it.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivateError("it is a symbolic link") from error
        raise
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        _check(status)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivateError("it is not a regular file")
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, at most {limit} are read")
        with suppress(OSError):  # a file system that is mounted read-only; then the last reading is not known
            os.utime(file, ns=(time.time_ns(), status.st_mtime_ns))
        return opened.read(limit)


def write(folder: int, name: str, content: bytes) -> None:
    """Replace a file of an open folder. After a kill or on a full disk the old file is still there."""
    unfinished = f"{_UNFINISHED}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):  # the first error is raised
            os.unlink(unfinished, dir_fd=folder)
        raise


def bound(folder: int, suffix: str, limit: int) -> None:
    """Remove the files of an open folder that were read least recently, until those with this suffix fit the limit.

    Also removes what writers left unfinished.
    """
    kept = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process has removed it
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(suffix):
                    kept.append((status.st_atime_ns, status.st_size, entry.name))
                elif entry.name.startswith(_UNFINISHED) and time.time() - status.st_mtime > _UNFINISHED_S:
                    os.unlink(entry.name, dir_fd=folder)
    total = sum(size for _, size, _ in kept)
    for _, size, name in sorted(kept):
        if total <= limit:
            return
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        total -= size


def _make(path: Path) -> None:
    """Make a folder and the missing ones above it, each with mode 0700."""
    for folder in (*reversed(path.parents), path):
        with suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=0o700)


def _check(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivateError(f"it belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivateError(f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users write it")
