"""Shows the progress of a run on stderr: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from raymoe.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 5.0  # at least, of plain progress lines, so that a job's log stays readable


class TimeLeft:
    """Estimates when all cases are done: the rest of this case at its pace, and others like those done before.

    The pace is that between the first step that was heard of and the last, so that it leaves out the set-up.

    >>> now = 0.0
    >>> left = TimeLeft(cases=3, finished=0, clock=lambda: now)
    >>> left.seconds("a", 0.0); now = 8.0
    >>> left.words("a", 0.25)
    '2 more cases'
    >>> now = 10.0
    >>> left.seconds("a", 0.5), left.words("a", 0.5)
    (32.0, '2 more cases, about 32 s left')
    >>> now = 12.0; left.done()
    >>> left.seconds("b", 0.5); now = 13.0
    >>> left.words("b", 0.75)
    '1 more case, about 13 s left'
    """

    def __init__(self, cases: int, finished: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cases, self._finished, self._clock = cases, finished, clock
        self._took: list[float] = []  # seconds of each case that this process finished
        self._case: str | None = None
        self._began = 0.0
        self._first: tuple[float, float] | None = None
        """When the case's first share was heard of, and that share."""

    def seconds(self, case: str, share: float) -> float | None:
        """Return the seconds left when a share of this case is done; None before there is a pace."""
        now = self._clock()
        if case != self._case:
            self._case, self._began, self._first = case, now, None
        if share > 0 and self._first is None:
            self._first = now, share
        if self._first is None or share <= self._first[1]:
            return None
        since, done_then = self._first
        rest = (1 - share) * (now - since) / (share - done_then)
        others = sum(self._took) / len(self._took) if self._took else now - self._began + rest
        return rest + others * self._others

    def words(self, case: str, share: float) -> str:
        """Return the cases and the time left as the end of a line; empty if nothing can be said yet."""
        seconds = self.seconds(case, share)
        others = f"{self._others} more case{'s' * (self._others > 1)}" if self._others else ""
        return ", ".join(filter(None, (others, "" if seconds is None else f"about {about(seconds)} left")))

    def done(self) -> None:
        """Note that the case is finished."""
        if self._case is not None:
            self._took.append(self._clock() - self._began)
        self._case = None
        self._finished += 1

    @property
    def _others(self) -> int:
        """The cases after this one."""
        return max(0, self._cases - self._finished - 1)


def about(seconds: float) -> str:
    """Write an estimated time with a unit.

    >>> about(0.2), about(95), about(600), about(9000)
    ('1 s', '95 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# Ray puts the name of a process in brackets before a line that came from another process than the job's own.
_LINE = re.compile(
    r"^(?:\([^()\n]*\) )?(case|step) ([0-9]+)/([0-9]+)\b.*?(?:[;,] about ([0-9.]+ (?:s|min|h)) left)?$", re.MULTILINE
)
_LAST_CHARACTERS = 100_000


def last_progress(log: str) -> str:
    """Read where a run or a program is from its log; empty if it has no progress line.

    >>> last_progress("case 1/6 a: done\\ncase 2/6 b: step 7/50; 4 more cases, about 3 min left\\nother\\n")
    'case 2/6, about 3 min left'
    >>> last_progress("case 1/6 a: done\\n"), last_progress(""), last_progress("(Trainer pid=7) step 8/24: loss 4.1\\n")
    ('case 1/6', '', 'step 8/24')
    """
    lines = _LINE.findall(log[-_LAST_CHARACTERS:])
    if not lines:
        return ""
    kind, number, all_of_them, left = lines[-1]
    return f"{kind} {number}/{all_of_them}" + (f", about {left} left" if left else "")


class ProgressBar:
    """Progress over `cases` cases. It draws only in calls of its methods and has no thread."""

    def __init__(self, stream: TextIO, cases: int, finished: int = 0, quiet: bool = False) -> None:
        self._stream, self._cases, self._finished, self._quiet = stream, cases, finished, quiet
        self._last_line = time.monotonic()
        self._left = TimeLeft(cases, finished)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        if stream.isatty() and not quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn())
            self._bar = RichProgress(*columns, console=Console(file=stream), auto_refresh=False, transient=True)
            self._task = self._bar.add_task("starting", total=float(cases), completed=finished)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._quiet:
            return
        text = printable(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._bar.refresh()
        else:
            print(text, file=self._stream, flush=True)

    def doing(self, text: str) -> None:
        """Show the current activity, before there are steps to count."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=printable(text))
            self._bar.refresh()
        else:
            self.note(text)

    def step(self, case: str, where: str, share: float) -> None:
        """Show where a case is: in words, and as a share of its steps."""
        left = self._left.words(case, share)
        text = printable(f"case {self._finished + 1}/{self._cases} {case}: {where}{'; ' * bool(left)}{left}")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=self._finished + share)
            self._bar.refresh()
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.note(text)

    def case_done(self, case: str) -> None:
        """Show that a case is finished and written."""
        self._finished += 1
        self._left.done()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=float(self._finished))
            self._bar.refresh()
        else:
            self._last_line = time.monotonic()
            self.note(f"case {self._finished}/{self._cases} {case}: done")
