"""Shows the progress of a run on stderr: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from raymoe.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 5.0  # at least, of plain progress lines, so that a job's log stays readable


class ProgressBar:
    """Progress over `cases` cases. It draws only in calls of its methods and has no thread."""

    def __init__(self, stream: TextIO, cases: int, finished: int = 0, quiet: bool = False) -> None:
        self._stream, self._cases, self._finished, self._quiet = stream, cases, finished, quiet
        self._last_line = time.monotonic()
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
        text = printable(f"case {self._finished + 1}/{self._cases} {case}: {where}")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=self._finished + share)
            self._bar.refresh()
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.note(text)

    def case_done(self, case: str) -> None:
        """Show that a case is finished and written."""
        self._finished += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=float(self._finished))
            self._bar.refresh()
        else:
            self._last_line = time.monotonic()
            self.note(f"case {self._finished}/{self._cases} {case}: done")
