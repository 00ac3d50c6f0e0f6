"""Keep other users of the machine away from the Ray that a run starts for itself. Imports no Ray.

A user who reaches a Ray runs code as its owner. By itself, Ray listens on every interface and writes its token with the
mode that the umask leaves. It opens its session directory, with sockets and logs, to everybody. So before Ray is
imported:

- **Loopback only.** The variable that Ray has for macOS makes every process of it listen on 127.0.0.1.
- **A token that nobody else reads.** It is made where Ray looks, with mode 0600, before Ray would make one.
- **A directory that nobody else enters.** RAY_TMPDIR names a new one of mode 0700, which holds Ray's own.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from raymoe.errors import ClusterError

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
MODE, TOKEN, TOKEN_PATH, DIRECTORY = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"

_LONGEST_BASE = 23
"""Bytes of the path that holds the directory. Ray's sockets are 84 bytes below it, and Linux takes 107 in all."""
_LAST_BASE = "/tmp"


@contextmanager
def private_ray(environment: MutableMapping[str, str]) -> Iterator[Path]:
    """Set what a Ray of this user's own inherits, and put it back at the end. Gives the directory of Ray's files.

    The directory is removed at the end if it is empty: sessions that nobody has removed stay in it.
    """
    directory = _make_directory(environment)
    changes = {LOOPBACK_ONLY: "0", DIRECTORY: str(directory), **_token(environment)}
    before = {name: environment.get(name) for name in changes}
    environment.update(changes)
    try:
        yield directory / "ray"
    finally:
        for name, value in before.items():
            if value is None:
                del environment[name]
            else:
                environment[name] = value
        for path in (directory / "ray", directory):
            with suppress(OSError):  # it holds a session
                path.rmdir()


def _make_directory(environment: MutableMapping[str, str]) -> Path:
    """Make the directory below RAY_TMPDIR, TMPDIR or /tmp, the first of them that is short and that is safe."""
    candidates = [environment[name] for name in (DIRECTORY, "TMPDIR") if environment.get(name)]
    base = next(
        (folder for folder in candidates if len(os.fsencode(folder)) <= _LONGEST_BASE and _is_safe(Path(folder))),
        _LAST_BASE,
    )
    try:
        return Path(tempfile.mkdtemp(prefix="raymoe-", dir=base))  # its mode is 0700
    except OSError as error:
        reason = f"no directory can be made in {base} ({error.strerror})"
        raise ClusterError(
            f"asked for a local Ray, and {reason}; make room there, or set RAY_TMPDIR to another directory of at most "
            f"{_LONGEST_BASE} characters"
        ) from error


def _is_safe(folder: Path) -> bool:
    """Return whether nobody else can exchange what this user puts into a folder."""
    try:
        status = folder.stat()
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (0, os.geteuid()) and (not others_write or bool(status.st_mode & stat.S_ISVTX))


def _token(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Return the variables of a token for this run alone, if it needs one.

    It needs none where the user has chosen one, where Ray asks for none, or where only this user reads Ray's own file.
    """
    if TOKEN in environment or TOKEN_PATH in environment or environment.get(MODE, "token").lower() != "token":
        return {}
    return {} if _own_token_file() else {TOKEN: secrets.token_hex(32)}


def _own_token_file() -> bool:
    """Make Ray's token file unless there is one. Return whether only this user can read and replace it."""
    try:
        path = Path.home() / ".ray" / "auth_token"
        unfinished = path.with_name(f".auth_token.{secrets.token_hex(8)}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.is_symlink() and not path.exists():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(unfinished, flags, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(unfinished, path)  # whole, and only if there is still none: another run may have made one
            except FileExistsError:
                return _is_private(path)
            finally:
                unfinished.unlink()
        return _is_private(path)
    except (OSError, RuntimeError):  # no home, or none that can be written
        return False


def _is_private(path: Path) -> bool:
    file, folder = path.lstat(), path.parent.stat()
    owned = file.st_uid == folder.st_uid == os.geteuid() and stat.S_ISREG(file.st_mode) and file.st_size > 0
    return owned and not stat.S_IMODE(file.st_mode) & 0o077 and not stat.S_IMODE(folder.st_mode) & 0o022
