"""A file is written whole or not at all, and a failure says which path and why."""

import contextlib
import os
from pathlib import Path

from raymoe.job.errors import CannotWrite


def write_atomically(path: Path, content: str | bytes) -> None:
    """Puts `content` at `path`: a reader sees the old file or the new one, also after a kill or on a full disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # else a crash soon after may leave the new name with no content
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell; the remains are hidden and harmless
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    reason = error.strerror or type(error).__name__
    return CannotWrite(f"cannot write {path}: {reason}; make room there or name another place with --out")
