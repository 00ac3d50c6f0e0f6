"""At most one live process writes to a run directory."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from raymoe.job.errors import ConfigError
from raymoe.report.atomic import cannot_write

# A file system without locks (some network mounts) answers with one of these; it can still hold results.
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class DirectoryLock:
    """Holds `<directory>/.lock` by flock until `close()` or death, whichever is first; there is no stale lock.

    The file itself stays: removing it could take it from under a process that has just opened it.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / ".lock"
        self.supported = True
        try:
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                self.supported = False
                return
            holder = self._read_holder()
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"{directory} is being written to by {holder}; wait for that run to end or name another directory"
                ) from error
            raise cannot_write(path, error) from error
        self._write_holder(path)

    def close(self) -> None:
        self._file.close()

    def _read_holder(self) -> str:
        self._file.seek(0)
        return self._file.read(200).strip() or "another process"

    def _write_holder(self, path: Path) -> None:
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(path, error) from error
