"""The directory of a run: config.yaml, environment.json, results.jsonl and summary.json.

- Every file is replaced whole, so a run killed at any point leaves its finished cases and nothing half written.
- One live process writes: a lock that ends with its holder.
- The first line of config.yaml names the run; by it a directory is known as one of ours.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from raymoe.job import to_yaml
from raymoe.job.errors import ConfigError
from raymoe.report.atomic import cannot_write, write_atomically
from raymoe.report.lock import DirectoryLock
from raymoe.report.place import new_run_id, place_for
from raymoe.report.record import CONFIG, ENVIRONMENT, MARK, RESULTS, SUMMARY, Record
from raymoe.report.results import Line, encode
from raymoe.report.summary import Generation, Summary


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
