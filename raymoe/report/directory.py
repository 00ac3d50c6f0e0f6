"""Writes the directory of a run: config.yaml, environment.json, results.jsonl, summary.json and report.html.

- Files are replaced atomically: a run that is killed leaves its finished cases and no partial file.
- Symbolic links, FIFOs and devices inside the directory are never followed, opened or replaced by a write.
- One process writes at a time. It holds a lock that ends with the process.
- The first line of config.yaml names the run. A directory without that line is not a run directory.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from raymoe.config import to_yaml
from raymoe.errors import CannotWrite, ConfigError, printable
from raymoe.home import home
from raymoe.report.history import EARLIER, environment_name, generations_so_far, next_number
from raymoe.report.results import (
    CONFIG,
    ENVIRONMENT,
    FIRST_LINE,
    PAGE,
    RESULTS,
    SUMMARY,
    Generation,
    Line,
    Record,
    Summary,
    encode,
    finished_cases,
    read_document,
)


def write_atomically(path: Path, content: str | bytes, *, linked_folder: bool = True) -> None:
    """Replace `path` by `content`. A reader sees the old file or the new one, even after a kill or on a full disk.

    Refuses to replace a directory, a device or a FIFO. With `linked_folder` False, also refuses a folder that is a
    symbolic link.
    """
    try:
        folder = os.open(
            path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if linked_folder else os.O_NOFOLLOW)
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    # A name that nobody can guess and that did not exist: nobody can put a link to another file in its place.
    temporary = f".{path.name[:100]}.{secrets.token_hex(8)}.tmp"
    try:
        _refuse_special(path.name, folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # without it, a crash soon after could leave an empty file at the new name
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        with contextlib.suppress(OSError):  # report the first error; a leftover hidden file is harmless
            os.unlink(temporary, dir_fd=folder)
        raise cannot_write(path, error) from error
    finally:
        os.close(folder)


def _refuse_special(name: str, folder: int) -> None:
    """Raise OSError if `name` is there and is neither a file nor a link. A link itself is replaced, not its target."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise OSError(errno.EEXIST, "something other than a file is there")


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    reason = error.strerror or type(error).__name__
    room_helps = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EEXIST)
    advice = f"{'make room there or ' * room_helps}name another place with --out"
    return CannotWrite(f"cannot write {path}: {reason}; {advice}")


# File systems without locks (some network mounts) return one of these. They can still hold results.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class DirectoryLock:
    """An flock on `<directory>/.lock`, held until `close()` or the end of the process, so it is never stale.

    The file is never removed, because another process could have opened it a moment before.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / ".lock"
        self.supported = True
        self._file = _open_lock(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
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

    def outlive_exec(self) -> None:
        """Keep the lock in the program that this process becomes, and until that ends."""
        os.set_inheritable(os.dup(self._file.fileno()), True)

    def _read_holder(self) -> str:
        self._file.seek(0)
        return printable(self._file.read(200).strip()) or "another process"

    def _write_holder(self, path: Path) -> None:
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(path, error) from error


def _open_lock(path: Path) -> TextIO:
    """Open a lock for reading and writing. Refuses everything whose truncation could harm another file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_lock(path, "a symbolic link") from error
        raise cannot_write(path, error) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _no_lock(path, "a hard link to another file" if stat.S_ISREG(status.st_mode) else "no regular file")
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")


def _no_lock(path: Path, kind: str) -> ConfigError:
    return ConfigError(f"{path} is {kind}, but it must be the lock of a run; remove it or name another directory")


# The place of a run directory.

# Ray 2.60 sets this variable for the entrypoint of a job only (ray/dashboard/modules/job/job_supervisor.py).
# RAY_ADDRESS would not do, because users set it as well.
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True)
class Place:
    path: Path
    named: bool  # by --out; otherwise a new name for every run
    notice: str | None = None


def under_ray_job() -> bool:
    return RAY_JOB in os.environ


def new_run_id(name: str) -> str:
    """Make the name of a run, in its results and in Ray: the job's name, the time and four random letters."""
    now = datetime.datetime.now(datetime.UTC)
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))
    return f"{as_file_name(name)}-{now:%Y%m%dT%H%M%SZ}-{letters}"


def place_for(out: Path | None, run: str) -> Place:
    """Choose the place of a run directory.

    Never inside the working directory of a Ray job, unless `out` says so: Ray deletes it when the job ends.
    """
    if out is None:
        if not under_ray_job():
            return Place(Path("runs").absolute() / run, named=False)
        if (folder := home()) is None:
            raise ConfigError(
                "Ray deletes the working directory of a job, and this user has no home directory for the results; "
                "name a place with --out"
            )
        path = folder / "raymoe_runs" / run
        return Place(
            path,
            named=False,
            notice=f"Ray deletes the working directory of a job, so results go to {path} (--out changes this)",
        )
    if under_ray_job() and not out.is_absolute():
        raise ConfigError(
            f"--out {out} is relative, but Ray deletes the working directory when a job ends; "
            f"give an absolute path, such as --out {(home() or Path('/results')) / 'raymoe_runs' / out.name}"
        )
    return Place(out.absolute(), named=True)


