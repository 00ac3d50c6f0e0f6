"""Runs the program of a job on the cluster: `python -m raymoe.program FILE …`, or `-m MODULE …`, as Python takes them.

It makes the directory for results and records the environment there. Then it becomes the program: this process runs
Python with these words, so signals and exit codes are the program's own. `raymoe submit` writes this command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from raymoe.errors import ConfigError, RaymoeError, printable, shown
from raymoe.report.directory import DirectoryLock, cannot_write, write_atomically
from raymoe.report.environment import environment
from raymoe.report.ray_job import ray_job, run_of, version_notice
from raymoe.report.results import CONFIG, ENVIRONMENT
from raymoe.report.transfer import run_path

OUT = "RAYMOE_OUT"


def main(words: Sequence[str]) -> NoReturn:
    """Become the program. If that cannot be, end with the exit code that says why."""
    try:
        out, words = _prepared(words)
    except RaymoeError as error:
        print(printable(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    os.environ[OUT] = str(out)
    os.execv(sys.executable, [sys.executable, *words])


def _prepared(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Make the directory for results; return it, and the words with its name in them."""
    job = ray_job()
    if job is None:
        raise ConfigError("this runs the program of a Ray job; submit it by `raymoe submit`")
    if notice := version_notice():
        print(printable(notice), file=sys.stderr)
    out = run_path(job.metadata.get("raymoe_out"), job.id).absolute()
    named = [word.replace("{out}", str(out)).replace("{run}", run_of(job.id)) for word in words]
    _lock(out, named).outlive_exec()
    print(f"the program's directory for results is {printable(str(out))}", file=sys.stderr, flush=True)
    return out, named


def _lock(out: Path, words: Sequence[str]) -> DirectoryLock:
    """Make the directory, or take one that a program had before, and record the environment in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in out.iterdir()} - {".lock"}
    except OSError as error:
        raise cannot_write(out, error) from error
    if CONFIG in names or (names and not _program_was_in(out)):
        held = "holds the results of a run" if CONFIG in names else "has files that no program of raymoe wrote"
        raise ConfigError(f"{shown(str(out))} {held}; name another place with the key out of the job")
    lock = DirectoryLock(out)
    write_atomically(out / ENVIRONMENT, json.dumps(environment() | {"program": list(words)}, indent=2) + "\n")
    return lock


def _program_was_in(out: Path) -> bool:
    try:
        facts = json.loads((out / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "program" in facts


if __name__ == "__main__":
    main(sys.argv[1:])
