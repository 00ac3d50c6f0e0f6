"""Where the directory of a run goes when the command line leaves it open."""

import datetime
import os
import re
import secrets
import string
from dataclasses import dataclass
from pathlib import Path

from raymoe.job.errors import ConfigError

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
