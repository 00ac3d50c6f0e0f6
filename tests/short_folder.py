"""A place for Ray's directories: their sockets need a short path, and /tmp may be full."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

ROOM = 200 * 2**20  # bytes that the Ray of a test needs


def has_room(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free >= ROOM


def short_base(longest: int) -> str:
    """Return a folder with room whose path has at most so many characters: TMPDIR if it can be."""
    for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", str(Path.home()))):
        if len(folder) <= longest and has_room(folder):
            return folder
    raise AssertionError(f"no folder of at most {longest} characters has {ROOM >> 20} MiB; set TMPDIR to one that has")


def name_one_for_ray() -> None:
    """Set RAY_TMPDIR where the Ray of `raymoe run` would take a full /tmp, because TMPDIR is too long for it."""
    if "RAY_TMPDIR" not in os.environ and len(os.environ.get("TMPDIR") or "/tmp" * 9) > 23 and not has_room("/tmp"):
        os.environ["RAY_TMPDIR"] = short_base(23)
