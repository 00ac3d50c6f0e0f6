"""Compiled kernels on disk, shared by every process of a user.

An entry is written aside, synchronised and renamed into place by `cuda.core`'s file cache, so a reader finds all of it
or nothing. It is the machine code followed by its SHA-256: tools that read cubins still read it, and an entry that was
damaged on disk afterwards is found out and compiled again.

The folder is RAYMOE_CACHE_DIR, by default ~/.cache/raymoe. A folder that cannot be used costs a second a kernel and
process, which is no reason to end a run: a RuntimeWarning names it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from pathlib import Path
from typing import Any

VARIABLE = "RAYMOE_CACHE_DIR"
LIMIT_BYTES = 512 << 20
_DIGEST_BYTES = 32


class Cubins:
    """A mapping from a key to machine code. Any number of threads and processes may use one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._files: Any = None
        self._out_of_use = False

    @classmethod
    def from_environment(cls) -> Cubins:
        asked = os.environ.get(VARIABLE)
        return cls(Path(asked) if asked else Path("~/.cache/raymoe").expanduser())

    def get(self, key: str) -> bytes | None:
        """What was put under the key, whole and undamaged, or None."""
        try:
            files = self._open()
            entry = files.get(key) if files is not None else None
        except OSError as error:
            self._give_up(error)
            return None
        if entry is None:
            return None
        code, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
        return code if code and hashlib.sha256(code).digest() == digest else None

    def put(self, key: str, code: bytes) -> None:
        try:
            files = self._open()
            if files is not None:
                files[key] = code + hashlib.sha256(code).digest()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> Any:
        from cuda.core.utils import FileStreamProgramCache

        with self._lock:
            if self._files is None and not self._out_of_use:
                self._files = FileStreamProgramCache(self.folder, max_size_bytes=LIMIT_BYTES)
            return self._files

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            first, self._out_of_use, self._files = not self._out_of_use, True, None
        if first:
            warnings.warn(
                f"compiled kernels cannot be kept in {self.folder} ({error.strerror or error}), so every process "
                f"compiles its own; set {VARIABLE} to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