def as_file_name(name: str, most: int = 64) -> str:
    """Replace other characters than letters, digits, `.`, `-` and `_`, and cut to `most`. No leading dot remains.

    >>> as_file_name("H100 sweep/second"), as_file_name("..")
    ('H100-sweep-second', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:most] or "run"


class RunDirectory:
    """A run directory that this process writes, from `create` or `resume`.

    `run` is the name of the run in its results. The directory may have another name.
    """

    def __init__(self, path: Path, run: str, lock: DirectoryLock, notices: Sequence[str] = ()) -> None:
        self.path = path
        self.run = run
        self.notices = list(notices)  # sentences for the user
        if not lock.supported:
            self.notices.append(f"{path} is on a file system without locks: start no second run there")
        self._lock = lock
        self._lines: list[Line] = []
        self._earlier: tuple[Generation, ...] = ()
        self._environment: dict[str, object] = {}  # of the last generation that was ready
        self.first_generation = 0  # number of the first generation of this process
        self.resumed = False

    @classmethod
    def create(cls, out: Path | None, name: str, run: str | None = None) -> Self:
        """Make the directory of a new run of job `name`, at `out` if given. Refuses a directory that holds results."""
        run = run or new_run_id(name)
        place = place_for(out, run)
        try:
            place.path.mkdir(parents=True, exist_ok=place.named)
        except OSError as error:
            if place.named and isinstance(error, FileExistsError):
                raise cannot_write(place.path, NotADirectoryError(error.errno, "it is a file")) from error
            raise cannot_write(place.path, error) from error
        lock = DirectoryLock(place.path)
        existing = [name for name in (CONFIG, ENVIRONMENT, RESULTS, SUMMARY) if (place.path / name).exists()]
        if existing:
            lock.close()
            raise ConfigError(
                f"--out {place.path} already holds {', '.join(existing)}; "
                f"continue that run with --resume {place.path}, or name another directory"
            )
        return cls(place.path, run, lock, [place.notice] if place.notice else [])

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Continue a run. Its finished cases are kept, and its generations stay in the summary written at the end."""
        path = path.absolute()
        run = Record.read(path).run  # before the lock, whose file would stay in a directory that is no run directory
        directory = cls(path, run, DirectoryLock(path))
        try:
            record = Record.read(path)  # again, because another process could write until the lock was held
            directory._lines = record.lines
            directory._earlier = generations_so_far(record)
            directory._environment = read_document(path / ENVIRONMENT) or {}
            directory.first_generation = next_number(record, directory._earlier)
            directory.resumed = True
        except ConfigError:
            directory.close()
            raise
        return directory

    def write_config(self, resolved: Mapping[str, object]) -> None:
        write_atomically(self.path / CONFIG, f"{FIRST_LINE}{self.run}\n{to_yaml(dict(resolved))}")

    def read_config(self) -> dict[str, object]:
        return Record.read(self.path).config

    def write_environment(self, environment: Mapping[str, object], ended: Iterable[Generation] = ()) -> None:
        """Write environment.json, and remove summary.json and report.html: a resumed run has not ended.

        The environment of the generation before gets a file of its own. `ended` are the generations of this process.
        """
        before = self._environment.get("generation")
        if isinstance(before, int) and before != environment.get("generation"):
            write_atomically(self.path / environment_name(before), _pretty(self._environment))
        earlier = [vars(generation) for generation in (*self._earlier, *ended)]
        document = {**environment, **({EARLIER: earlier} if earlier else {})}
        write_atomically(self.path / ENVIRONMENT, _pretty(document))
        self._environment = document if "generation" in document else {}
        for name in (SUMMARY, PAGE):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                raise cannot_write(self.path / name, error) from error

    def add_case(self, lines: Sequence[Line]) -> None:
        """Add all lines of one finished case."""
        cases = {line["case"] for line in lines}
        if len(cases) != 1:
            raise ValueError(f"add_case takes the lines of one case, got {len(lines)} lines of {len(cases)} cases")
        if cases <= self.finished():
            raise ValueError(f"case {cases.pop()!r} is already in {self.path / RESULTS}")
        kept = [line for line in self._lines if line["case"] not in cases]  # all but those of an earlier stop
        self._write_lines([*kept, *lines])

    def add_stopped(self, lines: Sequence[Line]) -> None:
        """Add the lines of a case that was stopped. They do not make it finished: a resumed run replaces them."""
        cases = {line["case"] for line in lines}
        self._write_lines([*(line for line in self._lines if line["case"] not in cases), *lines])

    def _write_lines(self, all_lines: list[Line]) -> None:
        write_atomically(self.path / RESULTS, "".join(map(encode, all_lines)))
        self._lines = all_lines

    def finished(self) -> set[str]:
        return finished_cases(self._lines)

    def lines(self) -> list[Line]:
        return list(self._lines)

    def write_summary(self, summary: Summary) -> None:
        write_atomically(self.path / SUMMARY, _pretty(summary.after(self._earlier).as_dict()))

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pretty(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
