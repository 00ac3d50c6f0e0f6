"""summary.json: how a run ended, in a form that a script can read."""

import dataclasses
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass

STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}


@dataclass(frozen=True)
class Generation:
    """One gang: how long it took to be ready (null: it never was), and why it ended before its time."""

    ready_s: float | None = None
    cause: str | None = None
    culprit: int | None = None


@dataclass(frozen=True)
class Summary:
    """`cases` maps every case of the job, in its order, to `done` or `not done`."""

    status: str
    exit_code: int
    message: str
    cases: dict[str, str]
    generations: tuple[Generation, ...] = ()

    @classmethod
    def of(
        cls,
        exit_code: int,
        message: str,
        cases: Iterable[str],
        finished: Collection[str],
        generations: Iterable[Generation] = (),
    ) -> "Summary":
        """
        >>> Summary.of(143, "stopped by SIGTERM", ["a", "b"], {"a"}).as_dict()["cases"]
        {'a': 'done', 'b': 'not done'}
        """
        status = "done" if exit_code == 0 else "stopped" if exit_code in STOPPED else "failed"
        marks = {case: "done" if case in finished else "not done" for case in cases}
        return cls(status, exit_code, message, marks, tuple(generations))

    def after(self, earlier: Iterable[Generation]) -> "Summary":
        """The same end of a run that began with the generations of an earlier process (`--resume`)."""
        return dataclasses.replace(self, generations=(*earlier, *self.generations))

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "generations": [vars(each) for each in self.generations]}


def generations_of(document: object) -> tuple[Generation, ...]:
    """The generations in a summary.json read back; ValueError when it is none of ours."""
    rows = document.get("generations") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("not a summary of raymoe: it has no list of generations")
    names = [field.name for field in dataclasses.fields(Generation)]
    return tuple(Generation(**{name: row.get(name) for name in names}) for row in rows)
