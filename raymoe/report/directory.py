"""The directory of a run: config.yaml, environment.json, results.jsonl and summary.json.

- Every file is replaced whole, so a run killed at any point leaves its finished cases and nothing half written.
- One live process writes: a lock that ends with its holder.
- The first line of config.yaml names the run; by it a directory is known as one of ours.
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
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from raymoe.config import to_yaml
from raymoe.errors import CannotWrite, ConfigError
from raymoe.report.results import CONFIG, ENVIRONMENT, MARK, RESULTS, SUMMARY, Generation, Line, Record, Summary, encode

# A file is written whole or not at all, and a failure says which path and why.


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


# At most one live process writes to a run directory.

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


# Where the directory of a run goes when the command line leaves it open.

# The one variable that Ray 2.60 gives to the entrypoint of a job (ray/dashboard/modules/job/job_supervisor.py) and to
# nothing else that starts on its own; RAY_ADDRESS is also what a person sets by hand.
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True)
class Place:
    path: Path
    given: bool  # by --out; else a name of ours, new for every run
    notice: str | None = None


def under_ray_job() -> bool:
    return RAY_JOB in os.environ


def new_run_id(name: str) -> str:
    """The job's name, the time and four letters: what a run is called in its results and in Ray."""
    now = datetime.datetime.now(datetime.UTC)
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))
    return f"{_as_file_name(name)}-{now:%Y%m%dT%H%M%SZ}-{letters}"


def place_for(out: Path | None, run: str) -> Place:
    """Under a Ray job the working directory is a copy that Ray deletes, so results never go below it by accident."""
    if out is None:
        if not under_ray_job():
            return Place(Path("runs").absolute() / run, given=False)
        path = Path.home() / "raymoe_runs" / run
        return Place(
            path, given=False, notice=f"Ray deletes the working directory of a job, so results go to {path} (or --out)"
        )
    if under_ray_job() and not out.is_absolute():
        raise ConfigError(
            f"--out {out} is relative, and Ray deletes the working directory of a job when it ends; "
            f"give an absolute path, such as --out {Path.home() / 'raymoe_runs' / out.name}"
        )
    return Place(out.absolute(), given=True)


def _as_file_name(name: str) -> str:
    """Letters, digits, dot, dash and underscore, at most 64 of them, and no leading dot.

    >>> _as_file_name("H100 sweep/second"), _as_file_name("..")
    ('H100-sweep-second', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:64] or "run"


class RunDirectory:
    """Made by `create` or `resume`; `run` is the name of this run in its results, whatever the directory is called."""

    def __init__(self, path: Path, run: str, lock: DirectoryLock, notices: Sequence[str] = ()) -> None:
        self.path = path
        self.run = run
        self.notices = list(notices)  # sentences for the person who started the run
        if not lock.supported:
            self.notices.append(f"{path} is on a file system without locks: start no second run there")
        self._lock = lock
        self._lines: list[Line] = []
        self._earlier: tuple[Generation, ...] = ()

    @classmethod
    def create(cls, out: Path | None, name: str) -> Self:
        """A new run of the job `name`, in `out` or in a place of its own; refuses one that holds results."""
        run = new_run_id(name)
        place = place_for(out, run)
        try:
            place.path.mkdir(parents=True, exist_ok=place.given)
        except OSError as error:
            if place.given and isinstance(error, FileExistsError):
                raise cannot_write(place.path, NotADirectoryError(error.errno, "it is a file")) from error
            raise cannot_write(place.path, error) from error
        lock = DirectoryLock(place.path)
        held = [name for name in (CONFIG, ENVIRONMENT, RESULTS, SUMMARY) if (place.path / name).exists()]
        if held:
            lock.close()
            raise ConfigError(
                f"--out {place.path} already holds {', '.join(held)}; "
                f"go on with that run by --resume {place.path}, or name another directory"
            )
        return cls(place.path, run, lock, [place.notice] if place.notice else [])

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Goes on with a run: its finished cases count, and its generations stay in the summary written at the end."""
        path = path.absolute()
        run = Record.read(path).run  # before the lock, which would leave a file in a directory that is none of ours
        directory = cls(path, run, DirectoryLock(path))
        try:
            record = Record.read(path)  # again, now that nobody else writes
            directory._lines = record.lines
            directory._earlier = record.generations
        except ConfigError:
            directory.close()
            raise
        return directory

    def write_config(self, resolved: Mapping[str, object]) -> None:
        write_atomically(self.path / CONFIG, f"{MARK}{self.run}\n{to_yaml(dict(resolved))}")

    def read_config(self) -> dict[str, object]:
        return Record.read(self.path).config

    def write_environment(self, environment: Mapping[str, object]) -> None:
        """Also takes away the summary of a run that goes on: from here it tells of an end that is no longer one."""
        write_atomically(self.path / ENVIRONMENT, _pretty(environment))
        try:
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(self.path / SUMMARY, error) from error

    def add_case(self, lines: Sequence[Line]) -> None:
        """Adds one finished case, all of its lines at once."""
        cases = {line["case"] for line in lines}
        if len(cases) != 1:
            raise ValueError(f"add_case takes the lines of one case, got {len(lines)} lines of {len(cases)} cases")
        if cases <= self.finished():
            raise ValueError(f"case {cases.pop()!r} is already in {self.path / RESULTS}")
        together = [*self._lines, *lines]
        write_atomically(self.path / RESULTS, "".join(map(encode, together)))
        self._lines = together

    def finished(self) -> set[str]:
        return {str(line["case"]) for line in self._lines}

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
